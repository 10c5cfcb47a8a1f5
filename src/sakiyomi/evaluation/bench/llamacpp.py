"""llama.cpp on the same weights and the same token ids, plain and with a draft model of its own.

The packages ``gguf``, which writes the files, and ``llama-cpp-python``, which runs them, are optional: ``missing`` says
what is not there. Texts and tokenizers are not known here: the files have no vocabulary.
"""

from __future__ import annotations

import hashlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sakiyomi.core.errors import LoadError, UnsupportedError
from sakiyomi.core.files import cache_folder, whole_file
from sakiyomi.core.params import SamplingParams
from sakiyomi.model_executor.loading import Loaded

__all__ = ["KINDS", "LlamaCpp", "check", "gguf_file", "gguf_folder", "missing"]

KINDS = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
"""ggml's names of torch's dtypes."""
_LAYOUT = 1
"""Of the files; a change of it writes them anew."""
_PACKAGES = {"gguf": "gguf", "llama_cpp": "llama-cpp-python"}


def missing(*, gpu: bool = False) -> str | None:
    """What has to be installed first, with the command; None if everything is there.

    Args:
        gpu: it is to run on a GPU.
    """
    absent = [package for module, package in _PACKAGES.items() if find_spec(module) is None]
    if not absent:
        alone = "llama-cpp-python is built for the CPU alone; build it for the GPU that the others run on"
        return alone if gpu and not _on_gpu() else None
    return f"{' and '.join(absent)} not installed; pip install 'sakiyomi[bench]'"


def _on_gpu() -> bool:
    import llama_cpp

    return bool(llama_cpp.llama_supports_gpu_offload())


class LlamaCpp:
    """One way of running llama.cpp, greedily, one text at a time.

    Args:
        file: GGUF file of the target.
        context: most tokens of a prompt and its text.
        stop: end tokens; the text ends with the first of them.
        draft: GGUF file of a draft model; None: plain.
        gamma: draft tokens a round.
        wide: keep keys and values in float32; llama.cpp's own choice is float16.
        every: of a pass all rows' logits are kept, as ``logits`` wants them.
        gpu: all layers are computed on the first GPU; see ``missing``.

    Attributes:
        rounds: passes of the target after a draft, so far.
    """

    def __init__(
        self,
        file: Path,
        context: int,
        stop: Sequence[int] = (),
        draft: Path | None = None,
        gamma: int = 4,
        *,
        wide: bool = False,
        every: bool = False,
        gpu: bool = False,
    ) -> None:
        self._stop = frozenset(stop)
        # A draft may reach past the last token that is asked for.
        places = context + gamma + 1
        self._drafter = None if draft is None else _Drafter(_open(draft, places, wide, gpu=gpu), gamma)
        self._llama = _open(file, places, wide, self._drafter, every=every, gpu=gpu)

    @property
    def rounds(self) -> int:
        """See the class."""
        return 0 if self._drafter is None else self._drafter.calls

    def generate(self, prompt: Sequence[int], params: SamplingParams) -> list[int]:
        """New tokens of one prompt; of ``params`` the length and ignore_eos are read."""
        # Otherwise llama.cpp would reuse the beginning of the last text from its cache, which no other contender does.
        self._llama.reset()
        if self._drafter is not None:
            self._drafter.llama.reset()
        found: list[int] = []
        for token in islice(_greedy(self._llama, prompt), params.max_new_tokens):
            found.append(token)
            if token in self._stop and not params.ignore_eos:
                break
        return found

    def logits(self, tokens: Sequence[int]) -> Tensor:
        """(T, V) float32: row i predicts what follows token i of a text of T tokens. Needs ``every``."""
        self._llama.reset()
        self._llama.eval(list(tokens))
        return torch.from_numpy(self._llama.scores[: len(tokens)].copy())


class _Drafter:
    """What llama-cpp-python takes for a draft model: it is called with all tokens so far and gives some more.

    What it has computed before is kept: ``Llama.generate`` goes on from the longest common beginning.
    """

    def __init__(self, llama: Any, gamma: int) -> None:
        self.llama, self._gamma, self.calls = llama, gamma, 0

    def __call__(self, input_ids: Any, /, **_: Any) -> Any:
        import numpy as np

        self.calls += 1
        return np.fromiter(islice(_greedy(self.llama, input_ids.tolist()), self._gamma), dtype=np.intc)


def _greedy(llama: Any, prompt: Sequence[int]) -> Iterator[int]:
    tokens: Iterator[int] = llama.generate(list(prompt), temp=0.0, repeat_penalty=1.0)
    return tokens


def _open(
    file: Path, places: int, wide: bool, drafter: _Drafter | None = None, *, every: bool = False, gpu: bool
) -> Any:
    import llama_cpp

    stored = llama_cpp.GGML_TYPE_F32 if wide else llama_cpp.GGML_TYPE_F16
    try:
        return llama_cpp.Llama(
            str(file),
            n_ctx=places,
            n_threads=torch.get_num_threads(),
            n_threads_batch=torch.get_num_threads(),
            type_k=stored,
            type_v=stored,
            # Of a drafted pass every row counts.
            logits_all=every or drafter is not None,
            n_gpu_layers=-1 if gpu else 0,
            draft_model=drafter,
            verbose=False,
        )
    except ValueError as error:  # whatever is wrong with the file
        raise LoadError(f"llama.cpp cannot load {file}: {error}; remove the file to have it written again") from error


def check(file: Path) -> None:
    """Have another process compute a few rows with a file: a build that dies there would take this one along.

    (Seen with quantized weights on a processor with AMX.)

    Raises:
        UnsupportedError: it died.
    """
    code = "import sys, llama_cpp; llama_cpp.Llama(sys.argv[1], n_ctx=64, verbose=False).eval([1, 2, 3, 4])"
    done = subprocess.run([sys.executable, "-c", code, str(file)], capture_output=True, check=False)
    if done.returncode < 0:
        raise UnsupportedError(
            f"llama.cpp dies by {signal.Signals(-done.returncode).name} on {file.name}; build llama-cpp-python anew "
            "for this machine, or another version"
        )


# ---------------------------------------------------------------- files


def gguf_folder() -> Path:
    """Where the files are kept; they are written once for each version of a model."""
    return cache_folder() / "gguf"


def gguf_file(loaded: Loaded, kind: str) -> Path:
    """A GGUF file of a model that was loaded from a folder, written if it is not there yet.

    Args:
        loaded: a Llama; its weights are read while the file is written.
        kind: ggml's name of the matrices' type: F32, BF16, F16, or blocks of 32 weights in 8 or 4 bits, Q8_0 and Q4_0.
            All matrices have it, the embeddings too. (Files from elsewhere often spare some of them.)

    Raises:
        UnsupportedError: no plain Llama.
        LoadError: the file cannot be written.
    """
    path = gguf_folder() / f"{Path(loaded.name).name}-{kind.lower()}-{_key(loaded)}.gguf"
    if path.exists():
        return path
    _check_kind(loaded.model)
    with whole_file(path, "make room there, or set SAKIYOMI_CACHE_DIR") as fresh:
        _write(fresh, loaded.model, kind)
    return path


def _key(loaded: Loaded) -> str:
    """Changes with the files of the model."""
    assert loaded.folder is not None, "a benchmark names its models"
    # A target may be a GGUF file itself, with no configuration beside it.
    patterns = ("*.safetensors", "*.gguf", "config.json")
    files = sorted(path for pattern in patterns for path in loaded.folder.glob(pattern))
    # A dtype other than the stored one rounds the weights.
    state = [str(loaded.folder.resolve()), str(loaded.model.dtype), _LAYOUT]
    state += [(file.name, (found := file.stat()).st_size, found.st_mtime_ns) for file in files]
    return hashlib.sha256(json.dumps(state).encode()).hexdigest()[:16]


def _check_kind(model: Any) -> None:
    config = model.config
    rope = getattr(config, "rope_parameters", None) or {}
    plain = rope.get("rope_type", "default") == "default" and config.hidden_act == "silu"
    if type(model).__name__ != "LlamaForCausalLM" or config.attention_bias or config.mlp_bias or not plain:
        raise UnsupportedError(
            f"{type(model).__name__} is not written for llama.cpp here; it has to be a LlamaForCausalLM without biases "
            "and with plain rotary positions (as tales is)"
        )


def _write(path: Path, model: Any, kind: str) -> None:
    import gguf

    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("no_vocab")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    wanted = gguf.GGMLQuantizationType[kind]
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        weight = tensor.cpu().float()
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            weight = _interleaved(weight, head_dim)
        type_ = gguf.GGMLQuantizationType.F32 if weight.dim() == 1 else wanted
        if weight.shape[-1] % gguf.GGML_QUANT_SIZES[type_][0]:
            type_ = gguf.GGMLQuantizationType.F16  # rows that are no whole blocks: as llama.cpp's own converter does
        values = gguf.quantize(weight.numpy(), type_)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), values, raw_dtype=type_)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def _interleaved(weight: Tensor, head_dim: int) -> Tensor:
    """Rows of each head (heads x head_dim, D) in llama.cpp's order, which turns neighbours and not the two halves."""
    return weight.view(-1, 2, head_dim // 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)

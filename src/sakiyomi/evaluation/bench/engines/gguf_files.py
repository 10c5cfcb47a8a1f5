"""GGUF files of our models, which llama.cpp runs: the same weights, and the tokenizer.

The package ``gguf``, which writes them, is optional.
"""

from __future__ import annotations

import hashlib
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import Tensor

from sakiyomi.core.errors import UnsupportedError
from sakiyomi.core.files import cache_folder, whole_file
from sakiyomi.model_executor.loading import Loaded

KINDS = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "int8": "Q8_0", "int4": "Q4_0"}
"""ggml's names of torch's dtypes, and of its blocks of 32 weights in 8 or 4 bits."""
_LAYOUT = 2
"""Of the files; a change of it writes them anew."""


def gguf_folder() -> Path:
    """Folder of the files; each version of a model is written once."""
    return cache_folder() / "gguf"


def gguf_file(loaded: Loaded, kind: str) -> Path:
    """A GGUF file of a model that was loaded from a folder, written if it is not there yet.

    Args:
        loaded: a Llama; its weights are read while the file is written.
        kind: ggml's name of the matrices' type, one of the values of ``KINDS``. All matrices have it, the embeddings
            too. (Files from elsewhere often spare some of them.)

    Raises:
        UnsupportedError: no plain Llama, another tokenizer than a byte-level BPE, or ``gguf`` is not installed.
        LoadError: the file cannot be written.
    """
    if find_spec("gguf") is None:
        raise UnsupportedError("gguf, which writes its files, is not installed; pip install 'sakiyomi[bench]'")
    path = gguf_folder() / f"{Path(loaded.name).name}-{kind.lower()}-{_key(loaded)}.gguf"
    if path.exists():
        return path
    _check_kind(loaded.model)
    with whole_file(path, "make room there, or set SAKIYOMI_CACHE_DIR") as fresh:
        _write(fresh, loaded.model, loaded.tokenizer, kind)
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


def _write(path: Path, model: Any, tokenizer: Any, kind: str) -> None:
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
    _add_vocabulary(writer, tokenizer, config.vocab_size)
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


def _add_vocabulary(writer: Any, tokenizer: Any, size: int) -> None:
    """llama.cpp's server dies without one. Rows of the model after the tokenizer's last token are unused tokens."""
    import gguf

    state = json.loads(tokenizer.backend_tokenizer.to_str())
    bpe = state["model"]
    if bpe["type"] != "BPE" or "ByteLevel" not in json.dumps(state["pre_tokenizer"]):
        raise UnsupportedError(
            f"{type(tokenizer).__name__} is not written for llama.cpp here; it has to be a byte-level BPE (as that of "
            "tales is)"
        )
    pieces = {number: piece for piece, number in tokenizer.get_vocab().items()}
    special = set(tokenizer.all_special_ids)
    kinds = gguf.TokenType
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([pieces.get(i, f"<unused {i}>") for i in range(size)])
    writer.add_token_types(
        [kinds.UNUSED if i not in pieces else kinds.CONTROL if i in special else kinds.NORMAL for i in range(size)]
    )
    writer.add_token_merges([" ".join(pair) for pair in bpe["merges"]])
    writer.add_add_bos_token(False)
    for name in ("bos", "eos"):
        if (number := getattr(tokenizer, f"{name}_token_id")) is not None:
            getattr(writer, f"add_{name}_token_id")(number)


def _interleaved(weight: Tensor, head_dim: int) -> Tensor:
    """Rows of each head (heads x head_dim, D) in llama.cpp's order: rotary embeddings pair neighbours, not halves."""
    return weight.view(-1, 2, head_dim // 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)

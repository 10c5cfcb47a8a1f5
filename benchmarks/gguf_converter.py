"""Converts tiny models with llama.cpp's own converter and compares them with what sakiyomi reads of the files.

    python benchmarks/gguf_converter.py LLAMA_CPP_FOLDER [KIND...]

LLAMA_CPP_FOLDER is a checkout of llama.cpp: `conversion/` and `gguf-py/` are imported from there. KIND is a name of
``KINDS``; all without one. For each, a model with random weights is written as float32, and configuration, tensors and
logits are compared. The last line is one JSON object; the exit status is 1 where something differs.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from sakiyomi.core.gguf import read_gguf
from sakiyomi.model_executor.gguf.config import architecture_of, build_config
from sakiyomi.model_executor.gguf.weights import weights_of

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import causal_models
from toys import tiny_tokenizer

_LINEAR = {"num_hidden_layers": 4, "layer_types": ["linear_attention"] * 3 + ["full_attention"]}
_FULL = {"sliding_window": None, "use_sliding_window": False, "layer_types": ["full_attention"] * 3}
_SLIDING = {"layer_types": ["sliding_attention"] * 3}
KINDS: Mapping[str, Mapping[str, Any]] = {
    "llama": {}, "mistral": {"sliding_window": None}, "mixtral": {}, "qwen2": _FULL, "qwen2_moe": {}, "qwen3": {},
    "qwen3_moe": {"norm_topk_prob": True}, "qwen3_5_text": _LINEAR, "qwen3_5_moe_text": _LINEAR, "gemma": {},
    "gemma2": {"query_pre_attn_scalar": 12},
    "gemma3_text": {"query_pre_attn_scalar": 8, "vocab_size": 320} | _SLIDING,
    "gemma4_text": {"vocab_size_per_layer_input": 320, "vocab_size": 320}, "phi3": {}, "granite": {},
    "falcon": {"bias": False}, "starcoder2": {"sliding_window": None}, "gpt_oss": {}, "lfm2": {}, "deepseek_v2": {},
    "deepseek_v3": {}, "cohere": {}, "cohere2": {"rotary_pct": 1.0} | _SLIDING, "olmo": {}, "olmo2": {}, "olmo3": {},
    "smollm3": {}, "mamba": {}, "stablelm": {"qk_layernorm": False}, "nemotron": {}, "gpt2": {"n_ctx": 256},
    "minimax_m2": {"rotary_dim": 8},
}  # fmt: skip
"""Types of models, and settings without which such files cannot hold them."""
_TOKENS, _ROWS = 320, 400  # of the tokenizer, to which some types add tokens, and of the model
_PROMPT = [5, 9, 31, 200, 7, 77, 31, 15, 250, 3] * 12
_TENSORS_AGREE = 2e-6
_LOGITS_AGREE = 1e-4


@dataclass
class Comparison:
    """A model and its file.

    Attributes:
        kind: type of the model.
        architecture: of the file.
        missing, extra, differ: names of tensors that are not read, that the model does not have, that differ.
        unused: names in the file that belong to no tensor of the model.
        logits: largest difference of a logit.
        error: why nothing could be compared.
    """

    kind: str
    architecture: str = ""
    missing: list[str] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)
    differ: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    logits: float = float("nan")
    error: str = ""

    @property
    def same(self) -> bool:
        """Whether file and model agree."""
        return not (self.error or self.missing or self.extra or self.differ) and self.logits <= _LOGITS_AGREE


def random_model(kind: str) -> Any:
    """A tiny model in which every tensor has values of its own, norms too."""
    torch.manual_seed(0)
    config = causal_models.config(kind)
    config.vocab_size = _ROWS
    for name, value in KINDS[kind].items():
        setattr(config, name, value)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if not tensor.dtype.is_floating_point or tensor.numel() == 1 or name.endswith(("inv_freq", "embed_scale")):
                continue
            if name.endswith("A_log"):
                tensor.copy_(torch.rand_like(tensor) + 0.1)
            else:
                tensor.copy_(torch.randn_like(tensor) * 0.3 + (1 if "norm" in name else 0))
    return model


def convert(folder: Path, out: Path) -> None:
    """Write a folder's model as a file, by llama.cpp's converter; its tokenizer as one of bytes."""
    import gguf
    from conversion import ModelBase, ModelType, get_model_architecture, get_model_class
    from conversion.base import TextModel

    TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"  # which the toy tokenizer is not known to have
    settings = ModelBase.load_hparams(folder, False)
    converter = get_model_class(get_model_architecture(settings, ModelType.TEXT))
    converter.set_vocab = lambda self: self._set_vocab_gpt2()
    converter.no_mtp, converter.mtp_only = True, False
    with torch.inference_mode():
        converter(folder, gguf.LlamaFileType.ALL_F32, out).write()


def compare(kind: str, place: Path) -> Comparison:
    """A model of this type against its file, which is written to a folder."""
    model, out = random_model(kind), place / f"{kind}.gguf"
    folder = place / kind
    model.save_pretrained(folder)
    tiny_tokenizer(_TOKENS).save_pretrained(folder)
    convert(folder, out)
    file = read_gguf(out)
    config = build_config(file)
    weights, unused = weights_of(file, architecture_of(file), config)
    found = {weight.name: weight.numbers(config, torch.float32) for weight in weights}
    wanted: dict[str, Tensor] = model.state_dict()
    tied = set(model._tied_weights_keys or ()) if config.tie_word_embeddings else set()
    differ = [
        name
        for name in found.keys() & wanted.keys()
        if found[name].shape != wanted[name].shape or not torch.allclose(found[name], wanted[name], atol=_TENSORS_AGREE)
    ]
    read = AutoModelForCausalLM.from_config(config).eval().float()
    read.load_state_dict(found, strict=False)
    read.tie_weights()
    ids = torch.tensor([_PROMPT])
    with torch.no_grad():
        one, other = (each(ids, use_cache=False).logits for each in (model, read))
    return Comparison(
        kind,
        file.metadata["general.architecture"],
        sorted(wanted.keys() - found.keys() - tied),
        sorted(found.keys() - wanted.keys()),
        sorted(differ),
        unused,
        float((one - other).abs().max()),
    )


def main() -> int:
    """Compare, and print a line for each type."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("llama_cpp", metavar="LLAMA_CPP_FOLDER", type=Path)
    parser.add_argument("kinds", metavar="KIND", nargs="*")
    given = parser.parse_args()
    if unknown := set(given.kinds) - KINDS.keys():
        parser.error(f"unknown: {', '.join(sorted(unknown))}; expected {', '.join(KINDS)}")
    if not (given.llama_cpp / "conversion").is_dir():
        parser.error(f"{given.llama_cpp} holds no folder conversion; expected a checkout of llama.cpp")
    sys.path[:0] = [str(given.llama_cpp), str(given.llama_cpp / "gguf-py")]
    logging.disable(logging.INFO)
    found: list[Comparison] = []
    with tempfile.TemporaryDirectory() as place:
        for kind in given.kinds or KINDS:
            try:
                result = compare(kind, Path(place))
            except Exception as error:  # the converter raises its own kinds
                result = Comparison(kind, error=f"{type(error).__name__}: {error}")
            found.append(result)
            lists = {name: value[:4] for name, value in asdict(result).items() if isinstance(value, list) and value}
            said = result.error or f"logits {result.logits:.1e} {lists or ''}"
            print(f"{'same' if result.same else 'OTHER':6}{kind:18}{result.architecture:14}{said}", flush=True)
    print(json.dumps([asdict(result) | {"same": result.same} for result in found]))
    return 0 if all(result.same for result in found) else 1


if __name__ == "__main__":
    raise SystemExit(main())

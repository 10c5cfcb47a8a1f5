"""Tiny encoder-decoder models of every supported family, their sources, and what transformers makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import GenerationMixin

from toys import character_tokenizer

VOCAB = 60
MELS, FRAMES = 16, 100
NEW = 24
TOKENIZER = character_tokenizer("".join(map(chr, range(0x3041, 0x3041 + VOCAB - 2))))
"""One character a token; 0 is unknown, 1 the end."""

_ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "bart": ("BartForConditionalGeneration", {}),
    "mbart": ("MBartForConditionalGeneration", {"scale_embedding": True}),
    "pegasus": ("PegasusForConditionalGeneration", {"scale_embedding": True}),
    "marian": ("MarianMTModel", {"scale_embedding": True}),
    "t5": ("T5ForConditionalGeneration", {"initializer_factor": 4.0, "tie_word_embeddings": True}),
    "mt5": ("MT5ForConditionalGeneration", {"initializer_factor": 4.0}),
    "whisper": (
        "WhisperForConditionalGeneration",
        {"num_mel_bins": MELS, "max_source_positions": FRAMES // 2, "max_target_positions": 100},
    ),
}
FOUR = ("bart", "marian", "t5", "whisper")
ALL = tuple(_ARCHITECTURES)
_SEEDS = {"mbart": 2, "t5": 2}
"""Of models whose text would be a small circle otherwise."""


def build(name: str, seed: int | None = None, layers: int = 2, dim: int = 32, **config: Any) -> Any:
    """A model with random weights, fp32, in evaluation mode.

    Its text is no circle of one or two tokens, in which a wrong position would not show: embeddings are large beside
    what the layers add to them, and the head is another matrix.
    """
    class_name, own = _ARCHITECTURES[name]
    cls = getattr(transformers, class_name)
    values: dict[str, Any] = {"vocab_size": VOCAB, "d_model": dim, "pad_token_id": 0, "eos_token_id": 1}
    values["tie_word_embeddings"] = False
    if "t5" in name:
        values |= {
            "d_kv": dim // 4,
            "d_ff": 2 * dim,
            "num_layers": layers,
            "num_decoder_layers": layers,
            "num_heads": 4,
        }
        values |= {"decoder_start_token_id": 0}
        # So few that distances of a short text lie in all of them.
        values |= {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 20}
    else:
        values |= {"encoder_layers": layers, "decoder_layers": layers, "encoder_ffn_dim": 2 * dim}
        values |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "decoder_ffn_dim": 2 * dim}
        values |= {"bos_token_id": 2, "decoder_start_token_id": 2, "init_std": 0.3, "forced_eos_token_id": None}
        values |= {"max_position_embeddings": 128}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEEDS.get(name, 0) if seed is None else seed)
        model = cls(cls.config_class(**(values | own | config)))
        for path, module in model.named_modules():
            for parameter in (getattr(module, "bias", None), getattr(module, "final_logits_bias", None)):
                if isinstance(parameter, Tensor):  # zero at first, which hides where one is left out
                    parameter.data.normal_(std=0.1)
            if "t5" not in name and isinstance(module, nn.Embedding):
                module.weight.data.normal_(std=2.0)
            if name in ("bart", "mbart", "marian") and "decoder" in path and path.endswith(("out_proj", "fc2")):
                module.weight.data.mul_(0.15)
            if path.endswith("relative_attention_bias"):  # large beside the scores, or its place would not matter
                module.weight.data.normal_(std=3.0)
            if path.endswith("SelfAttention.q"):
                module.weight.data.mul_(0.1)
    return model.eval()


@cache
def model_of(name: str, seed: int | None = None, layers: int = 2) -> Any:
    """The same model in every test; with a seed another one of its family."""
    return build(name, seed, layers)


def sources(name: str, lengths: Sequence[int] = (5, 17, 11), seed: int = 1) -> list[Any]:
    """Token ids of these lengths, or as many sounds' features."""
    generator = torch.Generator().manual_seed(seed)
    if name == "whisper":
        return [2 * torch.randn(MELS, FRAMES, generator=generator) for _ in lengths]
    return [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in lengths]


def reference(model: Any, source: Any, new: int = NEW, *, ended: bool = False, **options: Any) -> list[int]:
    """transformers' own greedy tokens, without those that the decoder begins with; `ended`: by an end token too.

    Whisper's own ``generate`` takes end tokens and prompts away, so the one below it is called.
    """
    given = source[None] if isinstance(source, Tensor) else torch.tensor([source])
    values: dict[str, Any] = {"max_new_tokens": new, "do_sample": False, "num_beams": 1} | options
    if not ended:
        values["eos_token_id"] = None
    begin = values.pop("begin", 1)
    tokens: list[int] = GenerationMixin.generate(model, given, **values)[0, begin:].tolist()
    return tokens

"""Real checkpoints that others trained, as Hugging Face folders.

Their files lie in ``../shared/models`` beside the repository and stay there; formats are described in
``../shared/data/README.md``. Tests that need them are skipped where they are absent.
"""

from __future__ import annotations

import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import BitNetConfig, BitNetForCausalLM, LlamaConfig, LlamaForCausalLM, LlamaTokenizer

SHARED = Path(__file__).resolve().parents[2] / "shared"
MODELS = SHARED / "models"

LLAMA2C = {"stories260K": ("stories260K.bin", "tok512.model"), "babyllama-105": ("model5000.bin", "tok105.model")}
BITLLAMA = ("bitllama-1M", "bitllama-3M")


@dataclass(frozen=True)
class Sizes:
    """The seven numbers of a llama2.c header."""

    dim: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    context: int

    @classmethod
    def read(cls, raw: bytes) -> Sizes:
        dim, hidden, layers, heads, kv_heads, vocab, context = struct.unpack("<7i", raw[:28])
        return cls(dim, hidden, layers, heads, kv_heads, abs(vocab), context)

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads

    def config(self) -> dict[str, Any]:
        return {
            "hidden_size": self.dim,
            "intermediate_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "vocab_size": self.vocab,
            "max_position_embeddings": self.context,
            "tie_word_embeddings": True,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }

    def shapes(self) -> dict[str, tuple[int, int]]:
        """(out, in) of the matrices of a layer, in the files' order; which ones rotate is seen by the name."""
        kv = self.kv_heads * self.head_dim
        return {
            "self_attn.q_proj": (self.dim, self.dim),
            "self_attn.k_proj": (kv, self.dim),
            "self_attn.v_proj": (kv, self.dim),
            "self_attn.o_proj": (self.dim, self.dim),
            "mlp.gate_proj": (self.hidden, self.dim),
            "mlp.down_proj": (self.dim, self.hidden),
            "mlp.up_proj": (self.hidden, self.dim),
        }

    def placed(self, name: str, matrix: Tensor) -> Tensor:
        """Rotated rows in transformers' order: the files turn neighbouring pairs, transformers the two halves."""
        if name not in ("self_attn.q_proj", "self_attn.k_proj"):
            return matrix
        heads = matrix.shape[0] // self.head_dim
        return matrix.view(heads, self.head_dim // 2, 2, -1).transpose(1, 2).reshape(matrix.shape)


class Reader:
    """Arrays one after another out of a file."""

    def __init__(self, raw: bytes, place: int) -> None:
        self.raw, self.place = raw, place

    def take(self, dtype: str, *shape: int) -> Tensor:
        count = int(np.prod(shape))
        found = np.frombuffer(self.raw, dtype, count, self.place)
        self.place += found.nbytes
        return torch.from_numpy(found.reshape(shape).copy())


def _read_llama2c(path: Path) -> Any:
    raw = path.read_bytes()
    sizes = Sizes.read(raw)
    reader = Reader(raw, 28)
    layers, shapes = sizes.layers, sizes.shapes()
    attention = {name: shape for name, shape in shapes.items() if name.startswith("self_attn")}
    mlp = {name: shape for name, shape in shapes.items() if name.startswith("mlp")}
    embedding = reader.take("<f4", sizes.vocab, sizes.dim)
    kinds: dict[str, Tensor] = {"input_layernorm": reader.take("<f4", layers, sizes.dim)}
    kinds |= {name: reader.take("<f4", layers, *shape) for name, shape in attention.items()}
    kinds["post_attention_layernorm"] = reader.take("<f4", layers, sizes.dim)
    kinds |= {name: reader.take("<f4", layers, *shape) for name, shape in mlp.items()}
    weights = {"model.embed_tokens.weight": embedding, "lm_head.weight": embedding}
    weights["model.norm.weight"] = reader.take("<f4", sizes.dim)
    for name, stack in kinds.items():
        for layer in range(layers):
            weights[f"model.layers.{layer}.{name}.weight"] = sizes.placed(name, stack[layer])
    model = LlamaForCausalLM(LlamaConfig(**sizes.config(), rms_norm_eps=1e-5))
    model.load_state_dict(weights)
    return model


def _read_bitllama(path: Path) -> Any:
    raw = path.read_bytes()
    assert struct.unpack("<Ii", raw[:8]) == (0x616B3432, 1), "not a bitllama file of version 1"
    sizes = Sizes.read(raw[8:36])
    reader = Reader(raw, 256)
    # Tiny activations: the usual epsilon would drown them.
    model = BitNetForCausalLM(BitNetConfig(**sizes.config(), rms_norm_eps=1e-20, hidden_act="silu", rope_theta=10000.0))
    weights = {name: torch.ones_like(value) for name, value in model.state_dict().items() if "norm" in name}
    weights["model.norm.weight"] = reader.take("<f4", sizes.dim)
    weights["model.embed_tokens.weight"] = weights["lm_head.weight"] = reader.take("<f4", sizes.vocab, sizes.dim)
    for name, (rows, columns) in sizes.shapes().items():
        for layer in range(sizes.layers):
            scale = float(reader.take("<f4", 1))
            packed = reader.take("u1", rows * columns // 4)
            codes = torch.stack([(packed >> shift) & 3 for shift in (6, 4, 2, 0)], 1).view(rows, columns)
            matrix = ((codes == 1).float() - (codes == 3).float()) * (scale / columns)
            weights[f"model.layers.{layer}.{name}.weight"] = sizes.placed(name, matrix)
    model.load_state_dict(weights)
    return model


def available(name: str) -> bool:
    return (MODELS / name).is_dir()


def convert(name: str, folder: Path) -> Path:
    """Write one of the checkpoints as a Hugging Face folder, fp32, with its tokenizer; the folder comes back."""
    reader: Callable[[Path], Any] = _read_bitllama
    weights, pieces = "bit_model.bin", "tokenizer.model"
    if name in LLAMA2C:
        reader, (weights, pieces) = _read_llama2c, LLAMA2C[name]
    folder.mkdir(parents=True, exist_ok=True)
    reader(MODELS / name / weights).eval().save_pretrained(folder)
    shutil.copy(MODELS / name / pieces, folder / "tokenizer.model")
    LlamaTokenizer.from_pretrained(folder, legacy=False, add_bos_token=True).save_pretrained(folder)
    return folder


needs_shared = pytest.mark.skipif(
    not MODELS.is_dir(), reason="the checkpoints of ../shared/models are not beside the repository"
)

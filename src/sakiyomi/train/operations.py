"""What training retaining heads costs: counted operations, and what measured times make of them for other models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sakiyomi.cache.policies.retaining.heads import RetainingShape
from sakiyomi.cache.policies.retaining.raw import out_features

__all__ = ["GPU", "LLAMA_8B", "Shape", "operations", "paper_run", "shape_of"]

GPU = 150e12
"""Operations a second: about half of an A100's or A800's peak in bf16, the rate of the paper's own 0.80 GPU-hours."""


@dataclass(frozen=True)
class Shape:
    """What counts of a model and its heads.

    Attributes:
        linear: weights of the linear layers, without the head over the vocabulary.
        layers, heads, dim: of attention.
        retaining: weights of the heads' first and second layers.
    """

    linear: int
    layers: int
    heads: int
    dim: int
    retaining: tuple[int, int]


LLAMA_8B = Shape(6_979_321_856, 32, 32, 128, (32 * 6144 * 1024, 32 * 1024 * 8))
"""Llama 3.1 8B, with heads as wide as the paper's."""


def shape_of(target: Any, heads: RetainingShape) -> Shape:
    """Of a transformers model and its heads. Of experts all are counted, also those that a token does not come to."""
    text, head = target.config.get_text_config(), target.get_output_embeddings()
    linear = sum(module.weight.numel() for module in target.modules() if out_features(module) and module is not head)
    count = int(text.num_attention_heads)
    dim = int(getattr(text, "head_dim", None) or text.hidden_size // count)
    retaining = sum(heads.widths) * heads.hidden, heads.hidden * sum(heads.kv_heads)
    return Shape(linear, heads.layers, count, dim, retaining)


def operations(shape: Shape, rows: Sequence[tuple[int, int]]) -> tuple[float, float]:
    """Operations (a multiplication and an addition are two) of the target's passes over rows, and of all of a step.

    Attention is causal: a token sees half of the row. Heads go forwards and backwards without a gradient for what they
    read; labels are the products of the answer's queries and the prompt's keys.

    Args:
        shape: of the model.
        rows: tokens of each, and how many of them are the prompt's.
    """
    attention = 2 * shape.layers * shape.heads * shape.dim
    first, second = shape.retaining
    passes = sum(2 * shape.linear * length + attention * length**2 for length, _ in rows)
    heads = sum((4 * first + 6 * second) * prompt for _, prompt in rows)
    labels = sum(attention * (length - prompt) * prompt for length, prompt in rows)
    return float(passes), float(passes + heads + labels)


def paper_run(shape: Shape, steps: int = 3000, tokens: int = 10240, answer: int = 300) -> float:
    """Operations of a run of the paper's size: so many rows of a prompt of `tokens` and an answer."""
    return steps * operations(shape, [(tokens + answer, tokens)])[1]

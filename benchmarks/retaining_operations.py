"""Hours that training retaining heads takes on an 8B target, from counted operations and a measured or assumed rate.

    python benchmarks/retaining_operations.py --target tales --width 256 --step-ms 480 --rows 96:80 --rows 96:72

Prints the operations of such a step, its operations a second, and the hours of a run of the paper's size (Locret, arXiv
2410.01805: 3000 rows of 10,240 tokens) at this rate and at half of an A100's peak. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sakiyomi.cache.policies.retaining.heads import RetainingShape, default_width
from sakiyomi.cache.policies.retaining.raw import Raw, out_features
from sakiyomi.train.retaining_labels import kv_heads_of
from sakiyomi.train.taught import load_target

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="tales", help="the target of the measured step")
    parser.add_argument("--width", type=int, default=0, help="of the heads; 0: the usual one")
    parser.add_argument("--step-ms", type=float, required=True, help="a step, as on the card of `train retaining`")
    parser.add_argument("--rows", action="append", required=True, help="TOKENS:PROMPT of each row of the step")
    asked = parser.parse_args()
    target, _ = load_target(asked.target)
    width = asked.width or default_width(int(target.config.get_text_config().hidden_size))
    shape = shape_of(target, RetainingShape(Raw(target).widths, kv_heads_of(target), width))
    counts = [tuple(map(int, row.split(":"))) for row in asked.rows]
    step = operations(shape, [(length, prompt) for length, prompt in counts])[1]
    rate = step / (asked.step_ms / 1000)
    found = {"operations": step, "rate": rate, "hours_here": paper_run(LLAMA_8B) / rate / 3600}
    found["gpu_hours"] = paper_run(LLAMA_8B) / GPU / 3600
    print(json.dumps(found))


if __name__ == "__main__":
    main()

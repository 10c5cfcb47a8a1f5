"""Builders of token trees, by name. A new one is a class in ``builders.py`` and one line in ``BUILDERS``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sakiyomi.core.params import SamplingParams
from sakiyomi.drafters.trees.base import Builder, CandidateTree, Shape
from sakiyomi.drafters.trees.builders import BestFirst, Chain, Choices, DDTree, Dynamic, Static

__all__ = [
    "BUILDERS", "BestFirst", "Builder", "CandidateTree", "Chain", "Choices", "DDTree", "Dynamic", "Ranks", "Shape",
    "Static",
]  # fmt: skip

Ranks = Sequence[float] | Sequence[Sequence[float]]

_CHAIN, _BEST_FIRST, _DDTREE, _DYNAMIC = Chain(), BestFirst(), DDTree(), Dynamic()

BUILDERS: dict[str, Callable[[SamplingParams, Callable[[], Ranks]], Builder]] = {
    "chain": lambda params, ranks: _CHAIN,
    "best-first": lambda params, ranks: _BEST_FIRST,
    "ddtree": lambda params, ranks: _DDTREE,
    "dynamic": lambda params, ranks: _DYNAMIC,
    "static": lambda params, ranks: Static(ranks()),
    "choices": lambda params, ranks: Choices(params.choices),
}
"""By the name in ``SamplingParams.builder``; made from the parameters and from what gives the acceptance by rank
measured so far, of every level where levels differ."""

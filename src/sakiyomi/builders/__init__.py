"""Builders of token trees, by name. A new one is a file here and one line in ``BUILDERS``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sakiyomi.builders.base import Builder, Growth
from sakiyomi.builders.best_first import BestFirst
from sakiyomi.builders.chain import Chain
from sakiyomi.builders.dynamic import Dynamic
from sakiyomi.builders.static import Static

__all__ = ["BUILDERS", "BestFirst", "Builder", "Chain", "Dynamic", "Growth", "Static"]

BUILDERS: dict[str, Callable[[Sequence[float]], Builder]] = {
    "chain": lambda ranks: Chain(),
    "best-first": lambda ranks: BestFirst(),
    "dynamic": lambda ranks: Dynamic(),
    "static": Static,
}
"""Each is made from the acceptance by rank that was measured so far."""

"""Bytes that passes read and hold, and their share of the memory's bandwidth."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import TracebackType

from sakiyomi.cache.slots import SlotCache
from sakiyomi.core.outputs import Stats
from sakiyomi.engine.engine import Engine
from sakiyomi.engine.machine import bandwidth
from sakiyomi.kernels.batch import BatchPlan


def round_figures(total: Stats) -> dict[str, float]:
    """Of a sum over requests: tau, alpha, acceptance, and milliseconds a round in draft, score and everything else.

    Of requests that ran together a round counts as often as requests took part in it.
    """
    milliseconds = 1000 / max(total.rounds, 1)
    return {
        "tau": total.tau,
        "alpha": total.alpha,
        "acceptance_rate": total.acceptance_rate,
        "draft_ms": milliseconds * total.draft_seconds,
        "score_ms": milliseconds * total.score_seconds,
        "overhead_ms": milliseconds * total.overhead_seconds,
    }


def round_ms(figures: Mapping[str, float], *, draft: bool = True) -> float:
    """Milliseconds of a round, with or without its draft, from ``round_figures``."""
    return (figures["draft_ms"] if draft else 0.0) + figures["score_ms"] + figures["overhead_ms"]


class Meter:
    """Watches the passes of an engine's target and draft while the ``with`` block runs.

    Args:
        engine: whose models are watched.
    """

    def __init__(self, engine: Engine) -> None:
        self._target = engine.target
        draft = engine.drafter.model if engine.drafter is not None else None
        self._counts = {model: _Passes(model.cache) for model in (engine.target, draft) if model is not None}

    def __enter__(self) -> Meter:
        for model, passes in self._counts.items():
            model.watchers.append(passes.add)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for model, passes in self._counts.items():
            model.watchers.remove(passes.add)

    def figures(self) -> dict[str, float]:
        """Bytes of keys and values in the largest pass, of target and draft; share of the memory's speed.

        The share is what the target's decoding passes read in a second (weights, keys and values), divided by the
        speed of a plain read of a large block (``machine.bandwidth``). It exceeds 1 if weights stay in the processor's
        caches. It is missing if it is not known which weights a pass reads.
        """
        held: dict[int, int] = {}  # by cache: the target's first layers have none of their own
        for model, seen in self._counts.items():
            held[id(model.cache)] = max(held.get(id(model.cache), 0), seen.most)
        found = {"kv_bytes": float(sum(held.values()))}
        passes, weights = self._counts[self._target], self._target.weights.bytes
        if weights is not None and passes.seconds:
            found["bandwidth_share"] = (
                (passes.count * weights + passes.read) / passes.seconds / _ceiling(str(self._target.device))
            )
        return found

    def passes(self) -> list[dict[str, float]]:
        """Of the target, then of the draft if there is one: decoding passes, their rows, bytes of keys and values."""
        return [{"passes": one.count, "rows": one.rows, "kv": one.read} for one in self._counts.values()]


class _Passes:
    """Of one model: decoding passes, their rows and seconds, bytes of keys and values read; the most of any pass."""

    def __init__(self, cache: SlotCache) -> None:
        self._cache = cache
        self.count = self.rows = self.read = self.most = 0
        self.seconds = 0.0

    def add(self, plan: BatchPlan, seconds: float) -> None:
        # The cache knows what was evicted, and how small quantized keys and values are.
        held = sum(self._cache.held_bytes(part.slot, part.length + len(part.tokens)) for part in plan.parts)
        self.most = max(self.most, held)
        # A prompt's pass computes more than it reads, and an empty one was only timed.
        if plan.parts and not any(part.prompt for part in plan.parts):
            self.count, self.read, self.seconds = self.count + 1, self.read + held, self.seconds + seconds
            self.rows += sum(len(part.tokens) for part in plan.parts)


@functools.cache
def _ceiling(device: str) -> float:
    """Measured once a process."""
    return bandwidth(device=device)

"""Layers of a drafter on the kernels of a model that runs: packed for them, and packed again when the model changes."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from sakiyomi.kernels.batch import BatchPlan
from sakiyomi.kernels.native import PackedWeights
from sakiyomi.model_executor.runner import ModelRunner
from sakiyomi.model_executor.weights import rounding_of


class Beside(ABC):
    """Layers beside a model. A subclass calls ``_prepare`` when its weights are there.

    Args:
        host: whose kernels run the layers.

    Attributes:
        seconds, passes: spent in these layers so far, and passes of the drafter.
    """

    def __init__(self, host: ModelRunner) -> None:
        self._host = host
        self.seconds, self.passes = 0.0, 0
        self._generation = -1

    @abstractmethod
    def _pack(self, tables: PackedWeights | None) -> None:
        """Pack the layers for these kernels."""

    def _prepare(self) -> None:
        """Pack the layers where the host has changed to other kernels since."""
        weights = self._host.weights
        if self._generation != weights.generation:
            self._generation = weights.generation
            self._pack(weights.packed)

    @contextmanager
    def _running(self, rows: int) -> Iterator[None]:
        """Context in which the layers can be computed for this many rows."""
        host = self._host
        with torch.no_grad(), host.lock:
            self._prepare()
            host.begin(BatchPlan([]), rows)  # other models may have had a pass meanwhile
            yield

    @contextmanager
    def _timed(self) -> Iterator[None]:
        """Adds the time of the block to ``seconds``."""
        began = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - began


def fewer_bits(target: ModelRunner) -> str | None:
    """How to round the layers of a head beside a target: to 4 bits where the target's own weights are rounded.

    A pass of a head takes half the time then, and as many of its tokens are accepted (benchmarks/log/rounds.md).
    """
    return "int4" if rounding_of(target.weights) is not None else None


def projection_bits(target: ModelRunner) -> int:
    """Bits of a head's single layers, see ``linear_beside``: 8 where the target's weights are rounded."""
    return 16 if rounding_of(target.weights) is None else 8


def target_logits(target: ModelRunner, hidden: Tensor) -> Tensor:
    """Logits (rows, V) by a target's own head over the vocabulary, of (rows, hidden)."""
    with torch.no_grad(), target.lock:
        target.begin(BatchPlan([]), len(hidden))
        logits: Tensor = target.head(hidden)
        return logits

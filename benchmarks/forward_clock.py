"""Counts and times the forwards of transformers' models."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = ["ForwardClock"]


def _now(model: Any) -> float:
    """The clock, when the model's device has done what it was given: a GPU only begins to work when a call returns."""
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    return time.perf_counter()


@dataclass
class ForwardClock:
    """Counts and times the forwards of models while the ``with`` block runs: what is left is bookkeeping.

    Attributes:
        models: whose forwards are watched.
        seconds: inside them.
        calls: of each model.
    """

    models: Sequence[Any]
    seconds: float = 0.0
    calls: list[int] = field(default_factory=list)

    def __enter__(self) -> ForwardClock:
        self.calls = [0] * len(self.models)
        self._hooks = []
        for index, model in enumerate(self.models):
            self._hooks.append(model.register_forward_pre_hook(self._begin, prepend=True))
            self._hooks.append(model.register_forward_hook(self._end(index)))
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _begin(self, model: Any, *_: Any) -> None:
        self._began = _now(model)

    def _end(self, index: int) -> Any:
        def end(model: Any, *_: Any) -> None:
            self.seconds += _now(model) - self._began
            self.calls[index] += 1

        return end

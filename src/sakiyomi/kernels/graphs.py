"""Compiled graphs of a model, one for each number of rows.

A graph knows the row count and nothing else: neither KV length nor batch, mask or cache policy, so nothing a request
does compiles anew. They are compiled in a background thread, or waited for, and inductor keeps its work on disk, so
the next process starts in seconds.
"""

from __future__ import annotations

import logging
import os
import threading
import types
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from sakiyomi.kernels.build import cache_folder, compiler
from sakiyomi.kernels.plan import Plan

logger = logging.getLogger("sakiyomi")
Graph = Callable[[Tensor, Tensor], Tensor]


class State(Protocol):
    """What the attention operator reads."""

    def begin(self, plan: Plan) -> None:
        """Say what the next pass looks like."""
        ...


def _step(model: Any, name: str) -> Graph:
    """A forward function with a code object of its own: dynamo keeps graphs by code object, ours are chosen by us."""

    def step(ids: Tensor, positions: Tensor) -> Tensor:
        return model(input_ids=ids, position_ids=positions, attention_mask=None, use_cache=False).logits  # type: ignore[no-any-return]

    return types.FunctionType(step.__code__.replace(co_name=name), step.__globals__, name, None, step.__closure__)


class Graphs:
    """The compiled graphs of one model, by row count."""

    def __init__(self, model: Any, sizes: Sequence[int], state: State, device: torch.device) -> None:
        self._model, self._state, self._device = model, state, device
        self._sizes = tuple(sizes)
        self._ready: dict[int, Graph] = {}
        self._thread: threading.Thread | None = None
        self.failed = False

    def get(self, size: int) -> Graph | None:
        """The graph for this row count, or None if there is none (yet)."""
        return self._ready.get(size)

    def ready(self, sizes: Sequence[int]) -> bool:
        """Whether all these row counts have their graph."""
        return all(size in self._ready for size in sizes)

    def start(self, *, wait: bool, order: Sequence[int] = (8, 1, 4, 16, 32, 64)) -> None:
        """Compile, in the background or now."""
        if compiler() is None and self._device.type == "cpu":
            logger.warning("no C++ compiler was found: passes run eagerly; install g++ or clang++ for more speed")
            self.failed = True
            return
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder() / "inductor"))
        sizes = [size for size in order if size in self._sizes]
        if wait:
            self._compile(sizes)
            return
        self._thread = threading.Thread(target=self._compile, args=(sizes,), name="sakiyomi-compile", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Until the background has finished."""
        if self._thread is not None:
            self._thread.join()

    def _compile(self, sizes: Sequence[int]) -> None:
        for size in sizes:
            try:
                self._ready[size] = self._compiled(size)
            except Exception as error:
                self.failed = True
                logger.warning(
                    "compiling a graph of %d rows failed, passes run eagerly: %s",
                    size,
                    str(error).strip().splitlines()[0][:200],
                )
                return

    def _compiled(self, size: int) -> Graph:
        graph = torch.compile(
            _step(self._model, f"pass_of_{size}_rows"),
            dynamic=False,
            fullgraph=True,
            options={"guard_filter_fn": torch.compiler.skip_all_guards_unsafe},
        )
        with torch.no_grad():
            ids = torch.zeros(1, size, dtype=torch.int64, device=self._device)
            self._state.begin(Plan.of([]))
            graph(ids, torch.zeros_like(ids))
        return graph

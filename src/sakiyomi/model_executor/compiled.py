"""Compiled graphs of a model, one for each number of rows.

A graph knows the row count and nothing else: neither KV length nor batch, mask or cache policy, so nothing a request
does compiles anew. They are compiled in a background thread, or waited for, and inductor keeps its work on disk, so
the next process starts in seconds.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import sys
import threading
import time
import types
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from sakiyomi.core.process import TORCH_STATE
from sakiyomi.kernels.batch import BatchPlan
from sakiyomi.kernels.build import cache_folder, compiler
from sakiyomi.model_executor.features import HiddenStateCapture

logger = logging.getLogger("sakiyomi")
Graph = Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]]
"""From token ids and positions, (1, N) each, to logits (1, N, V) and what the head has read, (1, N, hidden)."""


class State(Protocol):
    """What the attention operator reads. `attention` is the name under which transformers knows the operator."""

    attention: str

    def begin(self, plan: BatchPlan, size: int) -> None:
        """Say what the next pass looks like; `size` counts filler rows too."""
        ...

    def calls(self) -> int:
        """Attention calls since `begin`."""
        ...


OPTIONS: dict[str, Any] = {
    # What these check at every call of an operator was checked when the graph was made.
    "size_asserts": False,
    "alignment_asserts": False,
}


def _keep_on_disk() -> None:
    """Point inductor at a folder that survives a restart, unless the user has chosen one."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    # Importing transformers already writes torch's own default, a temporary folder, into the environment.
    if os.environ.get("TORCHINDUCTOR_CACHE_DIR", default_cache_dir()) == default_cache_dir():
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache_folder() / "inductor")


def _compiled(model: Any, tap: HiddenStateCapture, ids: Tensor, positions: Tensor) -> Graph:
    """Compile a forward pass for inputs of these shapes, and run it once.

    What inductor made is called directly from then on. Dynamo would look at every module again before each call (0.4 ms
    for 12 layers), to choose between graphs; we choose by the row count, the one thing that a graph depends on.
    """
    made: list[tuple[Any, list[Any]]] = []

    def keep(module: Any, examples: Any) -> Any:
        from torch._inductor.compile_fx import compile_fx

        run: Any = compile_fx(module, examples, config_patches=OPTIONS)

        def first(*inputs: Any) -> Any:
            made.append((run, list(inputs)))
            return run(*inputs)

        return first

    # A code object of its own: dynamo keeps graphs by code object.
    def step(ids: Tensor, positions: Tensor) -> tuple[Tensor, Tensor | None]:
        logits = model(input_ids=ids, position_ids=positions, attention_mask=None, use_cache=False).logits
        return logits, tap.traced

    name = f"pass_of_{ids.shape[1]}_rows"
    own = types.FunctionType(step.__code__.replace(co_name=name), step.__globals__, name, None, step.__closure__)
    torch.compile(own, backend=keep, dynamic=False, fullgraph=True)(ids, positions)
    (run, inputs), *more = made
    places = [[i for i, value in enumerate(inputs) if value is tensor] for tensor in (ids, positions)]
    first, second = places
    if more or len(first) != 1 or len(second) > 1:  # where only attention knows of positions, they are no input
        raise RuntimeError("the pass is not one graph of token ids and positions")
    for i in first + second:
        inputs[i] = None

    def graph(ids: Tensor, positions: Tensor) -> tuple[Tensor, Tensor | None]:
        given = inputs.copy()
        for i in first:
            given[i] = ids
        for i in second:
            given[i] = positions
        found = run(*given)
        return found[0], found[1] if len(found) > 1 else None

    return graph


_compiling: set[threading.Thread] = set()
_stopped = threading.Event()
TRIES = 60  # seconds, too, until a thread that does not end is left alone


@atexit.register
def stop_compiling() -> None:
    """End what compiles in the background; the models at work keep the graphs that they have by then.

    At exit this comes before the interpreter goes: a thread that dies inside the compiler takes the process with it.
    """
    _stopped.set()
    report = sys.unraisablehook
    sys.unraisablehook = lambda what: None if what.exc_type is SystemExit else report(what)
    try:
        for thread in list(_compiling):
            for _ in range(TRIES):  # more than once: a callback of the collector may swallow it
                ident = ctypes.c_ulong(thread.ident or 0)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(SystemExit))
                thread.join(1.0)
                if not thread.is_alive():
                    break
    finally:
        sys.unraisablehook = report
        _stopped.clear()  # models that are loaded later have their graphs compiled


class Graphs:
    """The compiled graphs of one model, by row count.

    Args:
        model: switched to our attention.
        tap: on its head.
        state: what its attention operator reads.
        device: of the model.
        sizes: row counts that may be asked for.
        first: those that any request needs, the likeliest first. They are compiled in the background from the first
            decoding pass on, not before: the compiler's imports would hold up the first token.
    """

    def __init__(
        self,
        model: Any,
        tap: HiddenStateCapture,
        state: State,
        device: torch.device,
        sizes: Sequence[int],
        first: Sequence[int] = (),
    ) -> None:
        self._model, self._tap, self._state, self._device = model, tap, state, device
        self._sizes, self._first = tuple(sizes), tuple(first)
        self._ready: dict[int, Graph] = {}
        self._wanted: deque[int] = deque()
        self._asked: set[int] = set()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self.failed = self._device.type == "cpu" and compiler() is None
        if self.failed:
            logger.warning("no C++ compiler was found: passes run eagerly; install g++ or clang++ for more speed")

    def get(self, size: int) -> Graph | None:
        """The graph for this row count; None, and it is made in the background, where there is none yet."""
        graph = self._ready.get(size)
        if graph is None and size in self._sizes:
            self.start((*self._first, size))
        return graph

    @property
    def ready(self) -> frozenset[int]:
        """Row counts that have their graph."""
        return frozenset(self._ready)

    def start(self, sizes: Sequence[int]) -> None:
        """Have these compiled in the background."""
        if self.failed or _stopped.is_set() or all(size in self._asked for size in sizes):
            return
        with self._lock:
            fresh = [size for size in dict.fromkeys(sizes) if size not in self._asked]
            self._asked.update(fresh)
            self._wanted.extend(fresh)
            if fresh and self._thread is None:
                self._thread = threading.Thread(target=self._work, name="sakiyomi-compile", daemon=True)
                _compiling.add(self._thread)
                self._thread.start()

    def make(self, sizes: Sequence[int]) -> None:
        """Have these compiled now."""
        self._asked.update(sizes)
        for size in sizes:
            if size not in self._ready and not self.failed:
                self._compile(size)

    def wait(self, timeout: float | None = None, *, every: bool = False) -> None:
        """Until the background has nothing left to do, the first sizes or all included, or so many seconds are over."""
        self.start((*self._first, *self._sizes) if every else self._first)
        thread = self._thread
        if thread is not None:
            thread.join(timeout)

    def _work(self) -> None:
        """Compile what is wanted, then end: a thread that waits for more would keep the model alive for ever."""
        try:
            while True:
                with self._lock:
                    if not self._wanted or self.failed or _stopped.is_set():
                        self._thread = None
                        return
                    size = self._wanted.popleft()
                self._compile(size)
                time.sleep(0.01)  # a model that waits to be loaded comes first: a lock knows no order
        finally:
            _compiling.discard(threading.current_thread())

    def _compile(self, size: int) -> None:
        _keep_on_disk()
        try:
            with TORCH_STATE, torch.no_grad():
                ids = torch.zeros(1, size, dtype=torch.int64, device=self._device)
                self._state.begin(BatchPlan([]), size)
                self._ready[size] = _compiled(self._model, self._tap, ids, torch.zeros_like(ids))
        except Exception as error:  # whatever the compiler throws, the eager path is there
            self.failed = True
            if _stopped.is_set():  # it broke because it was stopped
                return
            lines = (str(error).strip() or type(error).__name__).splitlines()[:2]
            logger.warning("compiling a graph of %d rows failed, passes run eagerly: %s", size, " ".join(lines)[:300])

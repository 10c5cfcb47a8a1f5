"""Decoding passes compiled by inductor, one graph for each number of rows: ``compile=True``.

A graph knows the row count and nothing else: neither KV length nor batch, mask or cache policy, so nothing a request
does compiles anew. They are compiled while the model is loaded, and inductor keeps its work on disk, so that the next
process has them in seconds.
"""

from __future__ import annotations

import logging
import os
import types
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from sakiyomi.core.files import cache_folder
from sakiyomi.core.process import TORCH_STATE
from sakiyomi.kernels.batch import BatchPlan
from sakiyomi.kernels.variants import compiler
from sakiyomi.model_executor.attention.registry import BeginPass, PassForward, PassResult

__all__ = ["CompiledPasses"]

logger = logging.getLogger("sakiyomi")
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


def _compiled(forward: PassForward, ids: Tensor, positions: Tensor) -> PassForward:
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
    def step(ids: Tensor, positions: Tensor) -> PassResult:
        return forward(ids, positions)

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

    def graph(ids: Tensor, positions: Tensor) -> PassResult:
        given = inputs.copy()
        for i in first:
            given[i] = ids
        for i in second:
            given[i] = positions
        found = run(*given)
        return found[0], tuple(found[1:])

    return graph


class CompiledPasses:
    """The compiled graphs of one session, by row count: see ``PassRecorder``.

    Args:
        forward: the eager pass.
        device: of the model.
        sizes: row counts that may be asked for.

    Attributes:
        failed: there is no compiler, or it failed; passes run eagerly.
        ready: the graphs.
    """

    mode: ClassVar[str] = "compiled"

    def __init__(self, forward: PassForward, device: torch.device, sizes: Sequence[int]) -> None:
        self._forward, self._device = forward, device
        self._sizes = frozenset(sizes)
        self.ready: dict[int, PassForward] = {}
        self.fresh = False
        self.failed = device.type == "cpu" and compiler() is None
        if self.failed:
            logger.warning("no C++ compiler was found: passes are not compiled; install g++ or clang++")

    def has(self, rows: int) -> bool:
        """Whether passes of so many rows have their graph."""
        return rows in self.ready

    def clear(self) -> None:
        """Nothing: no graph knows where the cache lies."""

    def run(self, begin: BeginPass, plan: BatchPlan, ids: Tensor, positions: Tensor) -> PassResult | None:
        """The pass that `begin` described; None: it has no graph."""
        graph = self.ready.get(ids.shape[1])
        return graph(ids, positions) if graph is not None else None

    def record(self, begin: BeginPass, rows: int) -> None:
        """Compile the graph of so many rows now."""
        if self.failed or rows in self.ready or rows not in self._sizes:
            return
        _keep_on_disk()
        try:
            with TORCH_STATE, torch.no_grad():
                ids = torch.zeros(1, rows, dtype=torch.int64, device=self._device)
                begin(BatchPlan([]), rows)
                self.ready[rows] = _compiled(self._forward, ids, torch.zeros_like(ids))
        except Exception as error:  # whatever the compiler throws, the eager path is there
            self.failed = True
            lines = (str(error).strip() or type(error).__name__).splitlines()[:2]
            logger.warning("compiling a graph of %d rows failed, passes run eagerly: %s", rows, " ".join(lines)[:300])

"""The processes of a model in stages: hidden states cross from one to the next, and back to the first.

The first process has the engine, the sampler, and the cache that decides for all: it sends the calls on its slots with
the next pass. The other processes only run passes.
"""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Callable, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sakiyomi.cache.slots import SlotCache
from sakiyomi.core.errors import InputError, UnsupportedError, WorkerError
from sakiyomi.core.peers import PATIENCE, Peers, launched, parting, start
from sakiyomi.core.threads import govern_threads
from sakiyomi.kernels.batch import BatchPlan, SequenceRows
from sakiyomi.model_executor.build import build_runner
from sakiyomi.model_executor.loading import Loaded, load_model
from sakiyomi.model_executor.runner import ModelRunner
from sakiyomi.model_executor.stages.cut import stage_count, stage_folder
from sakiyomi.model_executor.structural_copy import layer_list

ADVICE = "a stage of the model is gone with it: load the model again"

_library = torch.library.Library("sakiyomi", "FRAGMENT")
_library.define("border(Tensor hidden, int number) -> Tensor")
_borders: weakref.WeakValueDictionary[int, Border] = weakref.WeakValueDictionary()


def _cross(hidden: Tensor, number: int) -> Tensor:
    return _borders[number](hidden)


_library.impl("border", _cross, "CompositeExplicitAutograd")


class Border:
    """A place where hidden states (1, rows, hidden) leave or enter this process.

    Args:
        cross: from the hidden states at this place to those that replace them.

    Attributes:
        number: identifies it in recorded passes.
    """

    def __init__(self, cross: Callable[[Tensor], Tensor]) -> None:
        self._cross, self.number = cross, id(self)
        _borders[self.number] = self

    def __call__(self, hidden: Tensor) -> Tensor:
        """The hidden states that replace these."""
        return self._cross(hidden)

    def behind(self, layer: nn.Module) -> None:
        """Have a layer's output cross: its only one, or the first of several."""

        def hook(module: nn.Module, inputs: Any, output: Any) -> Any:
            if isinstance(output, tuple):
                return (torch.ops.sakiyomi.border(output[0], self.number), *output[1:])
            return torch.ops.sakiyomi.border(output, self.number)

        layer.register_forward_hook(hook)

    def before(self, layer: nn.Module) -> None:
        """Have a layer's input cross."""

        def hook(module: nn.Module, inputs: Any, named: dict[str, Any]) -> Any:
            if inputs:
                return (torch.ops.sakiyomi.border(inputs[0], self.number), *inputs[1:]), named
            return inputs, named | {"hidden_states": torch.ops.sakiyomi.border(named["hidden_states"], self.number)}

        layer.register_forward_pre_hook(hook, with_kwargs=True)


class Line:
    """The connection between the processes.

    Args:
        peers: all of them, connected in a ring.

    Raises:
        WorkerError: a process has ended.
    """

    def __init__(self, peers: Peers) -> None:
        self.peers = peers
        peers.greet(ADVICE)
        assert peers.store is not None, "several processes have one"
        with self._alive():
            self._group: Any = dist.ProcessGroupGloo(peers.store, peers.number, peers.count, PATIENCE)

    @property
    def last(self) -> bool:
        """Whether the next process is the first."""
        return self.peers.number == self.peers.count - 1

    def send(self, message: bytes, hidden: Tensor) -> None:
        """Send the next process a pass's description and hidden states; the first gets the states alone."""
        to = (self.peers.number + 1) % self.peers.count
        with self._alive():
            if self.last:
                self._group.send([hidden.contiguous()], to, 0).wait()
                return
            head = torch.tensor([len(message), hidden.shape[1], hidden.shape[2]])
            body = torch.frombuffer(bytearray(message), dtype=torch.uint8)
            states = hidden.contiguous().view(-1).view(torch.uint8)
            self._group.send([head], to, 0).wait()
            self._group.send([torch.cat([body, states])], to, 0).wait()

    def end(self) -> None:
        """Tell the next process that there is no further pass; it forwards this."""
        if not self.last:
            with suppress(WorkerError), self._alive():
                self._group.send([torch.zeros(3, dtype=torch.int64)], self.peers.number + 1, 0).wait()

    def receive(self, dtype: torch.dtype) -> tuple[bytes, Tensor]:
        """Receive message and hidden states of the previous process; an empty message: there is no further pass."""
        before, head = self.peers.number - 1, torch.empty(3, dtype=torch.int64)
        with self._alive():
            self._group.recv([head], before, 0).wait()
            length, rows, width = head.tolist()
            if not length:
                return b"", head
            body = torch.empty(length + rows * width * dtype.itemsize, dtype=torch.uint8)
            self._group.recv([body], before, 0).wait()
        return body[:length].numpy().tobytes(), body[length:].clone().view(dtype).view(1, rows, width)

    def back(self, hidden: Tensor) -> Tensor:
        """Receive the hidden states of the last process, shaped like these."""
        found = torch.empty_like(hidden, memory_format=torch.contiguous_format)
        with self._alive():
            self._group.recv([found], self.peers.count - 1, 0).wait()
        return found

    @contextmanager
    def _alive(self) -> Any:
        try:
            yield
        except RuntimeError as error:  # Gloo raises nothing else
            raise self.peers.ended(ADVICE) from error


class SharedSlots(SlotCache):
    """The cache of the first stage, which records the calls on its slots for the other stages.

    Attributes:
        calls: methods with their arguments, since the last pass.
        plan: plan of the current pass.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.plan = BatchPlan([])
        super().__init__(*args, **options)

    def begin(self, plan: BatchPlan | None) -> None:
        """See ``SlotCache``."""
        super().begin(plan)
        if plan is not None:
            self.plan = plan

    def clear(self, slot: int) -> None:
        """See ``SlotCache``."""
        super().clear(slot)
        self.calls.append(("clear", (slot,)))

    def commit(self, slot: int, length: int, rows: Sequence[int]) -> None:
        """See ``SlotCache``."""
        super().commit(slot, length, rows)
        self.calls.append(("commit", (slot, length, list(rows))))

    def fork(self, slot: int, other: int, first: int, last: int) -> None:
        """See ``SlotCache``."""
        super().fork(slot, other, first, last)
        self.calls.append(("fork", (slot, other, first, last)))

    def snapshot(self, slot: int, length: int) -> dict[str, Tensor]:
        """Not supported: other processes hold a part of the cache.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError("a model in stages has its cache in several processes, which is not saved; leave it out")


def lead(folder: Path, load: partial[Loaded], run: partial[ModelRunner]) -> tuple[Loaded, ModelRunner]:
    """Load the first stage, and run the others in their own processes, or in those that torchrun has started.

    In torchrun's other processes this does not return: it ends the process when the first one has ended.

    Args:
        folder: written by ``cut``.
        load: ``load_model`` with its options.
        run: ``build_runner`` with its options, which are those of all processes.

    Returns:
        The loaded first stage, and its runner.

    Raises:
        InputError: torchrun has started another number of processes than there are stages.
        WorkerError: a process has ended.
    """
    count = stage_count(folder)
    same = {**load.keywords, "recorded": False}, run.keywords
    peers = launched()
    if peers is None:
        peers = start(count, _follow, folder, *same)
    elif peers.count != count:
        raise InputError(
            f"torchrun has started {peers.count} processes, and {folder} has {count} stages; start {count}"
        )
    elif peers.number:
        _follow(peers, folder, *same)
        raise SystemExit(0)
    loaded = load(stage_folder(folder, 0), recorded=False)
    runner = run(loaded.model, owned=loaded.owned, prepared=loaded.prepared, make_cache=SharedSlots)
    weakref.finalize(runner, peers.end, 0.0)
    _check(runner)
    line, cache = Line(peers), runner.cache
    if not peers.children:  # torchrun's, which end by themselves
        parting(weakref.finalize(runner, line.end))
    assert isinstance(cache, SharedSlots)
    cache.calls.clear()  # of self-tests, which every stage has made by itself

    def cross(hidden: Tensor) -> Tensor:
        parts = [(p.slot, p.length, len(p.tokens), p.parents, p.prompt, p.done, p.block) for p in cache.plan.parts]
        message = pickle.dumps((cache.calls, parts))
        cache.calls = []
        line.send(message, hidden)
        return line.back(hidden)

    border = Border(cross)
    border.behind(_layers(runner)[-1])
    # The other stages need the plan of every pass; the kernels describe none by themselves while a watcher is there.
    runner.watchers.append(lambda plan, seconds, border=border: None)  # type: ignore[misc]
    return replace(loaded, name=str(folder)), runner


def _follow(peers: Peers, folder: Path, load: dict[str, Any], run: dict[str, Any]) -> None:
    """Run the passes of another stage, until the first process ends."""
    govern_threads()
    loaded = load_model(stage_folder(folder, peers.number), **load)
    runner = build_runner(loaded.model, owned=loaded.owned, prepared=loaded.prepared, **run)
    _check(runner)
    line = Line(peers)
    arrived = leaving = torch.empty(0)

    def arrive(hidden: Tensor) -> Tensor:
        return arrived.clone()

    def leave(hidden: Tensor) -> Tensor:
        nonlocal leaving  # and not sent: where a pass is compared with a replayed one, it comes twice
        leaving = hidden.clone()
        return leaving

    borders = Border(arrive), Border(leave)
    layers = _layers(runner)
    borders[0].before(layers[0])
    borders[1].behind(layers[-1])
    while True:
        message, arrived = line.receive(runner.dtype)
        if not message:
            line.end()
            return
        calls, parts = pickle.loads(message)
        for name, arguments in calls:
            getattr(runner.cache, name)(*arguments)
        segments = []
        for slot, length, rows, parents, prompt, done, block in parts:
            runner.cache.reserve(slot, length + rows)
            segments.append(SequenceRows(slot, length, [0] * rows, parents, prompt, done, block))
        runner.run(BatchPlan(segments), arrived.shape[1])
        line.send(message, leaving)


def _layers(runner: ModelRunner) -> nn.ModuleList:
    found = runner.module.get_submodule(layer_list(runner.module, int(runner.config.num_hidden_layers), "stages"))
    assert isinstance(found, nn.ModuleList)
    return found


def _check(runner: ModelRunner) -> None:
    """Refuse models that keep a state outside the cache's columns."""
    weights = runner.weights
    if weights.stateful or weights.own_attention or weights.encoder is not None or weights.offloaded:
        raise UnsupportedError(
            f"stages: {type(runner.module).__name__} has layers that keep something else than keys and values, its own "
            "attention, or an encoder; use offload instead"
        )

"""Chains and best-first trees grown by the compiled kernels: between two passes of the model no candidate is in Python.

`kernels/growth.h` does what `DraftTreeState.advance` does, with the same builders; a tree that is complete is read back
into its state.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sakiyomi.core.errors import InputError, MemoryLimitError
from sakiyomi.drafters.draft_tree_state import DraftTreeState
from sakiyomi.drafters.trees import BestFirst, Chain
from sakiyomi.kernels.build import loaded
from sakiyomi.model_executor.runner import ModelRunner
from sakiyomi.sampling.probs import NOTHING_LEFT

__all__ = ["NativeTrees"]

_ASK = struct.Struct("=11q9d2Q4q")  # Ask in growth.h
_RULES = {"greedy": 0, "coupled": 1}
_DRAWN, _LISTED = 2, 3
LEVELS = 4  # most levels are narrow: rows for so many of the widest are more than a tree reads
FOLLOWED = 0.8  # share of accepted nodes that have an accepted child, where the draft is good


class _Ask(NamedTuple):
    """What is asked of one tree, and what it points to."""

    packed: bytes
    numbers: Any
    probs: Tensor | None


class NativeTrees:
    """Grows the trees of several requests at once.

    Args:
        model: the draft model.
        vocab_size: of the target.
    """

    def __init__(self, model: ModelRunner, vocab_size: int) -> None:
        self._model, self._width = model, vocab_size
        self._kernels: ctypes.CDLL | None = None
        self._forest = 0
        self._native: tuple[int, tuple[int, ...]] | None = None  # what the forest was made for
        self._grown = (ctypes.c_int64 * 2)(), ctypes.POINTER(ctypes.c_int64)(), ctypes.POINTER(ctypes.c_double)()
        self._tables: list[Tensor] = []  # of the requests of a round, (depth, V): new memory costs more than its use

    def __del__(self) -> None:
        self._free()

    def _free(self) -> None:
        if self._kernels is not None:
            self._kernels.sk_free_forest(self._forest)

    def grow(self, states: Sequence[DraftTreeState], besides: float) -> int | None:
        """Grow trees that have no level yet until they are complete.

        Args:
            states: of different slots.
            besides: seconds of a level outside the model.

        Returns:
            How many passes that took; None: nothing was done, these trees grow in Python.

        Raises:
            InputError: the model computes no numbers.
        """
        kernels = loaded()
        if kernels is None or not states or not all(map(_fits, states)):
            return None
        widest = list(map(_widest, states))
        rows = max(sum(len(state.missing) for state in states), sum(widest))
        native = self._model.native_passes(rows)
        rooms = [state.columns + _most_read(state) for state in states]
        if native is None or not self._reserve(states, rooms):
            return None
        if native != self._native:
            self._begin(*native, kernels)
            self._native = native
        seconds = self._seconds(max(widest), besides) if any(state.worth is not None for state in states) else None
        asks = [self._ask(i, state, room) for i, (state, room) in enumerate(zip(states, rooms, strict=True))]
        forest, half, grow = self._forest, self._half, kernels.sk_grow
        size = kernels.sk_plant(forest, len(states), b"".join([ask.packed for ask in asks]), seconds)
        passes, size = self._model.replay(size, lambda logits: grow(forest, logits.data_ptr(), half))
        if size < 0:
            raise InputError(NOTHING_LEFT)
        for index, (state, ask) in enumerate(zip(states, asks, strict=True)):
            self._read(state, index, ask.probs, kernels)
        return passes

    def _reserve(self, states: Sequence[DraftTreeState], rooms: Sequence[int]) -> bool:
        try:
            for state, room in zip(states, rooms, strict=True):
                self._model.cache.reserve(state.slot, room)
        except MemoryLimitError:
            return False
        return True

    def _begin(self, session: int, sizes: Sequence[int], kernels: ctypes.CDLL) -> None:
        self._free()
        places = [buffer.ctypes.data for buffer in self._model.pass_buffers(sizes)]
        known = (ctypes.c_int64 * len(sizes))(*sizes), (ctypes.c_void_p * len(sizes))(*places)
        self._forest = kernels.sk_forest(session, self._model.vocab_size, self._width, len(sizes), *known)
        self._kernels = kernels
        self._half = self._model.dtype == torch.bfloat16

    def _seconds(self, rows: int, besides: float) -> ctypes.Array[ctypes.c_double]:
        """Of a level by its rows."""
        model = self._model
        found: list[float] = [besides]
        while len(found) <= rows:
            size = model.padded(len(found))
            found += [model.pass_seconds(size) + besides] * (size + 1 - len(found))
        return (ctypes.c_double * len(found))(*found)

    def _table(self, index: int, depth: int) -> Tensor:
        """Room for the distributions of a drawn chain."""
        while len(self._tables) <= index:
            self._tables.append(torch.empty(0, self._width))
        if len(self._tables[index]) < depth:
            self._tables[index] = torch.empty(depth, self._width)
        return self._tables[index]

    def _ask(self, index: int, state: DraftTreeState, room: int) -> _Ask:
        context, params, candidates, worth = state.context, state.sampler.params, state.candidates, state.worth
        rule = _RULES.get(context.rule, _DRAWN if state.drawn else _LISTED)
        tokens = (*state.missing, *context.stop_ids)
        numbers = (ctypes.c_int64 * len(tokens))(*tokens)
        probs = self._table(index, candidates.depth) if rule == _DRAWN else None
        stream = context.noise.fork(state.name).counter if rule == _DRAWN else 0
        packed = _ASK.pack(
            *(state.slot, state.held, state.first, room, candidates.depth, candidates.nodes),
            *(state.candidate_count(-1), _is_chain(state), rule, worth is not None, params.top_k),
            *(params.temperature, params.top_p, params.min_p, candidates.floor),
            *((worth.price(candidates.nodes), worth.rate) if worth is not None else (0.0, 0.0)),
            *(FOLLOWED, state.confidence.sharpness, state.confidence.coverage),
            *(context.noise.state, stream, len(state.missing), len(context.stop_ids)),
            *(ctypes.addressof(numbers), 0 if probs is None else probs.data_ptr()),
        )
        return _Ask(packed, numbers, probs)

    def _read(self, state: DraftTreeState, index: int, probs: Tensor | None, kernels: ctypes.CDLL) -> None:
        """A tree as it was grown, into its state."""
        counts, ints, doubles = self._grown
        kernels.sk_grown(self._forest, index, counts, ctypes.byref(ints), ctypes.byref(doubles))
        whole, real = ints[: counts[0]], doubles[: counts[1]]
        levels, nodes, rows, places, stream = whole[:5]
        at, ends = 5 + 3 * nodes, 1 + 3 * nodes
        candidates = state.candidates
        candidates.levels, candidates.floor = levels, real[0]
        candidates.tokens, candidates.parents = whole[5 : 5 + nodes], whole[5 + nodes : 5 + 2 * nodes]
        candidates.ranks, state.rows, state.unread = whole[5 + 2 * nodes : at], whole[at : at + rows], []
        candidates.chances, candidates.values = real[1 : 1 + nodes], real[1 + nodes : 1 + 2 * nodes]
        state.drew(real[1 + 2 * nodes : ends], None if probs is None else probs[:levels])
        at += rows
        for _ in range(places):
            place, start, count = whole[at : at + 3]
            state.listed[place] = start, whole[at + 3 : at + 3 + count], real[ends : ends + count]
            at, ends = at + 3 + count, ends + count
        if probs is not None:
            state.context.noise.fork(state.name).counter = stream % 2**64


def _fits(state: DraftTreeState) -> bool:
    """Whether the kernels know how this tree grows, and nobody changes its logits."""
    return (
        type(state) is DraftTreeState
        and type(state.builder) in (Chain, BestFirst)
        and not state.sampler.edits
        and not state.candidates.levels
    )


def _widest(state: DraftTreeState) -> int:
    """Rows that a level may have."""
    return 1 if _is_chain(state) else state.candidates.nodes


def _most_read(state: DraftTreeState) -> int:
    """Rows of candidates for which there is to be room; a tree that would read more of them is complete."""
    depth = state.candidates.depth
    return depth if _is_chain(state) else state.candidates.nodes * min(depth, LEVELS)


def _is_chain(state: DraftTreeState) -> bool:
    return type(state.builder) is Chain

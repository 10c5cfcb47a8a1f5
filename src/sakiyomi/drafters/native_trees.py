"""Grows trees in the compiled kernels, without Python between two passes of the model.

`kernels/growth.h` does the same as `DraftTreeState.advance`, with the same builders. A complete tree is read back into
its state.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sakiyomi.core.errors import InputError
from sakiyomi.drafters.confidence import Confidence
from sakiyomi.drafters.draft_length import TokenValue
from sakiyomi.drafters.draft_tree_state import DraftTreeState
from sakiyomi.drafters.trees import Builder, CandidateTree, Shape
from sakiyomi.kernels.build import loaded
from sakiyomi.model_executor.runner import ModelRunner
from sakiyomi.sampling.probs import NOTHING_LEFT

EXTENT = struct.Struct("=8q6d")  # Extent in growth.h
_ASK = struct.Struct("=4q1q3d2Q4q")  # Ask in growth.h, behind its extent
_SHAPES = {"chain": 0, "best-first": 1, "ddtree": 2, "dynamic": 3, "fixed": 4}
_RULES = {"greedy": 0, "coupled": 1}  # else 2 where candidates are drawn, and 3
FOLLOWED = 0.8  # share of accepted nodes that have an accepted child, where the draft is good


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
        self._tables: list[Tensor] = []  # of the requests of a round, (places, V): new memory costs more than its use

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
        if kernels is None or not states:
            return None
        missing = total = widest = 0
        weighed = False
        shapes = []
        for state in states:
            shape = _shape_of(state)
            if shape is None:
                return None
            shapes.append(shape)
            missing, total = missing + state.first - state.held, total + shape.width
            widest = max(widest, shape.width)
            weighed |= state.worth is not None
        native = self._model.native_passes(max(missing, total), states[0].slot, states[0].held)
        if native is None or not self._reserve(states, shapes):
            return None
        if native != self._native:
            self._begin(*native, kernels)
            self._native = native
        tokens: list[int] = []
        drawn = zip(states, shapes, strict=True)
        tables = [self._table(i, shape.rows + 1) if state.drawn else None for i, (state, shape) in enumerate(drawn)]
        children = [place_children(shape) for shape in shapes]  # kept alive while the kernels read them
        asks = [pack_ask(*each, tokens) for each in zip(states, shapes, children, tables, strict=True)]
        seconds = level_seconds(self._model, widest, besides) if weighed else None
        given = len(tokens), struct.pack(f"={len(tokens)}q", *tokens)
        size = kernels.sk_plant(self._forest, len(states), b"".join(asks), *given, seconds)
        passes, size = self._model.replay(size, partial(kernels.sk_grow, self._forest, self._half))
        if size < 0:
            raise InputError(NOTHING_LEFT)
        for index, (state, table) in enumerate(zip(states, tables, strict=True)):
            self._read(state, index, table, kernels)
        return passes

    def _reserve(self, states: Sequence[DraftTreeState], shapes: Sequence[Shape]) -> bool:
        both = zip(states, shapes, strict=True)
        return all(self._model.cache.has_room(state.slot, state.first + shape.rows) for state, shape in both)

    def _begin(self, session: int, sizes: Sequence[int], kernels: ctypes.CDLL) -> None:
        self._free()
        places = [self._model.replayed(size)[1].data_ptr() for size in sizes]
        known = (ctypes.c_int64 * len(sizes))(*sizes), (ctypes.c_void_p * len(sizes))(*places)
        self._forest = kernels.sk_forest(session, self._model.vocab_size, self._width, len(sizes), *known)
        self._kernels = kernels
        self._half = self._model.dtype == torch.bfloat16

    def _table(self, index: int, places: int) -> Tensor:
        """Room for the distributions of so many places, whose candidates are drawn."""
        while len(self._tables) <= index:
            self._tables.append(torch.empty(0, self._width))
        if len(self._tables[index]) < places:
            self._tables[index] = torch.empty(places, self._width)
        return self._tables[index]

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
        own = real[1 + 2 * nodes : ends]
        at += rows
        if len(whole) - at == 4 * places:  # one token is listed at each
            listed = zip(
                whole[at + 1 :: 4], zip(whole[at + 3 :: 4], strict=True), zip(real[ends:], strict=True), strict=True
            )
            state.listed = dict(zip(whole[at::4], listed, strict=True))
            places = 0
        for _ in range(places):
            place, start, count = whole[at : at + 3]
            state.listed[place] = start, whole[at + 3 : at + 3 + count], real[ends : ends + count]
            at, ends = at + 3 + count, ends + count
        state.drew(own, None if probs is None else probs[: len(state.listed)])
        if probs is not None:
            state.context.noise.fork(state.name).counter = stream % 2**64


def place_children(shape: Shape) -> Any:
    """Array of the children of a fixed shape for the kernels, which must be kept alive; None for other shapes."""
    return (ctypes.c_int64 * len(shape.children))(*shape.children) if shape.children else None


def level_seconds(model: ModelRunner, rows: int, besides: float) -> ctypes.Array[ctypes.c_double]:
    """Seconds of a pass by its rows, with the seconds of a level outside the model added."""
    found: list[float] = [besides]
    while len(found) <= rows:
        size = model.padded(len(found))
        found += [model.pass_seconds(size) + besides] * (size + 1 - len(found))
    return (ctypes.c_double * len(found))(*found)


def pack_extent(
    tree: CandidateTree, builder: Builder, shape: Shape, children: Any, worth: TokenValue | None, confidence: Confidence
) -> bytes:
    """How large a tree may become, as the kernels take it.

    Args:
        tree: without a level.
        builder, shape: of it.
        children: see ``place_children``.
        worth: what a token is worth, where that is weighed.
        confidence: what turns scores into chances.
    """
    limits = tree.depth, tree.nodes, builder.candidate_count(tree, -1), worth is not None
    about = _SHAPES[shape.kind], shape.width, shape.rows, 0 if children is None else ctypes.addressof(children)
    price, rate = (worth.price(tree.nodes), worth.rate) if worth is not None else (0.0, 0.0)
    learnt = confidence.sharpness, confidence.coverage
    return EXTENT.pack(*limits, *about, tree.floor, price, rate, FOLLOWED, *learnt)


def pack_ask(state: DraftTreeState, shape: Shape, children: Any, table: Tensor | None, tokens: list[int]) -> bytes:
    """What is asked of one tree, as the kernels take it.

    Args:
        state: without a level.
        shape, children: of it, see ``pack_extent``.
        table: for the distributions that candidates are drawn from; None: there are none, or they lie in the kernels.
        tokens: those that it names join those of other trees.
    """
    context, params = state.context, state.sampler.params
    named, missing, stops = len(tokens), context.tokens[state.held :], context.stop_ids
    tokens += missing
    tokens += stops
    noise = context.noise
    stream = noise.fork(state.name).counter if state.drawn else 0
    extent = pack_extent(state.candidates, state.builder, shape, children, state.worth, state.confidence)
    return extent + _ASK.pack(
        *(state.slot, state.held, state.first, _RULES.get(context.rule, 2 if state.drawn else 3)),
        *(params.top_k, params.temperature, params.top_p, params.min_p, noise.state, stream),
        *(len(missing), len(stops), named, 0 if table is None else table.data_ptr()),
    )


def _shape_of(state: DraftTreeState) -> Shape | None:
    """The shape of a tree that the kernels can grow; None for others, such as trees with logits processors."""
    candidates = state.candidates
    if type(state) is not DraftTreeState or state.sampler.edits or candidates.levels:
        return None
    return state.builder.shape(candidates.depth, candidates.nodes)

"""Trees that grow in the compiled kernels, without Python between two passes of the model.

`kernels/growth.h` does the same as `DraftTreeState.advance`, with the same builders. Here is how a tree is described to
the kernels, and how one that they have grown is read back into its state.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sakiyomi.drafters.confidence import Confidence
from sakiyomi.drafters.draft_length import TokenValue
from sakiyomi.drafters.draft_tree_state import DraftTreeState
from sakiyomi.drafters.trees import Builder, CandidateTree, Shape, native_shape
from sakiyomi.model_executor.kernel_rounds import KernelRounds
from sakiyomi.model_executor.runner import ModelRunner

_ASKED = struct.Struct("=9q6d")  # Asked in round.h
_ROOT = struct.Struct("=5q3d2Qq")  # Root in growth.h
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
        self._rounds = KernelRounds(model, None, vocab_size)
        self._grown = (ctypes.c_int64 * 2)(), ctypes.POINTER(ctypes.c_int64)(), ctypes.POINTER(ctypes.c_double)()
        self._tables: list[Tensor] = []  # of the requests of a round, (places, V): new memory costs more than its use

    def grow(self, states: Sequence[DraftTreeState], besides: float) -> int | None:
        """Grow trees that have no level yet until they are complete.

        Args:
            states: of different slots.
            besides: seconds of a level outside the model.

        Returns:
            How many passes that took; None: nothing was done, these trees grow in Python.
        """
        shapes, rounds = [], self._rounds
        for state in states:
            shape = _shape_of(state)
            if shape is None:
                return None
            shapes.append(shape)
        both = list(zip(states, shapes, strict=True))
        missing, width = sum([state.first - state.held for state in states]), sum([shape.width for shape in shapes])
        if not both or not rounds.ready([max(missing, width)], lambda: [(states[0].slot, states[0].held)]):
            return None
        if not all(self._model.cache.has_room(state.slot, state.first + shape.rows) for state, shape in both):
            return None
        children = [place_children(shape) for shape in shapes]  # kept alive while the kernels read them
        asked, tables = b"", []
        for i, (state, shape) in enumerate(both):
            tables.append(self._table(i, shape.rows + 1) if state.drawn else None)
            seat_tree(rounds, i, state, tables[i])
            about = state.candidates, state.builder, shape, children[i], state.worth, state.confidence
            asked += pack_asked(i, *about)
        weighed = any(state.worth is not None for state in states)
        widest = max(shape.width for shape in shapes)
        seconds = level_seconds(self._model, widest, besides) if weighed else None
        grown = rounds.run(len(states), asked, seconds)
        if grown is None:
            return None
        for i, state in enumerate(states):
            self._read(state, i, tables[i])
        return grown.passes

    def _table(self, index: int, places: int) -> Tensor:
        """Room for the distributions of so many places, whose candidates are drawn."""
        while len(self._tables) <= index:
            self._tables.append(torch.empty(0, self._width))
        if len(self._tables[index]) < places:
            self._tables[index] = torch.empty(places, self._width)
        return self._tables[index]

    def _read(self, state: DraftTreeState, number: int, probs: Tensor | None) -> None:
        """A tree as it was grown, into its state."""
        counts, ints, doubles = self._grown
        self._rounds.kernels.sk_grown(self._rounds.number, number, counts, ctypes.byref(ints), ctypes.byref(doubles))
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


def pack_asked(
    number: int,
    tree: CandidateTree,
    builder: Builder,
    shape: Shape,
    children: Any,
    worth: TokenValue | None,
    confidence: Confidence,
) -> bytes:
    """How large a request's tree may become, as the kernels take it.

    Args:
        number: of the request there.
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
    return _ASKED.pack(number, *limits, *about, tree.floor, price, rate, FOLLOWED, *learnt)


def pack_none(number: int) -> bytes:
    """As ``pack_asked``, of a request that has no tree in this round."""
    return _ASKED.pack(number, *[0] * 8, *[0.0] * 6)


def seat_tree(rounds: KernelRounds, number: int, state: DraftTreeState, probs: Tensor | None = None) -> None:
    """Say where a request's trees begin, and how their candidates are found.

    Args:
        rounds: in which they grow.
        number: of the request there.
        state: without a level.
        probs: for the distributions that candidates are drawn from; None: there are none, or they lie in the kernels.
    """
    context, params = state.context, state.sampler.params
    missing, stops, noise = context.tokens[state.held :], context.stop_ids, context.noise
    stream = noise.fork(state.name).counter if state.drawn else 0
    root = _ROOT.pack(
        *(state.slot, state.held, state.first, _RULES.get(context.rule, 2 if state.drawn else 3)),
        *(params.top_k, params.temperature, params.top_p, params.min_p, noise.state, stream),
        0 if probs is None else probs.data_ptr(),
    )
    tokens = struct.pack(f"={len(missing) + len(stops)}q", *missing, *stops)
    rounds.kernels.sk_seat(rounds.number, number, root, len(missing), len(stops), tokens)


def _shape_of(state: DraftTreeState) -> Shape | None:
    """The shape of a tree that the kernels can grow; None for others, such as trees with logits processors."""
    candidates = state.candidates
    if type(state) is not DraftTreeState or state.sampler.edits or candidates.levels:
        return None
    return native_shape(state.builder, candidates.depth, candidates.nodes)

"""Trees that grow in the compiled kernels, without Python between two passes of the model.

`kernels/growth.h` does the same as `DraftTreeState.advance`, with the same builders. Here is how a tree is described to
the kernels, and how one that they have grown is read back into its state.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sakiyomi.drafters.confidence import Confidence
from sakiyomi.drafters.draft_length import TokenValue
from sakiyomi.drafters.draft_tree_state import DraftTreeState
from sakiyomi.drafters.native_texts import Wanted
from sakiyomi.drafters.trees import Builder, CandidateTree
from sakiyomi.model_executor.kernel_rounds import FedRows, KernelRounds
from sakiyomi.model_executor.runner import ModelRunner

_ASKED = struct.Struct("=9q6d")  # Asked in round.h
_ROOT = struct.Struct("=6q3d2Qq")  # Root in growth.h
_SHAPES = {"chain": 0, "best-first": 1, "ddtree": 2, "dynamic": 3, "fixed": 4, "text": 5}
_RULES = {"greedy": 0, "coupled": 1}  # else 2 where candidates are drawn, and 3
FOLLOWED = 0.8  # share of accepted nodes that have an accepted child, where the draft is good


class TreeSize(NamedTuple):
    """How large the tree of a request may become in a round.

    Attributes:
        depth, nodes: at most; depth 0: no tree grows in the kernels.
        width: most rows of a level.
        rows: candidates that are read of all levels, at most.
        worth: what a token is worth, where that is weighed.
        children: of a fixed shape, which the kernels read as long as this is there.
        asked: all this of a request, as the kernels take it.
    """

    depth: int
    nodes: int
    width: int
    rows: int
    worth: TokenValue | None
    children: Any
    asked: bytes

    @classmethod
    def none(cls, number: int, nodes: int = 0) -> TreeSize:
        """Of a request with this number in the kernels whose draft, of so many nodes, does not grow there."""
        return cls(0, nodes, 0, 0, None, None, _ASKED.pack(number, *[0] * 8, *[0.0] * 6))

    @classmethod
    def found(cls, number: int, wanted: Wanted) -> TreeSize:
        """Of a request whose draft is found in its text."""
        worth, nodes = wanted.worth, max(wanted.nodes, wanted.most)
        limits = wanted.depth, wanted.nodes, wanted.members, worth is not None, _SHAPES["text"], wanted.most, 0, 0
        weights = 0.0, 0.0, worth.rate if worth is not None else 0.0, 0.0, 0.0, 0.0
        return cls(wanted.depth, nodes, 0, 0, worth, None, _ASKED.pack(number, *limits, *weights))

    @classmethod
    def of(
        cls, number: int, tree: CandidateTree, builder: Builder, worth: TokenValue | None, confidence: Confidence
    ) -> TreeSize | None:
        """Of a tree without a level; None: the kernels do not know its shape.

        Args:
            number: of the request in the kernels.
            tree, builder: the tree, and what decides its shape.
            worth: what a token is worth, where that is weighed.
            confidence: what turns scores into chances.
        """
        shape = builder.shape(tree.depth, tree.nodes)
        if shape is None:
            return None
        children = (ctypes.c_int64 * len(shape.children))(*shape.children) if shape.children else None
        limits = tree.depth, tree.nodes, builder.candidate_count(tree, -1), worth is not None
        about = _SHAPES[shape.kind], shape.width, shape.rows, 0 if children is None else ctypes.addressof(children)
        price, rate = (worth.price(tree.nodes), worth.rate) if worth is not None else (0.0, 0.0)
        weights = tree.floor, price, rate, FOLLOWED, confidence.sharpness, confidence.coverage
        asked = _ASKED.pack(number, *limits, *about, *weights)
        return cls(tree.depth, tree.nodes, shape.width, shape.rows, worth, children, asked)


class NativeTrees:
    """Grows the trees of several requests at once.

    Args:
        model: the draft model.
        vocab_size: of the target.
        fed: rows of the model's passes read hidden states beside their tokens.
    """

    def __init__(self, model: ModelRunner, vocab_size: int, fed: FedRows | None = None) -> None:
        self._model, self._width, self._fed = model, vocab_size, fed
        self._rounds = KernelRounds(model, None, vocab_size, fed=fed)
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
        sizes: list[TreeSize] = []
        for number, state in enumerate(states):
            size = self._size_of(number, state)
            if size is None:
                return None
            sizes.append(size)
        rounds, first = self._rounds, states[0] if states else None
        missing, width = sum([state.first - state.held for state in states]), sum([size.width for size in sizes])
        if first is None or not rounds.ready([max(missing, width)], lambda: [(first.slot, first.held - first.lead)]):
            return None
        room = [(state.slot, state.first - state.lead + size.rows) for state, size in zip(states, sizes, strict=True)]
        if not all(self._model.cache.has_room(*each) for each in room):
            return None
        tables = [
            self._table(i, size.rows + 1) if state.drawn else None
            for i, (state, size) in enumerate(zip(states, sizes, strict=True))
        ]
        for i, state in enumerate(states):
            seat_tree(rounds, i, state, tables[i])
        weighed = any(size.worth is not None for size in sizes)
        seconds = level_seconds(self._model, max(size.width for size in sizes), besides) if weighed else None
        grown = rounds.run(len(states), b"".join([size.asked for size in sizes]), seconds)
        if grown is None:
            return None
        for i, state in enumerate(states):
            self._read(state, i, tables[i])
        return grown.passes

    def _size_of(self, number: int, state: DraftTreeState) -> TreeSize | None:
        """The size of a tree that the kernels can grow; None for others, such as trees with logits processors."""
        if (self._fed is None and type(state) is not DraftTreeState) or state.sampler.edits or state.candidates.levels:
            return None
        return TreeSize.of(number, state.candidates, state.builder, state.worth, state.confidence)

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


def level_seconds(model: ModelRunner, rows: int, besides: float) -> ctypes.Array[ctypes.c_double]:
    """Seconds of a pass by its rows, with the seconds of a level outside the model added."""
    found: list[float] = [besides]
    while len(found) <= rows:
        size = model.padded(len(found))
        found += [model.pass_seconds(size) + besides] * (size + 1 - len(found))
    return (ctypes.c_double * len(found))(*found)


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
        *(state.slot, state.held, state.lead, state.first, _RULES.get(context.rule, 2 if state.drawn else 3)),
        *(params.top_k, params.temperature, params.top_p, params.min_p, noise.state, stream),
        0 if probs is None else probs.data_ptr(),
    )
    tokens = struct.pack(f"={len(missing) + len(stops)}q", *missing, *stops)
    given = None if rounds.fed is None else state.given.to(rounds.fed.given.dtype).contiguous()
    place = None if given is None else given.data_ptr()
    rounds.kernels.sk_seat(rounds.number, number, root, len(missing), len(stops), tokens, place)

"""Trees that grow in the compiled kernels, without Python between two passes of the model.

`kernels/growth.h` does the same as `DraftTreeState.advance`, with the same builders. Here is how a tree is described to
the kernels, and how one that they have grown is read back into its state.
"""

from __future__ import annotations

import ctypes
import struct
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sakiyomi.drafters.draft_length import TokenValue
from sakiyomi.drafters.draft_tree_state import DraftTreeState, TreePlan
from sakiyomi.drafters.native_texts import NOTHING, Wanted, doubles
from sakiyomi.kernels.native import pointer
from sakiyomi.model_executor.kernel_rounds import Around, FedRows, KernelRounds
from sakiyomi.model_executor.runner import ModelRunner

_EXTENT = struct.Struct("=8q6d2q")  # Extent in growth.h
_NOTHING = bytes(_EXTENT.size)
_ROOT = struct.Struct("=6q3d2Qq")  # Root in growth.h
_SHAPES = {"chain": 0, "best-first": 1, "ddtree": 2, "dynamic": 3, "fixed": 4}
_RULES = {"greedy": 0, "coupled": 1}  # else 2 where candidates are drawn, and 3
FOLLOWED = 0.8  # share of accepted nodes that have an accepted child, where the draft is good


class TreeSize(NamedTuple):
    """How large the draft of a request may become in a round.

    Attributes:
        depth: of a tree that grows in the kernels; 0: none does.
        nodes: of the draft, at most.
        width: most rows of a level of the tree.
        rows: candidates that are read of all levels, at most.
        worth: what a token is worth, where that is weighed.
        held: arrays that the kernels read as long as this is there.
        extent: of the tree, as the kernels take it.
        wanted: of what is found in the request's text, likewise.
    """

    depth: int
    nodes: int
    width: int
    rows: int
    worth: TokenValue | None
    held: Any = None
    extent: bytes = _NOTHING
    wanted: bytes = NOTHING

    @classmethod
    def none(cls, nodes: int = 0) -> TreeSize:
        """Of a draft of so many nodes that neither grows nor is found."""
        return cls(0, nodes, 0, 0, None)

    def asked(self, number: int) -> bytes:
        """All this of a request, as the kernels take it: `Asked` in `round.h`."""
        return number.to_bytes(8, sys.byteorder) + self.extent + self.wanted

    def finding(self, wanted: Wanted) -> TreeSize:
        """The same, of a draft that is also found in the request's text."""
        nodes = max(wanted.nodes, wanted.most, self.nodes)
        held = self.held, wanted.seconds
        return self._replace(nodes=nodes, worth=wanted.worth, held=held, wanted=wanted.pack())

    @classmethod
    def of(cls, plan: TreePlan) -> TreeSize | None:
        """Of a tree without a level; None: the kernels do not know its shape."""
        tree, builder, worth = plan.tree, plan.builder, plan.worth
        shape = builder.shape(tree.depth, tree.nodes)
        if shape is None:
            return None
        children = (ctypes.c_int64 * len(shape.children))(*shape.children) if shape.children else None
        chances = [number for each in plan.levels for number in (each.sharpness, each.coverage)]
        slots = doubles(chances) if len(plan.levels) > 1 else None
        limits = tree.depth, tree.nodes, plan.candidate_count(-1), worth is not None
        about = _SHAPES[shape.kind], shape.width, shape.rows, 0 if children is None else ctypes.addressof(children)
        price, rate = (worth.price(tree.nodes), worth.rate) if worth is not None else (0.0, 0.0)
        weights = tree.floor, price, rate, FOLLOWED, *chances[:2]
        more = 0 if slots is None else ctypes.addressof(slots), plan.breadth or 0
        extent = _EXTENT.pack(*limits, *about, *weights, *more)
        return cls(tree.depth, tree.nodes, shape.width, shape.rows, worth, (children, slots), extent)


class NativeTrees:
    """Grows the trees of several requests at once.

    Args:
        model: the draft model.
        vocab_size: of the target.
        fed: what the model's passes read and give beside tokens and logits.
    """

    def __init__(self, model: ModelRunner, vocab_size: int, fed: FedRows | None = None) -> None:
        self._model, self._width, self._fed = model, vocab_size, fed
        self._rounds = KernelRounds(model, None, vocab_size, around=Around(fed))
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
        for state in states:
            size = self._size_of(state)
            if size is None:
                return None
            sizes.append(size)
        rounds, first = self._rounds, states[0] if states else None
        if not self._model.describable():
            return None
        missing, width = sum([state.first - state.held for state in states]), sum([size.width for size in sizes])
        # A level is hardly ever as wide as it may be: one that is wider than the largest pass grows in Python.
        wanted = max(missing, min(width, self._model.sizes[-1]))
        if first is None or not rounds.ready([wanted], lambda: [(first.slot, first.held - first.lead)]):
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
        grown = rounds.run(len(states), b"".join([size.asked(number) for number, size in enumerate(sizes)]), seconds)
        if not grown:
            return None
        for i, state in enumerate(states):
            self._read(state, i, tables[i])
        return grown[0].passes

    def _size_of(self, state: DraftTreeState) -> TreeSize | None:
        """The size of a tree that the kernels can grow; None for others. Outside of rounds they change no rows."""
        if (self._fed is None and type(state) is not DraftTreeState) or state.sampler.edits or state.candidates.levels:
            return None
        return TreeSize.of(state.plan)

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
    given, (fed, _, heard) = state.given.to(rounds.models[0].dtype).contiguous(), rounds.around
    features = given if fed is not None and fed.given is not None else None
    rounds.kernels.sk_seat(rounds.number, number, root, len(missing), len(stops), tokens, pointer(features))
    if heard is not None and heard.slots is not None:
        rounds.kernels.sk_hear(rounds.number, number, given.data_ptr())

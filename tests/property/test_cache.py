"""The slot cache against the simplest thing that it could be: a list of kept pairs for each request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from backends import backend_on
from sakiyomi.cache.layout import LayerShape
from sakiyomi.cache.slots import FIRST_ROOM, SlotCache
from sakiyomi.core.errors import InputError, MemoryLimitError
from sakiyomi.kernels.build import native
from sakiyomi.model_executor.attention.cpu import CpuBackend

SHAPES = (LayerShape(2, 3, 3), LayerShape(1, 4, 2), LayerShape(2, 3, 3))
SLOTS = 5


def pairs(number: int, count: int) -> list[tuple[list[Tensor], list[Tensor]]]:
    """Keys and values of ``count`` tokens: for each a tensor (heads, dim) by layer, unlike any others."""
    found = []
    for i in range(count):
        generator = torch.Generator().manual_seed(1000 * number + i)
        keys = [torch.randn(shape.heads, shape.key_dim, generator=generator) for shape in SHAPES]
        values = [torch.randn(shape.heads, shape.value_dim, generator=generator) for shape in SHAPES]
        found.append((keys, values))
    return found


def write(cache: SlotCache, slot: int, start: int, rows: Sequence[tuple[list[Tensor], list[Tensor]]]) -> None:
    """What a pass does: rows go to the columns behind those that are there."""
    for i, (keys, values) in enumerate(rows):
        for layer in range(len(SHAPES)):
            cache.keys[layer][slot, :, start + i] = keys[layer]
            cache.values[layer][slot, :, start + i] = values[layer]


class Cache(RuleBasedStateMachine):
    """Requests come, write passes, keep parts of them, and go, in any order; storage grows meanwhile."""

    @initialize()
    def begin(self) -> None:
        self.moves: list[tuple[int, int]] = []
        self.cache = SlotCache(SHAPES, dtype=torch.float32, max_slots=SLOTS, on_move=self.moved)
        self.held: dict[int, list[tuple[list[Tensor], list[Tensor]]]] = {}
        self.number = 0

    def moved(self, cache: SlotCache) -> None:
        self.moves.append((cache.slots, cache.room))

    @precondition(lambda self: len(self.held) < SLOTS)
    @rule()
    def take(self) -> None:
        slot = self.cache.take()
        assert slot == min(set(range(SLOTS)) - set(self.held)), "the lowest free slot, so that storage stays small"
        self.held[slot] = []

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.held)))
        self.cache.release(slot)
        del self.held[slot]

    @precondition(lambda self: self.held)
    @rule(data=st.data(), count=st.one_of(st.integers(1, 9), st.integers(100, 300)))
    def a_pass(self, data: st.DataObject, count: int) -> None:
        slot = data.draw(st.sampled_from(sorted(self.held)))
        kept = sorted(data.draw(st.sets(st.integers(0, count - 1), max_size=20)))
        if data.draw(st.booleans()):
            kept = list(range(len(kept)))  # a chain's beginning: nothing has to move
        length = len(self.held[slot])
        self.number += 1
        rows = pairs(self.number, count)
        self.cache.reserve(slot, length + count)
        write(self.cache, slot, length, rows)
        self.cache.commit(slot, length, kept)
        self.held[slot] += [rows[i] for i in kept]

    @precondition(lambda self: self.held)
    @rule(data=st.data(), columns=st.integers(0, 2000))
    def reserve(self, data: st.DataObject, columns: int) -> None:
        before = (self.cache.slots, self.cache.room)
        slot = data.draw(st.sampled_from(sorted(self.held)))
        self.cache.reserve(slot, columns)
        assert self.cache.room >= columns
        assert self.cache.slots > slot
        if before != (self.cache.slots, self.cache.room):
            assert self.moves[-1] == (self.cache.slots, self.cache.room), "whoever keeps pointers was not told"

    @invariant()
    def holds_what_was_kept(self) -> None:
        for slot, rows in getattr(self, "held", {}).items():
            for layer in range(len(SHAPES)):
                for i, (keys, values) in enumerate(rows):
                    assert torch.equal(self.cache.keys[layer][slot, :, i], keys[layer])
                    assert torch.equal(self.cache.values[layer][slot, :, i], values[layer])

    @invariant()
    def grows_by_doubling(self) -> None:
        cache = getattr(self, "cache", None)
        if cache is not None and cache.room:
            assert cache.room % FIRST_ROOM == 0
            assert (cache.room // FIRST_ROOM) & (cache.room // FIRST_ROOM - 1) == 0
            assert cache.bytes == sum(t.numel() * t.element_size() for t in (*cache.keys, *cache.values))
            assert len(self.moves) <= 12, "storage moves with the logarithm of its size"


Cache.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None, derandomize=True)
test_any_order_of_events = Cache.TestCase


@pytest.mark.thorough
@given(length=st.integers(0, 40), count=st.integers(1, 12), data=st.data())
def test_keep_equals_a_cache_built_from_the_kept_tokens(length: int, count: int, data: st.DataObject) -> None:
    """The definition of roll-back: nobody can tell afterwards what else had been written."""
    kept = sorted(data.draw(st.sets(st.integers(0, count - 1))))
    prefix, rows = pairs(1, length), pairs(2, count)
    one, two, compiled = (SlotCache(SHAPES, dtype=torch.float32, max_slots=2) for _ in range(3))
    for cache in (one, two, compiled):
        cache.take(), cache.take()
        cache.reserve(1, length + count)
        write(cache, 1, 0, prefix)
    if native() is not None:
        kernels = backend_on(compiled, native=True)
        assert isinstance(kernels, CpuBackend) and compiled.gather is not None
    for cache in (one, compiled):
        write(cache, 1, length, rows)
        cache.commit(1, length, kept)
    write(two, 1, length, [rows[i] for i in kept])
    two.commit(1, length, range(len(kept)))
    end = length + len(kept)
    for cache in (one, compiled):
        for a, b in zip((*cache.keys, *cache.values), (*two.keys, *two.values), strict=True):
            assert torch.equal(a[1, :, :end], b[1, :, :end])


@given(available=st.integers(0, 200_000), columns=st.integers(1, 4000), slot=st.integers(0, 7))
def test_what_does_not_fit_is_refused_and_changes_nothing(available: int, columns: int, slot: int) -> None:
    """Asked before anything is allocated; the cache is as usable afterwards as it was."""
    room = [10**9]
    cache = SlotCache(SHAPES, dtype=torch.float32, max_slots=8, available=lambda: room[0])
    cache.reserve(0, 10)
    write(cache, 0, 0, pairs(1, 10))
    cache.commit(0, 0, range(10))
    before = [t.data_ptr() for t in (*cache.keys, *cache.values)]
    state = (cache.room, cache.slots, cache.bytes)
    room[0] = available
    try:
        cache.reserve(slot, columns)
    except MemoryLimitError as error:
        assert [t.data_ptr() for t in (*cache.keys, *cache.values)] == before
        assert (cache.room, cache.slots, cache.bytes) == state
        assert f"{available:,}" in str(error)
    else:
        assert cache.room >= columns
    for i, (keys, _) in enumerate(pairs(1, 10)):
        assert torch.equal(cache.keys[0][0, :, i], keys[0])


def test_nothing_is_allocated_before_it_is_needed() -> None:
    """A model's longest context may be a million tokens."""
    cache = SlotCache(SHAPES, dtype=torch.bfloat16, max_slots=64)
    assert cache.bytes == 0
    cache.reserve(cache.take(), 3)
    assert (cache.slots, cache.room) == (1, FIRST_ROOM)
    assert cache.pair_bytes == 2 * (2 * 6 + 6 + 2 * 6)


def test_slots_run_out() -> None:
    """The engine never asks for more places than there are; who measures beside running requests may."""
    cache = SlotCache(SHAPES, dtype=torch.float32, max_slots=2)
    cache.take(), cache.take()
    with pytest.raises(InputError, match=r"all 2 places .* are taken .* larger max_batch"):
        cache.take()
    with pytest.raises(InputError), cache.lent(5):
        pass
    cache.release(1)
    with cache.lent(5) as slot:
        assert slot == 1


def test_where_doubling_does_not_fit_what_is_needed_may() -> None:
    bytes_of = SlotCache(SHAPES, dtype=torch.float32, max_slots=8).pair_bytes
    cache = SlotCache(SHAPES, dtype=torch.float32, max_slots=8, available=lambda: bytes_of * 3 * 640)
    cache.reserve(2, 600)
    assert (cache.slots, cache.room) == (3, 640)
    cache.needs(3, 600)
    with pytest.raises(MemoryLimitError, match="about 480 tokens"):
        cache.needs(4, 600)


def test_growth_that_fails_leaves_everything_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Out of memory, or Ctrl-C, in the middle of a growth."""
    moves: list[int] = []
    cache = SlotCache(SHAPES, dtype=torch.float32, max_slots=2, on_move=lambda cache: moves.append(cache.room))
    cache.reserve(0, 10)
    write(cache, 0, 0, pairs(1, 10))
    before = [t.data_ptr() for t in (*cache.keys, *cache.values)]
    zeros, calls = torch.zeros, [0]

    def failing(*args: Any, **options: Any) -> torch.Tensor:
        calls[0] += 1
        if calls[0] > len(SHAPES):  # the keys are there, the values are not
            raise KeyboardInterrupt
        return zeros(*args, **options)

    monkeypatch.setattr(torch, "zeros", failing)
    with pytest.raises(KeyboardInterrupt):
        cache.reserve(1, 1000)
    assert [t.data_ptr() for t in (*cache.keys, *cache.values)] == before
    assert (cache.slots, cache.room, moves) == (1, FIRST_ROOM, [FIRST_ROOM])
    monkeypatch.undo()
    cache.reserve(1, 1000)
    for i, (keys, _) in enumerate(pairs(1, 10)):
        assert torch.equal(cache.keys[0][0, :, i], keys[0])


def test_pointers_are_renewed_after_a_growth_that_was_interrupted() -> None:
    """Ctrl-C while the kernels are told of the new tensors: they would read freed memory in the next pass."""
    pointers: list[int] = []
    failing = [True]

    def moved(cache: SlotCache) -> None:
        pointers.clear()
        for i, tensor in enumerate((*cache.keys, *cache.values)):
            if i == 2 and cache.room > FIRST_ROOM and failing.pop():
                raise KeyboardInterrupt
            pointers.append(tensor.data_ptr())

    cache = SlotCache(SHAPES, dtype=torch.float32, max_slots=2, on_move=moved)
    cache.reserve(0, 10)
    write(cache, 0, 0, pairs(1, 10))
    with pytest.raises(KeyboardInterrupt):
        cache.reserve(0, 1000)
    failing.append(False)
    cache.reserve(0, 12)  # as before every pass, though there is room
    assert pointers == [t.data_ptr() for t in (*cache.keys, *cache.values)]
    for i, (keys, _) in enumerate(pairs(1, 10)):
        assert torch.equal(cache.keys[0][0, :, i], keys[0])

"""A recurrent state holds the tokens of its text and no others, whatever was drafted, committed and rolled back."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from sakiyomi.cache.recurrent import Recurrence, Site
from sakiyomi.cache.recurrent_store import TAIL, RecurrentStore
from sakiyomi.kernels.batch import BatchPlan, SequenceRows


class Checksum(Recurrence):
    """A state that says which tokens are in it, and in which order."""

    def shape(self, rows: Sequence[Tensor], fixed: Sequence[Tensor]) -> tuple[int, ...]:
        return (1,)

    def advance(self, states: Tensor, rows: Sequence[Tensor], fixed: Sequence[Tensor]) -> Tensor:
        return (states * 7 + rows[0]) % 10007  # whole numbers below 2^24

    def read(self, states: Tensor, rows: Sequence[Tensor], fixed: Sequence[Tensor]) -> Tensor:
        return states


def checksum(tokens: Sequence[int]) -> float:
    found = 0
    for token in tokens:
        found = (found * 7 + token) % 10007
    return float(found)


class Text:
    """One slot of a store, and the tokens that it is to hold."""

    def __init__(self, store: RecurrentStore, slot: int = 0) -> None:
        self.store, self.slot = store, slot
        self.tokens: list[int] = []

    def run(
        self, tokens: Sequence[int], parents: tuple[int, ...] | None = None, *, prompt: bool = False
    ) -> list[float]:
        part = SequenceRows(self.slot, len(self.tokens), tokens, parents, prompt)
        plan = BatchPlan([part])
        self.store.reserve(self.slot, 0)
        self.store.begin(plan)
        return self.store.sites[0].forward([torch.tensor(tokens).float().view(1, -1, 1)], (), plan).flatten().tolist()

    def read(self, tokens: Sequence[int]) -> None:
        found = self.run(tokens, None, prompt=True)
        self.tokens += tokens
        assert found[-1] == checksum(self.tokens)

    def draft(self, tokens: Sequence[int], parents: tuple[int, ...], kept: Sequence[int]) -> None:
        """A tree whose every row has the state of its own path, and of which a path is committed."""
        found = self.run(tokens, parents)
        paths: list[list[int]] = []
        for token, parent in zip(tokens, parents, strict=True):
            paths.append([*(paths[parent] if parent >= 0 else ()), token])
        assert found == [checksum(self.tokens + path) for path in paths]
        self.store.commit(self.slot, len(self.tokens), kept)
        self.tokens += [tokens[row] for row in kept]

    def roll_back(self, length: int) -> None:
        assert self.store.resumable(self.slot, length) == length
        self.store.roll_back(self.slot, length)
        del self.tokens[length:]


def text(slots: int = 1) -> Text:
    site = Site(Checksum())
    site.learn([torch.zeros(1, 1, 1)], ())
    return Text(RecurrentStore({0: site}, slots))


@pytest.mark.parametrize("back", [1, 2, 5, TAIL])
def test_no_token_of_what_was_rolled_back_is_left(back: int) -> None:
    own = text()
    own.read(range(1, 11))
    for token in range(11, 60):
        own.draft([token], (-1,), [0])
    own.draft([60, 61], (-1, 0), [0])  # all before is in the state
    own.roll_back(len(own.tokens) - back)
    own.draft([70, 71], (-1, 0), [0, 1])
    own.draft([72], (-1,), [0])


def test_any_order_of_trees_and_ways_back() -> None:
    choices = random.Random(0)
    for _ in range(20):
        own = text()
        own.read([choices.randrange(100) for _ in range(choices.randrange(1, 20))])
        for _ in range(40):
            least = own.store.resumable(0, len(own.tokens))
            if choices.random() < 0.3:
                length = len(own.tokens) - choices.randrange(TAIL)
                if length > 0 and own.store.resumable(0, length) == length <= least:
                    own.roll_back(length)
            count = choices.randrange(1, 7)
            parents = (-1, *(choices.randrange(node) for node in range(1, count)))
            path, node = [], choices.randrange(count)
            while node >= 0:
                path.insert(0, node)
                node = parents[node]
            own.draft([choices.randrange(100) for _ in range(count)], parents, path)


def test_a_copied_text_goes_on_alone() -> None:
    own = text(slots=2)
    own.read(range(1, 11))
    for token in range(11, 40):
        own.draft([token], (-1,), [0])
    other = Text(own.store, 1)
    own.store.fork(1, 0, 0, 36)
    other.tokens = own.tokens[:36]
    other.draft([80, 81], (-1, 0), [0, 1])
    own.draft([90], (-1,), [0])
    own.draft([91], (-1,), [0])

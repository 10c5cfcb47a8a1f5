"""Drafts from texts that the compiled kernels find are those of Python."""

from __future__ import annotations

import math
import random
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sakiyomi.core.errors import LoadError
from sakiyomi.core.tree import Draft, TokenTree
from sakiyomi.drafters import Context
from sakiyomi.drafters.base import Drafter
from sakiyomi.drafters.draft_length import Costs, TokenValue
from sakiyomi.drafters.graph_file import GraphFile
from sakiyomi.drafters.lookup import PromptLookup
from sakiyomi.drafters.memory import MemoryFile, read_memory
from sakiyomi.drafters.merged import MergedDrafter
from sakiyomi.drafters.ngram import NgramDrafter
from sakiyomi.drafters.ngram_file import FileTables, OnlineTables
from sakiyomi.drafters.recycle import RecycleDrafter
from sakiyomi.drafters.suffix import SuffixDrafter
from sakiyomi.drafters.text_base import TextDrafter
from sakiyomi.kernels.build import native
from sakiyomi.train.ngram import count_tables
from text_drafters import context

pytestmark = pytest.mark.skipif(native() is None, reason="the kernels are not available")

DIGEST = "a" * 64
MAKE: dict[str, Callable[[Path], list[TextDrafter]]] = {
    "prompt-lookup": lambda _: [PromptLookup()],
    "suffix": lambda _: [SuffixDrafter()],
    "suffix, earlier texts": lambda path: [SuffixDrafter(memory(path / "memory"))],
    "recycle": lambda _: [RecycleDrafter()],
    "recycle, a file": lambda path: [RecycleDrafter(GraphFile(path / "graph", DIGEST, 99, 50, 4))],
    "ngram": lambda _: [NgramDrafter(99)],
    "ngram, a file": lambda _: [NgramDrafter(99, tables())],
    "merged": lambda _: [RecycleDrafter(), SuffixDrafter(), PromptLookup(3), NgramDrafter(99)],
}
SEEDS = range(4)


def tables() -> FileTables:
    documents = [np.array(text_of(random.Random(seed), 300), np.int64) for seed in range(100, 103)]
    return FileTables(3, count_tables(documents, 3, 99, least=1))


def memory(path: Path) -> MemoryFile:
    found = MemoryFile(path, DIGEST, 99)
    for seed in range(100, 103):
        found.add(text_of(random.Random(seed), 300))
    found.save()
    return found


def text_of(random_: random.Random, length: int) -> list[int]:
    """A text that repeats itself, with changes."""
    text = [random_.randrange(12) for _ in range(8)]
    while len(text) < length:
        start = random_.randrange(len(text))
        text += text[start : start + random_.randrange(1, 12)]
        if random_.random() < 0.5:
            text.append(random_.randrange(60))
    return text[:length]


def costs(rows: int) -> float:
    return 1.0 + 0.03 * rows + 0.1 * (rows > 8)


def drafts(make: Callable[[Path], list[TextDrafter]], folder: Path, seed: int, *, kernels: bool) -> list[Draft]:
    """Of some requests, one after the other and at once, in conversations that go on, of all sizes."""
    folder.mkdir()
    numbers, found = random.Random(seed), list[Draft]()
    members = make(folder)
    if not kernels:
        for member in members:
            member.__dict__["kernels"] = None
    drafter: Drafter = MergedDrafter(members) if len(members) > 1 else members[0]
    if len(members) > 1:
        drafter._seconds = Still()  # type: ignore[attr-defined]
    requests: list[tuple[Context, list[int]]] = []
    for number in range(3):
        text = text_of(numbers, numbers.randrange(40, 400))
        begun = numbers.randrange(1, len(text) - 30)
        rule = "coupled" if number == 1 else "greedy"
        requests.append((context(text[:begun], number=number, rule=rule, temperature=0.7 * number), text[begun:]))
    for step in range(60):
        for at, (request, left) in enumerate(requests):
            gamma = numbers.randrange(1, 9)
            request.nodes = gamma + numbers.randrange(0, 3) * 4
            worth = TokenValue(numbers.random(), Costs(costs, 0.0, 0.0), gamma + 2)
            request.worth = worth if numbers.random() < 0.5 else None
            (draft,) = drafter.propose([request], [gamma])
            found.append(draft)
            rows = [ranked(numbers) for _ in range(len(draft) + 1)]
            if drafter.leading:
                drafter.rank(request, draft.tree, rows)
            count = numbers.randrange(1, 5)
            request.tokens.extend(left[:count])
            del left[:count]
            if not left or step % 20 == 19:  # the conversation goes on, perhaps from an earlier place
                kept = len(request.tokens) - numbers.randrange(0, 2) * numbers.randrange(1, 9)
                later = text_of(numbers, 300)
                rule = "coupled" if step % 40 == 39 else "greedy"
                head = [*request.tokens[:kept], *later[:50]]
                other = context(head, number=3 + 3 * step + at, rule=rule, temperature=0.7 * at)
                if at:
                    drafter.inherit(other, request)
                drafter.end(request)
                requests[at] = other, later[50:]
    return found


class Still(dict[str, float]):
    """No clock says that a drafter is not worth its time."""

    def get(self, *_: Any) -> float:
        return 0.0


def ranked(numbers: random.Random) -> tuple[Sequence[int], Sequence[float]]:
    return numbers.sample(range(60), 4), sorted((math.log(0.02 + numbers.random()) for _ in range(4)), reverse=True)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", MAKE)
def test_drafts_are_those_of_python(kind: str, seed: int, tmp_path: Path) -> None:
    own, theirs = (drafts(MAKE[kind], tmp_path / name, seed, kernels=name == "own") for name in ("own", "theirs"))
    assert sum(map(len, theirs)) > 100
    for mine, other in zip(own, theirs, strict=True):
        assert mine.tree == other.tree
        assert mine.kind == other.kind or not mine.tree.tokens
        assert [draw[:3] for draw in mine.draws] == [draw[:3] for draw in other.draws]
        assert [draw.prob for draw in mine.draws] == pytest.approx([draw.prob for draw in other.draws], rel=1e-12)
        mine.validate(60)


def test_a_file_of_one_is_read_by_the_other(tmp_path: Path) -> None:
    for kernels in (True, False):
        path = tmp_path / f"graph-{kernels}"
        drafter = RecycleDrafter(GraphFile(path, DIGEST, 99, 50, 4))
        if not kernels:
            drafter.__dict__["kernels"] = None
        one = context([7, 8, 9], nodes=4)
        drafter.propose([one], [2])
        drafter.rank(one, TokenTree(), [([1, 2, 3, 4], [-0.1, -1.0, -2.0, -3.0])])
        drafter.end(one)
        for again in (True, False):
            other = RecycleDrafter(GraphFile(path, DIGEST, 99, 50, 4))
            if not again:
                other.__dict__["kernels"] = None
            (draft,) = other.propose([context([5, 9], nodes=1)], [1])
            assert draft.tree.tokens == (1,)


@pytest.mark.parametrize("kernels", [True, False])
def test_only_texts_of_requests_that_ask_for_it_are_remembered(kernels: bool, tmp_path: Path) -> None:
    members = [SuffixDrafter(memory(tmp_path / "memory")), PromptLookup()]
    if not kernels:
        for member in members:
            member.__dict__["kernels"] = None
    drafter = MergedDrafter(members)
    known = len(read_memory(tmp_path / "memory").documents)
    for number, asks in enumerate([{"prompt-lookup"}, {"suffix"}, None]):
        request = context([7, 8, 9 + number] * 3, number=number)
        request.asks = None if asks is None else frozenset(asks)
        (draft,) = drafter.propose([request], [2])
        assert {draw.drafter for draw in draft.draws} == (asks or {"prompt-lookup", "suffix"})
        drafter.end(request)
        assert len(read_memory(tmp_path / "memory").documents) == known + number


def test_tables_that_do_not_fit_each_other_are_refused() -> None:
    """The kernels read them without looking."""
    whole = tables()
    whole.arrays()
    parts = list(whole._orders[0])
    parts[1] = memoryview(np.array([*parts[1][:-1], 1 << 40]))
    whole._orders[0] = tuple(parts)
    with pytest.raises(LoadError, match="tables of 2-grams do not fit"):
        whole.arrays()


def test_another_kind_of_tables_is_read_by_python() -> None:
    own = OnlineTables()
    own.read((), [1, 2, 3, 4, 5])
    (draft,) = NgramDrafter(99, own).propose([context([2, 3])], [1])
    assert draft.tree.tokens == (4,)


class Cut(MergedDrafter):
    """Proposes nothing."""

    def propose(self, contexts: Sequence[Context], gammas: Sequence[int]) -> list[Draft]:
        return [Draft.empty()] * len(contexts)


def test_a_subclass_proposes_as_it_says() -> None:
    assert Cut([SuffixDrafter(), PromptLookup()]).texts is None
    assert MergedDrafter([SuffixDrafter(), PromptLookup()]).texts is not None


def test_a_drafter_goes_when_nobody_uses_it() -> None:
    for make in (SuffixDrafter, lambda: MergedDrafter([SuffixDrafter(), PromptLookup()])):
        drafter = make()
        gone = weakref.ref(drafter)
        drafter.propose([context([1, 2, 1])], [1])
        del drafter
        assert gone() is None

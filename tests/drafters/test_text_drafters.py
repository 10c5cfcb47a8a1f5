"""Drafters that read nothing but text: what they propose, what they do not, and that they forget."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sakiyomi.core.errors import InputError
from sakiyomi.core.tree import Draft
from sakiyomi.drafters import DrafterContext, make_drafter, parse_drafters
from sakiyomi.drafters.confidence import GuessCalibration
from sakiyomi.drafters.guessed_tree import grow
from sakiyomi.drafters.lookup import PromptLookup
from sakiyomi.drafters.ngram import NgramDrafter, NgramReader
from sakiyomi.drafters.ngram_file import OnlineTables
from sakiyomi.drafters.suffix import SuffixDrafter
from sakiyomi.drafters.text_base import CHUNK
from text_drafters import KINDS, context, text_drafter

V = 50
SONG = [5, 6, 7, 8, 9, 10, 11, 12]


def propose(drafter: Any, tokens: list[int], gamma: int, **values: Any) -> Draft:
    """The draft of a fresh request."""
    (draft,) = drafter.propose([context(tokens, **{"nodes": gamma} | values)], [gamma])
    draft.validate(V)
    return draft


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_there_before_is_proposed(kind: str) -> None:
    draft = propose(text_drafter(kind, V, [SONG]), [*SONG, 1, 2, *SONG[:4]], 3)
    assert draft.tree.tokens == (9, 10, 11)[: len(draft)]
    assert len(draft) >= 2
    assert draft.kind == "point_mass"
    assert all(draw.prob is not None and 0 < draw.prob <= 1 for draw in draft.draws)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_proposed_behind_a_stop_token(kind: str) -> None:
    draft = propose(text_drafter(kind, V, [SONG]), [*SONG, 1, 2, *SONG[:4]], 4, stop_ids=[10])
    assert draft.tree.tokens == (9, 10)
    tree = propose(text_drafter(kind, V, [SONG]), [*SONG, 1, 2, *SONG[:4]], 4, nodes=12, stop_ids=[10])
    assert not any(tree.tree.tokens[parent] == 10 for parent in tree.tree.parents if parent >= 0)


@pytest.mark.parametrize("kind", ["prompt-lookup", "suffix", "ngram"])
def test_an_unknown_place_is_left_to_the_target(kind: str) -> None:
    assert not len(propose(text_drafter(kind, V), SONG, 4))
    assert not len(propose(text_drafter(kind, V), [1], 4))


@pytest.mark.parametrize("kind", KINDS)
def test_depth_and_nodes_are_kept(kind: str) -> None:
    rng = random.Random(0)
    text = [rng.choice((1, 1, 1, 2, 3)) for _ in range(400)]
    for gamma in (1, 2, 5):
        for nodes in (gamma, 2 * gamma, 4 * gamma):
            draft = propose(text_drafter(kind, V, [text]), text, gamma, nodes=nodes)
            depths = draft.tree.depths()
            assert len(draft) <= nodes
            assert max(depths, default=-1) < gamma
            if nodes == gamma:
                assert draft.tree.parents == tuple(range(-1, len(draft) - 1))
            for parent in {-1, *range(len(draft))}:
                siblings = [draft.tree.tokens[child] for child in draft.tree.children(parent)]
                assert len(set(siblings)) == len(siblings)
                chances = [draft.draws[child].prob or 0.0 for child in draft.tree.children(parent)]
                assert sum(chances) <= 1 + 1e-9 or kind in ("ngram", "tables")


def test_where_continuations_branch_there_is_a_tree() -> None:
    text = [1, 2, 3, 9, 1, 2, 4, 9, 1, 2, 3, 8, 1, 2]
    draft = propose(SuffixDrafter(), text, 2, nodes=4)
    roots = [draft.tree.tokens[child] for child in draft.tree.children(-1)]
    assert roots[0] == 3
    assert set(roots) == {3, 4}


def test_of_equally_frequent_continuations_the_newest_comes_first() -> None:
    for drafter in (SuffixDrafter(), PromptLookup(), NgramDrafter(V)):
        assert propose(drafter, [1, 2, 3, 9, 1, 2, 4, 9, 1, 2], 1).tree.tokens == (4,)


def test_of_two_matches_the_longer_one_counts() -> None:
    text = [7, 1, 2, 3, 9, 8, 1, 2, 4, 9, 7, 1, 2]
    assert propose(PromptLookup(), text, 1).tree.tokens == (3,)
    assert propose(SuffixDrafter(), text, 1).tree.tokens == (3,)
    assert propose(PromptLookup(2), text, 1).tree.tokens == (4,)


def test_a_text_that_goes_round_is_followed_beyond_its_end() -> None:
    for drafter in (PromptLookup(), SuffixDrafter()):
        draft = propose(drafter, [1, 2, 3] * 8, 10)
        assert draft.tree.tokens == ((1, 2, 3) * 4)[:10]


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_and_growing_texts(kind: str) -> None:
    """Several requests at once, token by token, propose what each does alone from its whole text."""
    rng = random.Random(1)
    texts = [[rng.randrange(4) for _ in range(60)] for _ in range(3)]
    drafter = text_drafter(kind, V, texts)
    together = [context(text[:20], number=i) for i, text in enumerate(texts)]
    for end in range(20, 60):
        for request, text in zip(together, texts, strict=True):
            request.tokens[:] = text[:end]
        drafts = drafter.propose(together, [4] * 3)
        if end == 20:
            alone = [propose(text_drafter(kind, V, texts), text[:end], 4) for text in texts]
            assert [draft.tree for draft in drafts] == [draft.tree for draft in alone]
    assert any(len(draft) for draft in drafts)
    for request in together:
        drafter.end(request)
        assert not request.memory
        drafter.end(request)


@pytest.mark.parametrize("kind", ["prompt-lookup", "suffix", "ngram"])
def test_a_conversation_goes_on(kind: str) -> None:
    """The later request knows what was written in the earlier one, and reads only what is new."""
    drafter = text_drafter(kind, V)
    first = context([*SONG, 1, 2, 3, 4], number=1)
    drafter.propose([first], [2])
    second = context([*SONG, 1, 2, 20, 21, 22, 23, 1, 2], number=2)
    drafter.inherit(second, first)
    assert not first.memory
    assert second.memory[drafter.name].seen == len(SONG) + 2
    (draft,) = drafter.propose([second], [2])
    assert draft.tree.tokens[:1] == (20,)
    second.tokens += [3]
    (draft,) = drafter.propose([second], [2])
    assert draft.tree.tokens[:1] == (4,), "only the earlier request had it"
    stranger = context([1], number=3)
    drafter.inherit(context([1, 2], number=4), stranger)


@pytest.mark.parametrize("kind", ["prompt-lookup", "suffix", "ngram"])
def test_a_long_prompt_is_read_a_chunk_a_round(kind: str) -> None:
    drafter = text_drafter(kind, V)
    request = context(SONG * (2 * CHUNK // len(SONG)) + SONG[:4])
    assert [len(drafter.propose([request], [2])[0]) for _ in range(2)] == [0, 0]
    (draft,) = drafter.propose([request], [2])
    assert draft.tree.tokens == (9, 10)
    assert 0 < drafter.prefill_seconds < drafter.forward_seconds


@pytest.mark.parametrize("kind", ["prompt-lookup", "suffix", "ngram"])
def test_chances_become_honest(kind: str) -> None:
    """A text in which every fourth token is a coin: what is claimed in all comes near what comes true."""
    rng = random.Random(2)
    tokens: list[int] = []
    while len(tokens) < 4000:
        tokens += [1, 2, 3, rng.choice((4, 5))]
    drafter = text_drafter(kind, V)
    request = context(tokens[:100], nodes=1)
    claimed, right, asked = 0.0, 0, 0
    for end in range(100, 4000):
        request.tokens.append(tokens[end])
        (draft,) = drafter.propose([request], [1])
        if 500 < end < 3999 and len(draft):
            asked += 1
            claimed += draft.draws[0].prob or 0.0
            right += draft.tree.tokens[0] == tokens[end + 1]
    assert asked > 3000
    assert right / asked < 0.95
    assert abs(claimed / asked - right / asked) < 0.03


def test_guesses_that_fail_are_no_longer_proposed() -> None:
    """A match of one token that never comes true: the target is soon left alone, and tried again if that changes."""
    drafter = PromptLookup()
    rng = random.Random(3)
    request = context([0], nodes=4)
    proposed = []
    for _i in range(400):
        request.tokens += [0, 1 + rng.randrange(45)]
        request.tokens.append(0)
        proposed.append(len(drafter.propose([request], [4])[0]))
        request.tokens.pop()
    assert sum(proposed[200:]) / 200 < sum(proposed[:30]) / 30 / 3


class TestGrow:
    """Best-first over chances that are known."""

    CHANCES = ((1, 0.6), (2, 0.3), (3, 0.05))

    def expand(self, place: tuple[int, ...]) -> list[tuple[int, float, tuple[int, ...]]]:
        return [(token, chance, (*place, token)) for token, chance in self.CHANCES]

    def test_the_best_nodes_of_all(self) -> None:
        found = grow((), self.expand, 3, 7, 0.0, ())
        reach = []
        for node, chance in enumerate(found.chances):
            reach.append(chance * (reach[found.parents[node]] if found.parents[node] >= 0 else 1.0))
        everything = sorted(
            (math.prod(dict(self.CHANCES)[t] for t in path) for n in (1, 2, 3) for path in _paths(n)), reverse=True
        )
        assert sorted(reach, reverse=True) == pytest.approx(everything[:7])
        assert reach == sorted(reach, reverse=True)

    def test_the_floor_and_the_end(self) -> None:
        assert grow((), self.expand, 3, 50, 0.2, ()).tokens == [1, 1, 2, 1]
        assert grow((), self.expand, 3, 3, 0.3, ()).tokens == [1, 1]
        assert grow((), self.expand, 3, 50, 0.2, (1,)).tokens == [1, 2]
        assert grow((), self.expand, 3, 3, 0.0, (1,)).tokens == [1]
        assert grow((), lambda place: [], 3, 9, 0.0, ()).tokens == []


def _paths(length: int) -> list[tuple[int, ...]]:
    if not length:
        return [()]
    return [(*path, token) for path in _paths(length - 1) for token in (1, 2, 3)]


def test_calibration_counts_until_the_first_wrong_token() -> None:
    calibration = GuessCalibration([0.5, 0.5], weight=2.0, memory=1.0)
    calibration.expect(3, [(0, 7), (1, 8), (1, 9)])
    calibration.learn([0, 0, 0, 7])
    assert calibration.chances == [2 / 3, 0.5]
    calibration.learn([0, 0, 0, 7, 8])
    assert calibration.chances == [2 / 3, 0.5], "settled once"
    calibration.expect(0, [(1, 7), (0, 7)])
    calibration.learn([6, 7])
    assert calibration.chances == [2 / 3, 1 / 3]


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(1, 4))
def test_online_tables_count_every_ngram(text: list[int], order: int) -> None:
    tables = OnlineTables(order)
    cut = len(text) // 2
    tables.read([], text[:cut])
    tables.read(text[:cut], text[cut:])
    for length in range(order):
        runs = {tuple(text[i : i + length]) for i in range(len(text) - length)}
        for run in runs:
            after = [text[i + length] for i in range(len(text) - length) if tuple(text[i : i + length]) == run]
            seen = tables.after(run)
            assert seen is not None
            total, kinds, top, counts = seen
            assert (total, kinds) == (len(after), len(set(after)))
            assert counts == {token: after.count(token) for token in set(after)}
            assert [counts[token] for token in top] == sorted(counts.values(), reverse=True)
    assert tables.after((9,)) is None


def test_interpolated_chances_sum_to_one() -> None:
    """Over the whole vocabulary: what is not seen has the rest."""
    reader = NgramReader(None, 4)
    reader.read([0, 1, 2, 0, 1, 3, 0, 1, 2, 2, 1])
    for last in ((0, 1), (1,), (2, 2, 1)):
        chances = reader.chances(last, 99)
        assert all(0 < chance < 1 for chance in chances.values())
        assert sum(chances.values()) == pytest.approx(1.0)


def test_coupled_ngrams_choose_by_the_noise_of_the_position() -> None:
    rng = np.random.default_rng(0)
    text = rng.integers(1, 4, 300).tolist()
    chosen = {rule: set[int]() for rule in ("greedy", "ratio", "coupled")}
    for rule, found in chosen.items():
        for number in range(20):
            request = context([*text[: 200 + number], 1], rule=rule, temperature=1.0, nodes=1)
            (draft,) = NgramDrafter(V).propose([request], [1])
            found.update(draft.tree.tokens)
    assert len(chosen["coupled"]) == 3
    assert chosen["greedy"] == chosen["ratio"]


def around(device: str = "cpu") -> DrafterContext:
    loaded = type("Loaded", (), {"name": "toy", "tokenizer": None, "folder": None})()
    return DrafterContext(loaded, type("Runner", (), {"device": torch.device(device)})(), V)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_auto_is_a_free_drafter_where_no_draft_is_known(device: str) -> None:
    drafter = make_drafter(["auto"], around(device))
    assert drafter is not None and not drafter.runs_model
    assert drafter.name == ("recycle+" if device == "cpu" else "") + "suffix+prompt-lookup"


def test_specs() -> None:
    for spec, name in (("prompt-lookup", "prompt-lookup"), ("prompt-lookup:3", "prompt-lookup"), ("suffix", "suffix")):
        drafter = make_drafter([spec], around())
        assert drafter is not None
        assert drafter.name == name
    for wrong in ("prompt-lookup:0", "prompt-lookup:x", "prompt-lookup:-1", "prompt-lookup:1.5", "prompt-lookup:999"):
        with pytest.raises(InputError, match="longest match"):
            make_drafter([wrong], around())
    with pytest.raises(InputError, match=r"suffix\[:<file>\]"):
        parse_drafters("suffx")

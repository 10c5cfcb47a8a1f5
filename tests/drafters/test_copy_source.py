"""Where a text copies from, and what that is worth to suffix drafts."""

from __future__ import annotations

import random
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from sakiyomi.drafters.automaton import SuffixAutomaton
from sakiyomi.drafters.copy_source import CopySource
from sakiyomi.drafters.suffix import SuffixDrafter
from text_drafters import context


def source_of(text: Sequence[int]) -> tuple[CopySource, list[int]]:
    grown = list(text)
    source = CopySource(grown)
    source.read(grown)
    return source, grown


def test_the_next_place_is_taken_and_not_the_newest() -> None:
    """7 8 stands three times: what is copied goes from the first on to the second, and then to the third."""
    source, text = source_of([7, 8, 1, 2, 7, 8, 3, 4, 7, 8, 5, 6] + [99] * 60)
    for token, expected in ((7, -1), (8, 1), (1, 2), (9, -1), (7, -1), (8, 3), (3, 4), (9, -1), (7, -1), (8, 5)):
        text.append(token)
        source.read([token])
        place = source.next(2 if token == 8 else 1)
        assert (text[place] if place >= 0 else -1) == expected


def test_from_the_end_it_begins_again() -> None:
    source, text = source_of([7, 8, 1, 2, 3] + [99] * 60)
    for _ in range(2):
        for token in (7, 8):
            text.append(token)
            source.read([token])
        place = source.next(2)
        assert text[place] == 1
        text.append(50)
        source.read([50])


@given(
    head=st.lists(st.integers(0, 4), max_size=90),
    turns=st.lists(st.tuples(st.lists(st.integers(0, 4), min_size=1, max_size=5), st.booleans()), max_size=20),
)
def test_a_place_is_always_one_with_the_same_tokens_before_it(
    head: list[int], turns: list[tuple[list[int], bool]]
) -> None:
    """Whatever is read, and wherever the text branches."""
    automaton = SuffixAutomaton()
    source, now = CopySource(automaton.text), list(head)
    automaton.extend(head)
    source.read(head)
    for tokens, branches in turns:
        if branches and now:
            now = now[: len(now) // 2]
            automaton.branch(len(now))
            source.branch(now, automaton.place)
        automaton.extend(tokens)
        source.read(tokens)
        now += tokens
        place = source.next(automaton.match()[1])
        assert -1 <= place < len(automaton.text)
        if place > 0:
            assert automaton.text[place - 1] in (now[-1], -1)


def test_every_other_sentence_of_a_passage_is_found() -> None:
    """Sentences that begin alike, retold in order with gaps: the newest place would be one of the text's own."""
    random.seed(0)
    sentences = [[1, 2, *(random.randrange(10, 500) for _ in range(10)), 3] for _ in range(12)]
    prompt = [token for sentence in sentences for token in sentence] + [4] * 60
    text = [token for sentence in sentences[::2] for token in sentence]
    drafter, request = SuffixDrafter(), context(prompt, nodes=6)
    rounds = done = 0
    while done < len(text):
        (draft,) = drafter.propose([request], [6])
        right = 0
        while right < min(len(draft), len(text) - done) and draft.tree.tokens[right] == text[done + right]:
            right += 1
        fresh = text[done : done + right + 1]
        request.tokens.extend(fresh)
        done, rounds = done + len(fresh), rounds + 1
    assert rounds <= 27, "a sentence of 13 tokens needs two rounds and about two to find its place"

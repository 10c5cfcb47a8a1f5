"""The suffix automaton and the run tables against the text itself: longest match, counts, newest continuation."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from sakiyomi.drafters.automaton import ROOT, Cursor, SuffixAutomaton
from sakiyomi.drafters.lookup import LookupReader

TEXT = st.lists(st.integers(0, 2), max_size=40)
LONG_WALK = 1000  # further than any chain of links here


def occurrences(text: Sequence[int], part: Sequence[int]) -> list[int]:
    """Places of the last token of each occurrence."""
    size = len(part)
    return [end for end in range(size - 1, len(text)) if list(text[end - size + 1 : end + 1]) == list(part)]


def longest_match(text: Sequence[int]) -> int:
    """Length of the longest suffix that also ends before the end, by trying all."""
    lengths = (n for n in range(len(text) - 1, 0, -1) if len(occurrences(text, text[-n:])) > 1)
    return next(lengths, 0)


def state_of(automaton: SuffixAutomaton, part: Sequence[int]) -> int | None:
    state = ROOT
    for token in part:
        if token not in automaton.following[state]:
            return None
        state = automaton.following[state][token]
    return state


@given(TEXT)
def test_every_substring_its_count_and_its_places(text: list[int]) -> None:
    automaton = SuffixAutomaton(counted=LONG_WALK)
    automaton.extend(text)
    assert len(automaton) <= max(2 * len(text), 1)
    for start in range(len(text)):
        for end in range(start + 1, min(len(text), start + 12) + 1):
            part = text[start:end]
            places = occurrences(text, part)
            state = state_of(automaton, part)
            assert state is not None
            assert automaton.counts[state] == len(places)
            assert automaton.latest[state] == places[-1]
            assert automaton.earlier[state] == (places[-2] if len(places) > 1 else -1)
            going_on = [place for place in places if place + 1 < len(text)]
            assert automaton.newest(state) == (text[going_on[-1] + 1] if going_on else -1)
            followers = {text[place + 1] for place in going_on}
            assert automaton.following[state].keys() == followers
    assert state_of(automaton, [3]) is None


@given(TEXT)
def test_the_longest_match_after_every_token(text: list[int]) -> None:
    automaton = SuffixAutomaton()
    for i, token in enumerate(text, start=1):
        automaton.extend([token])
        state, length = automaton.match()
        assert length == longest_match(text[:i])
        assert state == state_of(automaton, text[i - length : i])


@given(TEXT, st.integers(1, 4))
def test_a_short_walk_never_counts_too_much(text: list[int], counted: int) -> None:
    automaton = SuffixAutomaton(counted)
    automaton.extend(text)
    for start in range(len(text)):
        for end in range(start + 1, len(text) + 1):
            state = state_of(automaton, text[start:end])
            assert state is not None
            assert automaton.counts[state] <= len(occurrences(text, text[start:end]))
    assert automaton.match()[1] == longest_match(text)


@given(st.lists(TEXT, min_size=1, max_size=4))
def test_texts_do_not_run_into_each_other(texts: list[list[int]]) -> None:
    automaton = SuffixAutomaton(counted=LONG_WALK)
    for text in texts:
        automaton.begin()
        automaton.extend(text)
    for text in texts:
        for start in range(len(text)):
            for end in range(start + 1, min(len(text), start + 8) + 1):
                state = state_of(automaton, text[start:end])
                assert state is not None
                assert automaton.counts[state] == sum(len(occurrences(other, text[start:end])) for other in texts)
    last = texts[-1]
    for before in texts[:-1]:
        crossing = before[-1:] + last[:1]
        if len(crossing) == 2 and not any(occurrences(text, crossing) for text in texts):
            assert state_of(automaton, crossing) is None


@given(TEXT, TEXT, st.data())
def test_a_branch_goes_on_behind_the_shared_beginning(first: list[int], second: list[int], data: st.DataObject) -> None:
    """The longest match then is that of the new text, in itself or in what was written before."""
    cut = data.draw(st.integers(0, len(first)))
    automaton = SuffixAutomaton(counted=LONG_WALK)
    automaton.extend(first)
    automaton.branch(cut)
    automaton.extend(second)
    text = first[:cut] + second
    for start in range(len(text)):
        assert state_of(automaton, text[start : start + 6]) is not None
    state, length = automaton.match()
    known = max((n for n in range(len(text) + 1) if n and occurrences(first, text[-n:])), default=0)
    assert length >= (max(known, longest_match(text)) if second else longest_match(text))
    assert state == state_of(automaton, text[len(text) - length :])


@given(TEXT, st.lists(TEXT, max_size=3), st.lists(TEXT, max_size=3))
def test_a_cursor_finds_the_longest_suffix_while_both_grow(
    known: list[int], more: list[list[int]], text: list[list[int]]
) -> None:
    automaton = SuffixAutomaton()
    automaton.extend(known)
    cursor = Cursor(automaton)
    texts, read = [list(known)], list[int]()
    for i in range(max(len(more), len(text))):
        part = text[i] if i < len(text) else []
        cursor.read(part)
        read += part
        lengths = (n for n in range(len(read), 0, -1) if any(occurrences(other, read[-n:]) for other in texts))
        if part:
            best = next(lengths, 0)
            # A match that began before the automaton grew is found again at its next mismatch only.
            assert cursor.length <= best
            assert i or cursor.length == best
        assert cursor.state == (state_of(automaton, read[len(read) - cursor.length :]) if cursor.length else ROOT)
        if i < len(more):
            automaton.begin()
            automaton.extend(more[i])
            texts.append(more[i])
            cursor.refresh()
            assert cursor.state == (state_of(automaton, read[len(read) - cursor.length :]) if cursor.length else ROOT)


@given(TEXT, st.integers(1, 6))
def test_run_tables_give_the_longest_newest_match(text: list[int], most: int) -> None:
    reader = LookupReader(most)
    for i, token in enumerate(text, start=1):
        reader.read([token])
        length, place = reader.match()
        wanted = min(longest_match(text[:i]), most)
        assert length == wanted
        if length:
            assert place == occurrences(text[: i - 1], text[i - length : i])[-1] + 1


@given(TEXT, st.data())
def test_reading_in_pieces_is_reading_at_once(text: list[int], data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(text)))
    pieces, whole = LookupReader(), LookupReader()
    pieces.read(text[:cut])
    pieces.read(text[cut:])
    whole.read(text)
    assert pieces.match() == whole.match()
    assert pieces.text == whole.text

"""Exact match and word error rate."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scores import edit_distance, exact_match, word_error_rate

words = st.text("abc", max_size=6)


@pytest.mark.parametrize(
    ("first", "second", "distance"),
    [("", "", 0), ("", "abc", 3), ("kitten", "sitting", 3), ("abc", "abc", 0), ("abc", "acb", 2), ("flaw", "lawn", 2)],
)
def test_known_distances(first: str, second: str, distance: int) -> None:
    assert edit_distance(first, second) == edit_distance(second, first) == distance


@given(words, words, words)
def test_it_is_a_distance(first: str, second: str, third: str) -> None:
    assert (edit_distance(first, second) == 0) == (first == second)
    assert edit_distance(first, third) <= edit_distance(first, second) + edit_distance(second, third)
    assert abs(len(first) - len(second)) <= edit_distance(first, second) <= max(len(first), len(second))


def test_word_errors_are_a_share_of_all_words_expected() -> None:
    assert word_error_rate(["a b c", "d"], ["a x c", "d e"]) == 2 / 4
    assert word_error_rate(["a"], ["b c d"]) == 3.0
    assert word_error_rate(["Tom  ran."], ["Tom ran."]) == 0


def test_exact_match() -> None:
    assert exact_match(["a", "b", "c", "d"], ["a", " b", "C", "d."]) == 0.5

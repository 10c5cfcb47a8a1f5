"""How right texts are: exact match and word error rate. Knows no model."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

__all__ = ["edit_distance", "exact_match", "word_error_rate"]


def exact_match(expected: Sequence[str], got: Sequence[str]) -> float:
    """Share of texts that are the expected ones to the last character, spaces at the ends left out.

    Args:
        expected, got: the texts, in the same order; at least one.
    """
    pairs = list(zip(expected, got, strict=True))
    return sum(right.strip() == text.strip() for right, text in pairs) / len(pairs)


def word_error_rate(expected: Sequence[str], got: Sequence[str]) -> float:
    """Words to be changed, left out or put in, as a share of the words expected, over all texts together.

    Words are what stands between spaces; it can be above 1.

    Args:
        expected, got: the texts, in the same order; at least one word is expected.
    """
    errors = words = 0
    for right, text in zip(expected, got, strict=True):
        errors += edit_distance(right.split(), text.split())
        words += len(right.split())
    return errors / words


def edit_distance(first: Sequence[Hashable], second: Sequence[Hashable]) -> int:
    """Fewest changes, each of one item changed, left out or put in, that make one sequence of another (Levenshtein)."""
    above = list(range(len(second) + 1))
    for row, item in enumerate(first, start=1):
        left = [row]
        for column, other in enumerate(second, start=1):
            left.append(min(above[column] + 1, left[-1] + 1, above[column - 1] + (item != other)))
        above = left
    return above[-1]

"""Chances of acceptance that are learnt: older places count less, however many there were."""

from __future__ import annotations

import random

import pytest

from sakiyomi.drafters.confidence import _MEMORY, _WEIGHT, RANKS, Confidence


def test_older_places_count_less() -> None:
    """As where everything is made smaller for each place, for so many places that the weights are scaled on the way."""
    learnt, choices = Confidence(1.0), random.Random(3)
    hits, places, covered = [chance * _WEIGHT for chance in RANKS], _WEIGHT, sum(RANKS) * _WEIGHT
    for _ in range(25_000):
        rank = choices.choice([0, 0, 0, 1, 3, None])
        learnt.learn([-1.0], rank)
        hits, places, covered = [each * _MEMORY for each in hits], places * _MEMORY + 1, covered * _MEMORY
        if rank is not None:
            hits[rank], covered = hits[rank] + 1, covered + 1
    assert learnt.coverage == pytest.approx(covered / places)
    assert learnt.ranks[:2] == pytest.approx([hits[0] / places, hits[1] / places])
    assert learnt.ranks[2] == pytest.approx(hits[2] / places)

"""The two tiers of the suite: quick, which ``pytest`` runs, and thorough, which ``pytest --thorough`` runs beside it.

In the quick tier are all tests but these:

- tests marked ``thorough``;
- of a test with several parameters, combinations: cases are kept in which each value of each parameter occurs. A
  drafter that is added to a list of parameters is therefore in both tiers of each test that takes the list;
- of a test marked ``few(n)``, all cases but n, which are others for each test.

Of a test marked ``every`` the quick tier runs every case.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from itertools import groupby
from zlib import crc32

import pytest

__all__ = ["covering", "sort_into_tiers", "spread"]

PLAIN = (str, int, float, bool, type(None))


def sort_into_tiers(items: Sequence[pytest.Item]) -> None:
    """Mark as thorough what the quick tier leaves out."""
    for name, group in groupby(items, key=lambda item: item.nodeid.partition("[")[0]):
        cases = [
            item for item in group if not any(item.get_closest_marker(mark) for mark in ("thorough", "slow", "gpu"))
        ]
        if cases and cases[0].get_closest_marker("every") is not None:
            continue
        kept = covering([values(item) for item in cases])
        few = cases[0].get_closest_marker("few") if cases else None
        if few is not None:
            kept = spread(kept, few.args[0], crc32(name.encode()))
        for place, item in enumerate(cases):
            if place not in kept:
                item.add_marker(pytest.mark.thorough)


def values(item: pytest.Item) -> dict[str, Hashable]:
    """The parameters of a test, as they are told apart: by value, and objects by their place in the list."""
    spec = getattr(item, "callspec", None)
    if spec is None:
        return {}
    return {
        name: (type(value), value) if isinstance(value, PLAIN) else spec.indices[name]
        for name, value in spec.params.items()
    }


def covering(cases: Sequence[Mapping[str, Hashable]]) -> list[int]:
    """Places of few cases that show each value of each parameter: of a, b, c with 1, 2 these are a1, b2, c1.

    Where several cases show a value that is still missing, the one is taken that shows most of what is missing, then
    the one whose other values were seen least.
    """
    seen: Counter[tuple[str, Hashable]] = Counter()
    kept: set[int] = set()
    for case in cases:
        for wanted in case.items():
            if seen[wanted]:
                continue
            place = min(
                (place for place, other in enumerate(cases) if wanted in other.items()),
                key=lambda place: (
                    -sum(not seen[value] for value in cases[place].items()),
                    sum(seen[value] for value in cases[place].items()),
                ),
            )
            kept.add(place)
            seen.update(cases[place].items())
    return sorted(kept) or list(range(len(cases)))


def spread(places: Sequence[int], count: int, start: int) -> list[int]:
    """So many of the places, at equal distances from an arbitrary one on."""
    count = min(count, len(places))
    return [places[(start + number * len(places) // count) % len(places)] for number in range(count)]

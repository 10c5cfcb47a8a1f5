"""What is said of memory, and when it is searched for garbage."""

from __future__ import annotations

import gc

import pytest

from sakiyomi.core.memory import loading


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_what_loads_is_not_searched_and_the_collector_is_as_before(before: bool, fails: bool) -> None:
    was = gc.isenabled()
    try:
        (gc.enable if before else gc.disable)()
        try:
            with loading():
                assert not gc.isenabled()
                if fails:
                    raise KeyboardInterrupt
        except KeyboardInterrupt:
            assert fails
        assert gc.isenabled() == before
    finally:
        (gc.enable if was else gc.disable)()

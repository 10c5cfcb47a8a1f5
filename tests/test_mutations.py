"""The table of mutations fits the code as it is; what it is for, ``python tests/mutations.py`` says."""

from __future__ import annotations

import pytest

from mutations import MUTATIONS, ROOT, SOURCES, Broken, mutated


def test_every_mutation_has_its_place() -> None:
    for mutation in MUTATIONS:
        assert mutated(ROOT, mutation)
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS) >= 20
    assert sum(mutation.file.endswith(SOURCES) for mutation in MUTATIONS) >= 6


def test_a_row_that_is_out_of_date_is_refused() -> None:
    known = MUTATIONS[0]
    for old, count in (("what nobody wrote", 0), ("def ", 3)):
        with pytest.raises(Broken, match=rf"{known.name}: {known.file} has .*'{old}' {count} times"):
            mutated(ROOT, known._replace(old=old))
    with pytest.raises(Broken, match=r"there is no file tests/test_gone\.py"):
        mutated(ROOT, known._replace(tests="test_gone.py"))

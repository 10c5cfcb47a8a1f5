"""The tiers: which cases the quick one keeps, and that it has something of everything that has a name."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.main import get_command

from sakiyomi.cli import app
from sakiyomi.core.cache_specs import CACHE_FORMS
from sakiyomi.core.draft_specs import FORMS
from sakiyomi.model_executor.attention import BACKENDS
from sakiyomi.sampling.verifiers import VERIFIERS
from tiers import covering, spread


@given(st.lists(st.fixed_dictionaries({"a": st.integers(0, 4), "b": st.booleans(), "c": st.text("xy", max_size=1)})))
def test_the_cases_that_are_kept_show_every_value(cases: list[dict[str, Any]]) -> None:
    kept = [cases[place] for place in covering(cases)]
    for name in ("a", "b", "c"):
        assert {case[name] for case in kept} == {case[name] for case in cases}
    assert len(kept) <= 5 + 2 + 3


def test_of_a_product_the_diagonal_is_kept() -> None:
    cases = [{"drafter": drafter, "rule": rule} for drafter in "abc" for rule in (1, 2)]
    assert [tuple(cases[place].values()) for place in covering(cases)] == [("a", 1), ("b", 2), ("c", 1)]
    assert covering([{}]) == [0]


def test_few_cases_are_far_apart_and_begin_anywhere() -> None:
    assert spread([3, 5, 7, 9, 11, 13], 3, 1) == [5, 9, 13]
    assert spread([3, 5], 4, 1) == [5, 3]
    assert {*spread(range(7), 2, 10**9)} <= {*range(7)}


def commands(group: Any, *path: str) -> list[str]:
    """The words of every command."""
    found = []
    for name, command in group.commands.items():
        found += commands(command, *path, name) if hasattr(command, "commands") else [" ".join((*path, name))]
    return found


DRAFTERS = "tests/drafters/test_every_drafter.py::test_"
RULES = [name for name, rule in VERIFIERS.items() if rule.lossless and name != "greedy"]
BACKEND_TESTS = {
    "TritonBackend": "tests/model_executor/test_triton.py",
    "CudaBackend": "tests/model_executor/test_cuda.py",
    "CpuBackend": "tests/model_executor/test_runner.py",
    "TorchBackend": "tests/model_executor/test_runner.py",
}
EVERYTHING: dict[str, tuple[str, Iterable[str]]] = {
    "greedy text of each drafter": (DRAFTERS + "greedy_text", FORMS),
    "samples of each drafter": (DRAFTERS + "samples", FORMS),
    "what each drafter refuses": (DRAFTERS + "what_cannot_be_meant", FORMS),
    "samples of each verifier": ("tests/statistical/test_losslessness.py::test_lossless[", RULES),
    "greedy text of each cache": ("tests/golden/test_exact_everywhere.py::test_every_member", CACHE_FORMS),
    "what each cache refuses": ("tests/core/test_cache_specs.py::test_every_name", CACHE_FORMS),
    "what each command refuses": ("tests/cli/test_cli.py::test_every_command", commands(get_command(app))),
}
"""The beginning of tests' names, and what has to stand in their brackets."""


@pytest.mark.parametrize("what", EVERYTHING)
def test_something_of_everything_is_in_the_quick_tier(what: str, request: pytest.FixtureRequest) -> None:
    """A name that is added to a registry is missing here until a test of the quick tier has it."""
    start, names = EVERYTHING[what]
    cases = [node.partition("[")[2] for node in quick(request) if node.startswith(start)]
    missing = [name for name in names if not any(re.search(rf"(?<!\w){name}(?!\w)", case) for case in cases)]
    assert not missing


def test_every_backend_is_in_the_quick_tier(request: pytest.FixtureRequest) -> None:
    assert set(BACKEND_TESTS) == {backend.__name__ for backend in BACKENDS}
    files = {node.partition("::")[0] for node in quick(request)}
    assert files >= set(BACKEND_TESTS.values())


def quick(request: pytest.FixtureRequest) -> list[str]:
    """Names of the tests of the quick tier."""
    items = request.session.items
    if len({item.path for item in items}) < 100:
        pytest.skip("asked of the whole suite")
    return [item.nodeid for item in items if item.get_closest_marker("thorough") is None]

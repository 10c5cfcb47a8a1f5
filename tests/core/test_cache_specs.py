"""What ``cache=`` says: names and options are those of the classes that they are made by; the rest is refused early."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from sakiyomi.cache.policies import read_cache, specs
from sakiyomi.core.cache_specs import CACHE_FORMS, PAPER, PATTERNS, check_cache, parse_cache
from sakiyomi.core.errors import InputError, LoadError

MADE = specs._MAKERS
SAMPLES = {"positions": "reassigned", "where": "prompt", "ranking": "mean", "pattern": "block-sparse", "pyramid": "2.0"}


@pytest.mark.parametrize("name", sorted(CACHE_FORMS))
def test_every_name_has_the_options_of_its_class(name: str) -> None:
    form = CACHE_FORMS[name]
    make = MADE[name.rpartition("-")[0] if form.kind == "packing" else name]
    fields = {field.name for field in dataclasses.fields(make) if field.init} - {"bits"}
    assert fields - {"file"} == set(form.options) and ("file" in fields) == form.file
    assert form.published == bool(getattr(make, "published", {})) and set(getattr(make, "published", {})) <= fields
    kinds = {field.name: str(field.type) for field in dataclasses.fields(make)}
    for option, about in form.options.items():
        found = about.read(SAMPLES.get(option, "1" if kinds[option] == "int" else "0.5"))
        wanted = {"int": int, "float": float}.get(kinds[option], str)
        assert type(found) is wanted
        if kinds[option].startswith("Literal"):
            assert kinds[option] == f"Literal[{', '.join(map(repr, about.expected.split(' or ')))}]"
    # One option is enough to see that they arrive.
    if form.kind in ("policy", "packing") and not form.made_by:
        option = "residual" if form.kind == "packing" else "sinks"
        spec = read_cache(f"{name}[{option}=7]")
        assert getattr(spec.policy or spec.packing, option) == 7


def test_no_class_is_without_a_name() -> None:
    assert {name.rpartition("-")[0] if form.kind == "packing" else name for name, form in CACHE_FORMS.items()} == set(
        MADE
    )
    for base in ("quant", "kvquant"):
        assert [int(name.rpartition("-")[2]) for name in CACHE_FORMS if name.startswith(f"{base}-")] == [
            *MADE[base].choices
        ]
    assert get_args(get_type_hints(MADE["minference"])["pattern"]) == PATTERNS


def test_options_stand_in_their_order() -> None:
    (part,) = parse_cache("sirllm[paper,sinks=9]")
    assert part.options == ((PAPER, None), ("sinks", 9))
    assert read_cache("sirllm[paper,sinks=9]").policy.sinks == 9  # type: ignore[union-attr]
    assert read_cache("sirllm[sinks=9,paper]").policy.sinks == 4  # type: ignore[union-attr]


def test_a_path_may_have_brackets_and_a_plus() -> None:
    (part,) = parse_cache("offload:/a b[1]+[x]/c")
    assert (part.name, part.file, part.options) == ("offload", "/a b[1]+[x]/c", ())
    heads, packing = parse_cache("locret:/a[1]/b+c[beside=3]+quant-4[residual=8]")
    assert (heads.file, heads.options) == ("/a[1]/b+c", (("beside", 3),))
    assert (packing.name, packing.options) == ("quant-4", (("residual", 8),))


WRONG = [
    (("nothing",), InputError, "expected full, or at most one policy .*h2o"),
    (("h2o[sink=4]", 100), InputError, "h2o has no option 'sink'; it has sinks"),
    (("h2o[sinks=-4]", 100), InputError, "sinks='-4'; expected a whole number of 0 or more"),
    (("h2o[recent=1.0]", 100), InputError, "recent='1.0'; expected a share"),
    (("h2o[pyramid=0.5]", 100), InputError, "expected 0 .all layers alike., or a number of 1 or more"),
    (("h2o+knorm", 100), InputError, "at most one policy"),
    (("h2o:file", 100), InputError, "h2o takes no file; leave 'file' out"),
    (("quant-4[residual=x]",), InputError, "residual='x'; expected a whole number"),
    (("quant-4[size=1]",), InputError, "quant-4 has no option 'size'; it has residual"),
    (("kvquant-4[paper]",), InputError, "kvquant-4 has no option 'paper'; it has residual"),
    (("quant-3",), InputError, "'3' bits; expected quant-8, quant-4 or quant-2"),
    (("minference[block=0]",), InputError, "block='0'; expected a whole number of 1 or more"),
    (("offload+quant-4",), InputError, "expected offload alone or with minference"),
    (("locret", 100), InputError, "expected locret:FOLDER with what `sakiyomi train retaining` made"),
    (("locret:/nowhere", 100), LoadError, "there is no folder '/nowhere'; check the path"),
    (("lococo", 100), InputError, "expected lococo:FOLDER"),
    (("h2o",), InputError, "without a budget; give kv_budget"),
    (("h2o", "many"), InputError, "kv_budget='many' is no number of bytes"),
    (("h2o", 5, "2GiB"), InputError, "say the same; give one of them"),
    (("h2o", None, "much"), InputError, "kv_memory='much' is no number of bytes"),
    (("quant-4", 100), InputError, "kv_budget=100 with cache='quant-4', which keeps everything"),
]


@pytest.mark.parametrize(("given", "kind", "words"), WRONG)
def test_what_means_nothing_is_refused(given: tuple[str], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        check_cache(*given)


@pytest.mark.parametrize(
    "given",
    [
        ("full",),
        ("h2o+quant-4", 64),
        ("locret:tales-retaining+quant-8[paper]", 9),
        ("minference[paper]",),
        ("offload",),
    ],
)
def test_what_means_something_is_not(given: tuple[str]) -> None:
    check_cache(*given)


@pytest.mark.thorough
def test_a_command_refuses_before_torch_is_imported(tmp_path: Path) -> None:
    """A torch that says when it is imported stands in the way."""
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')", encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "-m", "sakiyomi", "generate", "A fox", "--cache"]
    for spec, words in (("h2oo", "h2oo"), ("h2o[sinks=x]", "sinks='x'"), ("h2o", "without a budget")):
        done = subprocess.run([*command, spec], env=environment, capture_output=True, encoding="utf-8", check=False)
        assert done.returncode == 2 and words in done.stderr and "torch was imported" not in done.stderr

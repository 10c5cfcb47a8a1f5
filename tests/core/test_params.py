from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from typing import Any

import pytest

from sakiyomi.core.errors import InputError
from sakiyomi.core.params import SamplingParams


def test_defaults() -> None:
    params = SamplingParams()
    assert (params.max_new_tokens, params.temperature, params.top_k, params.top_p, params.seed) == (
        128,
        0.0,
        0,
        1.0,
        None,
    )
    assert (params.stop, params.gamma, params.n, params.acceptance) == ((), "auto", 1, "auto")
    assert params.greedy


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_new_tokens", 0),
        ("max_new_tokens", -1),
        ("max_new_tokens", 1.5),
        ("max_new_tokens", True),
        ("max_new_tokens", None),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "hot"),
        ("temperature", None),
        ("top_k", -1),
        ("top_k", 0.5),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", -0.5),
        ("top_p", math.nan),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("seed", 1.0),
        ("seed", "one"),
        ("seed", True),
        ("seed", 2**64),
        ("stop", [""]),
        ("stop", ["a", ""]),
        ("stop", [3]),
        ("stop", 3.5),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", ["a"]),
        ("gamma", 0),
        ("gamma", -2),
        ("gamma", 1.5),
        ("gamma", "fast"),
        ("gamma", None),
        ("gamma", True),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.0),
        ("bad_words", [[]]),
        ("bad_words", [""]),
        ("bad_words", [[-1]]),
        ("bad_words", [[1.5]]),
        ("bad_words", 2.5),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {1: math.nan}),
        ("logit_bias", {1: math.inf}),
        ("logit_bias", {"a": 1.0}),
        ("logits_processors", [3]),
        ("logprobs", -1),
        ("ignore_eos", 1),
        ("n", 0),
        ("n", -3),
        ("acceptance", "always"),
        ("epsilon", -1.0),
        ("delta", math.inf),
    ],
)
def test_bad_values_are_named(name: str, value: Any) -> None:
    with pytest.raises(InputError) as caught:
        SamplingParams(**{name: value})
    message = str(caught.value)
    assert name in message
    shown = value
    while isinstance(shown, list) and shown:
        shown = shown[-1]
    if not isinstance(shown, dict):
        assert repr(shown) in message or str(shown) in message
    # The value and what to do instead.
    assert len(message) > len(name) + 20


def test_messages_tell_the_way_out() -> None:
    with pytest.raises(InputError, match='draft="none"'):
        SamplingParams(gamma=0)
    with pytest.raises(InputError, match='"auto", "ratio", "coupled"'):
        SamplingParams(acceptance="always")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="0 is greedy"):
        SamplingParams(temperature=-1.0)


@pytest.mark.parametrize("gamma", [1, 64, "auto", "heuristic", "heuristic-kept"])
def test_good_gammas(gamma: int | str) -> None:
    assert SamplingParams(gamma=gamma).gamma == gamma


def test_lone_values_are_lists_of_one() -> None:
    params = SamplingParams(stop="\n", bad_words="darn", stop_token_ids=2, logits_processors=print)  # type: ignore[arg-type]
    assert params.stop == ("\n",)
    assert params.bad_words == ("darn",)
    assert params.stop_token_ids == (2,)
    assert params.logits_processors == (print,)
    nothing = SamplingParams(stop=None, bad_words=None)  # type: ignore[arg-type]
    assert nothing.stop == nothing.bad_words == ()


def test_replace_checks_again() -> None:
    params = SamplingParams(temperature=1, seed=-5, bad_words=["a", [1, 2]], logit_bias={3: -math.inf})
    assert dataclasses.replace(params, seed=7).bad_words == ("a", [1, 2])
    assert not params.greedy
    with pytest.raises(InputError):
        dataclasses.replace(params, top_p=0)


def test_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().seed = 1  # type: ignore[misc]


def test_reading_the_defaults_loads_no_torch() -> None:
    code = (
        "import sys, sakiyomi.core.params, sakiyomi.theory; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("values", "builder"),
    [
        ({}, "best-first"),
        ({"gamma": 4}, "chain"),
        ({"gamma": 4, "nodes": 9}, "best-first"),
        ({"tree": "dynamic"}, "dynamic"),
        ({"temperature": 1.0}, "best-first"),
        ({"temperature": 1.0, "acceptance": "block"}, "chain"),
        ({"acceptance": "block"}, "best-first"),
        ({"temperature": 1.0, "acceptance": "traversal", "nodes": 9}, "static"),
        ({"temperature": 1.0, "acceptance": "ratio", "tree": "best-first"}, "best-first"),
    ],
)
def test_what_an_automatic_tree_is(values: dict[str, Any], builder: str) -> None:
    assert SamplingParams(**values).builder == builder


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tree": "bush"}, "tree is 'bush'"),
        ({"nodes": 0}, "nodes is 0"),
        ({"nodes": "many"}, "nodes is 'many'"),
        ({"tree": "chain", "nodes": 4}, "leave one out"),
    ],
)
def test_trees_that_cannot_be_meant(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        SamplingParams(**values)

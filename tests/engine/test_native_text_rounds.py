"""Rounds whose drafts the compiled kernels find in texts give the text, the figures and the traces of Python's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from random_models import Numbers, random_llama
from sakiyomi import LLM, SamplingParams
from sakiyomi.drafters.base import Drafter
from sakiyomi.drafters.lookup import PromptLookup
from sakiyomi.drafters.merged import MergedDrafter
from sakiyomi.drafters.native_texts import NativeTexts
from sakiyomi.drafters.ngram import NgramDrafter
from sakiyomi.drafters.recycle import RecycleDrafter
from sakiyomi.drafters.suffix import SuffixDrafter
from sakiyomi.engine import engine
from sakiyomi.engine.native_rounds import NativeRounds
from sakiyomi.kernels.build import native
from sakiyomi.model_executor import kernel_rounds
from sakiyomi.model_executor.attention.cpu import CpuBackend
from sakiyomi.model_executor.runner import ModelRunner
from watched_rounds import watch_rounds

pytestmark = pytest.mark.skipif(native() is None, reason="the kernels are not available")

VOCAB = 100
PROMPTS = [[5, 6, 7, 5, 6, 7, 5], list(range(20, 29)) * 2, [9] * 5]
DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "suffix": SuffixDrafter,
    "recycle": RecycleDrafter,
    "prompt-lookup": PromptLookup,
    "ngram": lambda: NgramDrafter(VOCAB),
    "merged": lambda: MergedDrafter([RecycleDrafter(), SuffixDrafter(), PromptLookup(), NgramDrafter(VOCAB)]),
}
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"nodes": 8},
    "chains": {"tree": "chain"},
    "coupled": {"temperature": 0.7, "nodes": 8},
    "ratio": {"temperature": 0.3, "acceptance": "ratio", "nodes": 8, "top_k": 30},
    "a weighed tree": {"gamma": 4, "nodes": "auto"},
}


@cache
def target() -> Any:
    return random_llama(64, 2, 4, 128, VOCAB, torch.float32)


def written(
    kind: str, params: SamplingParams, *, kernels: bool, alone: bool = True
) -> tuple[list[dict[str, Any]], list[bool]]:
    """Texts with all that is told of them, and of each round whether the kernels ran it."""
    llm = LLM((target(), Numbers()), DRAFTERS[kind](), max_batch=len(PROMPTS), strict=True)
    for _ in range(2):
        llm.generate(PROMPTS, params)
        llm.wait()
    with pytest.MonkeyPatch.context() as patch:
        seen = watch_rounds(patch, kernels=kernels)
        patch.setattr(engine, "BRIEF", 1000.0)
        if not kernels and kind not in ("recycle", "merged"):  # these would be told of rounds without a draft, too
            patch.setattr(NativeRounds, "score", lambda *_: None)
        if kernels and alone:
            patch.setattr(NativeTexts, "propose", lambda *_: pytest.fail("a draft was made for Python"))
        found = [out.to_dict() for _ in range(2) for out in llm.generate(PROMPTS, params)]
    for each in found:
        each["stats"] = {name: value for name, value in each["stats"].items() if "second" not in name}
    return found, seen


@pytest.mark.few(8)
@pytest.mark.parametrize("passes", ["kernels", "python"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", DRAFTERS)
def test_rounds_are_those_of_python(kind: str, case: str, passes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelRunner, "pass_seconds", lambda model, rows: 1e-4 + 2e-5 * model.padded(rows))
    params = SamplingParams(**({"max_new_tokens": 40, "ignore_eos": True, "seed": 3, "gamma": 5} | CASES[case]))
    if passes == "python":
        monkeypatch.setattr(kernel_rounds, "_program", lambda *_: 0)
    expected, _ = written(kind, params, kernels=False)
    found, seen = written(kind, params, kernels=True)
    assert all(seen) and len(seen) > 10
    assert found == expected
    stop = replace(params, stop_token_ids=(expected[0]["token_ids"][17],))
    assert written(kind, stop, kernels=True)[0] == written(kind, stop, kernels=False)[0]
    assert sum(each["stats"]["accepted"] for each in found) > 20


def test_a_round_that_fails_is_run_again_by_python(monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(max_new_tokens=40, ignore_eos=True, gamma=5, nodes=8)
    expected, _ = written("merged", params, kernels=True)
    run, count = kernel_rounds.KernelRounds.run, [0]

    def failing(*round_: Any, **how: Any) -> Any:
        done = run(*round_, **how) if count[0] % 3 else None
        count[0] += 1
        return done

    monkeypatch.setattr(kernel_rounds.KernelRounds, "run", failing)
    found, seen = written("merged", params, kernels=True, alone=False)
    assert {*seen} == {True, False}
    assert [each["token_ids"] for each in found] == [each["token_ids"] for each in expected]


def test_trees_need_a_cache_whose_rows_the_kernels_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of a GPU is not: the rows of an accepted branch stayed where they were."""
    params = SamplingParams(max_new_tokens=40, ignore_eos=True, gamma=5, nodes=8)
    expected, _ = written("suffix", params, kernels=False)
    monkeypatch.setattr(CpuBackend, "keeps", False)
    found, seen = written("suffix", params, kernels=True, alone=False)
    assert not any(seen)
    assert [each["token_ids"] for each in found] == [each["token_ids"] for each in expected]

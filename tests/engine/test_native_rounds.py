"""Rounds that the compiled kernels verify give the text, the figures and the traces of those that Python verifies."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch

from sakiyomi import LLM, SamplingParams
from sakiyomi.drafters.model import ModelDrafter
from sakiyomi.engine import engine as engine_module
from sakiyomi.evaluation.bench.models import Numbers, random_llama
from sakiyomi.kernels.build import native
from sakiyomi.model_executor.build import build_runner
from sakiyomi.sampling.verifiers.native import Case, verify_all

pytestmark = pytest.mark.skipif(native() is None, reason="the kernels are not available")

VOCAB = 300
PROMPTS = [[5, 6, 7], list(range(20, 29)), [9] * 5]
CASES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy tree": {"tree": "best-first", "nodes": 7},
    "coupled": {"temperature": 0.9, "acceptance": "coupled", "top_p": 0.9},
    "coupled tree": {"temperature": 0.9, "tree": "best-first", "nodes": 7},
    "ratio": {"temperature": 0.8, "acceptance": "ratio"},
    "ratio tree": {"temperature": 0.8, "acceptance": "ratio", "tree": "static", "nodes": 6, "top_k": 40},
    "block": {"temperature": 0.8, "acceptance": "block", "min_p": 0.01},
}


@cache
def engine() -> LLM:
    target = random_llama(64, 2, 4, 128, VOCAB, torch.float32)
    draft = build_runner(random_llama(64, 1, 4, 128, VOCAB, torch.float32), max_slots=len(PROMPTS))
    llm = LLM((target, Numbers()), draft=ModelDrafter(draft, VOCAB), max_batch=len(PROMPTS))
    llm.generate(PROMPTS, SamplingParams(max_new_tokens=12, gamma=4))
    llm.wait()
    return llm


def texts(params: SamplingParams) -> list[dict[str, Any]]:
    reader = engine().engine.drafter.reader  # type: ignore[union-attr]
    learnt = copy.deepcopy(reader.confidence)  # it changes the trees of later texts
    found = [out.to_dict() for out in engine().generate(PROMPTS, params)]
    reader.confidence = learnt
    for each in found:
        each["stats"] = {name: value for name, value in each["stats"].items() if "second" not in name}
    return found


@pytest.mark.parametrize("case", CASES)
def test_rounds_are_those_of_python(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    judged: list[bool] = []

    def counted(cases: Sequence[Case], logits: Any) -> Any:
        verdicts = verify_all(cases, logits)
        judged.extend(verdict is not None for verdict in verdicts)
        return verdicts

    options = {"gamma": 4} | CASES[case]
    params = SamplingParams(max_new_tokens=25, ignore_eos=True, seed=3, logprobs=2, **options)
    monkeypatch.setattr(engine_module, "verify_all", counted)
    found = texts(params)
    assert len(judged) >= 25
    assert all(judged)
    monkeypatch.setattr(engine_module, "verify_all", lambda cases, logits: [None] * len(cases))
    assert texts(params) == found

"""The audit of sampled text: right rules pass it, every broken one is found, on a pair of models and the real loop.

Odds of a false alarm: 1e-6 an audit, see ``test_false_alarms`` for what the tails really are.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import sakiyomi.params
from sakiyomi import audit_report, sampled
from sakiyomi.audit import AuditConfig, AuditReport, audit
from sakiyomi.cli import app
from sakiyomi.errors import InputError
from sakiyomi.frequencies import Frequencies, Ranked, chance_to_see, rank
from sakiyomi.noise import RequestNoise
from sakiyomi.numerics import draw
from sakiyomi.recorded import STATES, Recording
from sakiyomi.tree import DRAFT_KINDS, Draft, DraftKind, Rule, Verdict
from sakiyomi.verifiers import VERIFIERS, RatioVerifier, Rows
from sakiyomi.verifiers.base import ended
from statistical import broken
from toys import save_model, tiny_llama, tiny_tokenizer

PROMPTS = ["Once upon a time", "The fox"]
PARTS = (1, 4, 16)
SHORT = AuditConfig(max_new_tokens=32, gammas=(2,), seeds=(0,), samples=24_000, texts=8)


class BonusFromDraft(broken.BonusFromDraft):
    """As in ``broken``, where the draft is a table; here its last row stands for the one more that it could offer."""

    def __init__(self) -> None:
        pass

    def verify(self, draft: Draft, rows: Rows, noise: RequestNoise) -> Verdict:
        verdict = RatioVerifier().verify(draft, rows, noise)
        if verdict.kind != "bonus" or draft.probs is None:
            return verdict
        return ended(draft, verdict.path, draw(draft.probs[-1].numpy(), noise.uniform()))


class SharedByRequests(broken._Broken):
    """The ratio rule with uniforms that requests of a batch have in common: each text by itself is as it should be."""

    def verify(self, draft: Draft, rows: Rows, noise: RequestNoise) -> Verdict:
        return RatioVerifier().verify(draft, rows, RequestNoise(0, rows.position))


CHAIN: frozenset[DraftKind] = frozenset({"chain"})
TREE: frozenset[DraftKind] = frozenset({"without_replacement"})
MERGED: frozenset[DraftKind] = frozenset({"merged"})
RATIO: list[tuple[Callable[[], Any], frozenset[DraftKind]]] = [
    (broken.AlwaysAccept, CHAIN),
    (broken.ResampleFromTarget, CHAIN),
    (broken.SharedUniform, CHAIN),
    (BonusFromDraft, CHAIN),
    (broken.BonusFromWrongRow, CHAIN),
    (broken.SiblingsWithoutResidual, TREE),
    (broken.NodesJudgedOnce, MERGED),
    (broken.BlockWithTokenResidual, CHAIN),
    (broken.BlockByLastToken, CHAIN),
    (broken.TraversalWithoutUpdate, TREE),
    (broken.TraversalWithOldLevel, TREE),
    (SharedByRequests, CHAIN),
]
COUPLED = [broken.CoupledWithWrongKey, broken.CoupledByRow]


def scaled(**values: Any) -> Any:
    """A toy with a few likely tokens, as a trained model has."""
    model = tiny_llama(eos_token_id=None, **values)
    with torch.no_grad():
        model.lm_head.weight.mul_(5)
    return model


class Named:
    """A rule under another name, for drafts of some kinds, that says of itself that it is lossless."""

    lossless = True

    def __init__(self, inner: Any, takes: frozenset[DraftKind], rule: Rule) -> None:
        self.name = f"rule-{secrets.token_hex(4)}"
        self.inner, self.takes, self.rule = inner, takes, rule

    def verify(self, draft: Draft, rows: Rows, noise: RequestNoise) -> Verdict:
        # Where a text ends nothing is drafted, which the broken ones were not written for.
        return (self.inner if len(draft) else VERIFIERS[self.rule]).verify(draft, rows, noise)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A target, and a draft that is right now and then: the target with other weights in its last layer."""
    folder = tmp_path_factory.mktemp("pair")
    target, draft = scaled(), scaled()
    draft.model.layers[1].load_state_dict(scaled(seed=1).model.layers[1].state_dict())
    saved = (save_model(folder / name, model, tiny_tokenizer()) for name, model in (("t", target), ("d", draft)))
    first, second = map(str, saved)
    return first, f"model:{second}"


def audited(
    monkeypatch: pytest.MonkeyPatch, pair: tuple[str, str], rules: Sequence[Named], config: AuditConfig = SHORT
) -> AuditReport:
    for rule in rules:
        monkeypatch.setitem(VERIFIERS, rule.name, rule)
    names = tuple(rule.name for rule in rules)
    known = (*sakiyomi.params.ACCEPTANCES, *names)
    monkeypatch.setattr(sakiyomi.params, "ACCEPTANCES", known)
    monkeypatch.setattr(audit_report, "ACCEPTANCES", known)
    return audit(*pair, prompts=PROMPTS, config=replace(config, verifiers=names), options={"compile": False})


def test_every_broken_rule_is_found(monkeypatch: pytest.MonkeyPatch, pair: tuple[str, str]) -> None:
    """On the user's pair, under names that say nothing; all kept in ``broken``, and some more."""
    rules = [Named(make(), takes, "ratio") for make, takes in RATIO]
    rules += [Named(make(), DRAFT_KINDS, "coupled") for make in COUPLED]
    rules.sort(key=lambda rule: rule.name)
    report = audited(monkeypatch, pair, rules)
    names = {rule.name: type(rule.inner).__name__ for rule in rules}
    for check in report.sampled:
        print(names[check.rule], check.how, check.shape, check.fit)
    found = {check.rule for check in report.checks if check.defects}
    found |= {check.rule for check in report.sampled if not check.fit.ok}
    assert {names[rule] for rule in set(names) - found} == set()
    assert not report.ok
    # Uniforms that requests share are found beside each other, and nowhere else for certain.
    beside = next(
        check for check in report.sampled if check.how == "neighbours" and names[check.rule] == "SharedByRequests"
    )
    assert not beside.fit.ok


def test_right_rules_pass(monkeypatch: pytest.MonkeyPatch, pair: tuple[str, str]) -> None:
    """Under names that say nothing too: all that there are, with every kind of draft that they take."""
    rules = [
        Named(rule, rule.takes, rule.rule) for name, rule in VERIFIERS.items() if rule.lossless and name != "greedy"
    ]
    report = audited(monkeypatch, pair, rules, replace(SHORT, samples=8000))
    assert report.ok, report.to_dict()
    assert all(check.fit.p > 1e-5 for check in report.sampled)
    assert all(0 < check.accepted < check.drafted for check in report.sampled)
    names = {rule.name: rule.inner.name for rule in rules}
    made = {(names[check.rule], check.how, check.shape) for check in report.sampled}
    kinds = ("chain", "without_replacement", "point_mass", "merged")
    taken = [*((rule, kind) for rule in ("ratio", "traversal") for kind in kinds), ("block", "chain")]
    assert made == {
        *((rule, how, kind) for rule, kind in taken for how in ("played", "neighbours")),
        *((rule, "whole", shape) for rule, shape in (("ratio", "gamma 2"), ("ratio", "tree"), ("block", "gamma 2"))),
        *(("traversal", "whole", shape) for shape in ("gamma 2", "tree")),
    }
    levels = [check.fit.level * (len(sampled.LOOKS) if check.how != "whole" else 1) for check in report.sampled]
    assert sum(levels) == pytest.approx(audit_report.ODDS / sampled.TAILS)

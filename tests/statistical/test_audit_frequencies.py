"""The audit of sampled text: right rules pass it, every broken one is found, on a pair of models and the real loop.

Odds of a false alarm: 1e-6 an audit, see ``test_false_alarms`` for what the tails really are.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import sakiyomi.core.params
from sakiyomi.cli import app
from sakiyomi.core.errors import InputError
from sakiyomi.core.tree import DRAFT_KINDS, Draft, DraftKind, Rule, Verdict
from sakiyomi.evaluation.audit import config as audit_config
from sakiyomi.evaluation.audit import distribution as sampled
from sakiyomi.evaluation.audit import report as audit_report
from sakiyomi.evaluation.audit.audit import AuditConfig, AuditReport, audit
from sakiyomi.evaluation.audit.chi_square import Frequencies, Ranked, chance_to_see, rank, shift_to_see
from sakiyomi.evaluation.audit.replay import STATES, WIDTH, Recording, TableModel, narrow, telling
from sakiyomi.kernels.batch import SequenceRows
from sakiyomi.sampling.rng import RequestNoise
from sakiyomi.sampling.rows import draw
from sakiyomi.sampling.verifiers import VERIFIERS, Rows
from sakiyomi.sampling.verifiers.base import ended
from sakiyomi.sampling.verifiers.ratio import RatioVerifier
from statistical import broken
from toys import save_model, tiny_llama, tiny_tokenizer

PROMPTS = ["Once upon a time", "The fox"]
PARTS = (1, 4, 16)
SHORT = AuditConfig(max_new_tokens=32, gammas=(2,), seeds=(0,), samples=24_000, texts=4)


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
    known = (*sakiyomi.core.params.ACCEPTANCES, *names)
    monkeypatch.setattr(sakiyomi.core.params, "ACCEPTANCES", known)
    monkeypatch.setattr(audit_config, "ACCEPTANCES", known)
    return audit(*pair, prompts=PROMPTS, config=replace(config, verifiers=names), options={"compile": False})


@pytest.mark.thorough
@pytest.mark.parametrize("half", [0, 1])  # by themselves, so that two processes can have one each
def test_every_broken_rule_is_found(half: int, monkeypatch: pytest.MonkeyPatch, pair: tuple[str, str]) -> None:
    """On the user's pair, under names that say nothing; all kept in ``broken``, and some more."""
    rules = [Named(make(), takes, "ratio") for make, takes in RATIO[half::2]]
    rules += [Named(make(), DRAFT_KINDS, "coupled") for make in COUPLED[half::2]]
    rules.sort(key=lambda rule: rule.name)
    report = audited(monkeypatch, pair, rules, replace(SHORT, texts=0))
    names = {rule.name: type(rule.inner).__name__ for rule in rules}
    for check in report.sampled:
        print(f"{names[check.rule]}, {check.how}: {check.fit.tokens} tokens, p = {check.fit.p:.2g}")
    found = {check.rule for check in report.checks if check.defects}
    found |= {check.rule for check in report.sampled if not check.fit.ok}
    assert {names[rule] for rule in set(names) - found} == set()
    assert not report.ok
    # Uniforms that requests share are found beside each other, and nowhere else for certain.
    beside = [check for check in report.sampled if check.how == "neighbours"]
    assert [check.fit.ok for check in beside if names[check.rule] == "SharedByRequests"] == [False] * half


@pytest.mark.thorough
def test_right_rules_pass(monkeypatch: pytest.MonkeyPatch, pair: tuple[str, str]) -> None:
    """Under names that say nothing too: all that there are, with every kind of draft that they take."""
    rules = [
        Named(rule, rule.takes, rule.rule) for name, rule in VERIFIERS.items() if rule.lossless and name != "greedy"
    ]
    report = audited(monkeypatch, pair, rules, replace(SHORT, samples=4000))
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


def arguments(pair: tuple[str, str], *more: str) -> list[str]:
    models = ["--target", pair[0], "--draft", pair[1], "--compile", "false"]
    few = ["--count", "1", "--max-new-tokens", "8", "--gammas", "2", "--seeds", "0", "--texts", "2"]
    return ["audit", *models, *few, "--samples", "4000", *more]


@pytest.mark.thorough
def test_the_command_fails_where_text_is_not_the_targets(pair: tuple[str, str]) -> None:
    """Typical acceptance is lossy, and says so."""
    result = CliRunner().invoke(app, [*arguments(pair), "--verifiers", "typical", "--json"])
    assert result.exit_code == 1, result.output
    value = json.loads(result.stdout.splitlines()[-1])
    assert not value["ok"]
    assert value["false_alarm_odds"] == 1e-6
    assert {check["rule"] for check in value["sampled"] if not check["fit"]["ok"]} == {"typical"}
    assert "DEFECT" in result.stdout
    assert "Odds of a false alarm in all: 1e-06" in result.stdout


@pytest.mark.thorough
def test_the_command_says_what_few_samples_see(pair: tuple[str, str]) -> None:
    """Of a drafter that draws nothing: then rows of the target are played, as point masses."""
    looking_up = [
        *arguments(pair, "--verifiers", "ratio", "--verifiers", "block"),
        "--draft",
        "prompt-lookup",
        "--json",
    ]
    result = CliRunner().invoke(app, looking_up)
    assert result.exit_code == 0, result.output
    assert "too few tokens: their power is down to 0.000; raise --samples for 0.999" in result.stdout
    assert "block was not tested: it takes no draft of these drafters" in result.stdout
    value = json.loads(result.stdout.splitlines()[-1])
    assert {check["shape"] for check in value["sampled"] if check["how"] == "played"} == {"point_mass"}
    assert value["untested"] == ["block"]
    played = next(check["fit"] for check in value["sampled"] if check["how"] == "played")
    assert played["tokens"] >= 4000
    assert 0.02 < played["seen"] < 0.2


def test_unknown_names_are_refused_with_the_known_ones(pair: tuple[str, str]) -> None:
    with pytest.raises(InputError, match=r"'nonsense'.*ratio, coupled, block, traversal, typical"):
        AuditConfig(verifiers=("ratio", "nonsense"))
    with pytest.raises(InputError, match="samples is 0"):
        AuditConfig(samples=0)
    with pytest.raises(InputError, match=r"unknown draft 'nonsense'.*prompt-lookup"):
        audit(*pair, drafts=["nonsense"], prompts=PROMPTS, config=SHORT, options={"compile": False})


# ---------------------------------------------------------------- rows that are recorded and played


def recorded() -> Recording:
    random = np.random.default_rng(2)
    rows = [torch.from_numpy(random.dirichlet(np.full(30, 0.3))) for _ in range(40)]
    return Recording.of([narrow(row) for row in rows], [narrow(row) for row in rows[1:] + rows[:1]])


def test_a_recording_is_a_chain_of_its_rows() -> None:
    recording = recorded()
    assert recording.target.shape == recording.draft.shape
    assert torch.allclose(recording.target.sum(1), torch.ones(STATES))
    assert ((recording.target > 0).sum(1) == WIDTH).all()
    assert 0.2 < recording.away < 0.8
    order = recording.target[0].argsort(descending=True)[:WIDTH].tolist()
    # The most probable token leads to the second row, the next to the third; what comes then to the first again.
    assert recording.states([*order[:1], 0, order[2], 5, 1]) == [0, 1, 0, 3, 0]


def test_a_table_model_gives_each_row_behind_its_own_path() -> None:
    """Prompts, chains, trees that are read a level a pass, and what is kept of them."""
    recording = recorded()
    model = TableModel(recording.target, recording.step, 2)
    first, second = (int(token) for token in recording.target[0].argsort(descending=True)[:2])
    logits = recording.target.log()
    slot = model.cache.take()
    assert torch.equal(model.score([SequenceRows(slot, 0, [first], prompt=True)], last=True).logits, logits[:1])
    # Two siblings, and a child of the second.
    tree = model.score([SequenceRows(slot, 1, [first, second, 0], (-1, -1, 1))]).logits
    assert torch.equal(tree, logits[[1, 2, 0]])
    model.cache.commit(slot, 1, [1, 2])
    assert torch.equal(model.score([SequenceRows(slot, 3, [second])]).logits, logits[[2]])
    # The same tree, its levels read one after the other.
    model.score([SequenceRows(slot, 1, [first, second], (-1, -1))])
    assert torch.equal(model.score([SequenceRows(slot, 3, [0], (-1, -1, 1), done=2)]).logits, logits[[0]])


def test_rows_on_which_nothing_can_go_wrong_are_not_telling() -> None:
    sure, even = torch.tensor([1.0, 0.0, 0.0]), torch.tensor([0.4, 0.3, 0.3])
    assert float(telling(sure, even[None])) == 0
    assert float(telling(even, even[None])) == pytest.approx(0, abs=1e-7)
    assert float(telling(torch.tensor([0.3, 0.4, 0.3]), torch.tensor([[0.6, 0.1, 0.3]]))) == 0  # one token is left
    assert float(telling(torch.tensor([0.2, 0.4, 0.4]), torch.tensor([[0.7, 0.1, 0.2]]))) > 0.001


# ---------------------------------------------------------------- the statistic


def counted(rows: np.ndarray, random: np.random.Generator, *, away: float = 0.0) -> Frequencies:
    """Tokens drawn from rows, with so much probability taken from the best and given to the worst."""
    found = Frequencies(len(PARTS) + 1, len(PARTS) + 1)
    for _ in range(40):
        table = torch.from_numpy(rows[random.integers(len(rows), size=300)])
        drawn = table.numpy().copy()
        place = np.arange(len(drawn))
        drawn[place, drawn.argmax(1)] -= away
        drawn[place, drawn.argmin(1)] += away
        add(found, table, tokens_of(drawn, random))
    return found


def tokens_of(table: np.ndarray, random: np.random.Generator) -> list[int]:
    sums = table.cumsum(1)
    chosen: list[int] = (random.random((len(sums), 1)) > sums / sums[:, -1:]).sum(1).tolist()
    return chosen


def add(found: Frequencies, table: torch.Tensor, tokens: list[int]) -> None:
    ranked = rank(table, tokens, PARTS)
    found.add(ranked, [0, *ranked.part[:-1]])


def test_what_is_far_away_is_seen_and_what_is_right_is_not() -> None:
    """On rows of 200 tokens, and with the power that was promised."""
    random = np.random.default_rng(3)
    rows = random.dirichlet(np.full(200, 0.03), size=64)
    rows = rows[rows.max(1) > 0.3]
    right, wrong = counted(rows, random).fit(1e-6), counted(rows, random, away=0.05).fit(1e-6, 0.05)
    assert right.ok and right.p > 1e-4 and right.distance < 3 * right.noise
    assert wrong.power > 0.999 and not wrong.ok and wrong.seen < 0.05
    assert wrong.distance == pytest.approx(0.05, abs=0.01)


def test_the_power_is_that_of_the_statistic() -> None:
    """By drawing: sums with the worst difference of a division in halves."""
    random = np.random.default_rng(5)
    count, away, level = 4000, 0.05, 1e-3
    drawn = random.binomial(count, 0.5 + away, size=20_000)
    statistic = (drawn - count / 2) ** 2 / (count / 4)
    seen = (statistic > 10.83).mean()  # chi-square's bound for one in a thousand at one degree of freedom
    # (2 away n)^2 / (s'C s) with s'C s = n for two halves
    assert chance_to_see((2 * away * count) ** 2 / count, 1, level) == pytest.approx(seen, abs=0.01)
    for freedom in (1, 15, 60):
        assert chance_to_see(shift_to_see(0.999, freedom, 1e-8), freedom, 1e-8) == pytest.approx(0.999, abs=1e-6)


@pytest.mark.thorough
def test_the_power_against_a_fiftieth_is_what_an_audit_promises() -> None:
    """Cells of an audit, and tokens whose distribution is .02 away: nearly always seen, and where it is least so."""
    recording, random, level = recorded(), np.random.default_rng(9), 1e-8
    rows = recording.target.double().numpy()
    found = 0
    for _ in range(40):
        states = random.integers(STATES, size=75_000)
        masses = -np.sort(-rows[states], 1)[:, :WIDTH]
        wrong = masses + 0.02 * np.array([1, -1, 1, -1]) / 2
        part = (random.random((len(states), 1)) > wrong.cumsum(1)[:, :-1]).sum(1)
        frequencies = Frequencies(STATES, WIDTH)
        frequencies.add(Ranked(part, masses, True), states)
        fit = frequencies.fit(level)
        assert fit.power > 0.999
        found += not fit.ok
    assert found >= 39


@pytest.mark.thorough
def test_false_alarms() -> None:
    """The statistic of right tokens is chi-square's: its mean, and no value far in its tail."""
    random = np.random.default_rng(7)
    rows = random.dirichlet(np.full(40, 0.2), size=32)
    fits = []
    for _ in range(150):
        found = Frequencies(len(PARTS) + 1, len(PARTS) + 1)
        table = rows[random.integers(len(rows), size=3000)]
        add(found, torch.from_numpy(table), tokens_of(table, random))
        fits.append(found.fit(1e-6))
    assert all(4 < fit.freedom <= (len(PARTS) + 1) * len(PARTS) for fit in fits)
    off = [(fit.statistic - fit.freedom) / (2 * fit.freedom) ** 0.5 for fit in fits]
    assert abs(np.mean(off)) < 5 / len(fits) ** 0.5
    assert all(fit.p > 1e-5 for fit in fits)
    assert min(fit.p for fit in fits) < 0.05


def test_what_cannot_come_is_a_defect() -> None:
    found = Frequencies(len(PARTS) + 1, len(PARTS) + 1)
    add(found, torch.tensor([[0.5, 0.5, 0.0]] * 400), [0, 1] * 199 + [0, 2])
    assert found.fit(1e-6).p == 0.0

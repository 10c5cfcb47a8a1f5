"""The audit finds nothing in a correct engine, and finds broken ones; near-ties are explained, defects are not."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from sakiyomi.cli import app
from sakiyomi.core.errors import InputError
from sakiyomi.core.params import SamplingParams
from sakiyomi.core.tree import Draft, Verdict
from sakiyomi.engine.model_pool import ModelPool
from sakiyomi.evaluation.audit.audit import AuditConfig, Auditor, AuditReport, Part, audit, put_together
from sakiyomi.evaluation.audit.reference import HFReference, coupled_scores, greedy_scores
from sakiyomi.evaluation.audit.report import SampledCheck
from sakiyomi.evaluation.bench.peers import Transformers, stop_tokens
from sakiyomi.kernels.build import native
from sakiyomi.model_executor.runner import ModelRunner
from sakiyomi.sampling.rng import RequestNoise
from sakiyomi.sampling.verifiers import VERIFIERS, Rows
from target_rows import TableRows
from toys import save_model, tiny_llama, tiny_tokenizer

PROMPTS = ["Once upon a time", "The fox"]
SMALL = AuditConfig(max_new_tokens=16, gammas=(1, 4), seeds=(0,))
EAGER = {"compile": False}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    tokenizer = tiny_tokenizer()
    save_model(folder / "target", tiny_llama(), tokenizer)
    save_model(folder / "target-bf16", tiny_llama().to(torch.bfloat16), tokenizer)
    save_model(folder / "draft", tiny_llama(seed=1, layers=1), tokenizer)
    # Right now and then: the target with other weights in its last layer.
    near, other = tiny_llama(), tiny_llama(seed=1)
    near.model.layers[1].load_state_dict(other.model.layers[1].state_dict())
    save_model(folder / "near", near, tokenizer)
    return folder


def run(models: Path, target: str = "target", draft: str = "near", **options: object) -> AuditReport:
    return audit(
        str(models / target), f"model:{models / draft}", prompts=PROMPTS, config=SMALL, options={**EAGER, **options}
    )


def arguments(models: Path, draft: str = "near") -> list[str]:
    pair = ["--target", str(models / "target"), "--draft", f"model:{models / draft}", "--compile", "false"]
    return ["audit", *pair, "--count", "2", "--max-new-tokens", "12", "--gammas", "3", "--seeds", "0"]


# ---------------------------------------------------------------- a correct engine


@pytest.mark.thorough
@pytest.mark.parametrize("draft", ["near", "draft", "target"])
def test_nothing_is_found(models: Path, draft: str) -> None:
    report = run(models, draft=draft)
    assert report.ok
    assert report.drafter == "model"
    assert all(check.equal == check.texts for check in report.checks), report.to_dict()
    made = {(check.rule, check.what, check.against) for check in report.checks}
    assert made == {
        ("greedy", "plain", "transformers"),
        ("greedy", "plain", "plain"),
        ("coupled", "plain", "logits"),
        ("greedy", "drafted", "transformers"),
        ("greedy", "drafted", "plain"),
        ("coupled", "drafted", "plain"),
    }
    assert {check.gamma for check in report.checks} == {None, 1, 4}
    assert {check.batch for check in report.checks} == {1, 2}


@pytest.mark.thorough
def test_bfloat16_has_no_defect(models: Path) -> None:
    report = run(models, "target-bf16", dtype="bfloat16")
    assert report.dtype == "bfloat16"
    assert report.noise > 1e-3
    assert report.ok, report.to_dict()


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_exact_is_bit_equal(models: Path, dtype: str) -> None:
    report = run(models, dtype=dtype, exact=True)
    assert report.exact
    assert report.ok, report.to_dict()
    ours = [check for check in report.checks if check.against == "plain"]
    assert len(ours) > 4
    assert all(check.equal == check.texts for check in ours)


def test_without_a_draft_plain_text_is_checked(models: Path) -> None:
    report = audit(str(models / "target"), "none", prompts=PROMPTS, config=SMALL, options=EAGER)
    assert report.ok
    assert report.drafter is None
    assert {check.what for check in report.checks} == {"plain"}


@pytest.mark.thorough
def test_the_command(models: Path) -> None:
    result = CliRunner().invoke(app, [*arguments(models), "--json"])
    assert result.exit_code == 0, result.output
    value = json.loads(result.stdout.splitlines()[-1])
    assert value["ok"]
    assert value["defects"] == 0
    assert "no defect" in result.stdout


def in_pieces(pair: tuple[str, str], config: AuditConfig) -> AuditReport:
    """By two engines in turn, a prompt or a rule each."""
    auditors = [Auditor(*pair, [], config, EAGER) for _ in range(2)]

    def do(parts: Sequence[Part]) -> list[Any]:
        return [auditors[number % 2].do(part) for number, part in enumerate(parts)]

    return put_together(do, [[text] for text in PROMPTS], config)


@pytest.mark.thorough
def test_pieces_make_the_whole(models: Path) -> None:
    """Whoever does them; what is compared in a batch is one of as many texts as a piece has."""
    config = replace(
        SMALL, max_new_tokens=8, gammas=(2,), sampled=True, samples=200, texts=2, verifiers=("ratio", "block")
    )
    pair = str(models / "target"), f"model:{models / 'near'}"
    whole, pieces = audit(*pair, prompts=PROMPTS, config=config, options=EAGER), in_pieces(pair, config)
    assert pieces.prompts == whole.prompts and pieces.noise == whole.noise and pieces.reference == whole.reference
    assert [replace(check, batch=0) for check in pieces.checks] == [replace(check, batch=0) for check in whole.checks]
    assert {check.batch for check in pieces.checks} == {1}

    def order(check: SampledCheck) -> tuple[str, ...]:
        return check.rule, check.how, check.shape

    assert sorted(pieces.sampled, key=order) == sorted(whole.sampled, key=order)
    assert pieces.untested == whole.untested


def test_a_broken_rule_is_found_in_a_piece(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the number that its text has among all."""
    measure = Auditor.measure

    def other_text(auditor: Auditor, texts: Sequence[str]) -> Any:
        measured = measure(auditor, texts)
        if list(texts) == PROMPTS[1:]:
            measured.expected[0][3] += 1
        return measured

    monkeypatch.setattr(Auditor, "measure", other_text)
    report = in_pieces((str(models / "target"), "none"), SMALL)
    assert [(found.text, found.position) for check in report.checks for found in check.divergences] == [(1, 3)]
    assert not report.ok and report.checks[0].equal == 1 and report.checks[0].texts == 2
    (found,) = report.checks[0].divergences
    assert report.words.keys() == {found.expected, found.got} and all(report.words.values())


needs_kernels = pytest.mark.skipif(native() is None, reason="no compiled kernels here")


@pytest.mark.thorough
@needs_kernels
@pytest.mark.parametrize("exact", [False, True])
def test_rounded_weights_are_their_own_reference(models: Path, exact: bool) -> None:
    report = run(models, quantize="int8", exact=exact)
    assert report.reference == "own plain"
    assert report.quantization is not None
    assert report.noise > 0
    assert report.ok, report.to_dict()
    assert {check.against for check in report.checks} == {"own plain", "plain", "logits"}


@pytest.mark.thorough
@needs_kernels
def test_weights_that_others_rounded_are_their_own_reference_too(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torchao's on a GPU, of whose rounding there is no report."""
    pack = ModelPool._pack

    def without_report(pool: ModelPool, *arguments: Any, **options: Any) -> ModelRunner:
        target = pack(pool, *arguments, **options)
        target.weights.quantization = None
        return target

    monkeypatch.setattr(ModelPool, "_pack", without_report)
    report = run(models, quantize="int8")
    assert report.reference == "own plain"
    assert report.ok, report.to_dict()


@pytest.mark.thorough
@needs_kernels
@pytest.mark.parametrize("rule", ["greedy", "coupled"])
def test_a_broken_rule_is_found_on_rounded_weights(models: Path, monkeypatch: pytest.MonkeyPatch, rule: str) -> None:
    monkeypatch.setitem(VERIFIERS, rule, AlwaysAccept(rule))
    result = CliRunner().invoke(app, [*arguments(models), "--quantize", "int8", "--json"])
    assert result.exit_code == 1, result.output
    value = json.loads(result.stdout.splitlines()[-1])
    assert {check["rule"] for check in value["checks"] if check["defects"]} == {rule}
    assert value["rounding"]["layers"] > 0
    assert "the same target without a draft is the reference" in result.stdout


# ---------------------------------------------------------------- broken engines


class AlwaysAccept:
    """Keeps every draft token, whatever the target says."""

    lossless = True

    def __init__(self, name: str) -> None:
        self._right = VERIFIERS[name]
        self.name, self.takes, self.rule = name, self._right.takes, self._right.rule

    def verify(self, draft: Draft, rows: Rows, noise: RequestNoise) -> Verdict:
        path: list[int] = []
        while children := draft.tree.children(path[-1] if path else -1):
            path.append(children[0])
        end = path[-1] + 1 if path else 0
        after = TableRows(rows.probs()[end : end + 1], rows.position + len(path))
        last = self._right.verify(Draft.empty(), after, noise)
        return Verdict(tuple(path), last.token, "bonus" if path else "plain")


class LateBonus:
    """Right about the path, but the token after it is the one of the row before: wrong where all were accepted."""

    lossless = True

    def __init__(self, name: str) -> None:
        self._right = VERIFIERS[name]
        self.name, self.takes, self.rule = name, self._right.takes, self._right.rule

    def verify(self, draft: Draft, rows: Rows, noise: RequestNoise) -> Verdict:
        verdict = self._right.verify(draft, rows, noise)
        if verdict.kind != "bonus":
            return verdict
        before = verdict.path[-2] + 1 if len(verdict.path) > 1 else 0
        return Verdict(verdict.path, rows.best(before), verdict.kind)


@pytest.mark.thorough
@pytest.mark.parametrize("rule", ["greedy", "coupled"])
@pytest.mark.parametrize(("broken", "draft"), [(AlwaysAccept, "near"), (LateBonus, "target")])
def test_a_broken_rule_is_found(
    models: Path, monkeypatch: pytest.MonkeyPatch, rule: str, broken: type, draft: str
) -> None:
    monkeypatch.setitem(VERIFIERS, rule, broken(rule))
    result = CliRunner().invoke(app, [*arguments(models, draft), "--json"])
    assert result.exit_code == 1, result.output
    value = json.loads(result.stdout.splitlines()[-1])
    assert not value["ok"]
    assert {check["rule"] for check in value["checks"] if check["defects"]} == {rule}
    assert "DEFECT" in result.stdout


@pytest.mark.thorough
def test_noise_of_another_request_is_found(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafted and plain text agree with each other then, and not with the logits."""
    monkeypatch.setattr("sakiyomi.engine.request_factory.RequestNoise", lambda seed, *key: RequestNoise(seed + 1, *key))
    report = run(models)
    assert {(check.rule, check.against) for check in report.checks if check.defects} == {("coupled", "logits")}


@pytest.mark.thorough
def test_exact_forgives_nothing(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A near-tie between our own texts is a defect there, and only there."""
    monkeypatch.setattr("sakiyomi.evaluation.audit.reference.TOLERANCE", 1e9)
    monkeypatch.setitem(VERIFIERS, "coupled", AlwaysAccept("coupled"))
    assert run(models).ok
    report = run(models, exact=True)
    assert not report.ok
    assert {(check.rule, check.against) for check in report.checks if check.defects} == {("coupled", "plain")}


# ---------------------------------------------------------------- the reference


def test_near_ties_and_defects() -> None:
    model = tiny_llama()
    reference = HFReference(model)
    prompt = [5, 6, 7]
    text = Transformers(model).generate(prompt, SamplingParams(max_new_tokens=12, ignore_eos=True))
    noise = reference.measure(prompt, text)
    assert 0 < noise < 1e-3
    assert reference.compare(0, prompt, text, text) is None
    place = 4
    row = reference.logits(prompt, text[: place + 1])[-1]
    second = int(row.topk(2).indices[1])
    other = [*text[:place], second, *text[place + 1 :]]
    found = reference.compare(3, prompt, text, other)
    assert found is not None
    assert (found.text, found.position, found.expected, found.got) == (3, place, text[place], second)
    assert found.gap == pytest.approx(found.top2_gap)
    assert found.gap == pytest.approx(float(row.max() - row[second]))
    assert found.defect
    generous = reference.compare(3, prompt, text, other, limit=found.gap * 1.01)
    assert generous is not None
    assert not generous.defect


@pytest.mark.parametrize("got", [[1, 2], [1, 2, 3, 4]])
def test_a_text_that_ends_elsewhere_is_a_defect(got: list[int]) -> None:
    found = HFReference(tiny_llama()).compare(0, [5], [1, 2, 3], got, limit=1e9)
    assert found is not None
    assert found.defect
    assert found.gap == math.inf
    assert found.to_dict()["gap"] is None
    assert -1 in (found.expected, found.got)


def test_both_tokens_have_to_be_near_the_best() -> None:
    """Two tokens that are equally bad have a small gap between them, which explains nothing."""
    model = tiny_llama()
    order = HFReference(model).logits([5, 6], [0])[0].sort(descending=True).indices.tolist()
    found = HFReference(model).compare(0, [5, 6], [order[100]], [order[101]], limit=1e-2)
    assert found is not None
    assert found.defect


def test_follow_judges_every_token() -> None:
    model = tiny_llama()
    reference, prompt = HFReference(model), [5, 6, 7]
    text = Transformers(model).generate(prompt, SamplingParams(max_new_tokens=10, ignore_eos=True))
    assert reference.follow(0, prompt, text, scores=greedy_scores, limit=1e-3) is None
    found = reference.follow(0, prompt, [*text[:-1], (text[-1] + 1) % 320], scores=greedy_scores, limit=1e-3)
    assert found is not None
    assert (found.position, found.expected, found.defect) == (9, text[-1], True)


def test_coupled_scores_are_the_rule_itself() -> None:
    """At the position of each token: argmax of log p + noise, as the coupled verifier decides."""
    logits = torch.randn(4, 320, generator=torch.Generator().manual_seed(0)) * 3
    params = SamplingParams(temperature=0.7, seed=11, acceptance="coupled")
    chosen = coupled_scores(params, 0)(logits, 20).argmax(-1).tolist()
    probs = (logits / 0.7).softmax(-1)
    noise = RequestNoise(11, 0)
    for i, token in enumerate(chosen):
        rows = TableRows(probs[i : i + 1], 20 + i)
        assert VERIFIERS["coupled"].verify(Draft.empty(), rows, noise).token == token


# ---------------------------------------------------------------- the reference


def test_reference_ignores_the_models_own_settings() -> None:
    """A checkpoint may say that it likes to sample with penalties; the reference is greedy all the same."""
    model = tiny_llama()
    expected = Transformers(model).generate([5, 6], SamplingParams(max_new_tokens=8, ignore_eos=True))
    model.generation_config.do_sample = True
    model.generation_config.temperature = 0.3
    model.generation_config.repetition_penalty = 1.9
    before = model.generation_config.to_dict()
    assert Transformers(model).generate([5, 6], SamplingParams(max_new_tokens=8, ignore_eos=True)) == expected
    assert model.generation_config.to_dict() == before
    assisted = Transformers(model, tiny_llama(seed=1, layers=1), gamma=3)
    assert assisted.generate([5, 6], SamplingParams(max_new_tokens=8, ignore_eos=True)) == expected


def test_stop_tokens() -> None:
    model = tiny_llama()
    assert stop_tokens(model) == (0,)
    model.generation_config.eos_token_id = [3, 4]
    assert stop_tokens(model) == (3, 4)


@pytest.mark.parametrize(
    "values",
    [
        {"gammas": ()},
        {"seeds": ()},
        {"gammas": (0,)},
        {"temperature": 0.0},
        {"prompt_tokens": 0},
        {"max_new_tokens": 0},
    ],
)
def test_bad_configurations(values: dict[str, object]) -> None:
    with pytest.raises(InputError):
        AuditConfig(**values)  # type: ignore[arg-type]

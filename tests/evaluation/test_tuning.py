"""`sakiyomi tune`: rounds that are counted again at every length, what is kept, and who uses it."""

from __future__ import annotations

import functools
import json
import random
import statistics
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sakiyomi import LLM, InputError, LoadError, SamplingParams
from sakiyomi.cli import app
from sakiyomi.core.tree import Draft, Draw, TokenTree
from sakiyomi.drafters.oracle import Oracle
from sakiyomi.engine import tuned_profile as profile
from sakiyomi.engine.tuned_profile import Profile, lasting, profile_path, read_profile, write_profile
from sakiyomi.evaluation.tuning import config, search
from sakiyomi.evaluation.tuning.beginnings import beginnings
from sakiyomi.evaluation.tuning.calibrate import DEEP
from sakiyomi.evaluation.tuning.config import PairConfig
from sakiyomi.evaluation.tuning.drift import watch
from sakiyomi.evaluation.tuning.predict import (
    Chains,
    Curve,
    RoundCosts,
    by_chance,
    by_place,
    by_rank,
    calm,
    usual,
    weighed,
)
from sakiyomi.evaluation.tuning.search import tune
from sakiyomi.evaluation.tuning.watch import Heard, Judged, Round, judged, watched
from train_toys import tiny_target

FREE = RoundCosts(Curve(((1, 1.0),)), Curve(((1, 0.0),)), Curve(((1, 0.0),)))


def same(rows: int) -> int:
    return rows


def round_(depth: int, tokens: int, **more: Any) -> Round:
    given = {"draft": 0.1 * depth, "score": 1.0, "other": 0.05} | more
    return Round(depth, depth, tokens, **given)


def chains_of(right: list[bool], gamma: int) -> list[Round]:
    """Rounds of a chain that goes wrong where a text says so."""
    found, place = [], 0
    while place < len(right):
        accepted = 0
        while accepted < gamma and place + accepted < len(right) - 1 and right[place + accepted]:
            accepted += 1
        found.append(round_(gamma, accepted + 1))
        place += accepted + 1
    return found


@pytest.mark.few(2)
@pytest.mark.parametrize("alpha", [0.3, 0.7, 0.85])
def test_lengths_between(alpha: float) -> None:
    """Of a text where a draft is better behind a mistake: lengths that were not run are told from those that were."""
    rng, right = random.Random(7), [True]
    for _ in range(12000):
        right.append(rng.random() < (alpha if right[-1] else (1 + alpha) / 2))
    text = Chains({gamma: [chains_of(right, gamma)] for gamma in (1, 4, 8)})
    for gamma in (1, 2, 3, 4, 6, 8):
        found = text.expect(gamma, FREE, same, 1.0)
        assert found.tau == pytest.approx(len(right) / len(chains_of(right, gamma)), rel=0.01)
        assert found.speedup == pytest.approx(found.tau)
        assert found.sampling == 0.0, "of one text nothing is known"
    assert by_place(text.rounds(8))[2:5] == pytest.approx([alpha] * 3, abs=0.06)


@pytest.mark.thorough
def test_what_texts_differ_by() -> None:
    """The standard error of tau is that of many draws, and shrinks with the root of their number."""
    rng = random.Random(3)

    def texts(count: int) -> list[list[Round]]:
        return [
            chains_of([rng.random() < alpha for _ in range(60)], 4) for alpha in (rng.random() for _ in range(count))
        ]

    draws = [Chains({1: [], 4: texts(50)}) for _ in range(100)]
    taus = [draw.tau(4) for draw in draws]
    told = statistics.fmean(draw.expect(4, FREE, same, 1.0).sampling for draw in draws)
    assert told == pytest.approx(statistics.stdev(taus) / statistics.fmean(taus), rel=0.2)
    assert Chains({1: [], 4: texts(800)}).expect(4, FREE, same, 1.0).sampling == pytest.approx(told / 4, rel=0.3)


def test_drafters_that_stop_by_themselves() -> None:
    """A draft of two that was right, then nothing to say, then a draft of four that was wrong at once."""
    text = Chains(
        {1: [[round_(1, 2), round_(1, 1), round_(0, 1), round_(1, 1)]], 8: [[round_(2, 3), round_(0, 1), round_(4, 1)]]}
    )
    costs = RoundCosts(Curve(((1, 1.0), (5, 1.4))), Curve(((0, 0.0), (4, 0.4))), Curve(((0, 0.1),)))
    found = text.expect(8, costs, same, 1.1)
    assert found.tau == pytest.approx(5 / 3)
    assert found.round_seconds == pytest.approx((1.2 + 0.2 + 1.0 + 1.4 + 0.4 + 3 * 0.1) / 3)
    assert found.speedup == pytest.approx(1.1 * found.tau / found.round_seconds)
    cut = text.expect(2, costs, same, 1.1)
    assert cut.round_seconds == pytest.approx((1.2 + 0.2 + 1.0 + 1.2 + 0.2 + 3 * 0.1) / 3)


def test_what_weighs_for_itself() -> None:
    """The few texts were easy ones, half as much again accepted as on all; one round met other work."""
    few, many = [[round_(8, 7)] * 5], [[round_(8, 5)] * 50]
    texts = [[round_(3, 4, score=1.0)] * 9 + [round_(3, 4, score=90.0)]]
    found = weighed(texts, few, many, 1.0)
    assert found.tau == pytest.approx(1 + 3 * 4 / 6)
    assert found.round_seconds == pytest.approx(1.1 * 1.35)
    assert weighed(texts, [[round_(8, 1)]], many, 1.0).tau == 4.0


def test_curves() -> None:
    readings = [(1, 1.0), (1, 2.0), (1, 1.0), *[(3, 2.0)] * 60, (2, 50.0)]
    curve = Curve.of(readings)
    assert curve.points == ((1, pytest.approx(4 / 3)), (3, 2.0)), "what was hardly read is left out"
    assert curve(2) == pytest.approx(5 / 3)
    assert curve(5) == pytest.approx(8 / 3)
    assert Curve.of([(4, 2.0)])(1) == 2.0
    shared = {1: 1.0, 8: 1.5}
    costs = RoundCosts.of([round_(4, 2, score=1.3)] * 3, lambda rows: 4 if rows < 8 else 8, shared)
    assert costs.score.points == ((1, 1.0), (4, 1.3), (8, 1.5))


def test_other_work_counts_little() -> None:
    """Of a round that met other work all parts shrink alike: their means add up to that of whole rounds."""
    rounds = [round_(4, 2)] * 9 + [round_(4, 2, other=10.0), round_(0, 1, draft=0.0)]
    found = calm(rounds)
    assert found[:9] == rounds[:9]
    assert found[9].seconds == pytest.approx(2 * rounds[0].seconds)
    assert found[9].other / found[9].score == pytest.approx(10.0)
    assert found[10].seconds == pytest.approx(rounds[10].seconds)
    costs = RoundCosts.of(rounds[:10], same, {})
    assert costs.round(4, same) == pytest.approx(usual(rounds[:10])) == pytest.approx(1.1 * rounds[0].seconds)


def test_what_became_of_a_tree() -> None:
    tree = TokenTree((5, 6, 7, 8), (-1, -1, 1, 1))
    draws = tuple(Draw(node, "x", None, None, chance) for node, chance in enumerate((0.6, 0.3, 0.2, 0.1)))
    draft = Draft(tree, "point_mass", draws)
    assert judged(draft, [6, 8, 9]) == (Judged(2, 1, 0.6), Judged(2, 1, 0.2))
    assert judged(draft, [9]) == (Judged(2, None, 0.6),)
    assert judged(Draft.empty(), [9]) == ()
    rounds = [round_(2, 3, judged=judged(draft, tokens)) for tokens in ([6, 8], [5], [9])]
    assert by_rank(rounds) == [1 / 4, 2 / 4]
    assert by_chance(rounds) == [
        {"from": 0.0, "to": 0.5, "places": 1, "accepted": 0.0},
        {"from": 0.5, "to": 0.8, "places": 3, "accepted": pytest.approx(1 / 3)},
    ]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("tuning"))


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for profiles."""
    monkeypatch.setenv("SAKIYOMI_PROFILES", str(tmp_path / "profiles"))
    return tmp_path / "profiles"


def load(target: Path, draft: str = "auto", **options: Any) -> LLM:
    return LLM(str(target), draft, dtype="float32", device="cpu", compile=False, **options)


def test_rounds_are_those_of_the_engine(target: Path) -> None:
    llm = load(target, "oracle")
    assert isinstance(llm.draft, Oracle)
    heard = Heard(llm.draft)
    assert heard.kind == llm.draft.kind
    llm.engine._speculation.drafter = heard
    params = SamplingParams(max_new_tokens=13, gamma=3, ignore_eos=True)
    alone = watched(llm.engine, heard, [[5, 6, 7]], params)
    together = watched(llm.engine, heard, [[5, 6, 7], [8, 9]], params)
    for rounds in (*alone, *together):
        assert sum(part.tokens for part in rounds) == 12, "the prompt's pass gives the first"
        assert [part.depth for part in rounds] == [3, 3, 3]
        assert all(place.rank == 0 for part in rounds for place in part.judged)
        assert all(part.score > 0 for part in rounds)
    assert not llm.engine.busy


@pytest.mark.thorough
def test_a_profile_is_followed(target: Path, kept: Path) -> None:
    plain = load(target, "none")
    prompt, params = [5, 6, 7, 5, 6, 7], SamplingParams(max_new_tokens=24, ignore_eos=True)
    expected = plain.generate([prompt], params)[0].token_ids
    assert load(target).profile is None
    path = profile_path(plain.target, plain.tokenizer)
    write_profile(path, Profile("oracle", 3, 1.5))
    llm = load(target)
    assert llm.profile == read_profile(path)
    assert isinstance(llm.draft, Oracle)
    (done,) = llm.generate([prompt], params, rounds_trace=True)
    assert done.token_ids == expected
    assert done.rounds_trace is not None
    drafted = [traced for traced in done.rounds_trace if traced.tokens]
    assert drafted
    assert all(traced.parents == tuple(range(-1, len(traced.tokens) - 1)) for traced in drafted), "chains"
    assert max(len(traced.tokens) for traced in drafted) == 3
    (other,) = llm.generate([prompt], SamplingParams(max_new_tokens=24, ignore_eos=True, gamma=5), rounds_trace=True)
    assert other.rounds_trace is not None
    assert len(other.rounds_trace[0].tokens) == 5, "what is asked for goes first"
    # Another draft, dtype or rounding is none of its business.
    assert load(target, "suffix").profile is None
    assert LLM(str(target), dtype="bfloat16", device="cpu", compile=False).profile is None
    write_profile(path, Profile("none", "auto", 1.0))
    assert load(target).draft is None
    write_profile(path, Profile(f"model:{kept / 'gone'}", 4, 2.0))
    assert load(target).profile is None
    path.write_text('{"draft": "nonsense", "gamma": 3, "speedup": 1}', encoding="utf-8")
    with pytest.raises(LoadError, match="sakiyomi tune"):
        load(target)


def test_specs_that_last(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(target.parent)
    assert lasting(f"suffix+model:{target.name}") == f"suffix+model:{target.resolve()}"
    assert lasting("early-exit:2") == "early-exit:2"
    assert lasting("model:tales-draft") == "model:tales-draft"


@pytest.mark.thorough
def test_a_target_is_tuned(target: Path, kept: Path, tmp_path: Path) -> None:
    """Itself as its draft is always right, and no faster; a model of another tokenizer stands in the folder."""
    drafts = tmp_path / "drafts"
    drafts.mkdir()
    (drafts / "small").symlink_to(target)
    (drafts / "broken").mkdir()
    (drafts / "broken" / "config.json").write_text("{}", encoding="utf-8")
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Once upon a time Tom\nOne day Mia saw\nThey played with\n", encoding="utf-8")
    config = PairConfig(
        target=str(target),
        drafts=str(drafts),
        prompts=str(prompts),
        dtype="float32",
        device="cpu",
        max_new_tokens=28,
        finalists=2,
        seconds=1,
    )
    found = tune(config)
    json.dumps(found)
    rows = found["table"]
    own = [row for row in rows if row["draft"] == f"model:{drafts / 'small'}"]
    assert {row["gamma"] for row in own} == {1, 2, 3, 4, 6, 8, "auto"}
    for row in own:
        if row["gamma"] != "auto":
            assert row["predicted_tau"] == pytest.approx(row["gamma"] + 1, rel=0.3), "always right, but for the end"
    assert sum("measured_speedup" in row for row in rows) == 3
    assert [row["predicted_speedup"] for row in rows if row["draft"] == "none"] == [1.0]
    facts = {row["draft"]: row for row in found["drafters"]}
    assert facts[f"model:{drafts / 'small'}"]["alphas"] == [1.0] * DEEP
    assert "refused" in facts[f"model:{drafts / 'broken'}"]
    assert found["A/A"][0] <= 1.0 <= found["A/A"][1]
    assert found["equal"] == found["texts"] == 4, "two finalists, and plain decoding twice"
    assert (found["conditions"]["calibrated_on"], found["conditions"]["compared_on"]) == (2, 1)
    llm = load(target)
    assert llm.profile is not None
    assert llm.profile.tau == found["best"]["measured_tau"] >= 1
    assert (llm.profile.draft, llm.profile.gamma) == (lasting(found["best"]["draft"]), found["best"]["gamma"])
    assert Path(found["file"]).parent == kept


@pytest.mark.thorough
def test_acceptance_that_falls_is_seen(target: Path, kept: Path) -> None:
    """A chosen draft is measured again under the conditions of then; what fell makes the command fail."""
    plain, texts = load(target, "none"), {"count": 3, "dtype": "float32", "device": "cpu"}
    config = PairConfig(target=str(target), watch=True, **texts)
    with pytest.raises(InputError, match="nothing was tuned"):
        watch(config)
    path = profile_path(plain.target, plain.tokenizer)
    then = {"max_new_tokens": 24, "temperature": 0.0}
    for tau, fell in ((2.0, False), (9.0, True)):
        write_profile(path, Profile("oracle", 3, 1.5, then, [], tau, 0.01))
        found = watch(config)
        assert (found["fell"], found["chosen_tau"], found["texts"]) == (fell, tau, 3)
        assert 3.0 < found["tau"] <= 4.0, "always right, but for the end"
    done = CliRunner().invoke(app, ["tune", "--target", str(target), "--dtype", "float32", "--count", "3", "--watch"])
    assert done.exit_code == 1 and "acceptance has fallen" in done.output
    with pytest.raises(InputError, match="leave out --draft"):
        watch(replace(config, draft=("suffix",)))
    write_profile(path, Profile("oracle", 3, 1.5, then))
    with pytest.raises(InputError, match="no draft with a known tau"):
        watch(config)


def test_beginnings() -> None:
    """No prompt comes twice; what calibrates and what compares have all sentences."""
    found = beginnings(9999)
    parts = tomllib.loads(Path(config.__file__).with_name("beginnings.toml").read_text(encoding="utf-8"))
    assert len(set(found)) == len(found) == 2717
    for half in (found[0:128:2], found[1:128:2]):
        for sentence in (*parts["who"], *parts["what"]):
            assert any(sentence in text for text in half)


def test_where_there_is_no_profile_nothing_is_looked_at(
    target: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To tell a model from others takes longer the larger its vocabulary is."""
    looked = []
    real = profile.fingerprint
    monkeypatch.setattr(profile, "fingerprint", lambda *given: looked.append(given) or real(*given))
    assert load(target).profile is None
    kept.mkdir()
    (kept / "0123456789abcdef-0123456789abcdef.json").write_text("{}", encoding="utf-8")
    assert load(target).profile is None
    assert not looked
    llm = load(target)
    write_profile(profile_path(llm.target, llm.tokenizer), Profile("suffix", 3, 1.5))
    looked.clear()
    assert load(target).profile == Profile("suffix", 3, 1.5)
    assert len(looked) == 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"count": 1}, "count is 1"),
        ({"seconds": 0}, "seconds is 0"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"draft": ("nonsense",)}, "unknown draft 'nonsense'"),
        ({"drafts": "/nowhere"}, "no folder"),
        ({"max_new_tokens": 120}, "do not fit into 128"),
    ],
)
def test_what_cannot_be_tuned(changes: dict[str, Any], words: str, target: Path) -> None:
    with pytest.raises(InputError, match=words):
        tune(PairConfig(**({"target": str(target), "dtype": "float32", "device": "cpu"} | changes)))


def test_texts_that_are_over_at_once(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "SamplingParams", functools.partial(SamplingParams, stop_token_ids=tuple(range(256))))
    with pytest.raises(InputError, match="end with their first token"):
        tune(PairConfig(target=str(target), dtype="float32", device="cpu", count=2, max_new_tokens=8, seconds=1))


@pytest.mark.thorough
def test_the_command(target: Path, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Drawn from a tiny model, both texts of a lap end with their first token now and then.
    monkeypatch.setattr(search, "SamplingParams", functools.partial(SamplingParams, ignore_eos=True))
    flags = ["--target", str(target), "--dtype", "float32", "--device", "cpu", "--count", "2", "--max-new-tokens", "8"]
    done = CliRunner().invoke(
        app, ["tune", *flags, "--temperature", "0.1", "--all", "--seconds", "1", "--no-save", "--json"]
    )
    assert done.exit_code == 0, (done.output, done.exception)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["file"] is None
    assert not kept.exists()
    assert "predicted against measured" in done.stdout
    assert "texts are equal" not in done.stdout, "they are drawn"
    assert all("measured_speedup" in row for row in found["table"])
    assert 0 < found["of_fastest"] <= 1
    misplaced = CliRunner().invoke(app, ["tune", "--seconds", "1", "medusa", "x"])
    assert misplaced.exit_code == 2

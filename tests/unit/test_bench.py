"""The benchmark: who runs when, what is compared, when no speed is given; each row runs on toys."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from sakiyomi.bench import bookkeeping as bookkeeping_row
from sakiyomi.bench import compiling, llamacpp, suites
from sakiyomi.bench.config import BenchConfig
from sakiyomi.bench.llamacpp import missing
from sakiyomi.bench.models import NearTies, Numbers, random_llama, random_prompts
from sakiyomi.bench.peers import ForwardClock, Transformers
from sakiyomi.bench.report import Row, condition_line, of_race
from sakiyomi.bench.runner import Agreement, Contender, Lap, race, same_tokens, timed
from sakiyomi.bench.trees import RandomTrees
from sakiyomi.bench.undrafted import Undrafted
from sakiyomi.cli import app
from sakiyomi.errors import InputError, LoadError, SakiyomiError
from sakiyomi.kernels.graphs import Graphs
from sakiyomi.llm import LLM
from sakiyomi.machine import bandwidth, conditions, costs, describe, lacks
from sakiyomi.model import SIZES
from sakiyomi.params import SamplingParams
from sakiyomi.prompts import STORIES, read_prompts
from toys import save_model, tiny_llama, tiny_tokenizer

TEXT = ((1, 2, 3),)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> BenchConfig:
    folder = tmp_path_factory.mktemp("models")
    tokenizer = tiny_tokenizer()
    save_model(folder / "target", tiny_llama(), tokenizer)
    save_model(folder / "draft", tiny_llama(seed=1, layers=1), tokenizer)
    return BenchConfig(
        target=str(folder / "target"),
        draft=f"model:{folder / 'draft'}",
        repeats=1,
        max_new_tokens=8,
        prompt_tokens=12,
        count=2,
        gamma=2,
        compile=False,
    )


# ---------------------------------------------------------------- runner


def test_contenders_take_turns_and_the_first_lap_does_not_count() -> None:
    order: list[str] = []

    def contender(name: str, seconds: list[float]) -> Contender:
        def run() -> Lap:
            order.append(name)
            return Lap(seconds.pop(0), 100, TEXT, {"tau": float(len(order))})

        return Contender(name, run, same_tokens)

    first, second = race(
        [contender("a", [99.0, 1.0, 2.0, 4.0]), contender("b", [0.001, 0.5, 0.5, 1.0])], repeats=3, note=order.append
    )
    assert [name for name in order if len(name) == 1] == ["a", "b"] * 4
    assert first.speeds == [100.0, 50.0, 25.0]
    assert (first.ratio, second.ratio) == (1.0, 4.0)  # of each lap: 2, 4, 4
    shown = second.to_dict()
    assert (shown["low"], shown["tokens_per_second"], shown["high"]) == (100.0, 200.0, 200.0)
    assert shown["equal"]


def test_unequal_outputs_have_no_speed() -> None:
    """Even if they are unequal in one lap only, or in the warm-up."""
    outputs = [TEXT, TEXT, ((1, 2, 4),)]
    good = Contender("good", lambda: Lap(1.0, 3, TEXT))
    bad = Contender("bad", lambda: Lap(0.5, 3, outputs.pop()), same_tokens)
    standings = race([good, bad], repeats=2)
    shown = standings[1].to_dict()
    assert shown["tokens_per_second"] is shown["ratio"] is shown["high"] is None
    assert not shown["equal"]
    row = of_race("x", "title", standings, gamma=4)
    assert row.notes == ["bad: text 0 differs from token 2 on"]
    assert standings[0].to_dict()["tokens_per_second"] == 3.0


def test_explained_differences_keep_their_speed() -> None:
    judge = lambda expected, got: Agreement(False, True, "a near-tie")  # noqa: E731
    standings = race(
        [Contender("a", lambda: Lap(1.0, 3, TEXT)), Contender("b", lambda: Lap(1.0, 3, (), {}), judge)], repeats=1
    )
    shown = standings[1].to_dict()
    assert shown["tokens_per_second"] == 3.0
    assert not shown["equal"]
    assert shown["note"] == "a near-tie"


@pytest.mark.parametrize(
    ("got", "note"),
    [
        (((1, 2),), "text 0 differs from token 2 on"),
        (((1, 2, 3), (4,)), "2 texts instead of 1"),
        (((9, 2, 3),), "token 0"),
    ],
)
def test_same_tokens(got: tuple[tuple[int, ...], ...], note: str) -> None:
    found = same_tokens(TEXT, got)
    assert not found.accepted
    assert note in found.note


def test_a_contender_may_have_a_reference_of_its_own() -> None:
    """What has other weights has other texts: it is compared with itself run another way, or not at all."""
    other = ((4, 5),)
    standings = race(
        [
            Contender("first", lambda: Lap(1.0, 3, TEXT)),
            Contender("rounded", lambda: Lap(1.0, 2, other)),
            Contender("rounded, drafted", lambda: Lap(1.0, 2, other), same_tokens, reference="rounded"),
        ],
        repeats=1,
    )
    shown = [standing.to_dict() for standing in standings]
    assert [line["equal"] for line in shown] == [None, None, True]
    assert all(line["tokens_per_second"] for line in shown)


def test_no_lap_begins_after_the_deadline() -> None:
    calls: list[int] = []
    contender = Contender("a", lambda: calls.append(1) or Lap(1.0, 1))  # type: ignore[func-returns-value]
    race([contender], repeats=5, until=time.perf_counter() - 1)
    assert len(calls) == 2  # the warm-up, and one that counts


def test_bad_races_are_refused() -> None:
    contender = Contender("a", lambda: Lap(1.0, 1))
    with pytest.raises(InputError, match="repeats is 0"):
        race([contender], repeats=0)
    with pytest.raises(InputError, match="one name"):
        race([contender, contender], repeats=1)


def test_timed_counts_tokens() -> None:
    lap = timed(lambda: [[1, 2], [3]])
    assert (lap.tokens, lap.outputs) == (3, ((1, 2), (3,)))
    assert lap.seconds > 0


def test_condition_line_leaves_out_what_is_unknown() -> None:
    assert condition_line({"load_average": 0.123456, "commit": None, "gamma": 4}) == "load average 0.123; gamma 4"


# ---------------------------------------------------------------- prompts and models


def test_stories_have_64_tokens_of_most_tokenizers() -> None:
    assert len(STORIES) == len(set(STORIES)) == 8
    assert all(50 <= len(story.split()) <= 80 for story in STORIES)


def test_prompts_from_files(tmp_path: Path) -> None:
    import gzip

    lines = tmp_path / "a.txt"
    lines.write_text("one\n\ntwo\nthree\n", encoding="utf-8")
    assert read_prompts(lines) == ["one", "two", "three"]
    assert read_prompts(lines, 2) == ["one", "two"]
    packed = tmp_path / "a.jsonl.gz"
    packed.write_bytes(gzip.compress('{"prompt": "むかし"}\n{"text": "b"}\n'.encode()))
    assert read_prompts(packed) == ["むかし", "b"]
    packed.write_bytes(b"no gzip at all")
    with pytest.raises(LoadError, match="cannot be read"):
        read_prompts(packed)


def test_random_model() -> None:
    model = random_llama(32, 1, 4, 64, 1000, torch.float32)
    prompts = random_prompts(2, 16, 1000)
    with torch.no_grad():
        logits = model(torch.tensor(prompts)).logits
    assert 2.5 < float(logits.std()) < 3.5
    assert Numbers().decode([3, 17]) == " 3 17"
    again = random_llama(32, 1, 4, 64, 1000, torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_near_ties_tell_noise_from_error() -> None:
    model = tiny_llama()
    prompts = [[5, 6, 7], [8, 9]]
    params = SamplingParams(max_new_tokens=6, ignore_eos=True)
    texts = tuple(tuple(Transformers(model).generate(prompt, params)) for prompt in prompts)
    judge = NearTies(model, prompts)
    assert judge(texts, texts) == Agreement(True, True)
    wrong = (texts[0], (*texts[1][:3], (texts[1][3] + 1) % 320, *texts[1][4:]))
    found = judge(texts, wrong)
    assert not found.accepted
    assert "1 of 2 texts part (no near-tie): text 1 at token 3" in found.note


# ---------------------------------------------------------------- peers and engine


def test_forwards_are_counted_and_hooks_come_off() -> None:
    target, draft = tiny_llama(), tiny_llama(seed=1, layers=1)
    params = SamplingParams(max_new_tokens=6, ignore_eos=True)
    began = time.perf_counter()
    with ForwardClock([target, draft]) as clock:
        Transformers(target, draft, gamma=2).generate([5, 6, 7], params)
    assert clock.calls[0] >= 2
    assert clock.calls[1] >= clock.calls[0]
    assert 0 < clock.seconds < time.perf_counter() - began
    assert not target._forward_hooks
    assert not draft._forward_pre_hooks


@pytest.mark.parametrize(
    "params", [SamplingParams(max_new_tokens=8), SamplingParams(max_new_tokens=8, temperature=1, seed=3)]
)
def test_undrafted_is_the_engine_without_a_draft(pair: BenchConfig, params: SamplingParams) -> None:
    llm = LLM(pair.target, draft=pair.draft, compile=False)
    plain = LLM(pair.target, draft="none", compile=False)
    prompts = [[5, 6, 7], [8, 9]]
    found = Undrafted(llm).generate(prompts, params)
    assert [done.token_ids for done in found] == [done.token_ids for done in plain.generate(prompts, params)]
    assert {entry.status for done in found for entry in done.trace} == {"plain"}
    assert all(done.stats.drafted == 0 for done in found)


def test_random_trees_are_trees_with_the_right_tokens_in_them() -> None:
    drafter = RandomTrees({(5, 6): [7, 8, 9, 10]}, 320, rate=1.0)

    class Context:
        tokens = (5, 6, 7)

    (draft,) = drafter.propose([Context()], [3])  # type: ignore[list-item]
    draft.tree.validate(320)
    assert len(draft.tree) > 3
    path, parent = [], -1
    for token in (8, 9, 10):
        parent = next(node for node in draft.tree.children(parent) if draft.tree.tokens[node] == token)
        path.append(parent)
    assert draft.tree.depths()[path[-1]] == 2


# ---------------------------------------------------------------- rows


@pytest.mark.parametrize("row", ["speculative", "stories", "batch"])
def test_rows_of_a_pair(pair: BenchConfig, row: str) -> None:
    found = suites.ROWS[row](pair, suites.Note())
    assert len(found.lines) >= 2
    assert all(line["equal"] and line["tokens_per_second"] > 0 for line in found.lines)
    assert found.lines[0]["ratio"] == 1.0
    assert {"dtype", "gamma", "prompt_tokens", "laps"} <= set(found.conditions)
    others = ["transformers assisted", "transformers plain", "transformers prompt lookup"]
    assert [line["name"] for line in found.lines if "transf" in line["name"]] == others * (row == "speculative")
    json.dumps(found.to_dict())


def test_row_of_peers(pair: BenchConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(llamacpp, "cache_folder", lambda: tmp_path)
    found = suites.ROWS["peers"](pair, suites.Note())
    names = [line["name"] for line in found.lines]
    assert names[:5] == [
        "transformers plain",
        "transformers assisted",
        "transformers prompt lookup",
        "sakiyomi plain",
        "sakiyomi speculative",
    ]
    if missing() is None:
        assert names[5:8] == [
            "llama.cpp f32 plain",
            "llama.cpp q8_0 plain (other weights)",
            "llama.cpp q4_0 plain (other weights)",
        ]
        drafted = next(line for line in found.lines if line["name"].startswith("llama.cpp q8_0 with its draft"))
        assert 1 <= drafted["tau"] <= 3
    compared = {line["name"]: line["equal"] for line in found.lines}
    assert compared.pop("sakiyomi speculative, int8 (other weights)", True)
    assert all(equal is (None if "other weights" in name else True) for name, equal in compared.items())
    assert all(line["tokens_per_second"] > 0 for line in found.lines)


def test_row_of_peers_says_who_is_left_out(pair: BenchConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llamacpp, "find_spec", lambda name: None)
    monkeypatch.setattr("sakiyomi.kernels.native.native", lambda: None)
    found = suites.ROWS["peers"](pair, suites.Note())
    assert len(found.lines) == 5
    assert found.notes[-2].startswith("llama.cpp is left out: gguf and llama-cpp-python not installed; pip install")
    assert found.notes[-1].startswith("int8 is left out: quantize='int8' needs")


def test_bookkeeping_row(pair: BenchConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bookkeeping_row, "VOCAB", 500)
    found = suites.ROWS["bookkeeping"](pair, suites.Note())
    assert len(found.lines) == 10
    assert all(0 < line["ours_ms"] < 1000 for line in found.lines)
    assert all((line["transformers_ms"] is None) == (line["sampling"] == "coupled") for line in found.lines)
    always = [line for line in found.lines if line["draft"] == "the target itself" and line["sampling"] == "greedy"]
    assert always[0]["tau"] == pytest.approx(7 / 3)  # 8 tokens: one of the prefill, rounds of 3, 3 and 1


def test_exact_row(pair: BenchConfig) -> None:
    found = suites.ROWS["exact"](pair, suites.Note())
    assert [line["dtype"] for line in found.lines] == ["float32", "bfloat16"]
    assert all(line["equal_tokens"] for line in found.lines), found.lines
    assert all(line["runs_compared"] == 26 for line in found.lines)


def test_a_row_that_fails_leaves_the_others(pair: BenchConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(config: BenchConfig, note: suites.Note) -> Row:
        raise LoadError("the model went away")

    monkeypatch.setitem(suites.ROWS, "batch", fails)
    arguments = ["bench", "--rows", "batch", "--rows", "stories", "--target", pair.target, "--draft", pair.draft]
    arguments += ["--repeats", "1", "--max-new-tokens", "4", "--count", "2", "--gamma", "2", "--no-compile", "--json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    assert "the model went away" in result.stdout
    rows = json.loads(result.stdout.splitlines()[-1])["rows"]
    assert [(row["row"], row["error"]) for row in rows] == [("batch", "the model went away"), ("stories", None)]


@pytest.mark.filterwarnings("default")  # the compiler's own
def test_a_new_process_times_every_graph(pair: BenchConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled(graphs: Graphs, size: int) -> None:
        graphs._ready[size] = lambda ids, positions: ids

    monkeypatch.setattr(Graphs, "_compile", compiled)
    found = compiling._start(pair.target, "float32")
    assert sorted(found["graphs"]) == list(SIZES)
    monkeypatch.setattr(Graphs, "_compile", lambda graphs, size: None)
    with pytest.raises(SakiyomiError, match="cannot be compiled"):
        compiling._start(pair.target, "float32")


@pytest.mark.slow
def test_compiling_row(pair: BenchConfig) -> None:
    found = compiling.compiling(dataclasses.replace(pair, compile=True), suites.Note())
    assert found.lines[-1]["new_graphs"] == found.lines[-1]["passes_without_graph"] == 0
    assert [line["rows"] for line in found.lines[:-1]] == [8, 1, 4, 16, 32, 64]


def test_the_command(pair: BenchConfig) -> None:
    arguments = ["bench", "--rows", "stories", "--target", pair.target, "--draft", pair.draft, "--no-compile", "--json"]
    arguments += ["--repeats", "1", "--max-new-tokens", "6", "--count", "2", "--gamma", "2"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    value = json.loads(result.stdout.splitlines()[-1])
    assert [row["row"] for row in value["rows"]] == ["stories"]
    assert {"processor", "threads", "torch"} <= set(value["conditions"])
    assert "sakiyomi plain" in result.stdout


# ---------------------------------------------------------------- machine


def test_machine_is_described() -> None:
    found = describe()
    assert found["cores"] >= 1
    assert "cpu" in found["devices"]
    assert conditions(gamma=4)["gamma"] == 4
    assert all(isinstance(line, str) for line in lacks())
    assert 1e8 < bandwidth() < 1e13


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sakiyomi.kernels.build.compiler", lambda: None)
    monkeypatch.setattr("sakiyomi.kernels.build.native", lambda: None)
    text = " ".join(lacks())
    assert "C++ compiler" in text
    assert "kernels" in text


def test_costs_of_a_pair(pair: BenchConfig) -> None:
    found = costs(LLM(pair.target, draft=pair.draft, compile=False), context=32, repeats=3)
    assert set(found["target_ms"]) == {1, 4, 8, 16}
    assert found["c"] == pytest.approx(found["draft_ms"] / found["target_ms"][1])
    assert math.isclose(found["v"][1], 1.0)
    alone = costs(LLM(pair.target, draft="none", compile=False), context=32, repeats=2)
    assert alone["c"] is None

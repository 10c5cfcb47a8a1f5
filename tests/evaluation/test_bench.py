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

import rows as script
from forward_clock import ForwardClock
from own_rows import bookkeeping as bookkeeping_row
from own_rows import passes as passes_row
from own_rows.common import OwnConfig
from own_rows.exactness import RandomTrees
from own_rows.lookup import Given
from random_models import Numbers, random_llama, random_prompts
from sakiyomi.cache.slots import SlotCache
from sakiyomi.cli import app
from sakiyomi.cli.output import table
from sakiyomi.core.errors import InputError, LoadError, MemoryLimitError, UnsupportedError
from sakiyomi.core.memory import peak_bytes
from sakiyomi.core.outputs import Stats
from sakiyomi.core.params import SamplingParams
from sakiyomi.core.prompts import STORIES, read_prompts, read_references, read_text
from sakiyomi.drafters.early_exit import EarlyExit
from sakiyomi.engine.llm import LLM
from sakiyomi.engine.machine import bandwidth, conditions, costs, describe, lacks
from sakiyomi.engine.plain import EngineView
from sakiyomi.evaluation.audit.reference import EngineReference, HFReference
from sakiyomi.evaluation.bench import speed as speed_row
from sakiyomi.evaluation.bench import suites
from sakiyomi.evaluation.bench.config import BenchConfig, silent
from sakiyomi.evaluation.bench.frame import PairRow, Race, Races, declared
from sakiyomi.evaluation.bench.meter import Meter, round_figures
from sakiyomi.evaluation.bench.models import NearTies
from sakiyomi.evaluation.bench.peers import Transformers
from sakiyomi.evaluation.bench.quality import Quality, perplexity
from sakiyomi.evaluation.bench.report import Row, condition_line, of_race
from sakiyomi.evaluation.bench.runner import Agreement, Contender, Spread, TimedRun, race, same_tokens, timed
from sakiyomi.kernels.build import native
from sakiyomi.kernels.native import PackedLinear
from sakiyomi.model_executor.early_exit import FirstLayers
from sakiyomi.model_executor.loading import load_model
from toys import byte_fallback_tokenizer, save_model, tiny_llama, tiny_tokenizer

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


def own_row(name: str, config: BenchConfig) -> Row:
    """A row about sakiyomi's own code, see ``benchmarks/rows.py``."""
    return suites.measure(name, config, rows=script.ROWS)


# ---------------------------------------------------------------- runner


def test_contenders_take_turns_and_the_first_run_does_not_count() -> None:
    order: list[str] = []

    def contender(name: str, seconds: list[float]) -> Contender:
        def run() -> TimedRun:
            order.append(name)
            return TimedRun(seconds.pop(0), 100, TEXT, {"tau": float(len(order))})

        return Contender(name, run, same_tokens)

    first, second = race(
        [contender("a", [99.0, 1.0, 2.0, 4.0]), contender("b", [0.001, 0.5, 0.5, 1.0])], repeats=3, note=order.append
    )
    assert [name for name in order if len(name) == 1] == ["a", "b"] * 4
    assert first.speeds == [100.0, 50.0, 25.0]
    assert (first.ratio, second.ratio) == (1.0, 4.0)  # of each run: 2, 4, 4
    shown = second.to_dict()
    assert (shown["low"], shown["tokens_per_second"], shown["high"]) == (100.0, 200.0, 200.0)
    assert shown["equal"]


def test_unequal_outputs_have_no_speed() -> None:
    """Even if they are unequal in one run only, or in the warm-up."""
    outputs = [TEXT, TEXT, ((1, 2, 4),)]
    good = Contender("good", lambda: TimedRun(1.0, 3, TEXT))
    bad = Contender("bad", lambda: TimedRun(0.5, 3, outputs.pop()), same_tokens)
    standings = race([good, bad], repeats=2)
    shown = standings[1].to_dict()
    assert shown["tokens_per_second"] is shown["ratio"] is shown["high"] is None
    assert not shown["equal"]
    row = of_race("x", "title", standings, gamma=4)
    assert row.notes == ["bad: text 0 differs from token 2 on"]
    assert standings[0].to_dict()["tokens_per_second"] == 3.0


def test_other_weights_are_compared_among_themselves() -> None:
    def contender(name: str, text: tuple[tuple[int, ...], ...], against: str | None = None) -> Contender:
        return Contender(name, lambda: TimedRun(1.0, 3, text), same_tokens, against)

    rounded = ((7, 8),)
    standings = race(
        [
            contender("base", TEXT),
            contender("a", rounded, "a"),
            contender("b", rounded, "a"),
            contender("c", TEXT, "a"),
        ],
        repeats=1,
    )
    shown = [standing.to_dict() for standing in standings]
    assert [line["equal"] for line in shown] == [True, True, True, False]
    assert [line.get("weights") for line in shown] == [None, "other", "other", "other"]
    assert shown[3]["tokens_per_second"] is None
    assert "other weights than base, compared with a: a; b; c" in of_race("x", "title", standings).notes
    alone = Contender("d", lambda: TimedRun(1.0, 3, rounded), against="d")
    notes = of_race("x", "title", race([contender("base", TEXT), alone], repeats=1)).notes
    assert "other weights than base, not compared: d" in notes


def test_explained_differences_keep_their_speed() -> None:
    judge = lambda expected, got: Agreement(False, True, "a near-tie")  # noqa: E731
    standings = race(
        [Contender("a", lambda: TimedRun(1.0, 3, TEXT)), Contender("b", lambda: TimedRun(1.0, 3, (), {}), judge)],
        repeats=1,
    )
    shown = standings[1].to_dict()
    assert shown["tokens_per_second"] == 3.0
    assert not shown["equal"]
    assert shown["note"] == "a near-tie"


def test_what_two_equal_things_show_is_not_claimed() -> None:
    """Runs of 100, 110 and 99 tokens/s: neighbours are up to 10/9 apart, in either direction."""

    def contender(name: str, seconds: list[float]) -> Contender:
        return Contender(name, lambda: TimedRun(seconds.pop(0), 100, TEXT), same_tokens)

    standings = race(
        [
            contender("base", [9.0, 1.0, 100 / 110, 100 / 99]),
            contender("same", [9.0, 1.05, 1.05 * 100 / 110, 1.05 * 100 / 99]),
            contender("twice", [9.0, 0.5, 0.5, 0.5]),
        ],
        repeats=3,
    )
    spread = Spread.of(standings)
    assert spread is not None
    assert (spread.low, spread.high) == pytest.approx((0.9, 10 / 9))
    assert 0.95 in spread
    assert 1.2 not in spread
    row = of_race("x", "title", standings)
    assert row.conditions["A/A"] == "0.90 to 1.11"
    assert row.notes == ["no difference from base (two equal things: 0.90 to 1.11): same"]
    assert Spread.of(race([contender("once", [1.0, 1.0])], repeats=1)) is None
    unsteady = race([contender("base", [9.0, 1.0, 1.0]), contender("other", [9.0, 1.0, 2.0])], repeats=2)
    assert str(Spread.of(unsteady)) == "0.50 to 2.00"  # though the baseline looks steady


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


def test_no_run_begins_after_the_deadline() -> None:
    calls: list[int] = []
    contender = Contender("a", lambda: calls.append(1) or TimedRun(1.0, 1))  # type: ignore[func-returns-value]
    race([contender], repeats=5, until=time.perf_counter() - 1)
    assert len(calls) == 2  # the warm-up, and one that counts


def test_bad_races_are_refused() -> None:
    contender = Contender("a", lambda: TimedRun(1.0, 1))
    with pytest.raises(InputError, match="repeats is 0"):
        race([contender], repeats=0)
    with pytest.raises(InputError, match="one name"):
        race([contender, contender], repeats=1)


def test_timed_counts_tokens() -> None:
    run = timed(lambda: [[1, 2], [3]])
    assert (run.tokens, run.outputs) == (3, ((1, 2), (3,)))
    assert run.seconds > 0


def test_condition_line_leaves_out_what_is_unknown() -> None:
    assert condition_line({"load_average": 0.123456, "commit": None, "gamma": 4}) == "load average 0.123; gamma 4"
    assert condition_line({"process_peak_bytes": 1_500_000_000}) == "process peak 1.5 GB"


def test_tables_have_short_heads_and_all_columns(capsys: pytest.CaptureFixture[str]) -> None:
    """A peer's line has fewer figures than ours; what was found equal stays the last column."""
    lines = [{"name": "peer", "tokens_per_second": 5.0, "tokens": 8, "equal": True}]
    lines.append({"name": "own", "tokens_per_second": 9.0, "kv_bytes": 2e6, "tokens": 8, "equal": True})
    found = Row("x", "title", lines).table()
    assert found[0] == {"name": "peer", "tok/s": 5.0, "KV MB": None, "equal": True}
    assert list(found[1].items())[2:] == [("KV MB", 2.0), ("equal", True)]
    figures = ("tau", "acceptance_rate", "draft_ms", "score_ms", "overhead_ms", "kv_bytes", "bandwidth_share")
    widest = {"name": "llama.cpp q8_0 with its draft", "tokens_per_second": 123.4, "low": 100.2, "high": 150.1}
    widest |= (
        {"ratio": 0.123} | dict.fromkeys(figures, 0.123) | {"perplexity": 12.34, "weights": "other", "equal": True}
    )
    table(Row("x", "title", [widest]).table())
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 120
    plain_lines = [{"rows": 8, "start_seconds": 0.5}]
    assert Row("x", "title", plain_lines).table() == plain_lines


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


def test_chats_from_files(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    user, reply = {"role": "user", "content": "Who?"}, {"role": "assistant", "content": "A fox."}
    file.write_text(json.dumps({"messages": [user, reply, user, reply]}) + '\n"a text"\n', encoding="utf-8")
    assert read_prompts(file) == [[user, reply, user], "a text"]
    assert read_text(file) == "Who?\n\nA fox.\n\nWho?\n\na text"
    for wrong, message in (([reply], "one is the user's"), ([{"role": "tool", "content": "x"}], "from 'tool'")):
        file.write_text(json.dumps({"messages": wrong}), encoding="utf-8")
        with pytest.raises(LoadError, match=message):
            read_prompts(file)


def test_references_of_prompts(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    lines = [{"prompt": "1 + 1 =", "answer": 2}, {"turns": ["a"], "reference": [" b ", "c"]}, {"text": "c"}]
    file.write_text("\n\n".join(map(json.dumps, lines)), encoding="utf-8")
    assert read_references(file) == ["2", "b", None]
    assert read_references(file, 1) == ["2"]
    assert read_text(file) == "1 + 1 =\n\na\n\nc"
    plain = tmp_path / "a.txt"
    plain.write_text("one\n\ntwo", encoding="utf-8")
    assert read_references(plain) == [None, None]
    assert read_text(plain) == "one\n\ntwo"


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
    assert "1 of 2 texts differ (no near-tie): text 1 at token 3" in found.note


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


def test_the_clock_waits_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call returns before its work is done there, which would be counted as bookkeeping."""
    model, waited = tiny_llama(), []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    with ForwardClock([model]):
        model(torch.tensor([[1]]))
    assert not waited
    monkeypatch.setattr(type(model), "device", property(lambda self: torch.device("cuda", 1)))
    with ForwardClock([model]):
        model(torch.tensor([[1]]))
    assert waited == [torch.device("cuda", 1)] * 2


def test_figures_of_a_round_sum_up() -> None:
    stats = Stats(rounds=4, committed=10, seconds=1.0, prefill_seconds=0.2, draft_seconds=0.1, score_seconds=0.5)
    found = round_figures(stats)
    assert found["tau"] == 2.5
    assert found["draft_ms"] == pytest.approx(25)
    assert found["score_ms"] == pytest.approx(125)
    assert found["overhead_ms"] == pytest.approx(50)
    assert round_figures(Stats(tokens=1))["draft_ms"] == 0


def test_the_meter_counts_what_passes_hold_and_read(pair: BenchConfig) -> None:
    llm = LLM(pair.target, draft=pair.draft, compile=False)
    plain = EngineView(llm)
    with Meter(plain.engine) as meter:
        plain.generate([[5, 6, 7], [8, 9]], SamplingParams(max_new_tokens=4, ignore_eos=True))
    # The last pass is over the last but one new token: 3 + 3 and 2 + 3 pairs.
    assert meter.figures()["kv_bytes"] == 11 * llm.target.cache.pair_bytes
    assert meter.figures()["bandwidth_share"] > 0
    assert not llm.target.watchers
    with Meter(llm.engine) as both:
        llm.generate([[5, 6, 7]], SamplingParams(max_new_tokens=4, gamma=2, ignore_eos=True))
    assert both.figures()["kv_bytes"] > 6 * llm.target.cache.pair_bytes
    kept = {"cache": "streaming[local=4]", "kv_budget": 16, "chunk_size": 16}
    for options, held in ((kept, 16 + 8), (kept | {"cache": "streaming[local=4]+quant-8[residual=32]"}, None)):
        bounded = EngineView(LLM(pair.target, "none", compile=False, **options))  # type: ignore[arg-type]
        with Meter(bounded.engine) as meter:
            bounded.generate([[5] * 48], SamplingParams(max_new_tokens=9, ignore_eos=True))
        last = bounded.engine.target.cache.pair_bytes
        most = 16 + 16  # what stays at a border, and the next chunk
        assert meter.figures()["kv_bytes"] == most * last if held else meter.figures()["kv_bytes"] < (48 + 8) * last
    own = EngineView(plain_llm := LLM(pair.target, "none", compile=False), EarlyExit(FirstLayers(plain_llm.target, 1)))
    with Meter(own.engine) as shared:
        own.generate([[5, 6, 7]], SamplingParams(max_new_tokens=4, gamma=2, ignore_eos=True))
    assert own.engine.drafter.passes > 0  # type: ignore[union-attr]
    assert 6 <= shared.figures()["kv_bytes"] / plain_llm.target.cache.pair_bytes <= 9, "one cache is counted once"


def test_bytes_that_a_pass_reads(pair: BenchConfig) -> None:
    """Embeddings are not read; a packed layer counts as it lies in memory; 8 bits are a quarter of float32."""
    model = tiny_llama()
    embedding = model.get_input_embeddings().weight
    whole = sum(p.nbytes for p in model.parameters()) - embedding.nbytes
    assert model.get_output_embeddings().weight is not embedding
    packed = LLM(pair.target, draft="none", compile=False).target
    linears = [module for module in packed.module.modules() if isinstance(module, PackedLinear)]
    assert packed.weights.bytes is not None
    assert whole <= packed.weights.bytes <= 1.1 * whole  # blocks of 32 channels are filled up
    if linears:  # the compiled kernels are here
        rounded = LLM(pair.target, draft="none", compile=False, quantize="int8").target.weights.bytes
        assert rounded is not None
        assert whole / 4 < rounded < whole / 2


def test_perplexity_of_our_passes_is_that_of_transformers(pair: BenchConfig) -> None:
    chunks = [([5], [6, 7, 8, 9, 5] * 10), ([30], [31, 32])]
    llm = LLM(pair.target, draft="none", compile=False)
    expected = perplexity(HFReference(tiny_llama()).logits, chunks)
    assert perplexity(EngineReference(llm.target).logits, chunks) == pytest.approx(expected, rel=1e-4)
    flat = perplexity(lambda prompt, tokens: torch.zeros(len(tokens), 320), chunks)
    assert flat == pytest.approx(320)


def test_right_answers_are_counted(pair: BenchConfig, tmp_path: Path) -> None:
    """Of four texts, two of each prompt; the second prompt has no reference."""
    tokenizer = tiny_tokenizer()
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "a", "answer": "cat"}\n{"text": "b"}\n', encoding="utf-8")
    quality = Quality(dataclasses.replace(pair, prompts=str(file)), tokenizer)
    outputs = [tokenizer(text).input_ids for text in (" cat and dog", "x", "dog", "x")]
    assert quality.matches(outputs) == {"match": 0.5}
    assert Quality(pair, tokenizer).matches(outputs) == {}


@pytest.mark.parametrize(
    "params", [SamplingParams(max_new_tokens=8), SamplingParams(max_new_tokens=8, temperature=1, seed=3)]
)
def test_undrafted_is_the_engine_without_a_draft(pair: BenchConfig, params: SamplingParams) -> None:
    llm = LLM(pair.target, draft=pair.draft, compile=False)
    plain = LLM(pair.target, draft="none", compile=False)
    prompts = [[5, 6, 7], [8, 9]]
    found = EngineView(llm).generate(prompts, params)
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


@pytest.mark.thorough
@pytest.mark.parametrize("row", ["speculative", "stories", "batch", "trees", "useless"])
def test_rows_of_a_pair(pair: BenchConfig, row: str) -> None:
    found = own_row(row, pair) if row in script.ROWS else suites.measure(row, pair)
    assert len(found.lines) >= 2
    assert all(line["equal"] and line["tokens_per_second"] > 0 for line in found.lines)
    assert found.lines[0]["ratio"] == 1.0
    assert {"dtype", "gamma", "prompt_tokens", "runs"} <= set(found.conditions)
    others = ["transformers assisted", "transformers plain", "transformers prompt lookup"]
    assert [line["name"] for line in found.lines if "transf" in line["name"]] == others * (row == "speculative")
    json.dumps(found.to_dict())


@pytest.mark.skipif(native() is None, reason="no compiled kernels here")
def test_row_of_targets_that_draft_for_themselves(pair: BenchConfig) -> None:
    found = own_row("selfdraft", pair)
    names = [line["name"] for line in found.lines]
    assert names[:3] == ["plain", "self-int8", "self-int4"]
    assert names[3].startswith("early-exit:1")
    assert all(line["equal"] and line["tau"] >= 1 for line in found.lines)
    assert found.lines[0]["draft_share"] == 0
    assert all(0 < line["draft_share"] < 1 for line in found.lines[1:])


@pytest.mark.thorough
def test_row_of_every_drafter(pair: BenchConfig) -> None:
    found = own_row("heads", dataclasses.replace(pair, draft=f"model:{pair.draft_model}"))
    names = [line["name"] for line in found.lines]
    assert names[:2] == ["T=0: plain", f"T=0: model:{pair.draft_model}"] and "T=1: suffix" in names
    for line in found.lines:
        assert line["round_ms"] > 0 and line["tau"] >= 1
        assert (line.get("tau_16") is None) == line["name"].endswith("plain")
        assert line["equal"] or line["name"].startswith("T=1")
    json.dumps(found.to_dict())


@pytest.mark.skipif(native() is None, reason="no compiled kernels here")
def test_row_of_a_draft_that_goes_on_learning(pair: BenchConfig) -> None:
    """Both halves, learning off and on, the same texts; in one half there is nothing to compare."""
    found = own_row("learning", dataclasses.replace(pair, count=4))
    assert [(line["half"], line["learning"]) for line in found.lines] == [
        (half, name) for half in ("first", "second") for name in ("off", "on")
    ]
    assert all(line["drafted"] and line["tokens_per_second"] > 0 for line in found.lines)
    assert "4 of 4 texts are equal" in found.notes
    with pytest.raises(InputError, match="ask for more"):
        own_row("learning", dataclasses.replace(pair, count=1))


def test_row_of_a_target_on_an_excerpt_of_its_cache(pair: BenchConfig) -> None:
    found = own_row("evicted", OwnConfig(**vars(pair) | {"contexts": (16, 32)}))
    assert [line["context"] for line in found.lines] == [16, 32]
    assert all(line["equal"] and line["ratio"] > 0 for line in found.lines)
    assert all(line["acceptance_rate"] == 1 for line in found.lines)  # all pairs are in such an excerpt
    with pytest.raises(InputError, match=r"contexts has 100000 tokens, and the prompts together have \d+"):
        own_row("evicted", OwnConfig(**vars(pair) | {"contexts": (100000,)}))


@pytest.mark.thorough
def test_row_of_the_drop_in(pair: BenchConfig) -> None:
    """transformers' own loop and ours, one text at a time and all together, write the same."""
    found = suites.measure("dropin", pair)
    names = [line["name"] for line in found.lines]
    assert names[0].startswith("transformers assisted") and "custom_generate" in names
    assert names[-1].startswith("custom_generate, batch of")
    assert all(line["equal"] for line in found.lines)


@pytest.mark.thorough
def test_quality_is_shown_beside_speed(pair: BenchConfig, tmp_path: Path) -> None:
    file = tmp_path / "held-out.txt"
    file.write_text("Once upon a time there was a fox. " * 20, encoding="utf-8")
    found = suites.measure("speculative", dataclasses.replace(pair, quality=str(file)))
    figures = [line["perplexity"] for line in found.lines]
    assert figures == pytest.approx([figures[0]] * 5, rel=1e-4)
    assert found.table()[0]["ppl"] == figures[0]
    assert "held-out.txt" in found.conditions["perplexity_of"]
    with pytest.raises(LoadError, match="cannot be read"):
        suites.run(dataclasses.replace(pair, quality=str(tmp_path / "none.txt")))
    file.write_text("a", encoding="utf-8")
    with pytest.raises(InputError, match="longer"):
        suites.measure("speculative", dataclasses.replace(pair, quality=str(file)))


@pytest.mark.thorough
def test_row_of_block_verification(pair: BenchConfig) -> None:
    found = own_row("block", pair)
    assert [line["gamma"] for line in found.lines] == [2, 4, 8]
    for line in found.lines:
        # On the same chains it never keeps less; measured taus are of unlike texts.
        assert line["paired"] >= 1.0 and line["rounds"] > 0
        assert 1.0 <= line["tau_block"] <= line["gamma"] + 1
        assert line["ratio_tokens_per_second"] > 0
    assert "no fewer" in found.notes[0]
    assert len(found.table()[0]) == 9
    json.dumps(found.to_dict())


@pytest.mark.thorough
def test_row_of_the_oracle(pair: BenchConfig) -> None:
    found = suites.measure("oracle", dataclasses.replace(pair, max_new_tokens=13))
    assert [line["rate"] for line in found.lines[:6]] == [0.5, 0.6, 0.7, 0.8, 0.9, 1.0]
    for line in found.lines:
        assert line["equal"] and line["ratio"] > 0 and line["predicted"] > 0
        assert line["expected"] == pytest.approx(sum(line["rate"] ** i for i in range(line["gamma"] + 1)))
        if line["rate"] == 1.0:
            assert line["passes"] == line["least"] == -(-12 // (line["gamma"] + 1)) * found.conditions["prompts"]
    assert len({line["gamma"] for line in found.lines}) == 5
    assert len(found.table()[0]) == 10
    json.dumps(found.to_dict())


def test_a_judge_of_more_prompts_than_texts() -> None:
    """Texts of a batch of 1, which part, when all prompts of the row are known."""
    model = tiny_llama()
    judge = NearTies(model, [[5, 6, 7], [8, 9, 10], [11, 12]])
    assert not judge([[3, 4, 5]], [[4, 4, 5]]).equal
    assert not judge([[3, 4], [5, 6]], [[3, 4], [6, 6]]).equal


def test_sweep_row(pair: BenchConfig) -> None:
    config = dataclasses.replace(pair, batch_sizes=(4, 1, 2), repeats=2)
    found = suites.measure("sweep", config)
    assert [line["batch"] for line in found.lines] == [1, 2, 4]
    assert all(line["equal"] and line["ratio"] > 0 and line["pays"] for line in found.lines)
    assert all(0 < line["plain_latency_seconds"] < 60 for line in found.lines)
    sizes = [line["kv_bytes"] for line in found.lines]
    assert sizes[0] < sizes[1] < sizes[2]
    assert "speculation" in found.notes[-1]
    assert len(found.table()[0]) == 12
    with pytest.raises(InputError, match="batch_sizes"):
        dataclasses.replace(pair, batch_sizes=(0,))


@pytest.mark.thorough
def test_never_slower_row(pair: BenchConfig) -> None:
    config = dataclasses.replace(pair, batch_sizes=(2, 1), repeats=2)
    found = own_row("never-slower", config)
    assert [(line["draft"], line["batch"], line["tokens"]) for line in found.lines] == [
        (draft, size, length)
        for draft in ("the pair's", "never right")
        for size in (1, 2)
        for length in (config.max_new_tokens // 4, config.max_new_tokens)
    ]
    assert all(line["equal"] and line["ratio"] > 0 for line in found.lines)
    assert all(line["tau"] == 1.0 for line in found.lines if line["draft"] == "never right")
    assert found.notes[-1].startswith("slower than plain: ")


def test_sweep_ends_where_memory_does(pair: BenchConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def needs(cache: SlotCache, requests: int, columns: int) -> int:
        if requests > 1:
            raise MemoryLimitError("the KV cache needs too much")
        return 0

    monkeypatch.setattr(SlotCache, "needs", needs)
    found = suites.measure("sweep", dataclasses.replace(pair, batch_sizes=(1, 2, 4)))
    assert [line["batch"] for line in found.lines] == [1]
    assert found.notes[0] == "batch of 2 and above: the KV cache needs too much"


@pytest.mark.parametrize(
    ("pays", "stops", "note"),
    [
        (("yes", "yes", "no"), 4, "speculation is faster up to a batch of 2 and slower at 4 (ratio 0.90)"),
        (("yes", "even", "no"), 4, "speculation is faster up to a batch of 1 and slower at 4 (ratio 0.90)"),
        (("no", "no", "yes"), 1, "speculation is slower at 1 (ratio 0.90)"),
        (("yes", None, "yes"), None, "speculation is faster up to a batch of 4 and slower at no size"),
        ((None, "even", None), None, "speculation is slower at no size"),
    ],
)
def test_where_speculation_stops_paying(pays: tuple[str | None, ...], stops: int | None, note: str) -> None:
    lines = [{"batch": 2**i, "pays": word, "ratio": 0.9, "stops": False} for i, word in enumerate(pays)]
    assert speed_row._mark(lines) == note
    assert [line["batch"] for line in lines if line["stops"]] == ([stops] if stops else [])


@pytest.mark.thorough
@pytest.mark.skipif(native() is None, reason="no compiled kernels here")
def test_rounded_weights_are_compared_with_themselves(pair: BenchConfig) -> None:
    """Against transformers there is a speed and no equality; our speculative text has to be our plain one."""
    rounded = dataclasses.replace(pair, quantize="int8")
    found = suites.measure("speculative", rounded)
    assert [line.get("weights") for line in found.lines] == [None, None, None, "other", "other"]
    assert all(line["tokens_per_second"] for line in found.lines)
    assert "other weights than transformers assisted, compared with sakiyomi plain" in " ".join(found.notes)
    assert str(found.conditions["rounding"]).startswith("int8: ")
    alone = suites.measure("stories", rounded)
    assert not any("weights" in line for line in alone.lines)
    assert all(line["tokens_per_second"] for line in alone.lines)
    with pytest.raises(InputError, match="int3"):
        dataclasses.replace(pair, quantize="int3")


@pytest.mark.skipif(native() is None, reason="no compiled kernels here")
def test_our_own_passes_judge_rounded_texts(pair: BenchConfig) -> None:
    llm = LLM(pair.target, draft="none", compile=False, quantize="int8")
    prompts = [[5, 6, 7], [8, 9]]
    texts = tuple(
        tuple(done.token_ids) for done in llm.generate(prompts, SamplingParams(max_new_tokens=6, ignore_eos=True))
    )
    judge = NearTies(llm.target, prompts)
    wrong = (texts[0], (*texts[1][:3], (texts[1][3] + 1) % 320, *texts[1][4:]))
    found = judge(texts, wrong)
    assert not found.accepted
    assert "text 1 at token 3" in found.note
    reference = EngineReference(llm.target)
    row = reference.logits(prompts[0], texts[0][:4])[-1]
    second = int(row.topk(2).indices[1])
    near = reference.compare(0, prompts[0], texts[0], (*texts[0][:3], second), limit=1e9)
    assert near is not None
    assert near.gap == pytest.approx(near.top2_gap)


@pytest.mark.thorough
@pytest.mark.parametrize("quantize", [None, "int8"])
def test_row_of_drafts_from_text(pair: BenchConfig, quantize: str | None) -> None:
    """Three kinds of text, the same contenders in each; given texts come out as they were given."""
    found = own_row("lookup", dataclasses.replace(pair, max_new_tokens=24, quantize=quantize))
    names = ["transformers prompt lookup", "sakiyomi plain"]
    names += [f"sakiyomi {name}" for name in ("prompt-lookup", "suffix", "ngram")]
    assert [line["name"] for line in found.lines] == [
        f"{text}: {name}" for text in ("stories", "summary", "edit") for name in names
    ]
    for line in found.lines:
        assert line["tokens"] == 48
        text, _, name = line["name"].partition(": ")
        if text != "stories":
            assert line["equal"]
        if name == "sakiyomi plain":
            assert line["tau"] == 1
        elif text == "edit":
            # transformers' pass over the prompt verifies a draft, too, and counts for one token: 1 + 2 + 7 x 3.
            assert 1.2 < line["tau"] <= (23 / 7 if name.startswith("transformers") else 3)


def test_given_texts_are_written_by_everybody(pair: BenchConfig) -> None:
    """By us and by transformers, with other tokens than the model's own; behind the text's end it is free again."""
    target = load_model(pair.target)
    text = [17, 4, 4, 200, 17, 4, 4, 9]
    params = SamplingParams(max_new_tokens=12, ignore_eos=True, logits_processors=[Given(3, text)])
    ours = LLM(pair.target, draft="suffix", compile=False).generate([[5, 6, 7]], params)[0].token_ids
    theirs = Transformers(target.model, lookup=True).generate([5, 6, 7], params)
    assert ours == theirs
    assert ours[:8] == text
    assert Transformers(target.model).generate([5, 6, 7], SamplingParams(max_new_tokens=8, ignore_eos=True)) != text


@pytest.mark.skipif(native() is None, reason="no compiled kernels here")
def test_a_packed_copy_is_refused_before_any_row_runs(pair: BenchConfig) -> None:
    LLM(pair.target, draft="none", compile=False, quantize="int8")
    copy = str(Path(pair.target) / "sakiyomi-int8-float32")
    for values in ({"target": copy}, {"draft": f"model:{copy}"}):
        with pytest.raises(UnsupportedError, match=r"sakiyomi-int8-float32' is a packed copy.* the model's own folder"):
            suites.run(dataclasses.replace(pair, rows=("stories", "peers"), **values))


@pytest.mark.thorough
def test_row_across_tokenizers(pair: BenchConfig, tmp_path: Path) -> None:
    """Both drafts, plain, and transformers with both tokenizers: equal texts, and characters beside tokens."""
    other = save_model(tmp_path / "other", tiny_llama(288, seed=3, eos_token_id=None), byte_fallback_tokenizer())
    found = own_row("cross", OwnConfig(**vars(pair) | {"cross": f"model:{other}"}))
    lines = {line["name"]: line for line in found.lines}
    assert list(lines) == [
        "sakiyomi plain",
        "sakiyomi, draft of another tokenizer",
        "sakiyomi, draft of another tokenizer, 15 nodes",
        "sakiyomi, draft of its own tokenizer",
        "transformers plain",
        "transformers universal assisted",
    ]
    assert all(line["equal"] and line["characters_per_second"] > 0 for line in lines.values())
    assert lines["sakiyomi, draft of another tokenizer"]["alignment_ms"] > 0
    assert "alignment_ms" not in lines["sakiyomi, draft of its own tokenizer"]
    assert lines["transformers plain"]["tau"] == 1
    assert found.conditions["assistant_tokens"] >= pair.gamma
    with pytest.raises(InputError, match="another tokenizer"):
        own_row("cross", OwnConfig(**vars(pair)))


@pytest.mark.thorough
def test_bookkeeping_row(pair: BenchConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bookkeeping_row, "VOCAB", 500)
    found = own_row("bookkeeping", pair)
    assert len(found.lines) == 10
    assert all(0 < line["ours_ms"] < 1000 for line in found.lines)
    assert all((line["transformers_ms"] is None) == (line["sampling"] == "coupled") for line in found.lines)
    always = [line for line in found.lines if line["draft"] == "the target itself" and line["sampling"] == "greedy"]
    assert always[0]["tau"] == pytest.approx(7 / 3)  # 8 tokens: one of the prefill, rounds of 3, 3 and 1


@pytest.mark.thorough
def test_passes_row(pair: BenchConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes_row, "MEDIUM", (64, 2, 4, 128, 320))
    found = own_row("passes", pair)
    kinds = ["bf16", "int8", "int4"] if native() is not None else ["bf16"]
    assert [(line["name"], line["cached"]) for line in found.lines] == [
        (k, n) for k in kinds for n in (128, 1024, 4096)
    ]
    for line in found.lines:
        assert all(0 < line[f"low_ms_{rows}"] <= line[f"ms_{rows}"] for rows in (1, 4, 8, 16))
        assert line["ratio_8_to_1"] == line["ms_8"] / line["ms_1"]
        assert line["kv_bytes"] == line["cached"] * 2 * 2 * 64 * 2  # keys and values of two layers, 2 bytes each
        assert 0 < line["read_ms"] < 100
    weights = [line["weight_bytes"] for line in found.lines[::3]]
    assert weights == sorted(weights, reverse=True)
    assert len(weights) == len(set(weights))
    assert found.conditions["graphs"] == "eager"
    assert 1e8 < found.conditions["read_a_second_bytes"] < 1e13
    json.dumps(found.to_dict())


@pytest.mark.thorough
def test_merged_row(pair: BenchConfig) -> None:
    found = own_row("merged", dataclasses.replace(pair, max_new_tokens=24))
    kinds = ("stories", "summary", "edit", "retold", "revised")
    ways = ("plain", "model", "suffix", "suffix+model")
    assert [line["name"] for line in found.lines] == [f"{kind}: {way}" for kind in kinds for way in ways]
    assert all(line["equal"] for line in found.lines)
    assert sum("the better of the two" in note for note in found.notes) == 5


def test_coverage_row(pair: BenchConfig) -> None:
    found = own_row("coverage", pair)
    assert [line["name"] for line in found.lines] == [
        f"{rule}, {count} sibling{'s' * (count > 1)}" for rule in ("coupled", "ratio") for count in (1, 2, 4)
    ]
    assert all(0 < line["coverage"] <= 1 and line["rounds"] > 0 for line in found.lines), found.lines


def test_scoring_row(pair: BenchConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes_row, "MEDIUM", (64, 2, 4, 128, 320))
    found = own_row("scoring", pair)
    assert [(line["prefix"], line["nodes"]) for line in found.lines] == [
        (prefix, nodes) for prefix in (32, 512, 4096) for nodes in (8, 16)
    ]
    for line in found.lines:
        assert 1 < line["leaves"] < line["nodes"]
        assert min(line["chain_ms"], line["tree_ms"], line["batch_ms"]) > 0
        # A copy of the prefix for each path, and every path's own tokens.
        assert line["batch_kv_bytes"] > line["leaves"] * line["prefix"] / (line["prefix"] + 16) * line["tree_kv_bytes"]
    json.dumps(found.to_dict())


@pytest.mark.thorough
def test_passes_row_says_what_cannot_run(pair: BenchConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes_row, "MEDIUM", (64, 2, 4, 128, 320))
    monkeypatch.setattr("sakiyomi.kernels.native.native", lambda: None)
    found = own_row("passes", pair)
    assert [line["name"] for line in found.lines] == ["bf16"] * 3
    assert [note[:5] for note in found.notes] == ["int8:", "int4:"]


@pytest.mark.thorough
def test_exact_row(pair: BenchConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("own_rows.exactness.COMPARED", (1, 4))
    found = own_row("exact", pair)
    names = ["plain", "plain", "draft model", "draft model", "quantize int8", "cache h2o, 32 pairs", "cache quant-4"]
    assert [line["name"] for line in found.lines] == names
    assert [line["dtype"] for line in found.lines] == ["float32", "bfloat16"] * 2 + ["bfloat16"] * 3
    assert all(line["equal_tokens"] for line in found.lines), found.lines
    assert [line["runs_compared"] for line in found.lines] == [2, 2, 14, 14, 14, 14, 14]
    assert all(line["cost_percent"] is not None for line in found.lines)


def test_a_row_that_fails_leaves_the_others(pair: BenchConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(row: object) -> Row:
        raise LoadError("the model went away")

    monkeypatch.setitem(suites.ROWS, "sweep", fails)
    arguments = ["bench", "--rows", "sweep", "--rows", "stories", "--target", pair.target, "--draft", pair.draft]
    arguments += ["--repeats", "1", "--max-new-tokens", "4", "--count", "2", "--gamma", "2", "--no-compile", "--json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1
    assert "the model went away" in result.stdout
    rows = json.loads(result.stdout.splitlines()[-1])["rows"]
    assert [(row["row"], row["error"]) for row in rows] == [("sweep", "the model went away"), ("stories", None)]


def test_a_row_that_fails_closes_what_it_has_opened(pair: BenchConfig) -> None:
    """At once, and not when the error that refers to it is forgotten."""
    closed = []

    def races(row: PairRow) -> Races:
        try:
            yield Race([Contender("dies", lambda: pytest.fail("a run"))])
        finally:
            closed.append(row.name)
        return {}

    with pytest.raises(pytest.fail.Exception, match="a run") as held:
        declared("tokens/s")(races)(PairRow("x", pair, silent))
    assert closed == ["x"] and held.value is not None


def test_rows_that_left_say_where_they_are(pair: BenchConfig) -> None:
    """The script itself says which rows it has."""
    assert not set(script.ROWS) & set(suites.ROWS)
    for name in script.ROWS:
        with pytest.raises(InputError, match=rf"no row '{name}'.*python benchmarks/rows.py --help"):
            suites.run(dataclasses.replace(pair, rows=(name,)))
    with pytest.raises(InputError, match=r"no row 'stories'; rows are bookkeeping, .* offload, and all$"):
        suites.run(dataclasses.replace(pair, rows=("stories",)), rows=script.ROWS)


def test_rows_that_make_their_own_models_need_no_draft(pair: BenchConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(script.ROWS, "plain", lambda row: Row(row.name, "measured", [{"name": "x"}]))
    result = CliRunner().invoke(script.app, ["--rows", "plain", "--target", pair.target])
    assert result.exit_code == 0 and "measured" in result.output
    refused = CliRunner().invoke(script.app, ["--rows", "plain", "--rows", "block", "--target", pair.target])
    assert isinstance(refused.exception, InputError) and "has to be a draft model" in refused.exception.message


def test_the_command(pair: BenchConfig) -> None:
    arguments = ["bench", "--rows", "stories", "--target", pair.target, "--draft", pair.draft, "--no-compile", "--json"]
    arguments += ["--repeats", "1", "--max-new-tokens", "6", "--count", "2", "--gamma", "2"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    value = json.loads(result.stdout.splitlines()[-1])
    assert [row["row"] for row in value["rows"]] == ["stories"]
    assert {"processor", "threads", "torch"} <= set(value["conditions"])
    assert "sakiyomi plain" in result.stdout
    assert max(map(len, result.stdout.splitlines()[2:-4])) <= 120
    assert value["rows"][0]["conditions"]["process_peak_bytes"] > 1e7
    own = value["rows"][0]["lines"][1]
    assert {"draft_ms", "score_ms", "overhead_ms", "kv_bytes", "bandwidth_share"} <= set(own)


# ---------------------------------------------------------------- machine


def test_machine_is_described() -> None:
    found = describe()
    assert found["cores"] >= 1
    assert "cpu" in found["devices"]
    assert conditions(gamma=4)["gamma"] == 4
    assert all(isinstance(line, str) for line in lacks())
    assert 1e8 < bandwidth() < 1e13
    assert 1e7 < peak_bytes() < 1e13


def test_what_a_processor_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr("sakiyomi.engine.machine.features", lambda: {"avx512f", "avx512_bf16"})
    assert [line for line in lacks() if "AVX" in line] == [
        "no VNNI of AVX: weights in 8 and 4 bits gain less in passes of many rows"
    ]
    monkeypatch.setattr("sakiyomi.engine.machine.features", lambda: {"avx2", "avx_vnni"})
    assert not any("VNNI" in line for line in lacks())
    monkeypatch.setattr("sakiyomi.engine.machine.features", set)  # nobody can tell
    assert not any("AVX" in line for line in lacks())
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    monkeypatch.setattr("sakiyomi.engine.machine.features", lambda: {"asimd"})
    assert any(line.startswith("no dot products of NEON") for line in lacks())
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    assert any(line.startswith("riscv64: the CPU kernels") for line in lacks())


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sakiyomi.kernels.build._native", lambda: (None, "no C++ compiler found"))
    assert lacks()[0].startswith("no CPU kernels (no C++ compiler found): plain torch runs instead")


def test_costs_of_a_pair(pair: BenchConfig) -> None:
    llm = LLM(pair.target, draft=pair.draft, compile=False)
    found = costs(llm.target, llm.draft, context=32, repeats=3)
    assert set(found["target_ms"]) == {1, 4, 8, 16}
    assert found["c"] == pytest.approx(found["draft_ms"] / found["target_ms"][1])
    assert math.isclose(found["v"][1], 1.0)
    alone = costs(llm.target, None, context=32, repeats=2)
    assert alone["c"] is None


def test_costs_while_every_place_is_taken(pair: BenchConfig) -> None:
    llm = LLM(pair.target, draft="none", compile=False, max_batch=1)
    with llm.conversation() as conversation:
        conversation.generate([5, 6, 7], SamplingParams(max_new_tokens=2))
        with pytest.raises(InputError, match="close a conversation, or load with a larger max_batch"):
            costs(llm.target, llm.draft)
    assert costs(llm.target, llm.draft, context=32, repeats=2)["target_ms"][1] > 0

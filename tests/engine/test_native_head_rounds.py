"""Rounds in which the compiled kernels run heads give the text, the figures and the traces of Python's."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import block_toys
import eagle_toys
from medusa_toys import new_heads
from mtp_toys import new_toy, target_folder
from sakiyomi import LLM, LoadError, SamplingParams
from sakiyomi.drafters.confidence import Confidence
from sakiyomi.drafters.draft_length import Throughput
from sakiyomi.drafters.medusa_heads.formats import write_heads
from sakiyomi.drafters.merged import MergedDrafter
from sakiyomi.drafters.recycle import RecycleDrafter
from sakiyomi.drafters.suffix import SuffixDrafter
from sakiyomi.drafters.tree_reader import TreeReader
from sakiyomi.engine import engine
from sakiyomi.engine.conversation import Conversation
from sakiyomi.engine.native_rounds import NativeRounds
from sakiyomi.engine.native_seats import NativeSeats
from sakiyomi.kernels.build import native
from sakiyomi.model_executor import build, kernel_rounds, session
from sakiyomi.model_executor.row_layers import RowLayers
from sakiyomi.model_executor.runner import ModelRunner
from toys import character_tokenizer, save_model, tiny_llama
from watched_rounds import rounds_of

pytestmark = pytest.mark.skipif(native() is None, reason="the kernels are not available")

V, MASK = 40, 39
TOKENIZER = character_tokenizer("abc")
PROMPTS = [[5, 6, 7, 5, 6, 7, 5], [*range(20, 29)] * 2, [9] * 5]
LAYERS = (0, 1, 2)


def target() -> Any:
    return tiny_llama(vocab=V, layers=4, dim=32, initializer_range=0.3)


def eagle(folder: Path, **options: Any) -> str:
    head = eagle_toys.new_head(target(), layers=LAYERS, sharp=0.3, **options)
    return f"eagle:{eagle_toys.speculators_folder(folder, head)}"


def first(folder: Path) -> str:
    return f"eagle:{eagle_toys.first_folder(folder, eagle_toys.new_head(target(), first=True, layers=(3,)))}"


def medusa(folder: Path, **shape: Any) -> str:
    write_heads(new_heads(target(), heads=3, scale=0.3, **shape), folder)
    return f"medusa:{folder}"


def some_tokens(folder: Path) -> str:
    heads = new_heads(target(), heads=3, own=True, scale=0.3)
    assert heads.own is not None
    heads.own = torch.nn.Parameter(heads.own[:, ::2].detach().clone())
    heads.shape = replace(heads.shape, vocab_size=V // 2)
    heads.token_map = torch.arange(0, V, 2)
    write_heads(heads, folder, "vllm")
    return f"medusa:{folder}"


def block(folder: Path, write: Callable[..., Path] = block_toys.deepspec_folder, **options: Any) -> str:
    anchored = write is block_toys.deepspec_folder
    file = block_toys.new_block(target(), sharp=0.3, layers=LAYERS, size=5, anchored=anchored, **options)
    return f"block:{write(folder, file)}"


def parallel(folder: Path) -> str:
    draft = tiny_llama(vocab=V, layers=4, dim=32, initializer_range=0.3)
    draft.lm_head.weight.data += 0.05 * torch.randn(V, 32, generator=torch.Generator().manual_seed(1))
    draft.config.pard_token = MASK
    return f"model:{save_model(folder, draft, TOKENIZER)}"


HEADS: dict[str, Callable[[Path], str]] = {
    "eagle": eagle,
    "eagle of some tokens": lambda folder: eagle(folder, tokens=range(1, V, 2)),
    "eagle with norms": lambda folder: eagle(folder, fc_norm=True, norm_before_fc=True),
    "eagle 1": first,
    "eagle in parallel": lambda folder: eagle(folder, mask=MASK),
    "medusa": medusa,
    "medusa, own heads of two layers": lambda folder: medusa(folder, own=True, layers=2),
    "medusa of some tokens": some_tokens,
    "block": lambda folder: block(folder, block_toys.dflash_folder),
    "causal block": lambda folder: block(folder, block_toys.dflash_folder, causal=True),
    "block, corrected": lambda folder: block(folder, markov="gated"),
    "block, corrected and rated": lambda folder: block(folder, markov="vanilla", confident=True),
    "block of some tokens": lambda folder: block(folder, markov="vanilla", tokens=range(1, V, 2)),
    "parallel model": parallel,
}
CASES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy tree": {"tree": "best-first", "nodes": 8},
    "coupled ddtree": {"temperature": 0.8, "tree": "ddtree", "nodes": 8},
    "ratio": {"temperature": 0.8, "acceptance": "ratio"},
    "ratio static": {"temperature": 0.8, "acceptance": "ratio", "tree": "static", "nodes": 7, "top_k": 30},
    "dynamic": {"tree": "dynamic", "nodes": 8},
    "a weighed tree": {"nodes": "auto", "tree": "best-first"},
}
PARAMS = SamplingParams(max_new_tokens=30, ignore_eos=True, seed=3, gamma=3)


@pytest.fixture(autouse=True)
def alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes always cost the same, and a drafter learns nothing: Python passes over the trees of last rounds."""
    monkeypatch.setattr(ModelRunner, "pass_seconds", lambda model, rows: 1e-4 + 2e-5 * model.padded(rows))
    monkeypatch.setattr(Confidence, "learn", lambda *_: None)
    monkeypatch.setattr(TreeReader, "took", lambda *_: None)
    # By what a request had so far, so that those of a round have different ones.
    monkeypatch.setattr(Throughput, "expected", lambda gain, costs: 900.0 + 400.0 * (gain._tokens % 4))


def made(spec: Any, place: Any = None) -> LLM:
    """An LLM whose passes are ready."""
    llm = LLM(place or (target(), TOKENIZER), spec, dtype="float32", max_batch=len(PROMPTS), strict=True)
    for _ in range(3):
        llm.generate(PROMPTS, replace(PARAMS, tree="best-first", nodes=8))
        llm.wait()
    return llm


def written(
    llm: LLM, params: SamplingParams, *, kernels: bool, patience: float = engine.BRIEF
) -> tuple[list[dict[str, Any]], list[bool]]:
    """Texts with all that is told of them, and of each round whether the kernels ran all of it."""
    seen, run = list[bool](), NativeRounds.run

    def watched(rounds: NativeRounds, *round_: Any) -> Any:
        steps = run(rounds, *round_) if kernels else None
        seen.extend([steps is not None] * rounds_of(steps, round_[0]))
        if steps is None:
            for request in round_[0]:
                rounds.end(request.id)
        return steps

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NativeRounds, "run", watched)
        patch.setattr(engine, "BRIEF", patience)
        if not kernels:
            patch.setattr(NativeRounds, "score", lambda *_: None)
        found = [out.to_dict() for out in llm.generate(PROMPTS, params)]
    for each in found:
        each["stats"] = {name: value for name, value in each["stats"].items() if "second" not in name}
        for entry in each["trace"]:  # of the tokens that a head knows, and of all, sums are in another order
            entry["draft_prob"] = None if entry["draft_prob"] is None else round(entry["draft_prob"], 5)
    return found, seen


@pytest.mark.few(8)
@pytest.mark.parametrize("passes", ["kernels", "python"])
@pytest.mark.parametrize("kind", HEADS)
def test_rounds_are_those_of_python(kind: str, passes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens, traces and counts; also around passes that Python runs."""
    if passes == "python":
        monkeypatch.setattr(kernel_rounds, "_program", lambda *_: 0)
    llm = made(HEADS[kind](tmp_path / "head"))
    same_rounds(llm)


def test_rounds_of_a_targets_own_layer_are_those_of_python(tmp_path: Path) -> None:
    toy = new_toy("mimo", vocab_size=V, num_hidden_layers=2, hidden_size=32, num_attention_heads=2)
    target_folder(tmp_path, toy, TOKENIZER)
    same_rounds(made("mtp", str(tmp_path)))


def same_rounds(llm: LLM) -> None:
    accepted = 0
    for case, options in CASES.items():
        params = replace(PARAMS, **options)
        expected, _ = written(llm, params, kernels=False)
        found, seen = written(llm, params, kernels=True, patience=0.0)
        assert found == expected, case
        assert all(seen) and len(seen) > 5, case
        assert written(llm, params, kernels=True, patience=1000.0)[0] == expected, case
        stop = replace(params, stop_token_ids=(expected[0]["token_ids"][17],))
        assert written(llm, stop, kernels=True)[0] == written(llm, stop, kernels=False)[0], case
        accepted += sum(each["stats"]["accepted"] for each in found)
    assert accepted > 20
    assert llm.engine._native._turns == {}


@pytest.mark.parametrize("kind", ["eagle", "medusa", "block, corrected and rated", "parallel model"])
def test_merged_rounds_are_those_of_python(kind: str, tmp_path: Path) -> None:
    """A head and drafts from text in one tree."""
    llm = made(HEADS[kind](tmp_path / "head"))
    engine, head = llm.engine, llm.engine.drafter
    told: list[str] = []
    assert head is not None
    for case, options in CASES.items():
        if options.get("nodes") == "auto":  # measured seconds decide whether the head is asked
            continue
        params = replace(PARAMS, **options)
        found = []
        for kernels in (False, True):
            merged = MergedDrafter([RecycleDrafter(), SuffixDrafter(), head], strict=True)  # has learnt nothing
            engine.drafter = engine._speculation.drafter = engine._slots._drafter = merged
            engine._native = NativeRounds(engine.target, merged, engine._speculation)
            out, seen = written(llm, params, kernels=kernels)
            assert all(seen) == kernels
            found.append(out)
        assert found[0] == found[1], case
        told += [entry["source"] for each in found[1] for entry in each["trace"]]
    assert {*told} == {"target", "recycle", "suffix", head.name}


def test_what_was_heard_is_handed_back(tmp_path: Path) -> None:
    """A request that Python's rounds go on with, and a conversation's next request, draft as if they had always."""
    for kind in ("eagle", "medusa", "block", "block, corrected"):
        llm = made(HEADS[kind](tmp_path / kind))
        params, found = replace(PARAMS, max_new_tokens=24), []
        for mixed in (False, True):
            count, run = 0, NativeRounds.run

            def some(rounds: NativeRounds, *round_: Any, mixed: bool = mixed, run: Any = run) -> Any:
                nonlocal count
                count += 1
                if mixed and count % 4:
                    return run(rounds, *round_)
                for request in round_[0]:
                    rounds.end(request.id)
                return None

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(NativeRounds, "run", some)
                patch.setattr(NativeRounds, "score", lambda *_: None)
                chat = Conversation(llm.engine)
                texts = [chat.generate(prompt, params) for prompt in PROMPTS[:2]]
            found.append([(out.token_ids, out.stats.drafted, out.stats.accepted) for out in texts])
        assert found[0] == found[1], kind


def test_what_is_learnt_is_what_python_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each level by itself; but the last round of a text, whose tree Python does not look at any more."""
    for kind in ("eagle", "medusa", "block, corrected"):
        llm = made(HEADS[kind](tmp_path / kind))
        learnt: list[tuple[int, list[float], int | None]] = []
        levels: dict[int, int] = {}

        def learn(
            level: Confidence,
            scores: Any,
            rank: int | None,
            told: list[Any] = learnt,
            levels: dict[int, int] = levels,
        ) -> None:
            told.append((levels.setdefault(id(level), len(levels)), [*scores], rank))

        with monkeypatch.context() as patch:
            patch.setattr(Confidence, "learn", learn)
            params = replace(PARAMS, tree="best-first", nodes=8)
            found = []
            for kernels in (False, True):
                learnt.clear()
                _, seen = written(llm, replace(params, max_new_tokens=20), kernels=kernels)
                assert all(seen) == kernels
                found.append(sorted(learnt, key=repr))
        python, kernels_ = found
        assert len(python) > 10
        assert all(python.count(each) <= kernels_.count(each) for each in python), kind


class Handed:
    """Counts what requests are handed back."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seats = self.rows = 0
        inner, heard_by = NativeSeats.hand_back, kernel_rounds.KernelRounds.heard_by

        def hand_back(seats: NativeSeats, turn: Any) -> None:
            self.seats += turn.seat is not None
            inner(seats, turn)

        def heard(rounds: Any, number: int, length: int) -> Any:
            found = heard_by(rounds, number, length)
            self.rows += len(found)
            return found

        monkeypatch.setattr(NativeSeats, "hand_back", hand_back)
        monkeypatch.setattr(kernel_rounds.KernelRounds, "heard_by", heard)


@pytest.mark.parametrize("kind", ["eagle", "medusa", "block", "parallel model"])
def test_a_request_is_seated_once(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = made(HEADS[kind](tmp_path / "head"))
    handed = Handed(monkeypatch)
    _, seen = written(llm, replace(PARAMS, max_new_tokens=100), kernels=True)
    assert all(seen) and len(seen) > 20
    assert handed.seats == len(PROMPTS)


@pytest.mark.parametrize("kind", ["eagle", "medusa", "block, corrected", "parallel model"])
@pytest.mark.parametrize("name", ["committed", "_count"])
@pytest.mark.parametrize("patience", [0.0, 1000.0])
def test_an_interrupted_round_is_run_again(
    kind: str, name: str, patience: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C when the kernels have committed rounds that no request has: what they heard in them is dropped."""
    llm = made(HEADS[kind](tmp_path / "head"))
    loop, inner, calls = llm.engine, getattr(kernel_rounds.KernelRounds, name), 0
    expected, _ = written(llm, PARAMS, kernels=True)

    def interrupted(*given: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls in (2, 3, 6):
            raise KeyboardInterrupt
        return inner(*given)

    requests = [loop.submit(prompt, PARAMS) for prompt in PROMPTS]
    monkeypatch.setattr(kernel_rounds.KernelRounds, name, interrupted)
    while not all(request.over for request in requests):
        with suppress(KeyboardInterrupt):
            loop.step(patience)
    assert calls > (3 if patience else 6)
    assert [request.output for request in requests] == [each["token_ids"] for each in expected]
    accepted = [request.stats.accepted for request in requests]
    assert sum(accepted) >= sum(each["stats"]["accepted"] for each in expected) - 6  # of one draft of each at most


def test_what_does_not_fit_in_a_pass_is_scored_in_the_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of more requests than a pass has rows for."""
    llm = made(HEADS["block"](tmp_path / "head"))
    expected, _ = written(llm, PARAMS, kernels=True)
    handed, score, scored = Handed(monkeypatch), NativeRounds.score, list[bool]()

    def counted(rounds: NativeRounds, *round_: Any) -> Any:
        steps = score(rounds, *round_)
        scored.append(steps is not None)
        return steps

    monkeypatch.setattr(NativeRounds, "score", counted)
    monkeypatch.setattr(NativeSeats, "fits", lambda *_, **__: False)
    found = [out.token_ids for out in llm.generate(PROMPTS, PARAMS)]
    assert found == [each["token_ids"] for each in expected]
    assert all(scored) and len(scored) > 5 and not handed.seats


def test_a_head_that_is_not_asked_reads_nothing(tmp_path: Path) -> None:
    llm = made(HEADS["eagle"](tmp_path / "head") + "+suffix")
    seats = llm.engine._native._seats
    assert seats is not None
    before = seats.grower.forward_seconds
    done = llm.engine.complete(llm.engine.submit(prompt, PARAMS, asks=["suffix"]) for prompt in PROMPTS)
    assert seats.grower.forward_seconds == before
    assert {entry.source for each in done for entry in each.trace} <= {"target", "suffix"}


def test_a_head_drafts_in_kernels_that_come_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are built in the background at first use: what was packed for Python is packed anew."""
    for kind in ("eagle", "medusa", "block, corrected"):
        with monkeypatch.context() as patch:
            for module in (build, session):
                patch.setattr(module, "native_at_hand", lambda: False)
            llm = LLM((target(), TOKENIZER), HEADS[kind](tmp_path / kind), dtype="float32", max_batch=3, strict=True)
            assert llm.engine._native._seats is None
            llm.generate(PROMPTS, PARAMS)
        for _ in range(3):
            llm.wait()
            llm.generate(PROMPTS, PARAMS)
        _, seen = written(llm, PARAMS, kernels=True)
        assert all(seen), kind


def test_tables_of_other_sizes_are_refused(tmp_path: Path) -> None:
    file = block_toys.new_block(target(), layers=LAYERS, size=5, anchored=True, markov="vanilla")
    file.tensors["markov_head.markov_w2.weight"] = file.tensors["markov_head.markov_w2.weight"][:8].clone()
    with pytest.raises(LoadError, match="markov_head"):
        LLM((target(), TOKENIZER), f"block:{block_toys.deepspec_folder(tmp_path, file)}")


def test_layers_that_cannot_be_recorded_are_pythons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RowLayers, "_recorded", lambda layers: layers.nothing)
    llm = made(HEADS["eagle"](tmp_path / "head"))
    assert llm.engine._native._seats is None
    found, _ = written(llm, PARAMS, kernels=True)
    assert found == written(llm, PARAMS, kernels=False)[0]


def test_drafts_that_stay_unheard_are_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above see hidden states that were not handed back."""
    llm = made(HEADS["medusa"](tmp_path / "head"))
    monkeypatch.setattr(NativeSeats, "hand_back", lambda seats, turn: setattr(turn, "seat", None))
    expected, _ = written(llm, PARAMS, kernels=False)
    run, count = NativeRounds.run, 0

    def some(rounds: NativeRounds, *round_: Any) -> Any:
        nonlocal count
        count += 1
        if count % 3:
            return run(rounds, *round_)
        for request in round_[0]:
            rounds.end(request.id)
        return None

    monkeypatch.setattr(NativeRounds, "run", some)
    monkeypatch.setattr(NativeRounds, "score", lambda *_: None)
    monkeypatch.setattr(engine, "BRIEF", 0.0)
    found = [out.to_dict() for out in llm.generate(PROMPTS, PARAMS)]
    assert [each["token_ids"] for each in found] == [each["token_ids"] for each in expected]
    assert [each["stats"]["accepted"] for each in found] != [each["stats"]["accepted"] for each in expected]

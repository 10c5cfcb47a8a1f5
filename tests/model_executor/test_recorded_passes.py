"""Recorded passes: equal to eager ones to the last bit, on every architecture, and refused where they would not be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

from architectures import CONFIGS, HYBRIDS, KINDS, VOCAB, make, model_of, prompt
from sakiyomi import LLM
from sakiyomi.kernels.batch import SequenceRows
from sakiyomi.kernels.build import native
from sakiyomi.model_executor import recorded_passes
from sakiyomi.model_executor.build import build_runner
from sakiyomi.model_executor.program import Program
from sakiyomi.model_executor.recorded_passes import WORTH_IT, RecordedPasses
from sakiyomi.model_executor.runner import ModelRunner
from toys import character_tokenizer, tiny_llama

TREE = (-1, 0, 0, 1, 2)


def passes(runner: ModelRunner, laps: int = WORTH_IT + 3) -> list[torch.Tensor]:
    """Logits of trees and chains of two requests, each pass at another place."""
    found = []
    with runner.cache.lent(200) as first, runner.cache.lent(200) as second:
        for slot, length in ((first, 9), (second, 5)):
            runner.score([SequenceRows(slot, 0, prompt(length), prompt=True)])
        for lap in range(laps):
            rows = [SequenceRows(first, 9 + lap, prompt(5, lap), TREE), SequenceRows(second, 5 + lap, prompt(3, lap))]
            found.append(runner.score(rows).logits.clone())
            for slot, length in ((first, 9), (second, 5)):
                runner.cache.commit(slot, length + lap, (0,))
    return found


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_equal_to_the_last_bit(name: str, dtype: torch.dtype) -> None:
    model = (
        model_of(name).to(dtype) if dtype == torch.float32 else __import__("copy").deepcopy(model_of(name)).to(dtype)
    )
    eager, traced = build_runner(model, compile=False), build_runner(model, compile="auto")
    expected, found = passes(eager), passes(traced)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    if isinstance(traced.recorder, RecordedPasses) and not traced.recorder.failed:
        assert traced.recorded(8) and set(traced.recorder.ready) == {8}


@pytest.mark.few(4)
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "mistral", "opt", "gpt2", *KINDS, "mamba", "jamba"])
def test_common_models_are_recorded(name: str) -> None:
    """Though one makes a tensor of its settings in each pass, one asks how many rows there are, and others multiply by
    weights from the left.
    """
    traced = build_runner(model_of(name), compile="auto")
    passes(traced)
    assert isinstance(traced.recorder, RecordedPasses) and not traced.recorder.failed
    assert traced.recorded(8)


@pytest.mark.skipif(native() is None, reason="no compiled kernels here")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_passes_are_recorded_once_kernels_are_built(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine's first use, too, and of models whose weights the kernels do not pack."""
    for place in ("session", "build"):
        monkeypatch.setattr(f"sakiyomi.model_executor.{place}.native_at_hand", lambda: False)
    llm = LLM((tiny_llama(vocab=VOCAB).to(dtype), character_tokenizer()), "none")
    assert llm.target.recorder is None
    monkeypatch.undo()
    assert llm.wait() and llm.target.mode == "recorded"


def test_a_norm_in_groups_is_recorded() -> None:
    """It cuts rows by ``int(width // groups)``, a number that a trace makes of a size."""
    grouped = {"mamba_rms_norm": True, "mamba_n_groups": 2, "mamba_norm_before_gate": False}
    model = make(hf.FalconH1Config(**(HYBRIDS["falcon_h1"]().to_dict() | grouped)))
    traced = build_runner(model, compile="auto")
    found, expected = passes(traced), passes(build_runner(model, compile=False))
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert isinstance(traced.recorder, RecordedPasses) and not traced.recorder.failed


class Deciding(nn.Module):
    """In the place of an MLP: what it does depends on what a function finds of its input."""

    def __init__(self, decide: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
        super().__init__()
        self.decide = decide
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (2.00001 if self.decide(x, self.weight) else 2) * x


def rows_of(x: torch.Tensor) -> Any:
    return x.shape[1]


BY_VALUES: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "float": lambda x, _: float(x.abs().max()) > 1e9,
    "truth": lambda x, _: x.abs().max() > 1e9,
    "item": lambda x, _: x.abs().max().item() > 1e9,
    "list": lambda x, _: x.flatten().tolist()[0] > 1e9,
    "loop": lambda x, _: any(row.sum() > 1e9 for row in x[0, :, 0].nonzero()),
    "among others": lambda x, w: rows_of(x) > 99 or w.sum() * x.abs().max() > 1e9,
    "constant": lambda x, _: torch.tensor(x.abs().max()) > 1e9,
    "how many": lambda x, _: x.nonzero().shape[0] > 1e9,
    "how many chosen": lambda x, _: x[x > 0].shape[0] > 1e9,
    "how many masked": lambda x, _: torch.masked_select(x, x > 0).flatten().shape[0] * 2 > 1e9,
}
BY_SIZES: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "rows": lambda x, _: rows_of(x) == 1 or any([False]),
    "width": lambda x, _: int(x.shape[2] // 2) > 1000,
    "few": lambda x, _: rows_of(x) < 6,
    "weights": lambda x, w: w.sum() > 99,
    "settings": lambda x, _: torch.tensor([1.0, 2.0])[0] > 99,
    "made": lambda x, _: torch.zeros(x.shape[1]).sum() > 99,
}


def deciding(decide: Callable[[torch.Tensor, torch.Tensor], Any]) -> Any:
    model = tiny_llama(vocab=VOCAB)
    model.model.layers[0].mlp = Deciding(decide)
    return model


@pytest.mark.few(4)
@pytest.mark.filterwarnings("ignore:To copy construct:UserWarning")
@pytest.mark.parametrize("kind", BY_VALUES)
def test_what_decides_by_values_is_not_recorded(kind: str) -> None:
    model = deciding(BY_VALUES[kind])
    traced = build_runner(model, compile="auto")
    expected = passes(build_runner(model, compile=False))
    assert all(torch.equal(a, b) for a, b in zip(expected, passes(traced), strict=True))
    assert isinstance(traced.recorder, RecordedPasses) and traced.recorder.failed


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", BY_SIZES)
def test_what_decides_by_sizes_is_recorded(kind: str) -> None:
    """One row count after the other, with logits of the eager passes, whatever is decided for it."""
    model = deciding(BY_SIZES[kind])
    traced, eager = build_runner(model, compile="auto"), build_runner(model, compile=False)
    traced.record()
    for _ in range(2):
        for rows in (1, 4, 8, 16):
            with traced.cache.lent(rows) as one, eager.cache.lent(rows) as other:
                found = traced.score([SequenceRows(one, 0, prompt(rows))]).logits
                expected = eager.score([SequenceRows(other, 0, prompt(rows))]).logits
            assert torch.equal(found, expected)
    assert isinstance(traced.recorder, RecordedPasses) and not traced.recorder.failed
    assert set(traced.recorder.ready) == {1, 4, 8, 16}


def test_a_recording_that_differs_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pass that proves it gives the eager logits, and all later ones are eager."""
    model = tiny_llama(vocab=VOCAB)
    traced, expected = build_runner(model, compile="auto"), passes(build_runner(model, compile=False))
    run = Program.__call__

    def wrong(program: Program, *given: Any) -> Any:
        logits, states = run(program, *given)
        return logits + 1e-6, states

    monkeypatch.setattr(Program, "__call__", wrong)
    assert all(torch.equal(a, b) for a, b in zip(expected, passes(traced), strict=True))
    assert isinstance(traced.recorder, RecordedPasses) and traced.recorder.failed


def test_one_recording_serves_all_row_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama(vocab=VOCAB)
    traced, eager = build_runner(model, compile="auto"), build_runner(model, compile=False)
    traced.record()
    monkeypatch.setattr(torch.jit, "trace", lambda *_: pytest.fail("traced once more"))
    for _ in range(2):
        for rows in (1, 3, 8, 16, 20, 64, 100):
            with traced.cache.lent(rows) as one, eager.cache.lent(rows) as other:
                found = traced.score([SequenceRows(one, 0, prompt(rows))]).logits
                expected = eager.score([SequenceRows(other, 0, prompt(rows))]).logits
            assert torch.equal(found, expected)
    assert isinstance(traced.recorder, RecordedPasses)
    assert set(traced.recorder.ready) == {1, 4, 8, 16, 32, 64, 128}


@pytest.mark.parametrize("wrong", [1e-6, RuntimeError("shape '[1, 8, 64]' is invalid")], ids=["differs", "raises"])
def test_a_row_count_that_a_recording_does_not_serve_gets_its_own(
    wrong: float | Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_llama(vocab=VOCAB)
    traced, expected = build_runner(model, compile="auto"), passes(build_runner(model, compile=False))
    made = recorded_passes.program_of

    def narrow(graph: Any) -> Any:
        program, rows = made(graph), next(graph.inputs()).type().sizes()[1]

        def replay(ids: torch.Tensor, positions: torch.Tensor) -> Any:
            if ids.shape[1] == rows:
                return program(ids, positions)
            if isinstance(wrong, Exception):
                raise wrong
            logits, states = program(ids, positions)
            return logits + wrong, states

        return replay

    monkeypatch.setattr(recorded_passes, "program_of", narrow)
    traced.record()
    assert all(torch.equal(a, b) for a, b in zip(expected, passes(traced), strict=True))
    assert isinstance(traced.recorder, RecordedPasses) and not traced.recorder.failed
    assert sorted(traced.recorder._made) == [8, 16] == sorted({8, *traced.recorder.ready})


def test_without_compile_nothing_is_recorded() -> None:
    assert build_runner(tiny_llama(vocab=VOCAB), compile=False).recorder is None


@pytest.mark.skipif(native() is None, reason="the kernels are not available")
def test_a_batch_with_trees_is_that_of_eager_passes() -> None:
    """Levels of a tree whose upper rows lie in the cache, beside a chain; with other parents it is another pass."""
    runners = [build_runner(model_of("llama"), compile="auto"), build_runner(model_of("llama"), compile=False)]
    passes(runners[0])

    def both(runner: Any, tree: tuple[int, ...]) -> torch.Tensor:
        with runner.cache.lent(60) as first, runner.cache.lent(60) as second:
            for slot in (first, second):
                runner.score([SequenceRows(slot, 0, prompt(7), prompt=True)])
            runner.score([SequenceRows(first, 7, prompt(3, 1), (-1, 0, 0))])
            level = SequenceRows(first, 10, prompt(2, 2), (-1, 0, 0, *tree), done=3)
            return torch.Tensor(runner.score([level, SequenceRows(second, 7, prompt(4, 3))]).logits.clone())

    found, other = both(runners[0], (1, 2)), both(runners[0], (2, 1))
    assert torch.equal(found, both(runners[1], (1, 2))) and torch.equal(other, both(runners[1], (2, 1)))
    assert not torch.equal(found, other)
    told: list[Any] = []
    runners[0].watchers.append(lambda plan, seconds: told.append(plan))
    assert torch.equal(both(runners[0], (1, 2)), found) and told  # who listens changes no number

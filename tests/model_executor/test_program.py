"""Passes as programs of the kernels: equal to eager ones to the last bit, and made only where they would be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from architectures import VOCAB, model_of, prompt
from sakiyomi.kernels.batch import SequenceRows
from sakiyomi.kernels.build import native
from sakiyomi.model_executor import program
from sakiyomi.model_executor.build import build_runner
from sakiyomi.model_executor.program import Program, program_of
from sakiyomi.model_executor.runner import ModelRunner
from sakiyomi.model_executor.traced import TracedPasses, trace
from toys import tiny_llama

pytestmark = pytest.mark.skipif(native() is None, reason="the kernels are not available")
PROGRAMS = ("gemma3", "granite", "lfm2", "llama", "mistral", "phi3", "qwen2", "qwen3")


def passes(runner: ModelRunner, laps: int = 8) -> list[Tensor]:
    """Logits and what the head reads, of chains, at places that ascend."""
    found = []
    with runner.cache.lent(100) as slot:
        runner.score([SequenceRows(slot, 0, prompt(9), prompt=True)])
        for lap in range(laps):
            output = runner.score([SequenceRows(slot, 9 + lap, prompt(5, lap))])
            found += [output.logits.clone(), output.features[-1].clone()]
            runner.cache.commit(slot, 9 + lap, (0,))
    return found


def serving(runner: ModelRunner) -> Any:
    assert isinstance(runner.recorder, TracedPasses) and not runner.recorder.failed
    return runner.recorder.ready[8]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", PROGRAMS)
def test_equal_to_the_last_bit(name: str, dtype: torch.dtype) -> None:
    model = __import__("copy").deepcopy(model_of(name)).to(dtype)
    runner = build_runner(model, compile="auto")
    found, expected = passes(runner), passes(build_runner(model, compile=False))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert isinstance(serving(runner), Program)


def test_positions_beyond_the_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are computed when they come."""
    expected = passes(build_runner(tiny_llama(), compile=False))
    monkeypatch.setattr(program, "REACH", 11)
    runner = build_runner(tiny_llama(), compile="auto")
    found = passes(runner)
    assert isinstance(serving(runner), Program) and serving(runner)._reach == 22
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_wrong_program_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is compared with an eager pass as a trace is, which then serves."""
    expected = passes(build_runner(tiny_llama(), compile=False))
    wrong = program._STEPS | {"aten::add": ("mul", program._STEPS["aten::add"][1])}
    monkeypatch.setattr(program, "_STEPS", wrong)
    runner = build_runner(tiny_llama(), compile="auto")
    found = passes(runner)
    assert not isinstance(serving(runner), Program)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_step_that_fails_is_no_programs_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trace serves where the kernels refuse what a step reads."""
    wrong = program._STEPS | {"aten::transpose": ("view", program._STEPS["aten::transpose"][1])}
    monkeypatch.setattr(program, "_STEPS", wrong)
    expected = passes(build_runner(tiny_llama(), compile=False))
    runner = build_runner(tiny_llama(), compile="auto")
    assert all(torch.equal(a, b) for a, b in zip(passes(runner), expected, strict=True))
    assert not isinstance(serving(runner), Program)


def test_what_a_pass_has_given_stays() -> None:
    """No later pass writes into it."""
    runner = build_runner(tiny_llama(), compile="auto")
    passes(runner)
    with runner.cache.lent(20) as slot:
        first = runner.score([SequenceRows(slot, 0, prompt(5))]).logits
        kept = first.clone()
        runner.score([SequenceRows(slot, 0, prompt(5, 1))])
        assert torch.equal(first, kept)


SOME: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], bool]] = {
    "angles": (lambda ids, positions: (positions[..., None] * torch.arange(1.0, 17)).cos(), True),
    "a product of matrices": (
        lambda ids, positions: (torch.ones(1, 16, 1) @ positions[:, None].float()).mT.cos(),
        True,
    ),
    "of the largest": (lambda ids, positions: (positions / positions.max())[..., None].cos(), False),
    "of the number": (lambda ids, positions: (positions / positions.shape[1])[..., None].cos(), False),
    "of another operator": (lambda ids, positions: torch.erf(ids.float())[..., None] * 1.0, False),
}


@pytest.mark.parametrize("case", SOME)
def test_what_follows_from_positions(case: str) -> None:
    """Each has to have a row of its own: what depends on the others is not looked up."""
    function, works = SOME[case]
    table = torch.rand(10, 16)

    def forward(ids: Tensor, positions: Tensor) -> Tensor:
        return torch.nn.functional.embedding(ids, table) * function(ids, positions)

    ids, positions = torch.tensor([[3, 9, 0, 3]]), torch.tensor([[7, 8, 2, 3000]])
    traced = trace(forward, nn.Module(), ids, torch.arange(4)[None])
    made = program_of(traced.graph, [], [16], torch.float32)
    assert (made is not None) == works
    if made is not None:
        assert torch.equal(made(ids, positions)[0], forward(ids, positions))
        with pytest.raises(RuntimeError, match="does not run"):
            made(torch.tensor([[10]]), torch.tensor([[0]]))


def test_every_model_has_a_trace_at_least() -> None:
    """One whose operators are not among the kernels' is replayed by torch."""
    config = hf.GPTNeoXConfig(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48
    )
    torch.manual_seed(0)
    model = hf.GPTNeoXForCausalLM(config).eval()
    runner = build_runner(model, compile="auto")
    expected = passes(build_runner(model, compile=False))
    assert all(torch.equal(a, b) for a, b in zip(passes(runner), expected, strict=True))
    assert serving(runner) is not None and not isinstance(serving(runner), Program)

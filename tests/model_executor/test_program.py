"""Passes as programs of the kernels: equal to eager ones to the last bit, and made only where they would be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from architectures import CONFIGS, HYBRIDS, KINDS, model_of, prompt
from sakiyomi.core.errors import UnsupportedError
from sakiyomi.kernels.batch import SequenceRows
from sakiyomi.kernels.build import native
from sakiyomi.model_executor import kernel_steps, program, program_steps, torch_steps
from sakiyomi.model_executor.build import build_runner
from sakiyomi.model_executor.program import Program
from sakiyomi.model_executor.recorded_passes import RecordedPasses
from sakiyomi.model_executor.runner import ModelRunner
from sakiyomi.model_executor.trace import trace
from toys import tiny_llama

pytestmark = pytest.mark.skipif(native() is None, reason="the kernels are not available")
OWN = ("gemma3", "granite", "lfm2", "llama", "mistral", "phi3", "qwen2", "qwen3")
"""They need no operator of torch."""
PYTHON = (
    "bloom", "falcon_mamba", "gemma3n", "jamba", "llama4-chunked", "mamba", "nemotron_h", "olmo_hybrid", "qwen3_5",
    "qwen3_5_moe", "qwen3_next", "recurrent_gemma", "zamba", "zamba2",
)  # fmt: skip
"""Some of their operators are called through Python."""
ALL = sorted({*CONFIGS, *KINDS, *HYBRIDS})


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
    assert isinstance(runner.recorder, RecordedPasses) and not runner.recorder.failed
    return runner.recorder.ready[8]


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, torch.bfloat16) for name in ALL), *((name, torch.float32) for name in OWN)]
)
def test_equal_to_the_last_bit(name: str, dtype: torch.dtype) -> None:
    model = __import__("copy").deepcopy(model_of(name)).to(dtype)
    runner = build_runner(model, compile="auto")
    found, expected = passes(runner), passes(build_runner(model, compile=False))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert isinstance(serving(runner), Program)
    if name in OWN:
        assert not serving(runner).calls
    assert any(call.startswith("sakiyomi_python::") for call in serving(runner).calls) == (name in PYTHON)


def test_positions_beyond_the_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are computed when they come."""
    expected = passes(build_runner(tiny_llama(), compile=False))
    monkeypatch.setattr(program, "TABLE_ROWS", 11)
    runner = build_runner(tiny_llama(), compile="auto")
    found = passes(runner)
    assert isinstance(serving(runner), Program) and serving(runner)._table_rows == 22
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(("operator", "step"), [("aten::add", "mul"), ("aten::transpose", "view")])
def test_a_wrong_program_is_not_used(operator: str, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether its outputs are others than those of an eager pass, or the kernels refuse a step: passes stay eager."""
    expected = passes(build_runner(tiny_llama(), compile=False))
    steps = kernel_steps.KERNEL_STEPS
    monkeypatch.setattr(program_steps, "KERNEL_STEPS", {**steps, operator: (step, steps[operator][1])})
    runner = build_runner(tiny_llama(), compile="auto")
    found = passes(runner)
    assert isinstance(runner.recorder, RecordedPasses) and runner.recorder.failed
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_what_a_pass_has_given_stays() -> None:
    """No later pass writes into it."""
    runner = build_runner(tiny_llama(), compile="auto")
    passes(runner)
    with runner.cache.lent(20) as slot:
        first = runner.score([SequenceRows(slot, 0, prompt(5))]).logits
        kept = first.clone()
        runner.score([SequenceRows(slot, 0, prompt(5, 1))])
        assert torch.equal(first, kept)


SOME: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "angles": lambda ids, positions: (positions[..., None] * torch.arange(1.0, 17)).cos(),
    "a product of matrices": lambda ids, positions: (torch.ones(1, 16, 1) @ positions[:, None].float()).mT.cos(),
    "of the largest": lambda ids, positions: (positions / positions.max())[..., None].cos(),
    "of the number": lambda ids, positions: (positions / positions.shape[1])[..., None].cos(),
    "of an operator of torch": lambda ids, positions: torch.erf(ids.float())[..., None] * 1.0,
    "of one with numbers": lambda ids, positions: functional.softplus(ids.float())[..., None],
    "of a part": lambda ids, positions: torch.cat(positions.split(2, 1)[::-1], 1)[..., None].float(),
}


@pytest.mark.parametrize("case", SOME)
def test_what_follows_from_positions(case: str) -> None:
    """What has no row of its own for each is not looked up, but computed in each pass."""
    function = SOME[case]
    table = torch.rand(10, 16)

    def forward(ids: Tensor, positions: Tensor) -> Tensor:
        return torch.nn.functional.embedding(ids, table) * function(ids, positions)

    ids, positions = torch.tensor([[3, 9, 0, 3]]), torch.tensor([[7, 8, 2, 3000]])
    traced = trace(forward, ids, torch.arange(4)[None])
    made = Program(traced.graph, [], [(16, torch.float32)])
    assert bool(made._tables) == (case in ("angles", "a product of matrices"))
    assert torch.equal(made(ids, positions)[0], forward(ids, positions))
    with pytest.raises(RuntimeError, match="does not run"):
        made(torch.tensor([[10, 0, 0, 0]]), positions)


NUMBERS = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).reshape(512, 128)
NUMBERS[NUMBERS.abs() < torch.finfo(torch.bfloat16).tiny] = 0
"""All there are of bfloat16, but the smallest, which some processors take for 0."""
CALLED: dict[str, Callable[[Tensor], Tensor]] = {
    "square": lambda x: x.pow(2),
    "cube": lambda x: x**3,
    "root": lambda x: torch.pow(x, 0.5),
    "one by the root": lambda x: torch.pow(x, -0.5),
    "inverse": lambda x: x.pow(-1),
    "bounds": lambda x: x.clamp(min=-1.5, max=2),
    "one bound": lambda x: x.clamp(max=1.25) + x.clamp_min(-7) + x.clamp(min=0) + x.mT.clamp(-1, 0.3).mT,
    "bounds of places": lambda x: x * torch.arange(x.shape[1]).add(x.topk(1).indices[0, :, 0]).clamp(3, 40)[:, None],
    "chosen by bounds": lambda x: torch.where((x >= -0.3) & (x.float() < 0.9) & (x != 0.5), 3.25, x).where(x <= 9, -1),
    "whole numbers in place": lambda x: (
        x * (y := x.topk(3).indices).view(-1).add_(2).view_as(y)[..., :1] * (3 - y[..., :1])
    ),
    "of truth values": lambda x: x * ((x > 0) == 1) * (x.topk(1).indices > 0.5),
    "the rest": lambda x: 1 - x + (0.3 - x),
    "twice in place": lambda x: (y := x * 2) + y.view(-1).add_(1).sub_(y.flatten()).view_as(y) + y,
    "full of one": lambda x: (
        torch.full_like(x, 0.3).masked_fill_(x > 1, 5) + torch.full_like(x, 1, dtype=torch.float64)
    ),
    "the larger ones": lambda x: x.masked_fill(x > 0.7, 3.25),
    "difference": lambda x: x - x.flip(-1),
    "several at once": lambda x: x.topk(3).values * x.topk(3).indices.to(x.dtype),
    "a whole number of the size": lambda x: x[..., : x.shape[-1] // 2] * 2,
    "every second one": lambda x: x[..., ::2],
    "parts": lambda x: torch.cat(list(x.split(48, dim=-1))[::-1], -1),
    "set": lambda x: torch.zeros_like(x).scatter_(-1, x.float().nan_to_num().topk(3).indices, 2.5),
    "filled": lambda x: torch.full_like(x, -torch.inf).scatter(-1, x.float().nan_to_num().topk(3).indices, x),
    "a turned product": lambda x: x @ (x.transpose(1, 2).reshape(1, 128, -1, 1).squeeze(-1) @ x),
    "a scaled turned one": lambda x: x @ ((x.transpose(1, 2) * 0.5) @ x + x.transpose(1, 2) @ x),
    "in place, in a view": lambda x: (y := x * 2).view(1, -1, 4, 32).add_(1.0).view_as(x) + y,
    "twice in place, in a view": lambda x: (
        (y := x * 2).view(1, -1, 4, 32).add_(1.0).mul_(x.view(1, -1, 4, 32)).view_as(x) + y
    ),
    "in place": lambda x: (x * 1.5).add_(x).div_(x.sum(-1, keepdim=True)),
    "of rows": lambda x: functional.layer_norm(x, (128,)),
    "a smooth bend": functional.softplus,
    "one of two": lambda x: torch.where(x > 0, x, 2.0),
    "a list": lambda x: torch.stack([x.unbind(-1)[i] for i in (3, 1)], -1),
    "a mean of its own length": lambda x: torch.arange(x.shape[1])[None, :, None] + x,
    "another type": lambda x: x.to(torch.device("cpu"), torch.float64).cumsum(-1).type_as(x),
}


def told(numbers: Tensor) -> Tensor:
    """To be compared: some processors make zeros of the smallest numbers."""
    return numbers.masked_fill(numbers.abs() < torch.finfo(numbers.dtype).tiny, 0.0).nan_to_num(7.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CALLED)
def test_operators_of_torch(case: str, dtype: torch.dtype) -> None:
    """Called from C++ they give what they give to Python, of whatever numbers there are."""
    table = (NUMBERS.nan_to_num(0.5, 1, 1).clamp(-9, 9) if "turned" in case else NUMBERS).to(dtype)

    def forward(ids: Tensor, positions: Tensor) -> Tensor:
        return CALLED[case](functional.embedding(ids, table))

    traced = trace(forward, torch.zeros(1, 5, dtype=torch.int64), torch.arange(5)[None])
    ids = torch.arange(512)[None]
    wanted = forward(ids, ids)
    made = Program(traced.graph, [], [(wanted.shape[-1], wanted.dtype)])
    for lap in range(2):
        assert torch.equal(told(made(ids, ids)[0]), told(wanted)), lap


def test_what_passes_share_is_not_written() -> None:
    """What writes into a constant would change the next pass."""
    table = torch.rand(10, 16)
    kept = torch.zeros(1, 4, 16)
    for write in (lambda x: kept.masked_fill_(x > 0.5, 1.0), lambda x: kept.add_(x), lambda x: kept.add_(1.0)):
        traced = trace(
            lambda ids, positions, f=write: f(functional.embedding(ids, table)) + functional.embedding(ids, table),
            torch.tensor([[3, 9, 0, 3]]),
            torch.arange(4)[None],
        )
        with pytest.raises(UnsupportedError, match="of what other passes read"):
            Program(traced.graph, [], [(16, torch.float32)])


def test_learned_positions_end_somewhere() -> None:
    """A table of them is as long as the embeddings, and what lies behind is refused."""
    table, places = torch.rand(10, 16), torch.rand(300, 16)

    def forward(ids: Tensor, positions: Tensor) -> Tensor:
        return functional.embedding(ids, table) + functional.embedding(positions, places)

    ids = torch.tensor([[3, 9, 0]])
    traced = trace(forward, ids, torch.arange(3)[None])
    made = Program(traced.graph, [], [(16, torch.float32)])
    for first in (0, 150, 297):
        positions = torch.arange(first, first + 3)[None]
        assert torch.equal(made(ids, positions)[0], forward(ids, positions))
    with pytest.raises(IndexError):
        made(ids, torch.tensor([[298, 299, 300]]))


def test_rows_that_are_asked_for() -> None:
    """What behind them is computed for these alone."""
    table, weight = torch.rand(10, 16), torch.rand(3, 16)

    def forward(ids: Tensor, positions: Tensor, keep: Tensor) -> Tensor:
        return (functional.embedding(ids, table) * positions[..., None])[:, keep, :] @ weight.T

    ids, keep = torch.tensor([[3, 9, 0, 7]]), torch.tensor([1, 3])
    positions = torch.arange(4)[None]
    made = Program(trace(forward, ids, positions, keep).graph, [], [(3, torch.float32)])
    for rows in (keep, torch.tensor([2]), None):
        kept = torch.arange(4) if rows is None else rows
        assert torch.equal(made(ids, positions, rows)[0], forward(ids, positions, kept))


def test_functions_go_with_their_program() -> None:
    """Python's functions that steps call are held by the program alone."""
    before = len(torch_steps._functions)
    traced = trace(lambda ids, positions: functional.softplus(ids.float())[..., None], *[torch.arange(4)[None]] * 2)
    made = Program(traced.graph, [], [(1, torch.float32)])
    assert len(torch_steps._functions) == before + 1
    del made
    assert len(torch_steps._functions) == before

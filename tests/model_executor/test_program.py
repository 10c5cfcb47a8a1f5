"""Passes as programs of the kernels: equal to eager ones to the last bit, and made only where they would be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from architectures import CONFIGS, HYBRIDS, KINDS, model_of, prompt
from sakiyomi.kernels.batch import SequenceRows
from sakiyomi.kernels.build import native
from sakiyomi.model_executor import program, program_steps
from sakiyomi.model_executor.build import build_runner
from sakiyomi.model_executor.program import Program, program_of
from sakiyomi.model_executor.runner import ModelRunner
from sakiyomi.model_executor.traced import TracedPasses, trace
from toys import tiny_llama

pytestmark = pytest.mark.skipif(native() is None, reason="the kernels are not available")
OWN = ("gemma3", "granite", "lfm2", "llama", "mistral", "phi3", "qwen2", "qwen3")
"""They need no operator of torch."""
TRACED = {
    "bloom", "falcon_mamba", "gemma3n", "jamba", "mamba", "nemotron_h", "olmo_hybrid", "qwen3_5", "qwen3_5_moe",
    "qwen3_next", "recurrent_gemma", "zamba", "zamba2",
}  # fmt: skip
"""They need one that is not called from C++: mostly softplus, of two ``Scalar``."""
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
    assert isinstance(runner.recorder, TracedPasses) and not runner.recorder.failed
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
    assert isinstance(serving(runner), Program) == (name not in TRACED)
    if name in OWN:
        assert not serving(runner).calls


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
    wrong = {**program_steps._STEPS, "aten::add": ("mul", program_steps._STEPS["aten::add"][1])}
    monkeypatch.setattr(program_steps, "_STEPS", wrong)
    runner = build_runner(tiny_llama(), compile="auto")
    found = passes(runner)
    assert not isinstance(serving(runner), Program)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_step_that_fails_is_no_programs_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trace serves where the kernels refuse what a step reads."""
    wrong = {**program_steps._STEPS, "aten::transpose": ("view", program_steps._STEPS["aten::transpose"][1])}
    monkeypatch.setattr(program_steps, "_STEPS", wrong)
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
    "of the number": (lambda ids, positions: (positions / positions.shape[1])[..., None].cos(), True),
    "of an operator of torch": (lambda ids, positions: torch.erf(ids.float())[..., None] * 1.0, True),
    "of one with numbers": (lambda ids, positions: functional.softplus(ids.float())[..., None], False),
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
    made = program_of(traced.graph, [], [(16, torch.float32)])
    assert (made is not None) == works
    if made is not None:
        assert torch.equal(made(ids, positions)[0], forward(ids, positions))
        with pytest.raises(RuntimeError, match="does not run"):
            made(torch.tensor([[10]]), torch.tensor([[0]]))


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
    "in place": lambda x: (x * 1.5).add_(x).div_(x.sum(-1, keepdim=True)),
    "of rows": lambda x: functional.layer_norm(x, (128,)),
    "another type": lambda x: x.to(torch.device("cpu"), torch.float64).cumsum(-1).type_as(x),
}


def told(numbers: Tensor) -> Tensor:
    """To be compared: some processors make zeros of the smallest numbers."""
    return numbers.masked_fill(numbers.abs() < torch.finfo(numbers.dtype).tiny, 0.0).nan_to_num(7.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CALLED)
def test_operators_of_torch(case: str, dtype: torch.dtype) -> None:
    """Called from C++ they give what they give to Python, of whatever numbers there are."""
    table = (NUMBERS.nan_to_num(0.5, 1, 1).clamp(-9, 9) if "turned" in case else NUMBERS).to(dtype)

    def forward(ids: Tensor, positions: Tensor) -> Tensor:
        return CALLED[case](functional.embedding(ids, table))

    traced = trace(forward, nn.Module(), torch.zeros(1, 5, dtype=torch.int64), torch.arange(5)[None])
    ids = torch.arange(512)[None]
    wanted = forward(ids, ids)
    made = program_of(traced.graph, [], [(wanted.shape[-1], dtype)])
    assert made is not None
    for lap in range(2):
        assert torch.equal(told(made(ids, ids)[0]), told(wanted)), lap


def test_what_passes_share_is_not_written() -> None:
    """What writes into a constant would change the next pass; what writes into a view, another value."""
    table = torch.rand(10, 16)
    kept = torch.zeros(1, 4, 16)
    functions = {
        "a constant": lambda x: kept.masked_fill_(x > 0.5, 1.0) + x,
        "a view": lambda x: x.view(1, -1, 4, 4).add_(1.0).view_as(x) + x,
    }
    for function in functions.values():
        traced = trace(
            lambda ids, positions, f=function: f(functional.embedding(ids, table)),
            nn.Module(),
            torch.tensor([[3, 9, 0, 3]]),
            torch.arange(4)[None],
        )
        assert program_of(traced.graph, [], [(16, torch.float32)]) is None


def test_learned_positions_end_somewhere() -> None:
    """A table of them is as long as the embeddings, and what lies behind is refused."""
    table, places = torch.rand(10, 16), torch.rand(300, 16)

    def forward(ids: Tensor, positions: Tensor) -> Tensor:
        return functional.embedding(ids, table) + functional.embedding(positions, places)

    ids = torch.tensor([[3, 9, 0]])
    traced = trace(forward, nn.Module(), ids, torch.arange(3)[None])
    made = program_of(traced.graph, [], [(16, torch.float32)])
    assert made is not None
    for first in (0, 150, 297):
        positions = torch.arange(first, first + 3)[None]
        assert torch.equal(made(ids, positions)[0], forward(ids, positions))
    with pytest.raises(IndexError):
        made(ids, torch.tensor([[298, 299, 300]]))

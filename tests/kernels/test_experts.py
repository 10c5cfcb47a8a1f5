"""Experts by the kernels against transformers' own modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GptOssConfig, Qwen3MoeConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from backends import begin
from sakiyomi.kernels.experts import expert_bytes, pack_experts
from sakiyomi.kernels.native import PackedWeights

pytestmark = pytest.mark.skipif(PackedWeights.create() is None, reason="the C++ kernels cannot be compiled here")
HIDDEN, INNER, EXPERTS, CHOSEN = 24, 40, 6, 3
SIZES = {"hidden_size": HIDDEN, "num_experts_per_tok": CHOSEN, "experts_implementation": "eager"}
KINDS = {
    "gate and up": lambda: Qwen3MoeExperts(Qwen3MoeConfig(**SIZES, moe_intermediate_size=INNER, num_experts=EXPERTS)),
    "turned, with biases": lambda: GptOssExperts(
        GptOssConfig(**SIZES, intermediate_size=INNER, num_local_experts=EXPERTS)
    ),
}


def experts_of(kind: str, dtype: torch.dtype) -> Any:
    module = KINDS[kind]()
    generator = torch.Generator().manual_seed(0)
    for weight in module.parameters():
        weight.data = torch.randn(weight.shape, generator=generator) / weight.shape[-1] ** 0.5
    return module.to(dtype).requires_grad_(False)


def routed(rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    chosen = torch.stack([torch.randperm(EXPERTS, generator=generator)[:CHOSEN] for _ in range(rows)])
    weights = torch.rand(rows, CHOSEN, generator=generator).to(dtype)
    return torch.randn(rows, HIDDEN, generator=generator).to(dtype), chosen, weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_experts_are_the_modules_own(kind: str, dtype: torch.dtype) -> None:
    module, table = experts_of(kind, dtype), PackedWeights.create()
    assert table is not None
    inputs = [routed(rows, dtype) for rows in (1, 2, 9, 70)]
    wanted = [module(*given) for given in inputs]
    assert expert_bytes(nn.Sequential(module)) == sum(w.nbytes for w in module.parameters() if w.ndim == 3)
    assert pack_experts(nn.Sequential(module), table, free=True)
    assert expert_bytes(nn.Sequential(module)) == 0
    for given, expected in zip(inputs, wanted, strict=True):
        begin(table, len(given[0]))
        found = module(*given)
        assert found.dtype == dtype
        size = float(expected.float().abs().max())
        torch.testing.assert_close(found, expected, rtol=0.0, atol=(1e-5 if dtype == torch.float32 else 0.02) * size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_know_of_its_company(dtype: torch.dtype) -> None:
    """Whatever other rows choose the same experts, and however many fill the pass up."""
    module, table = experts_of("gate and up", dtype), PackedWeights.create()
    assert table is not None and pack_experts(nn.Sequential(module), table)
    rows, chosen, weights = routed(12, dtype)
    begin(table, 12)
    together = module(rows, chosen, weights)
    for i in range(12):
        begin(table, 1)
        assert torch.equal(module(rows[i : i + 1], chosen[i : i + 1], weights[i : i + 1])[0], together[i])
    begin(table, 5, 7)
    filled = module(rows, chosen, weights)
    assert torch.equal(filled[:5], together[:5]) and not filled[5:].any()
    begin(table, 2, 4)  # where it is another number of rows, nobody knows which of them fill the pass up
    assert torch.equal(module(rows, chosen, weights), together)


def test_an_expert_that_is_none_is_refused() -> None:
    module, table = experts_of("gate and up", torch.float32), PackedWeights.create()
    assert table is not None and pack_experts(nn.Sequential(module), table)
    rows, chosen, weights = routed(2, torch.float32)
    begin(table, 2)
    for wrong in (-1, EXPERTS):
        with pytest.raises(RuntimeError, match="an expert that is none"):
            module(rows, torch.full_like(chosen, wrong), weights)
    with pytest.raises(RuntimeError, match="int64"):
        module(rows, chosen.int(), weights)
    with pytest.raises(RuntimeError, match="shapes differ"):
        module(rows[:, :-2], chosen, weights)


def test_what_cannot_be_packed_stays_as_it_is() -> None:
    table = PackedWeights.create()
    assert table is not None
    plain = experts_of("gate and up", torch.float16)
    hooked = experts_of("gate and up", torch.float32)
    hooked.register_forward_hook(lambda module, args, output: 2 * output)
    for module in (plain, hooked, nn.Linear(4, 4)):
        assert not pack_experts(nn.Sequential(module), table) and expert_bytes(nn.Sequential(module)) == 0
        assert "forward" not in vars(module)

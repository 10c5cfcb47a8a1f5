"""Norms by the kernels against transformers' own modules, and which modules are left alone."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import GraniteMoeHybridRMSNormGated
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNormGated

from sakiyomi.kernels import norms
from sakiyomi.kernels.native import PackedWeights

pytestmark = pytest.mark.skipif(PackedWeights.create() is None, reason="the C++ kernels cannot be compiled here")
NORMS = [LlamaRMSNorm, Gemma2RMSNorm, MambaRMSNormGated, Qwen3_5RMSNormGated]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def norm_of(kind: Any, width: int, dtype: torch.dtype) -> nn.Module:
    whole = {"group_size": width} if kind is MambaRMSNormGated else {}
    module: nn.Module = kind(width, **whole)
    module.weight = nn.Parameter(random(width), requires_grad=False)
    return module.to(dtype)


def rows_of(kind: Any, *shape: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [random(*shape, seed=i).to(dtype) for i in range(len(inspect.signature(kind.forward).parameters) - 1)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", NORMS)
def test_a_norm_is_the_modules_own(kind: Any, dtype: torch.dtype) -> None:
    """Up to the order of a sum, which of 1000 numbers in bf16 hardly any shows."""
    for width in (2, 7, 16, 24, 64, 100, 385):
        model = nn.Sequential(norm_of(kind, width, dtype))
        for shape in ((1, 3, width), (5, width), (1, 2, 4, width)):
            rows = rows_of(kind, *shape, dtype=dtype)
            wanted = type(model[0]).forward(model[0], *rows)
            assert norms.serve_norms(model) == (shape == (1, 3, width))
            found = model[0](*rows)
            assert found.shape == wanted.shape and found.dtype == wanted.dtype
            torch.testing.assert_close(found, wanted, rtol=2e-6 if dtype == torch.float32 else 2**-7, atol=1e-6)
            assert (found != wanted).float().mean() < (1.0 if dtype == torch.float32 else 0.01)


def test_rows_do_not_know_of_each_other() -> None:
    model = nn.Sequential(norm_of(Qwen3_5RMSNormGated, 40, torch.float32))
    norms.serve_norms(model)
    rows, gate = random(1, 9, 40), random(1, 9, 40, seed=1)
    together = model[0](rows, gate)
    for i in range(9):
        assert torch.equal(model[0](rows[:, i : i + 1], gate[:, i : i + 1]), together[:, i : i + 1])
    assert torch.equal(model[0](rows.transpose(0, 1), gate.transpose(0, 1)), together.transpose(0, 1))  # with strides


def test_rows_of_another_type_than_the_weights() -> None:
    """State functions give float32 where weights are bf16: the result is what torch's promotion makes of both."""
    for kind in (LlamaRMSNorm, MambaRMSNormGated, Qwen3_5RMSNormGated):
        module = norm_of(kind, 24, torch.bfloat16)
        rows = rows_of(kind, 4, 24)
        gated = len(rows) > 1
        given = [rows[0], *(gate.bfloat16() for gate in rows[1:])]
        wanted = module(*given)
        assert norms.serve_norms(nn.Sequential(module)) == 1
        torch.testing.assert_close(module(*given), wanted)
        assert module(*given).dtype == wanted.dtype == torch.float32
        wide = norm_of(kind, 24, torch.float32)
        narrow = [row.bfloat16() for row in rows]
        wanted = wide(*narrow)
        norms.serve_norms(nn.Sequential(wide))
        assert wide(*narrow).dtype == wanted.dtype and torch.equal(wide(*narrow), wanted), gated


class Centered(LlamaRMSNorm):
    """Has the attributes of a norm, and does something else."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        rows: Tensor = super().forward(hidden_states - hidden_states.mean(-1, keepdim=True))
        return rows


class AcrossRows(LlamaRMSNorm):
    """Is one of rows of two dimensions alone."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        rows: Tensor = super().forward(hidden_states)
        return rows if rows.ndim == 2 else rows.flip(-2)


def test_what_is_not_such_a_norm_stays_as_it_is() -> None:
    hooked, replaced = LlamaRMSNorm(8), LlamaRMSNorm(8)
    hooked.register_forward_hook(lambda module, args, output: 2 * output)
    replaced.forward = lambda rows: rows
    grouped = GraniteMoeHybridRMSNormGated(16, group_size=8)
    others = [nn.LayerNorm(8), nn.LayerNorm(8, bias=False), Centered(8), AcrossRows(8), hooked, replaced, grouped]
    model = nn.Sequential(*others)
    assert norms.serve_norms(model) == 0
    assert all("forward" not in vars(module) for module in others if module is not replaced)


def test_another_form_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ground under these tests: with the kernels' forms mixed up, no module is served."""
    own = norms._norm
    monkeypatch.setattr(norms, "_norm", lambda module, eps, form, *rows: own(module, 4 * eps + 0.01, form, *rows))
    assert norms.serve_norms(nn.Sequential(LlamaRMSNorm(8), Gemma2RMSNorm(8), MambaRMSNormGated(8, group_size=8))) == 0

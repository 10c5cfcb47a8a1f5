"""8-bit weights: the kernel against the arithmetic that it stands for, and what a rounded model still promises."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import sakiyomi.kernels.native
from architectures import VOCAB, model_of, prompt
from sakiyomi import LLM, InputError, SamplingParams, UnsupportedError
from sakiyomi.cli import app
from sakiyomi.kernels.native import NativeModel
from sakiyomi.kernels.plan import Plan, Segment
from sakiyomi.kernels.rounding import ROUNDINGS, compare, layer_errors
from toys import tiny_llama, tiny_tokenizer

pytestmark = pytest.mark.skipif(NativeModel.create() is None, reason="the C++ kernels cannot be compiled here")
TOKENIZER = tiny_tokenizer(VOCAB)
PROMPT = "Once upon a time, there was a little fox"


def begin(model: NativeModel, rows: int) -> None:
    model.begin(Plan([Segment(0, 0, [0] * rows)]), rows)


def rounded(values: Tensor) -> tuple[Tensor, Tensor]:
    scale = values.abs().amax(-1, keepdim=True) / 127
    return (values / scale).round(), scale


@pytest.mark.parametrize(("inner", "out"), [(2, 1), (4, 16), (6, 17), (33, 70), (64, 64), (96, 200), (384, 130)])
@pytest.mark.parametrize("bias", [False, True])
def test_linear_in_8_bits(inner: int, out: int, bias: bool) -> None:
    """Whole numbers are summed, so that nothing but the last multiplication rounds."""
    generator = torch.Generator().manual_seed(inner + out)
    weight, x = torch.randn(out, inner, generator=generator), torch.randn(1, 13, inner, generator=generator)
    shift = torch.randn(out, generator=generator) if bias else None
    model = NativeModel.create()
    assert model is not None
    layer = model.add_linear(weight, shift, bits=8)
    numbers, scale = rounded(weight)
    for rows in (1, 2, 5, 6, 7, 13):
        begin(model, rows)
        got = layer(x[:, :rows])
        own, own_scale = rounded(x[:, :rows])
        exact = (own.double() @ numbers.double().T) * own_scale.double() * scale.T.double()
        exact = exact if shift is None else exact + shift.double()
        assert torch.allclose(got.double(), exact, rtol=1e-6, atol=1e-6 * float(exact.abs().max()))


def test_extremes_do_not_saturate() -> None:
    """Products of the largest bytes: sums in 16 bits, as instructions before VNNI make them, would be cut off."""
    weight, x = torch.ones(16, 4096), torch.ones(1, 1, 4096)
    weight[8:] = -1.0
    model = NativeModel.create()
    assert model is not None
    layer = model.add_linear(weight, None, bits=8)
    begin(model, 1)
    assert torch.equal(layer(x)[0, 0], torch.tensor([4096.0] * 8 + [-4096.0] * 8))


def test_a_row_of_zeros() -> None:
    model = NativeModel.create()
    assert model is not None
    layer = model.add_linear(torch.randn(20, 8), torch.ones(20), bits=8)
    begin(model, 1)
    assert torch.equal(layer(torch.zeros(1, 1, 8)), torch.ones(1, 1, 20))


@pytest.fixture(scope="module")
def tales() -> LLM:
    return LLM("tales", "model:tales-draft", quantize="int8", compile=False, exact=True)


def test_what_changed_is_said(tales: LLM) -> None:
    report = tales.target.rounding
    assert report is not None
    assert report.layers + len(report.kept) == 12 * 7 + 1
    assert report.agreement > 0.93 and 0 < report.divergence < 0.02
    assert f"{report.agreement:.1%}" in str(report)


@pytest.mark.parametrize("values", [{}, {"temperature": 0.8, "seed": 3}])
def test_exact_holds(tales: LLM, values: dict[str, float]) -> None:
    """Sums of whole numbers do not depend on their order, let alone on the other rows."""
    params = [SamplingParams(max_new_tokens=40, gamma=gamma, **values) for gamma in (1, 3, 7)]  # type: ignore[arg-type]
    plain = LLM("tales", "none", quantize="int8", compile=False, exact=True)
    wanted = plain.generate([PROMPT], params[0])[0].token_ids
    assert [tales.generate([PROMPT], each)[0].token_ids for each in params] == [wanted] * 3
    assert tales.generate([PROMPT, "The sea", PROMPT], params[1])[0].token_ids == wanted


def test_a_layer_with_outliers_keeps_its_weights() -> None:
    """One input outgrows the others and brings nothing itself: rounded by it, the others are lost."""
    model = tiny_llama(vocab=VOCAB, dim=64)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0] *= 3000.0
        model.model.layers[0].mlp.down_proj.weight[:, 0] = 0.0
    errors, logits = layer_errors(model, torch.tensor([prompt(50)]))
    assert logits.shape == (50, VOCAB)
    assert errors[id(model.model.layers[0].mlp.down_proj)]["int8"] > 4 * ROUNDINGS["int8"].most
    llm = LLM((model, TOKENIZER), "none", quantize="int8", compile=False)
    assert llm.target.rounding is not None
    assert "model.layers.0.mlp.down_proj" in llm.target.rounding.kept
    assert llm.target.rounding.agreement > 0.8


def test_compare() -> None:
    logits = torch.randn(20, 50)
    assert compare(logits, logits) == (1.0, pytest.approx(0.0, abs=1e-6))
    assert compare(logits, -logits)[0] == 0.0


def test_what_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="quantize='int3'; expected None, 'int8' or 'int4'"):
        LLM("tales", quantize="int3")
    monkeypatch.setattr(sakiyomi.kernels.native, "native", lambda: None)
    with pytest.raises(UnsupportedError, match="quantize='int8' needs the compiled CPU kernels"):
        LLM((model_of("llama"), TOKENIZER), "none", quantize="int8", compile=False)


def test_the_command_says_what_changed() -> None:
    result = CliRunner().invoke(
        app, ["generate", PROMPT, "--quantize", "int8", "--compile", "false", "--max-new-tokens", "4", "--json"]
    )
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout.splitlines()[-1])["rounding"]
    assert found["tokens"] == 512 and found["agreement"] > 0.9
    assert f"same {found['agreement']:.1%} of the time" in result.stderr

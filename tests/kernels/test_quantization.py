"""Weights in 8 and 4 bits: the kernels against the arithmetic they stand for, and what a rounded model promises."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import sakiyomi.kernels.native
from architectures import VOCAB, model_of, prompt
from backends import begin
from drafters import Branching, texts_of
from sakiyomi import LLM, InputError, SamplingParams, UnsupportedError
from sakiyomi.cli import app
from sakiyomi.kernels.native import PackedExperts, PackedLayer, PackedLinear, PackedWeights
from sakiyomi.kernels.pack import join_siblings
from sakiyomi.kernels.quantization import QUANTIZATIONS, choose_bits, compare, layer_errors
from toys import tiny_llama, tiny_tokenizer

pytestmark = pytest.mark.skipif(PackedWeights.create() is None, reason="the C++ kernels cannot be compiled here")
TOKENIZER = tiny_tokenizer(VOCAB)
PROMPT = "Once upon a time, there was a little fox"
ROWS = (*range(1, 14), 300)
"""Numbers of rows; the last is a chunk of a prompt."""


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Packed copies of embedded models go elsewhere than the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SAKIYOMI_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


# --- the kernels ------------------------------------------------------------------------------------------------------


def tables() -> PackedWeights:
    model = PackedWeights.create()
    assert model is not None
    return model


def rounded(values: Tensor) -> tuple[Tensor, Tensor]:
    """Each row's numbers from -127 to 127, and its scale."""
    scale = values.float().abs().amax(-1, keepdim=True) / 127
    return (values.float() / scale).round(), scale


def exact_product(x: Tensor, weight: Tensor, bias: Tensor | None, bits: int) -> Tensor:
    """What a layer stands for, in double: (rows, in) x (out, in), both rounded."""
    largest = x.float().abs().amax(-1, keepdim=True)
    inverse = torch.full_like(largest, 127.0) / largest  # (127 / x is not that in torch); ties fall as in the kernel
    own, own_scale = (x.float() * inverse).round(), largest / 127
    if bits == 8:
        numbers, scale = rounded(weight)
        product = own.double() @ numbers.double().T * scale.T.double()
    else:
        product = torch.zeros(len(x), len(weight), dtype=torch.float64)
        for first in range(0, weight.shape[1], 32):
            group = weight[:, first : first + 32].float()
            largest = group[torch.arange(len(group)), group.abs().argmax(1)]
            scale = (largest / -8).bfloat16().float()
            numbers = (group / scale[:, None]).round().clamp(-8, 7)
            product += own[:, first : first + 32].double() @ numbers.double().T * scale.double()
    product *= own_scale.double()
    return product if bias is None else product + bias.double()


SHAPES = {
    8: [(2, 1), (4, 16), (6, 17), (33, 70), (64, 64), (96, 200), (384, 130), (192, 96)],
    4: [(32, 1), (32, 16), (64, 17), (64, 70), (32, 64), (96, 200), (384, 130)],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("bits", "inner", "out"), [(bits, *shape) for bits in SHAPES for shape in SHAPES[bits]])
def test_linear(bits: int, inner: int, out: int, bias: bool, dtype: torch.dtype) -> None:
    """Whole numbers are summed: nothing but a few multiplications round, and in bfloat16 the result."""
    generator = torch.Generator().manual_seed(inner + out)
    weight = torch.randn(out, inner, generator=generator).to(dtype)
    x = torch.randn(1, ROWS[-1], inner, generator=generator).to(dtype)
    shift = torch.randn(out, generator=generator).to(dtype) if bias else None
    model = tables()
    layer = model.add_linear(weight, shift, bits=bits)
    exact = exact_product(x[0], weight, shift, bits)
    begin(model, ROWS[-1])
    whole = layer(x)
    relative = 1e-6 if dtype == torch.float32 else 2**-8
    assert torch.allclose(whole[0].double(), exact, rtol=relative, atol=1e-6 * float(exact.abs().max()))
    for rows in ROWS:
        begin(model, rows)
        assert torch.equal(layer(x[:, :rows].contiguous()), whole[:, :rows]), "a row does not depend on the others"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", [8, 4])
def test_experts(bits: int, dtype: torch.dtype) -> None:
    """Each row is that of a layer with the weights of its expert, to the last bit; scales begin anywhere."""
    count, inner, out, rows = 5, 64, 70, 9
    generator = torch.Generator().manual_seed(bits)
    weights = torch.randn(count, out, inner, generator=generator).to(dtype)
    biases = torch.randn(count, out, generator=generator).to(dtype)
    x = torch.randn(rows, inner, generator=generator).to(dtype)
    chosen = torch.randint(0, count, (rows, 2), generator=generator)
    model = tables()
    experts = model.add_experts(weights, biases, bits=bits)
    alone = [model.add_linear(weight, bias, bits=bits) for weight, bias in zip(weights, biases, strict=True)]
    begin(model, rows)
    found = experts(x, chosen).view(rows, 2, out)
    for row, choices in enumerate(chosen.tolist()):
        for place, expert in enumerate(choices):
            begin(model, 1)
            assert torch.equal(found[row, place], alone[expert](x[None, row : row + 1])[0, 0])


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", QUANTIZATIONS)
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_mixtures(name: str, kind: str) -> None:
    """Experts are rounded, too, are counted, and with ``exact`` drafted text is plain text, to the token."""
    pair = copy.deepcopy(model_of(name)).bfloat16(), TOKENIZER
    prompts = [prompt(11, 1), prompt(6, 2)]
    params = SamplingParams(max_new_tokens=12, ignore_eos=True, gamma=3)
    plain = LLM(pair, "none", quantize=kind, exact=True, compile=False)
    stacks = [part for part in plain.target.module.modules() if isinstance(part, PackedExperts)]
    assert len(stacks) == 2 * plain.target.config.num_hidden_layers and min(part.bits for part in stacks) < 16
    report = plain.target.weights.quantization
    assert report is not None
    assert report.layers + len(report.kept) == sum(
        isinstance(part, PackedLayer) for part in plain.target.module.modules()
    )
    wanted = [out.token_ids for out in plain.generate(prompts, params)]
    drafter = Branching(texts_of(prompts, wanted), "sometimes", VOCAB)
    drafted = LLM(pair, drafter, quantize=kind, exact=True, compile=False)
    assert [out.token_ids for out in drafted.generate(prompts, params)] == wanted


def test_the_error_of_a_stack_is_that_of_its_experts() -> None:
    """One that cannot bear the rounding keeps its weights; the other stacks have 8 or 4 bits."""
    model = copy.deepcopy(model_of("qwen3_moe"))
    layer = model.model.layers[0]
    stack = layer.mlp.experts.gate_up_proj
    with torch.no_grad():  # the weights of one input outgrow the others, and no output shows it
        stack[:, :, 0] *= 3000
        layer.post_attention_layernorm.weight[0] /= 3000
    errors, _ = layer_errors(model, {"input_ids": torch.tensor([prompt(40, 1)])}, ("int8", "int4"))
    bits = choose_bits("int4", errors, model.lm_head)
    other = model.model.layers[1].mlp.experts
    assert errors[id(other.gate_up_proj)]["int8"] < errors[id(other.gate_up_proj)]["int4"]
    assert [bits[id(part)] for part in (stack, other.gate_up_proj, other.down_proj)] == [16, 4, 8]


@pytest.mark.parametrize("bits", [8, 4])
def test_extremes_do_not_saturate(bits: int) -> None:
    """Products of the largest bytes: sums in 16 bits, as instructions before VNNI make them, would be cut off."""
    weight, x = torch.full((16, 4096), 8.0), torch.ones(1, 1, 4096)
    weight[8:] = -8.0
    model = tables()
    layer = model.add_linear(weight, None, bits=bits)
    begin(model, 1)
    torch.testing.assert_close(layer(x)[0, 0], torch.tensor([32768.0] * 8 + [-32768.0] * 8), rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("bits", [8, 4])
def test_zeros(bits: int) -> None:
    """Rows, channels, and 32 neighbours of nothing but zeros have no scale to be divided by."""
    weight = torch.randn(20, 64)
    weight[3], weight[5, 32:] = 0.0, 0.0
    model = tables()
    layer = model.add_linear(weight, torch.ones(20), bits=bits)
    begin(model, 1)
    assert torch.equal(layer(torch.zeros(1, 1, 64)), torch.ones(1, 1, 20))
    got = layer(torch.cat([torch.zeros(32), torch.ones(32)])[None, None])[0, 0]
    assert got[3] == 1.0 and got[5] == 1.0 and got.isfinite().all()


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("place", [3, 64])
def test_what_is_no_number_is_seen(bits: int, place: int) -> None:
    """A NaN of a broken model must not become a likely text; the other rows do not see it."""
    inner = 64 if bits == 4 else 66  # the last two by themselves
    x = torch.randn(1, 3, inner)
    layers = tables()
    layer = layers.add_linear(torch.randn(20, inner), None, bits=bits)
    begin(layers, 3)
    good = layer(x)
    x[0, 1, min(place, inner - 1)] = torch.nan
    begin(layers, 3)
    got = layer(x)
    assert got[0, 1].isnan().all()
    assert torch.equal(got[0, ::2], good[0, ::2])


def test_numbers_of_all_sizes() -> None:
    """4 bits: neighbours 10^30 times larger spoil no other group, and the largest of a group is kept."""
    weight = torch.randn(8, 96)
    weight[:, :32] *= 1e30
    weight[:, 32:64] *= 1e-30
    numbers, scales = sakiyomi.kernels.native.to_halves(weight)
    back = ((numbers.float() - 8).unflatten(1, (3, 32)) * scales.float()[..., None]).flatten(1)
    for part in (slice(0, 32), slice(32, 64), slice(64, 96)):
        own, other = weight[:, part], back[:, part]
        largest = own.abs().argmax(1, keepdim=True)
        torch.testing.assert_close(other.gather(1, largest), own.gather(1, largest), rtol=2**-8, atol=0.0)
        # Half a step, or a whole one where the largest has the other sign; and the scale's own rounding.
        assert ((own - other).abs() <= 1.05 * own.abs().amax(1, keepdim=True) / 8).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_siblings_of_mixed_bits(dtype: torch.dtype) -> None:
    """Computed together, each gives what it gives alone."""
    weights = {16: torch.randn(40, 64), 8: torch.randn(70, 64), 4: torch.randn(33, 64)}
    alone, model = tables(), tables()
    single = [alone.add_linear(weight.to(dtype), None, bits=bits) for bits, weight in weights.items()]
    layers = [model.add_linear(weight.to(dtype), None, bits=bits) for bits, weight in weights.items()]
    join_siblings(model, layers)
    for rows in (1, 8, 300):
        x = torch.randn(1, rows, 64).to(dtype)
        for order in ((0, 1, 2), (2, 0, 1)):
            begin(model, rows)
            together = {i: layers[i](x) for i in order}
            begin(alone, rows)
            for i, layer in enumerate(single):
                assert torch.equal(together[i], layer(x))


# --- models -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["int8", "int4"])
def tales(request: pytest.FixtureRequest) -> LLM:
    return LLM("tales", "model:tales-draft", quantize=request.param, compile=False, exact=True)


@pytest.mark.thorough
def test_what_changed_is_said(tales: LLM) -> None:
    report = tales.target.weights.quantization
    assert report is not None
    assert report.layers + len(report.kept) == 12 * 7 + 1
    agreement, divergence = {"int8": (0.93, 0.02), "int4": (0.8, 0.2)}[report.kind]
    assert report.agreement > agreement and 0 < report.divergence < divergence
    assert str(report).startswith(f"{report.kind}: {report.layers} layers")
    assert f"{report.agreement:.1%}" in str(report)


@pytest.mark.thorough
@pytest.mark.parametrize("values", [{}, {"temperature": 0.8, "seed": 3}])
def test_exact_holds(tales: LLM, values: dict[str, float]) -> None:
    """Sums of whole numbers do not depend on their order, let alone on the other rows."""
    params = [SamplingParams(max_new_tokens=40, gamma=gamma, **values) for gamma in (1, 3, 7)]  # type: ignore[arg-type]
    assert tales.target.weights.quantization is not None
    plain = LLM("tales", "none", quantize=tales.target.weights.quantization.kind, compile=False, exact=True)
    wanted = plain.generate([PROMPT], params[0])[0].token_ids
    assert [tales.generate([PROMPT], each)[0].token_ids for each in params] == [wanted] * 3
    assert tales.generate([PROMPT, "The sea", PROMPT], params[1])[0].token_ids == wanted


def test_a_layer_with_outliers_keeps_its_weights() -> None:
    """One input outgrows the others and brings nothing itself: rounded by it, the others are lost."""
    model = tiny_llama(vocab=VOCAB, dim=64)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0] *= 3000.0
        model.model.layers[0].mlp.down_proj.weight[:, 0] = 0.0
    errors, logits = layer_errors(model, {"input_ids": torch.tensor([prompt(50)])})
    assert logits.shape == (50, VOCAB)
    assert errors[id(model.model.layers[0].mlp.down_proj)]["int8"] > 4 * QUANTIZATIONS["int8"].most
    llm = LLM((model, TOKENIZER), "none", quantize="int8", compile=False)
    assert llm.target.weights.quantization is not None
    assert "model.layers.0.mlp.down_proj" in llm.target.weights.quantization.kept
    assert llm.target.weights.quantization.agreement > 0.8


def bits_of(llm: LLM) -> dict[str, int]:
    return {name: layer.bits for name, layer in llm.target.module.named_modules() if isinstance(layer, PackedLinear)}


def test_what_has_4_bits() -> None:
    """Not the head, and not a layer whose inputs are no whole groups of 32."""
    llm = LLM((tiny_llama(dim=48, intermediate_size=64), TOKENIZER), "none", quantize="int4", compile=False)
    for name, bits in bits_of(llm).items():
        assert bits == (4 if name.endswith("down_proj") else 8), name
    llm = LLM((tiny_llama(dim=64), TOKENIZER), "none", quantize="int4", compile=False)
    for name, bits in bits_of(llm).items():
        assert bits == (8 if name == "lm_head" else 4), name


def test_a_layer_that_bears_8_bits_has_8() -> None:
    layers = [nn.Linear(2, 2) for _ in range(5)]
    found = [
        {"int8": 0.01, "int4": 0.1},
        {"int8": 0.01, "int4": 0.5},
        {"int8": 0.5, "int4": 0.5},
        {"int8": 0.01},  # no whole groups of 32
        {"int8": 0.01, "int4": 0.1},
    ]
    errors = {id(layer): each for layer, each in zip(layers, found, strict=True)}
    assert list(choose_bits("int4", errors, layers[4]).values()) == [4, 8, 16, 8, 8]
    assert list(choose_bits("int8", errors, layers[4]).values()) == [8, 8, 16, 8, 8]


def test_errors_are_those_of_the_kernels() -> None:
    """What is measured before the packing is what the packed layer then does."""
    model = tiny_llama(vocab=VOCAB, dim=64)
    ids = torch.tensor([prompt(64)])
    layer = model.model.layers[0].mlp.down_proj
    errors, _ = layer_errors(model, {"input_ids": ids}, ("int8", "int4"))
    seen: list[Tensor] = []
    with torch.no_grad():
        hook = layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0][:, ::4].contiguous()))
        model(ids)
        hook.remove()
        wanted, native = layer(seen[0]), tables()
        for kind, bits in (("int8", 8), ("int4", 4)):
            begin(native, seen[0].shape[1])
            got = native.add_linear(layer.weight, None, bits=bits)(seen[0])
            assert float((got - wanted).norm() / wanted.norm()) == pytest.approx(errors[id(layer)][kind], rel=0.01)


def test_compare() -> None:
    logits = torch.randn(20, 50)
    assert compare(logits, logits) == (1.0, pytest.approx(0.0, abs=1e-6))
    assert compare(logits, -logits)[0] == 0.0


def test_what_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="quantize='int3'; expected None, 'int8' or 'int4'"):
        LLM("tales", quantize="int3")
    monkeypatch.setattr("sakiyomi.kernels.quantization.native", lambda: None)
    with pytest.raises(UnsupportedError, match="quantize='int8' needs the compiled CPU kernels"):
        LLM((model_of("llama"), TOKENIZER), "none", quantize="int8", compile=False)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_the_command_says_what_changed(kind: str) -> None:
    options = ["--quantize", kind, "--compile", "false", "--max-new-tokens", "4", "--json"]
    CliRunner().invoke(app, ["generate", PROMPT, *options])  # which may say where it kept a packed copy
    result = CliRunner().invoke(app, ["generate", PROMPT, *options])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout.splitlines()[-1])["rounding"]
    assert found["kind"] == kind and found["tokens"] == 512 and found["agreement"] > 0.8
    line, _ = result.stderr.splitlines()  # the other one is about speed
    assert line.startswith(f"{kind}: ") and f"same {found['agreement']:.1%} of the time" in line

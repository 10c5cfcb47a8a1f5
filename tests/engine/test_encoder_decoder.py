"""Encoder-decoder targets: the same tokens as transformers' ``generate``, with every kind of draft, tree and batch.

fp32 on the CPU, tiny random models: where a test fails, the engine's text is not the target's.
"""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from sakiyomi import LLM, SamplingParams
from sakiyomi.drafters.model import ModelDrafter
from sakiyomi.engine.plain import EngineView
from sakiyomi.kernels.batch import BatchPlan, SequenceRows
from sakiyomi.kernels.native import PackedLinear, PackedWeights
from sakiyomi.model_executor.attention.cpu import CpuBackend
from sakiyomi.model_executor.attention.torch import TorchBackend
from sakiyomi.model_executor.build import build_runner
from sakiyomi.model_executor.encoder_decoder.decoder import Encoder
from sakiyomi.model_executor.widened import PRODUCTS
from seq2seq_toys import ALL, FOUR, NEW, TOKENIZER, VOCAB, build, model_of, reference, sources
from watched_rounds import watch_rounds


@pytest.fixture
def plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the compiled kernels."""
    monkeypatch.setattr(PackedWeights, "create", lambda: None)


@cache
def wanted(name: str) -> list[list[int]]:
    return [reference(model_of(name), source) for source in sources(name)]


def drafter(name: str, which: str) -> Any:
    """By name: the target itself as its draft, another model of the family, or a spec."""
    if which in ("self", "other"):
        model = model_of(name) if which == "self" else model_of(name, 7, 1)
        return ModelDrafter(build_runner(model, compile=False), VOCAB)
    return which


def llm_of(name: str, which: str = "none", **options: Any) -> LLM:
    return LLM((model_of(name), TOKENIZER), drafter(name, which), compile=False, strict=True, **options)


def params(**values: Any) -> SamplingParams:
    return SamplingParams(**({"max_new_tokens": NEW, "ignore_eos": True} | values))


def tokens(llm: LLM, prompts: list[Any], values: SamplingParams) -> list[list[int]]:
    return [out.token_ids for out in llm.generate(prompts, values)]


HEAT = {"bart": 1.0, "marian": 1.0, "t5": 30.0, "whisper": 1.0}
"""Temperatures at which text is drawn from several tokens."""
SIZES = {"chain": {"gamma": 3}, "tree": {"gamma": 4, "nodes": 12}, "auto": {}}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ALL)
def test_plain_text_is_that_of_transformers_alone_and_in_a_batch(name: str) -> None:
    llm = llm_of(name)
    assert tokens(llm, sources(name), params()) == wanted(name)
    assert [tokens(llm, [source], params())[0] for source in sources(name)] == wanted(name)
    assert len({tuple(text) for text in wanted(name)}) == 3, "the texts do not depend on the source"
    assert sum(len(set(text)) for text in wanted(name)) > 12, "the texts go round in small circles"


@pytest.mark.few(1)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("which", ["self", "other"])
@pytest.mark.parametrize("name", FOUR)
def test_text_with_a_draft_model_is_that_of_transformers(name: str, which: str, size: str) -> None:
    llm = llm_of(name, which)
    done = llm.generate(sources(name), params(**SIZES[size]))
    assert [out.token_ids for out in done] == wanted(name)
    if size == "auto":
        return  # how much is read ahead then depends on what passes cost here
    assert all(out.stats.drafted for out in done)
    if which == "self":  # what the draft reads is what the target reads, in trees too
        assert min(out.stats.accepted for out in done) > NEW / 3
    if which == "self" and size == "chain":
        assert all(out.stats.acceptance_rate == 1.0 for out in done)


@pytest.mark.few(3)
@pytest.mark.parametrize("which", ["prompt-lookup", "suffix", "ngram", "early-exit:1", "oracle:0.7"])
@pytest.mark.parametrize("name", FOUR)
def test_text_with_drafts_without_a_model_is_that_of_transformers(name: str, which: str) -> None:
    llm = llm_of(name, which)
    assert tokens(llm, sources(name), params(gamma=4)) == wanted(name)
    assert not llm.engine.busy


@pytest.mark.few(3)
@pytest.mark.parametrize("which", ["none", "self", "suffix"])
@pytest.mark.parametrize("name", FOUR)
def test_rounds_in_the_kernels_read_each_requests_source(
    name: str, which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also log probabilities come from there, which speech asks for."""
    draft = ModelDrafter(build_runner(model_of(name), max_slots=3), VOCAB) if which == "self" else which
    llm = LLM((model_of(name), TOKENIZER), draft, strict=True, max_batch=3)
    values, plain = params(gamma=3, logprobs=0), llm_of(name).generate(sources(name), params(logprobs=0))
    for _ in range(3):
        llm.generate(sources(name), values)
        llm.wait()
    seen = watch_rounds(monkeypatch)
    done = llm.generate(sources(name), values)
    assert [out.token_ids for out in done] == wanted(name)
    assert all(seen) and len(seen) > 5
    for out, alone in zip(done, plain, strict=True):
        assert [entry.logprob for entry in out.trace] == [
            pytest.approx(entry.logprob, abs=1e-4) for entry in alone.trace
        ]


@pytest.mark.few(1)
@pytest.mark.parametrize("name", FOUR)
def test_text_without_the_compiled_kernels_is_that_of_transformers(name: str, plain_torch: None) -> None:
    for which, size in (("none", "auto"), ("self", "tree")):
        llm = llm_of(name, which)
        assert isinstance(llm.target.backend, TorchBackend)
        assert tokens(llm, sources(name), params(**SIZES[size])) == wanted(name)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", FOUR)
def test_one_place_serves_requests_one_after_the_other(name: str) -> None:
    """A source left in a slot must not be taken for the next request's."""
    llm = llm_of(name, "self", max_batch=1)
    assert tokens(llm, sources(name), params(gamma=2)) == wanted(name)


@pytest.mark.few(3)
@pytest.mark.parametrize("name", FOUR)
def test_an_end_token_ends_the_text_as_in_transformers(name: str) -> None:
    model = copy.deepcopy(model_of(name))
    end = wanted(name)[0][7]
    model.generation_config.eos_token_id = end
    expected = [reference(model, source, ended=True) for source in sources(name)]
    assert len(expected[0]) <= 8
    llm = LLM((model, TOKENIZER), drafter(name, "self"), compile=False, strict=True)
    done = llm.generate(sources(name), SamplingParams(max_new_tokens=NEW, gamma=3))
    assert [out.token_ids for out in done] == expected
    assert done[0].finish_reason == "stop"


@pytest.mark.thorough
@pytest.mark.parametrize("name", FOUR)
def test_a_seed_gives_one_text_whatever_reads_ahead(name: str) -> None:
    """The coupled rule: an audit of sampled text is an equality."""
    values = {"temperature": HEAT[name], "top_p": 0.95, "seed": 3}
    plain = tokens(llm_of(name), sources(name), params(**values))
    assert plain != wanted(name)
    for which, size in (("self", "tree"), ("other", "chain"), ("other", "tree"), ("prompt-lookup", "chain")):
        assert tokens(llm_of(name, which), sources(name), params(**values, **SIZES[size])) == plain, (which, size)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", FOUR)
def test_exact_text_is_bit_equal(name: str) -> None:
    plain = llm_of(name, exact=True).generate(sources(name), params())
    ahead = llm_of(name, "self", exact=True).generate(sources(name), params(gamma=3))
    assert [out.token_ids for out in plain] == wanted(name)
    for a, b in zip(plain, ahead, strict=True):
        assert [entry.target_prob for entry in a.trace] == [entry.target_prob for entry in b.trace]


@pytest.mark.parametrize("name", ["bart", "t5"])
def test_samples_of_one_source_are_read_once(name: str) -> None:
    llm = llm_of(name, max_batch=4)
    calls = counted(llm)
    ids, text = sources(name)[0], TOKENIZER.decode(sources(name)[1])
    first, other = llm.generate([ids, text], params(n=3, temperature=HEAT[name], seed=1))
    assert len({tuple(out.token_ids) for out in first}) == 3
    assert len(calls) == 2
    assert first[0].token_ids != other[0].token_ids


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["bart", "marian", "whisper"])
def test_text_up_to_the_last_position(name: str) -> None:
    """Nothing is drafted into positions that the decoder does not have."""
    limit = "max_target_positions" if name == "whisper" else "max_position_embeddings"
    model = build(name, **{limit: 20})
    for which in ("none", "self"):
        draft = ModelDrafter(build_runner(model, compile=False), VOCAB) if which == "self" else which
        llm = LLM((model, TOKENIZER), draft, compile=False, strict=True)
        done = llm.generate(sources(name), params(max_new_tokens=50, gamma=4))
        assert [out.token_ids for out in done] == [reference(model, source, 19) for source in sources(name)]
        assert all(out.finish_reason == "length" for out in done)


def test_what_a_pass_reads_is_less_than_the_model() -> None:
    """Not the encoder, and not what makes cross-attention's keys and values: those are read once a request."""
    model = model_of("t5")
    ends = ("EncDecAttention.k", "EncDecAttention.v")
    cross = [module for path, module in model.decoder.named_modules() if path.endswith(ends)]
    read = {id(p): p.nbytes for p in (*model.decoder.parameters(), *model.lm_head.parameters())}
    bias = model.decoder.block[0].layer[0].SelfAttention.relative_attention_bias  # an embedding
    assert len(cross) == 4
    elsewhere = sum(module.weight.nbytes for module in (*cross, bias))
    padding = 4 * 32 * 4  # the head's 60 channels are packed as 64
    assert build_runner(model, compile=False).weights.bytes == sum(read.values()) - elsewhere + padding


def counted(llm: LLM) -> list[object]:
    """Calls of the encoder from now on."""
    calls: list[object] = []
    assert llm.target.weights.encoder is not None
    llm.target.weights.encoder.module.register_forward_hook(lambda module, inputs, output: calls.append(module))
    return calls


def test_a_source_is_read_once_a_request() -> None:
    llm = llm_of("marian", "other")
    calls = counted(llm)
    llm.generate(sources("marian"), params(gamma=2))
    assert len(calls) == 3


def test_a_draft_with_the_targets_encoder_has_it_run_once(tmp_path: Path) -> None:
    """For both; another encoder runs for itself. The text is the plain one."""
    model_of("marian").save_pretrained(tmp_path / "same")
    model_of("marian", 7, 1).save_pretrained(tmp_path / "other")
    for name, lent in (("same", True), ("other", False)):
        TOKENIZER.save_pretrained(tmp_path / name)
        llm = LLM((model_of("marian"), TOKENIZER), f"model:{tmp_path / name}", compile=False, strict=True)
        assert isinstance(llm.draft, ModelDrafter)
        own = llm.draft.model.weights.encoder
        assert own is not None
        calls: list[object] = []
        own.module.register_forward_hook(lambda module, *_, at=calls: at.append(module))
        found = tokens(llm, sources("marian"), params(gamma=2))
        assert found == tokens(llm_of("marian"), sources("marian"), params())
        assert (own.lender is not None, not calls) == (lent, lent)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["t5", "whisper"])
def test_the_kernels_run_the_encoder(name: str) -> None:
    """Its linear layers, rounded where that is asked for; what it reads stays nearly the same."""
    read = []
    for quantize in (None, "int8"):
        llm = LLM((copy.deepcopy(model_of(name)), TOKENIZER), "none", compile=False, quantize=quantize)
        encoder, source = llm.target.weights.encoder, llm.engine.process(sources(name)[0], params()).source
        assert encoder is not None and source is not None
        layers = [part for part in encoder.module.modules() if isinstance(part, PackedLinear)]
        assert layers and {layer.bits for layer in layers} == {8 if quantize else 16}
        with llm.target.cache.lent(8) as slot:
            llm.target.make_room(slot, 8, source)
        (hidden,) = source.encoded.values()
        read.append(hidden)
    assert 0 < float((read[1] - read[0]).norm() / read[0].norm()) < 0.05


class Noting(TorchFunctionMode):
    """Notes in which types torch's products are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.types: set[torch.dtype] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in PRODUCTS:
            self.types.add(args[1].dtype)
        return func(*args, **(kwargs or {}))


@pytest.mark.few(1)
@pytest.mark.parametrize("name", FOUR)
def test_sources_are_read_in_float32_where_the_processor_multiplies_no_16_bits(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An encoder that the kernels do not have: its weights stay in bfloat16, as do its results, torch's own but for the
    order of sums; drafted text is the plain text of the same precision.
    """
    monkeypatch.setattr(Encoder, "pack", lambda *_, **__: None)
    model = copy.deepcopy(model_of(name)).bfloat16()
    llm = LLM((model, TOKENIZER), drafter(name, "other"), compile=False)
    encoder = llm.target.weights.encoder
    assert encoder is not None
    source = llm.engine.process(sources(name)[0], params()).source
    found, types = [], []
    for multiplies in (True, False):
        monkeypatch.setattr("sakiyomi.model_executor.widened.multiplies_bf16", lambda at=multiplies: at)
        assert source is not None
        source.encoded.clear()
        with Noting() as noted, torch.no_grad():
            found.append(encoder.read(source))
        types.append(noted.types)
    assert types == [{torch.bfloat16}, {torch.float32}]
    assert found[1].dtype == torch.bfloat16
    torch.testing.assert_close(*found, atol=0.03 * float(found[0].abs().max()), rtol=0.0)
    plain = [EngineView(llm).generate([llm.engine.process(one, params())], params())[0] for one in sources(name)]
    assert tokens(llm, sources(name), params(gamma=3)) == [out.token_ids for out in plain]


@pytest.mark.few(2)
@pytest.mark.parametrize("name", FOUR)
def test_the_users_model_is_as_it_was(name: str) -> None:
    model = build(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    modules = [(path, type(module)) for path, module in model.named_modules()]
    implementation = model.config._attn_implementation
    llm = LLM((model, TOKENIZER), "none", compile=False)
    llm.generate(sources(name), params())
    assert [(path, type(module)) for path, module in model.named_modules()] == modules
    assert model.config._attn_implementation == implementation
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert [reference(model, source) for source in sources(name)] == wanted(name)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["bart", "t5"])
def test_streams_and_conversations_read_their_own_source(name: str) -> None:
    llm = llm_of(name, "self")
    for source, text in zip(sources(name), wanted(name), strict=True):
        assert [t for step in llm.stream(source, params(gamma=2)) for t in step.token_ids] == text
    with llm.conversation() as conversation:
        found = [conversation.generate(source, params(gamma=2)).token_ids for source in sources(name)]
    assert found == wanted(name)


# ---------------------------------------------------------------- that these tests would notice


def test_a_wrong_relative_bias_is_noticed() -> None:
    """T5's bias one place off, none, or that of another head: the text is another one."""
    for broken in (lambda table: table.roll(1, 1), lambda table: 0 * table, lambda table: table.flip(0)):
        llm = llm_of("t5")
        assert isinstance(llm.target.backend, CpuBackend)
        llm.target.module.distances = broken(llm.target.module.distances).contiguous()
        llm.target.take_backend()
        assert tokens(llm, sources("t5"), params()) != wanted("t5")


def test_a_bias_by_column_is_noticed_in_trees(plain_torch: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a tree siblings lie in different columns at one depth."""
    llm = llm_of("t5", "self")
    assert isinstance(llm.target.backend, TorchBackend)
    good = llm.generate(sources("t5"), params(**SIZES["tree"]))
    assert [out.token_ids for out in good] == wanted("t5")

    def by_column(self: BatchPlan, segment: int, device: Any = "cpu") -> torch.Tensor:
        _, _, rows, length, _ = self.table[segment]
        place = torch.arange(length + rows)
        return (place[length:, None] - place).clamp_min(0)

    monkeypatch.setattr(BatchPlan, "distances", by_column)
    done = llm.generate(sources("t5"), params(**SIZES["tree"]))
    assert [out.token_ids for out in done] != wanted("t5")


def test_wrong_positions_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("bart", "marian", "whisper"):
        llm = llm_of(name)
        embed = llm.target.module.positions.forward
        monkeypatch.setattr(
            llm.target.module.positions,
            "forward",
            lambda ids, position_ids, embed=embed: embed(ids, position_ids=torch.arange(position_ids.shape[0])),
        )
        assert tokens(llm, sources(name), params()) != wanted(name), name


@pytest.mark.parametrize("name", FOUR)
def test_the_source_of_another_request_is_noticed(name: str) -> None:
    llm = llm_of(name)
    assert llm.target.sources is not None
    llm.target.sources.holds = lambda slot, source: bool(llm.target.sources.lengths[slot])  # type: ignore[method-assign]
    first, second, _ = sources(name)
    tokens(llm, [first], params())
    assert tokens(llm, [second], params()) != [wanted(name)[1]]


# ---------------------------------------------------------------- kernels


@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["bart", "t5"])
def test_compiled_and_plain_attention_agree_on_trees(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cross-attention, and the bias by distance over prefix and own path; a request without a source beside them."""
    found = []
    for plain in (False, True):
        if plain:
            monkeypatch.setattr(PackedWeights, "create", lambda: None)
        model = build_runner(build(name).to(dtype), compile=False)
        assert isinstance(model.backend, TorchBackend if plain else CpuBackend)
        intake = LLM((model_of(name), TOKENIZER), "none", compile=False).engine._requests.process
        slots = [model.cache.take() for _ in range(3)]
        for slot, source in zip(slots[:2], sources(name), strict=False):
            model.make_room(slot, 64, intake(source, SamplingParams()).source)
        model.make_room(slots[2], 64)
        model.score([SequenceRows(slot, 0, list(range(3, 3 + 5 + slot)), prompt=True) for slot in slots])
        parents = (-1, 0, 0, 1, 1, 3, 2)
        parts = [SequenceRows(slot, 5 + slot, list(range(10, 17)), parents) for slot in slots]
        found.append(model.score(parts).logits.float())
    assert found[0].isfinite().all()
    tolerance = (1e-5 if dtype == torch.float32 else 0.05) * float(found[0].abs().max())
    torch.testing.assert_close(found[0], found[1], atol=tolerance, rtol=0.0)


# ------------------------------------------------------------ weights in 8 bits


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ALL)
def test_drafts_change_nothing_in_8_bits(name: str) -> None:
    plain = llm_of(name, quantize="int8")
    report = plain.target.weights.quantization
    assert report is not None and report.layers > 20 and not report.kept
    expected = tokens(plain, sources(name), params())
    assert tokens(llm_of(name, "other", quantize="int8"), sources(name), params(gamma=3)) == expected


@pytest.mark.parametrize("name", ALL)
def test_quantizing_is_judged_on_what_the_model_computes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no layer is rounded, logits through our cache are those of the whole model: no position is off."""
    from sakiyomi.model_executor.encoder_decoder import judged

    monkeypatch.setattr(judged, "choose_bits", lambda *_: {})
    report = llm_of(name, quantize="int8").target.weights.quantization
    assert report is not None and report.layers == 0 and len(report.kept) > 20
    assert report.agreement == 1.0 and report.divergence < 1e-4


def test_the_target_in_8_bits_drafts_for_itself() -> None:
    assert tokens(llm_of("bart", "self-int8"), sources("bart"), params(gamma=4)) == wanted("bart")

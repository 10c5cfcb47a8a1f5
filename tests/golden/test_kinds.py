"""Attention of other kinds than llama's: greedy text equals transformers', whatever way it takes through the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import transformers as hf
from torch.overrides import TorchFunctionMode

from architectures import KINDS, VOCAB, WINDOW, greedy, make, model_of, prompt, references, widen
from drafters import Branching, Scripted, texts_of
from sakiyomi import LLM, InputError, SamplingParams, UnsupportedError
from sakiyomi.kernels.native import native
from sakiyomi.model_executor.attention import latent
from sakiyomi.model_executor.build import build_runner
from sakiyomi.model_executor.probe import expect
from sakiyomi.model_executor.proof import prove
from sakiyomi.model_executor.runner import ModelRunner
from sakiyomi.model_executor.structural_copy import structural_copy
from toys import character_tokenizer

TOKENIZER = character_tokenizer("".join(map(chr, range(0x3041, 0x3041 + VOCAB - 2))))
NEW = 16
PROMPTS = [prompt(11, 1), prompt(3, 2), prompt(19, 3)]
"""Longer than windows and chunks, or so in the end."""
WITHOUT_EXPERTS = ["granite_swa", "bloom", "mpt", "falcon-alibi", "gemma3n", "gemma4", "minicpm3"]


def wanted(name: str) -> list[list[int]]:
    return references(name, PROMPTS, NEW)


def drafter(name: str, kind: Any) -> Any:
    return kind(texts_of(PROMPTS, wanted(name)), "sometimes", VOCAB)


def check(llm: LLM, name: str) -> None:
    """Each prompt alone, and all in a batch."""
    values = SamplingParams(max_new_tokens=NEW, ignore_eos=True, gamma=3)
    for chosen in ([0], [1], [0, 1, 2]):
        done = llm.generate([PROMPTS[i] for i in chosen], values)
        assert [out.token_ids for out in done] == [wanted(name)[i] for i in chosen], chosen
    assert not llm.engine._speculation.broken, "the drafter raised"


@pytest.mark.few(1)
@pytest.mark.parametrize("how", ["chain", "tree", "chunks", "traced"])
@pytest.mark.parametrize("name", KINDS)
def test_greedy_text(name: str, how: str) -> None:
    draft = drafter(name, Scripted if how == "chain" else Branching) if how in ("chain", "tree") else "none"
    options: dict[str, Any] = {"chunk_size": 4} if how == "chunks" else {}
    check(LLM((model_of(name), TOKENIZER), draft, compile="auto" if how == "traced" else False, **options), name)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", KINDS)
def test_in_plain_torch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sakiyomi.kernels.native.native", lambda: None)
    check(LLM((model_of(name), TOKENIZER), drafter(name, Branching), compile=False), name)


@pytest.mark.thorough
@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("name", WITHOUT_EXPERTS)
def test_exact(name: str, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that do not depend on their company."""
    if not compiled:
        monkeypatch.setattr("sakiyomi.kernels.native.native", lambda: None)
    check(LLM((model_of(name), TOKENIZER), drafter(name, Branching), compile=False, exact=True), name)


@pytest.mark.few(8)
@pytest.mark.skipif(native() is None, reason="the kernels cannot be compiled here")
@pytest.mark.parametrize("name", KINDS)
def test_the_kernels_serve_them(name: str) -> None:
    runner = build_runner(model_of(name), compile=False)
    assert runner.weights.packed is not None
    assert not runner.weights.own_attention


def test_what_is_kept_of_each_layer() -> None:
    """Windows and chunks are read from masks, widths and sinks from calls."""
    phimoe, llama4, gemma4, mimo = (
        build_runner(model_of(name), compile=False).weights.shapes
        for name in ("phimoe", "llama4-chunked", "gemma4", "mimo_v2_flash")
    )
    assert [shape.window for shape in phimoe] == [WINDOW] * 3
    assert [shape.chunk for shape in llama4] == [WINDOW] * 3
    assert [shape.key_dim for shape in gemma4] == [8, 12, 12]
    assert [shape.sinks is not None for shape in mimo] == [shape.window > 0 for shape in mimo]


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("bloom", {"cache": "quant-4"}, "ALiBi or chunks"),
        ("llama4-chunked", {"cache": "streaming", "kv_budget": 64}, "ALiBi or chunks"),
        ("gpt_oss", {"cache": "minference"}, "attention sinks"),
    ],
)
def test_policies_that_would_move_positions_are_refused(name: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        LLM((model_of(name), TOKENIZER), "none", compile=False, **options)


def drop(name: str, layer: int) -> Sequence[Any]:
    """What is kept of each layer, one of which forgets how far it sees and what is added to its scores."""
    shapes = build_runner(model_of(name), compile=False).weights.shapes
    old = shapes[layer]
    shapes[layer] = type(old)(old.heads, old.key_dim, old.value_dim)
    return shapes


@pytest.mark.few(1)
@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("name", ["gpt_oss", "bloom", "llama4-chunked", "phimoe"])
def test_the_proof_finds_what_is_left_out(name: str, large: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sinks, ALiBi, chunks or windows of one layer that attention does not know of."""
    if large:  # then on some of the layers
        monkeypatch.setattr("sakiyomi.model_executor.weights.LARGE", 0)
    broken = drop(name, 0)
    from sakiyomi.model_executor.weights import ModelWeights

    def forgetful(self: ModelWeights, *given: Any, **options: Any) -> None:
        own(self, *given, **options)
        self.shapes = broken
        assert self.expected is not None
        self.expected.windows.pop(0, None)

    own = ModelWeights.__init__
    monkeypatch.setattr(ModelWeights, "__init__", forgetful)
    with pytest.raises(UnsupportedError, match="other logits through our cache"):
        build_runner(model_of(name), compile=False)


def test_a_window_that_the_text_does_not_reach() -> None:
    """The proof's windows are shorter than its text; afterwards they are the model's own again."""
    config = KINDS["phimoe"]()
    config.sliding_window = 100
    model = make(config)
    runner = build_runner(model, compile=False)
    assert [shape.window for shape in runner.weights.shapes] == [100] * 3
    assert model.config.sliding_window == runner.module.config.sliding_window == 100
    tokens = prompt(130)
    llm = LLM((model, TOKENIZER), "none", compile=False)
    done = llm.generate([tokens], SamplingParams(max_new_tokens=8, ignore_eos=True))
    assert done[0].token_ids == greedy(model, tokens, 8)
    with torch.no_grad():
        config.sliding_window = 250
        far = make(config)
    assert greedy(far, tokens, 8) != done[0].token_ids, "the window makes no difference"


@pytest.mark.few(2)
@pytest.mark.parametrize(("name", "depth"), [("gpt_oss", [0, 1]), ("bloom", [0]), ("gemma3n", None)])
def test_a_large_model_is_proven_on_some_of_its_layers(
    name: str, depth: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as hold one of every kind."""
    depths: list[list[int] | None] = []

    def note(runner: ModelRunner) -> None:
        assert runner.weights.expected is not None
        depths.append(runner.weights.expected.layers)
        prove(runner)

    monkeypatch.setattr("sakiyomi.model_executor.weights.LARGE", 0)
    monkeypatch.setattr("sakiyomi.model_executor.build.prove", note)
    check(LLM((model_of(name), TOKENIZER), "none", compile=False), name)
    assert depths == [depth]


class Noting(TorchFunctionMode):
    """Notes of which types linear layers are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.types: list[torch.dtype] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.linear:
            self.types.append(args[1].dtype)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_proof_widens_weights_where_the_processor_multiplies_none_of_16_bits(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And gets torch's own logits but for the rounding of sums."""
    model = make(KINDS["gemma3n"]()).to(dtype)
    found, types = [], []
    for multiplies in (False, True):
        monkeypatch.setattr("sakiyomi.model_executor.widened.multiplies_bf16", lambda at=multiplies: at)
        with Noting() as noted:
            expected = expect(structural_copy(model), VOCAB, torch.device("cpu"), stateful=False)
        assert expected is not None
        found.append(expected.logits)
        types.append(set(noted.types))
    assert types == [{torch.float32}, {dtype}]
    torch.testing.assert_close(*found, atol=0.03 * float(found[1].abs().max()), rtol=0.0)


@pytest.mark.parametrize("kind", ["BigBirdPegasus", "Bart"])
def test_a_decoder_that_counts_positions_by_a_cache_is_noticed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes no positions of its own, and would begin anew in every pass if it were not given them."""
    sizes = {"d_model": 32, "decoder_layers": 3, "num_hidden_layers": 3, "decoder_attention_heads": 4}
    sizes |= {"decoder_ffn_dim": 48, "max_position_embeddings": 256, "vocab_size": VOCAB}
    config = getattr(hf, f"{kind}Config")(**sizes, is_decoder=True, is_encoder_decoder=False)
    model = getattr(hf, f"{kind}ForCausalLM")(config).eval()
    widen(model)
    build_runner(model, compile=False)
    monkeypatch.setattr("sakiyomi.model_executor.weights.take_positions", lambda module: 0)
    monkeypatch.setattr("sakiyomi.model_executor.own_forward.WAYS", ())
    with pytest.raises(UnsupportedError, match=r"differ by .* of the largest"):
        build_runner(model, compile=False)


def test_latents_are_kept_as_they_are_compressed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One head of latents and rotary parts, values among them; a policy and ``exact`` keep them expanded."""
    runner = build_runner(model_of("minicpm3"), compile=False)
    assert [(s.heads, s.key_dim, s.stored) for s in runner.weights.shapes] == [(1, 16 + 8, ("keys",))] * 3
    assert runner.cache.pair_bytes == 3 * (16 + 8) * 4
    exact = build_runner(model_of("minicpm3"), compile=False, exact=True)
    assert exact.cache.pair_bytes == 3 * 4 * (4 + 8 + 10) * 4
    evicting = LLM((model_of("minicpm3"), TOKENIZER), "none", compile=False, cache="streaming", kv_budget=64)
    assert [s.heads for s in evicting.target.weights.shapes] == [4] * 3
    monkeypatch.setattr(latent, "outputs", lambda module, found: found[..., : module.v_head_dim])
    monkeypatch.setattr("sakiyomi.model_executor.own_forward.WAYS", ())
    with pytest.raises(UnsupportedError, match="other logits through our cache"):
        build_runner(model_of("minicpm3"), compile=False)


@pytest.mark.skipif(native() is None, reason="prompts are expanded for the compiled kernels")
def test_prompts_of_latents_are_expanded_in_their_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunk by chunk, in a batch, beside others that write; where it pays. Wrong values would be seen."""
    prompts = [prompt(70, 4), prompt(45, 5), prompt(9, 6)]
    texts = references("minicpm3", prompts, NEW)
    values = SamplingParams(max_new_tokens=NEW, ignore_eos=True, gamma=3)
    expanded: list[int] = []

    def expand(module: Any, latents: Any) -> Any:
        expanded.append(len(latents))
        return own(module, latents)

    own = latent.expand
    monkeypatch.setattr(latent, "expand", expand)
    llm = LLM((model_of("minicpm3"), TOKENIZER), drafter("minicpm3", Branching), compile=False, chunk_size=32)
    for chosen in ([0], [2], [0, 1, 2]):
        expanded.clear()
        done = llm.generate([prompts[i] for i in chosen], values)
        assert [out.token_ids for out in done] == [texts[i] for i in chosen]
        assert bool(expanded) == (chosen != [2]) and {32, 0} <= {*expanded, *([32, 0] if chosen == [2] else [])}
    monkeypatch.setattr(latent, "expand", lambda module, latents: [2 * part for part in own(module, latents)])
    assert llm.generate([prompts[0]], values)[0].token_ids != texts[0]


def test_layers_that_share_keys_store_them_once() -> None:
    runner = build_runner(model_of("gemma3n"), compile=False)
    assert [shape.source for shape in runner.weights.shapes] == [None, None, 0]
    assert runner.cache.pair_bytes == 2 * 2 * 2 * 8 * 4  # two layers, keys and values of two heads
    with runner.cache.lent(8):
        assert runner.cache.keys[2] is runner.cache.keys[0]
        assert runner.cache.bytes == runner.cache.capacity(runner.cache.slots, runner.cache.room)


@pytest.mark.parametrize("name", ["minicpm3", "gemma3n"])
def test_a_prefix_of_what_is_stored_once(name: str) -> None:
    """Its copies are what a fresh request would read; one that was made of expanded keys is refused."""
    llm = LLM((model_of(name), TOKENIZER), "none", compile=False)
    values = SamplingParams(max_new_tokens=NEW, ignore_eos=True)
    prefix = llm.prefix(PROMPTS[2][:-1])
    with llm.conversation(prefix) as talk:
        assert talk.generate(PROMPTS[2], values).token_ids == wanted(name)[2]
    prefix.recipe.pop("stored")
    with pytest.raises(InputError, match="stored"):
        llm.conversation(prefix)

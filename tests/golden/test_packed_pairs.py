"""Caches in 8, 4 and 2 bits, alone and with a budget: reading ahead changes no token of the quantized target's text.

The oracle of what attention sees is transformers with keys and values that are rounded in its own attention.
"""

from __future__ import annotations

import copy
import itertools
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from architectures import CONFIGS, VOCAB, model_of, prompt, settled
from drafters import Branching, Fading, texts_of
from sakiyomi import LLM, SamplingParams
from sakiyomi.cache.eviction_plan import EvictionPlan
from sakiyomi.cache.policies.retaining.formats import write_heads
from sakiyomi.cache.policies.retaining.heads import RetainingHeads, RetainingShape
from sakiyomi.cache.policies.retaining.raw import Raw
from sakiyomi.cache.quantized import QuantizedKV
from sakiyomi.cache.quantized_levels import LeveledPacking
from sakiyomi.core.errors import InputError, UnsupportedError
from sakiyomi.model_executor.attention.torch import TorchBackend
from sakiyomi.model_executor.build import build_runner
from sakiyomi.model_executor.weights import ModelWeights
from toys import character_tokenizer, places_of

TOKENIZER = character_tokenizer("".join(map(chr, range(0x3041, 0x3041 + VOCAB - 2))))
NEW, CHUNK, BUDGET = 80, 48, 72
PROMPTS = [prompt(150, 1), prompt(5, 2), prompt(100, 3)]
"""Longer than a tail and some groups, shorter than any, and one that ends within a chunk."""
SMALL = "[residual=16]"


def options(spec: str) -> dict[str, Any]:
    budget = None if spec.startswith(("quant", "kvquant")) else BUDGET
    return {"cache": spec, "kv_budget": budget, "chunk_size": CHUNK, "compile": False}


@cache
def plain(name: str, spec: str) -> list[list[int]]:
    """The text of each prompt, nothing drafted."""
    llm = LLM((model_of(name), TOKENIZER), "none", **options(spec))
    return [out.token_ids for out in llm.generate(PROMPTS, params())]


def params(**values: Any) -> SamplingParams:
    return SamplingParams(**({"max_new_tokens": NEW, "ignore_eos": True} | values))


def drafted(name: str, spec: str, skill: Any, gamma: int, **more: Any) -> list[list[int]]:
    """The same by a drafter that is right now and then."""
    drafter = skill(texts_of(PROMPTS, plain(name, spec)), "sometimes", VOCAB)
    llm = LLM((model_of(name), TOKENIZER), drafter, **(options(spec) | more))
    if more.get("compile"):
        settled(llm)
    done = llm.generate(PROMPTS, params(gamma=gamma))
    assert not llm.engine._speculation.broken, "the drafter raised"
    assert sum(out.stats.accepted for out in done) > 20, "nothing was read ahead"
    packed = llm.target.cache.packed
    assert packed is not None and int(packed.count.max()) >= 32, "nothing was packed"
    return [out.token_ids for out in done]


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["quant-8", "quant-4", "quant-2", "kvquant-4", "kvquant-3", "kvquant-2"])
def test_reading_ahead_changes_nothing(kind: str) -> None:
    """Trees and chains in a batch of unequal lengths, against each prompt alone."""
    spec = kind + SMALL
    llm = LLM((model_of("llama"), TOKENIZER), "none", **options(spec))
    alone = [llm.generate([tokens], params())[0].token_ids for tokens in PROMPTS]
    for skill in (Branching, Fading):
        assert drafted("llama", spec, skill, 5) == plain("llama", spec) == alone


@pytest.mark.thorough
@pytest.mark.parametrize("name", [*CONFIGS, "gemma", "mixtral", "deepseek_v3"])
def test_every_architecture(name: str) -> None:
    spec = f"quant-4{SMALL}"
    assert drafted(name, spec, Branching, 3) == plain(name, spec)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["gpt_neox", "mistral", "glm", "llama3-rope"])
def test_keys_turned_back(name: str) -> None:
    """Partial rotations, neighbours as pairs, sliding windows, frequencies of their own."""
    spec = f"kvquant-3{SMALL}"
    assert drafted(name, spec, Branching, 3) == plain(name, spec)


@cache
def heads_of(name: str) -> str:
    """A folder with heads of random weights for this architecture."""
    heads = tuple(layer.heads for layer in LLM((model_of(name), TOKENIZER), "none", compile=False).target.cache.shapes)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = RetainingHeads(RetainingShape(Raw(model_of(name)).widths, heads, 24))
    folder = Path(tempfile.mkdtemp()) / name
    write_heads(made, folder)
    return str(folder)


@pytest.mark.thorough
@pytest.mark.parametrize("policy", ["h2o", "snapkv[window=16]", "streaming", "pyramidkv[window=8,pyramid=4]"])
def test_reading_ahead_with_a_budget(policy: str) -> None:
    spec = f"{policy}+quant-4{SMALL}"
    assert drafted("llama", spec, Branching, 4) == plain("llama", spec)


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "bits"), [("llama", 4), ("phi3", 2), ("gemma2", 8)])
def test_reading_ahead_with_retaining_heads(name: str, bits: int) -> None:
    spec = f"locret:{heads_of(name)}+quant-{bits}{SMALL}"
    assert drafted(name, spec, Branching, 4) == plain(name, spec)


@pytest.mark.thorough
@pytest.mark.parametrize("more", [{"exact": True}, {"compile": "auto"}], ids=str)
@pytest.mark.parametrize("spec", [f"quant-4{SMALL}", f"h2o+quant-4{SMALL}", f"kvquant-4{SMALL}"])
def test_recorded_and_exact_passes(spec: str, more: dict[str, Any]) -> None:
    llm = LLM((model_of("llama"), TOKENIZER), "none", **(options(spec) | more))
    if more.get("compile"):
        settled(llm)
    alone = [llm.generate([tokens], params())[0] for tokens in PROMPTS]
    assert drafted("llama", spec, Branching, 4, **more) == [out.token_ids for out in alone] == plain("llama", spec)


@pytest.mark.thorough
def test_exact_numbers_do_not_depend_on_drafts() -> None:
    """In bf16 the last bit would show in some token's probability."""
    model = copy.deepcopy(model_of("llama")).bfloat16()
    how = options(f"quant-4{SMALL}") | {"exact": True, "dtype": "auto"}
    first = LLM((model, TOKENIZER), "none", **how).generate(PROMPTS, params())
    drafter = Branching(texts_of(PROMPTS, [out.token_ids for out in first]), "sometimes", VOCAB)
    second = LLM((model, TOKENIZER), drafter, **how).generate(PROMPTS, params(gamma=4))
    assert sum(out.stats.accepted for out in second) > 20
    for a, b in zip(first, second, strict=True):
        assert [(x.token_id, x.target_prob) for x in a.trace] == [(x.token_id, x.target_prob) for x in b.trace]


@pytest.mark.thorough
@pytest.mark.parametrize("spec", [f"h2o+quant-4{SMALL}", f"kvquant-3{SMALL}"])
def test_plain_torch_says_the_same(monkeypatch: pytest.MonkeyPatch, spec: str) -> None:
    monkeypatch.setattr(ModelWeights, "packable", property(lambda self: False))
    llm = LLM((model_of("llama"), TOKENIZER), "none", **options(spec))
    assert isinstance(llm.target.backend, TorchBackend)
    assert [out.token_ids for out in llm.generate(PROMPTS, params())] == plain("llama", spec)


# ---------------------------------------------------------------- what attention sees


def rounded(numbers: Tensor, bits: int, axis: int) -> Tensor:
    """Numbers (heads, n, dim) after rounding in groups of 32 along an axis, as the paper says."""
    found = []
    for group in numbers.split(32, axis):
        low = group.amin(axis, keepdim=True).half().float()
        step = ((group.amax(axis, keepdim=True) - low) / (2**bits - 1)).half().float()
        codes = ((group - low) / step.clamp_min(1e-9)).round().clamp(0, 2**bits - 1)
        found.append(low + codes * step)
    return torch.cat(found, axis)


Quantization = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Keys and values, (heads, n, dim), of a layer's first columns as they are after packing."""


def evenly(bits: int) -> Quantization:
    return lambda layer, keys, values: (rounded(keys, bits, 1), rounded(values, bits, 2))


def at_levels(packed: QuantizedKV) -> Quantization:
    """By what was fitted to the model; test_leveled_pairs.py has it number by number."""

    def rounding(layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        heads = slice(0, len(keys))
        return packed.decode(layer, heads, packed.encode(layer, heads, keys, values, 0))

    return rounding


def attention_of(rounding: Quantization, borders: list[int]) -> Any:
    """Attention for transformers: rows between two borders see rounded keys and values before the tail of the first."""

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **_: Any) -> Any:
        group, rows = query.shape[1] // key.shape[1], query.shape[2]
        out = []
        for first, last in zip([0, *borders], [*borders, rows], strict=True):
            first, last = min(first, rows), min(last, rows)
            old = max(0, first - 16) // 32 * 32
            keys, values = key[0, :, :last].clone(), value[0, :, :last].clone()
            if old:
                keys[:, :old], values[:, :old] = rounding(module.layer_idx, keys[:, :old], values[:, :old])
            scores = query[0, :, first:last] @ keys.repeat_interleave(group, 0).transpose(1, 2) * scaling
            seen = torch.ones(last - first, last, dtype=torch.bool).tril(first)
            weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
            out.append(weights @ values.repeat_interleave(group, 0))
        return torch.cat(out, 1).transpose(0, 1)[None].contiguous(), None

    return attend


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *itertools.product(["llama", "gpt2", "olmo2", "granite", "gpt_neox"], ["quant-8", "quant-4", "quant-2"]),
        *(("llama", "kvquant-2"), ("gpt_neox", "kvquant-4"), ("glm", "kvquant-3")),
    ],
)
def test_what_attention_sees(name: str, kind: str) -> None:
    """The text and its probabilities by transformers, with keys and values rounded in its own attention."""
    length = len(PROMPTS[0])
    borders = [*range(CHUNK, length, CHUNK), length, length + 64]
    llm = LLM((model_of(name), TOKENIZER), "none", **options(kind + SMALL))
    (out,) = llm.generate([PROMPTS[0]], params())
    model, packed = copy.deepcopy(model_of(name)), llm.target.cache.packed
    assert packed is not None
    rounding = at_levels(packed) if kind.startswith("kv") else evenly(packed.bits)
    AttentionInterface.register("rounded", attention_of(rounding, borders))
    AttentionMaskInterface.register("rounded", lambda *args, **kwargs: None)
    gaps = []
    for attention in ("rounded", "eager"):
        model.set_attn_implementation(attention)
        with torch.no_grad():
            logits = model(torch.tensor([[*PROMPTS[0], *out.token_ids]])).logits[0]
        rows = logits[length - 1 : -1].softmax(-1)
        chosen = rows.gather(1, torch.tensor(out.token_ids)[:, None])[:, 0]
        if attention == "rounded":  # the likeliest but where two tokens are about as likely, see below
            assert float((rows.amax(-1) - chosen).max()) < 0.01
            assert int((rows.argmax(-1) != torch.tensor(out.token_ids)).sum()) <= 1
        gaps.append((chosen - torch.tensor([entry.target_prob for entry in out.trace])).abs())
    # Where a number lies between two codes the last bit decides, and a whole step is felt by some tokens.
    assert gaps[0].median() <= 5e-4 and gaps[0].max() <= 1e-2
    assert gaps[1].median() > 5 * gaps[0].median(), "what was rounded did not matter"


# ---------------------------------------------------------------- memory and refusals


def far() -> Any:
    """A model that knows many positions."""
    model = copy.deepcopy(model_of("llama"))
    model.config.max_position_embeddings = 4096
    return model


def test_memory() -> None:
    """Full precision stays at the tail and what comes between two borders, however long the text; the packed storage
    grows by what columns take in so many bits.
    """
    full = LLM((far(), TOKENIZER), "none", compile=False, max_batch=1)
    llm = LLM((far(), TOKENIZER), "none", **options(f"quant-4{SMALL}"), max_batch=1)
    tokens = [prompt(1100, 4)]
    sizes = []
    for one in (full, llm):
        one.generate(tokens, params(max_new_tokens=2))
        sizes.append(one.target.cache.bytes)
    cache, shapes = llm.target.cache, llm.target.cache.shapes
    assert cache.packed is not None
    beside = sum(store.nbytes for store in (*cache.keys, *cache.values))
    assert beside == sum(shape.pair_bytes(4) for shape in shapes) * 256  # 16 and 31 and a chunk, in the least room
    # 2048 columns of 4 bits with 32 bits for every 32 numbers of a key's channel, and for all 8 numbers of a value
    per_pair = sum(shape.heads * (8 * 5 / 8 + 8 / 2 + 4) for shape in shapes)
    assert sizes[1] - beside == per_pair * 2048
    assert sizes[0] == sum(shape.pair_bytes(4) for shape in shapes) * 2048


def test_memory_of_levels() -> None:
    """What is fitted counts too; all of it is there when the cache says so."""
    llm = LLM((far(), TOKENIZER), "none", **options(f"kvquant-2{SMALL}"), max_batch=1)
    llm.generate([prompt(1100, 4)], params(max_new_tokens=2))
    cache = llm.target.cache
    packed: Any = cache.packed
    tables = [packed.levels, *packed.channels, packed.rotation.near, packed.rotation.far]
    stored = [*cache.keys, *cache.values, *tables, *(store for stores in packed.stores for store in stores)]
    assert cache.bytes == sum(store.nbytes for store in stored)
    assert int(packed.count[0, 0, 0]) == 1056 and packed.room == 2048


def test_a_beginning_goes_on_from_levels(tmp_path: Path) -> None:
    llm = LLM((model_of("llama"), TOKENIZER), "none", **options(f"kvquant-3{SMALL}"))
    llm.prefix(PROMPTS[0][:96]).save(tmp_path / "prefix")
    prefix = llm.load_prefix(tmp_path / "prefix")
    assert {int(name.split(".")[1]) for name in prefix.tensors if name.startswith("packed.")} == set(range(6))
    (out,) = llm.generate([PROMPTS[0][96:]], params(), prefix=prefix)
    assert out.token_ids == plain("llama", f"kvquant-3{SMALL}")[0]


def test_a_budget_in_bytes_is_kept() -> None:
    given = options(f"h2o+quant-4{SMALL}") | {"kv_budget": "200KiB", "max_batch": 1}
    llm = LLM((far(), TOKENIZER), "none", **given)
    llm.generate([prompt(1500, 4)], params(max_new_tokens=150))
    assert 150 << 10 < llm.target.cache.bytes <= 200 << 10


def test_conversations_continue() -> None:
    """The text is that of a fresh request: it goes on from the last boundary that the longer prompt has, too."""
    llm = LLM((model_of("llama"), TOKENIZER), "none", **options(f"quant-8{SMALL}"))
    with llm.conversation() as conversation:
        first = conversation.generate(PROMPTS[0], params(max_new_tokens=20))
        places = places_of(llm.target.eviction, 0)
        assert [len(layer) for layer in places] == [2] * 3
        assert all(torch.equal(own, torch.arange(len(PROMPTS[0]))) for layer in places for own in layer)
        longer = [*PROMPTS[0], *first.token_ids, *prompt(30, 9)]
        second = conversation.generate(longer, params(max_new_tokens=50))
    chunk = llm.engine.chunk_size
    assert second.stats.reused == (len(PROMPTS[0]) - 1) // chunk * chunk > 0
    assert llm.generate([longer], params(max_new_tokens=50))[0].token_ids == second.token_ids
    assert len(second.token_ids) == 50


def test_refusals() -> None:
    pair = model_of("llama"), TOKENIZER
    with pytest.raises(InputError, match=r"kv_budget=100 with cache='quant-4', which keeps everything"):
        LLM(pair, "none", cache="quant-4", kv_budget=100)
    with pytest.raises(InputError, match=r"'h2o\+quant-4' without a budget"):
        LLM(pair, "none", cache="h2o+quant-4")
    with pytest.raises(InputError, match=r"reassigned.*rounded anew at every boundary"):
        LLM(pair, "none", cache="h2o[positions=reassigned]+quant-4", kv_budget=100)
    with pytest.raises(InputError, match=r"infllm with quantized keys.*leave the quantization out"):
        LLM(pair, "none", cache="infllm+quant-4", kv_budget=1000)
    with pytest.raises(InputError, match=r"h2o with kvquant.*turned back.*use quant-4"):
        LLM(pair, "none", cache="h2o+kvquant-4", kv_budget=100)
    for name in ("gpt2", "exaone4", "gemma3"):  # no rotation, not in every layer, not the same in every layer
        with pytest.raises(
            UnsupportedError, match=r"cache='kvquant-4': keys of .* cannot be turned.*use cache='quant-4'"
        ):
            LLM((model_of(name), TOKENIZER), "none", cache="kvquant-4")
    with pytest.raises(InputError, match=r"levels are fitted on a text"):
        build_runner(model_of("llama"), eviction=EvictionPlan(None, None, 64, packing=LeveledPacking(4)))
    with pytest.raises(UnsupportedError, match=r"GPTNeoXJapanese.*keeps its own attention.*cache='full'"):
        LLM((model_of("gpt_neox_japanese"), TOKENIZER), "none", cache="quant-4")

"""``exact=True`` with every cache and every drafter: one row of a table for each cache, drafts and rules in turn.

A row runs each prompt alone without a draft, and all at once with one, and compares tokens and the bits of the best
log probabilities: in bfloat16, where a last bit that moved shows.
"""

from __future__ import annotations

import copy
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from architectures import VOCAB, model_of, prompt
from drafters import Branching, Fading, Noisy, texts_of
from medusa_toys import heads_folder
from sakiyomi import LLM, SamplingParams
from sakiyomi.cache.slots import LayerShape
from sakiyomi.drafters import DRAFTERS
from sakiyomi.merging.convolutions import Convolutions, MergingShape
from sakiyomi.merging.formats import write_merging
from sakiyomi.outputs import Generation
from sakiyomi.policies import POLICIES
from sakiyomi.policies.specs import SPARSE
from sakiyomi.retaining.formats import write_heads
from sakiyomi.retaining.heads import RetainingHeads, RetainingShape
from sakiyomi.retaining.raw import Raw
from toys import character_tokenizer, save_model

TOKENIZER = character_tokenizer("".join(map(chr, range(0x3041, 0x3041 + VOCAB - 2))))
OTHER = character_tokenizer("".join(map(chr, range(0x3041 + VOCAB - 3, 0x3040, -1))))
NEW, CHUNK, BUDGET = 70, 32, 72
PROMPTS = [prompt(100, 1), prompt(5, 2), prompt(45, 3)]
"""Past borders of prompt and text, shorter than the budget, and one that ends within a chunk."""
GREEDY = SamplingParams(max_new_tokens=NEW, ignore_eos=True, logprobs=4, gamma=4)
COUPLED = replace(GREEDY, temperature=0.9, top_p=0.95, seed=1, acceptance="coupled")
RULES = {"greedy": GREEDY, "coupled": COUPLED}

SMALL = {"infllm": "[block=4,sinks=4,local=4,representatives=2]", "minference": "[vertical=8,slash=8,block=4]"}
QUANT = "[residual=16]"
CACHES = [
    *(
        name + SMALL.get(name, "[local=8]" if name not in ("snapkv", "pyramidkv") else "[window=8]")
        for name in POLICIES
    ),
    *(name + SMALL[name] for name in SPARSE),
    *(f"quant-{bits}{QUANT}" for bits in (8, 4, 2)),
    *(f"kvquant-{bits}{QUANT}" for bits in (4, 3, 2)),
    "h2o[local=8]+lococo",
    "streaming[local=8,positions=reassigned]",
    f"locret[local=8]+quant-4{QUANT}",
    f"kvquant-4{QUANT}+minference{SMALL['minference']}",
    f"quant-4{QUANT}+minference{SMALL['minference']}",
]
BY_TEXT = {"prompt-lookup": "prompt-lookup", "suffix": "suffix", "ngram": "ngram"}
MERGED = "suffix+model:near"
DRAFTS = [Branching, "model:near", Noisy, "early-exit:1", MERGED, "oracle:0.7", Fading, "self-int8", "medusa:heads"]
FULL = [*BY_TEXT, "model:other", "self-evicted:64", "self-int8", "medusa:heads", MERGED]
"""Those that no row of a cache has, and those that run something else beside the target; on a full cache."""
TABLE = [("full", draft, ("greedy", "coupled")[i % 2]) for i, draft in enumerate(FULL)]
TABLE += [(cache, DRAFTS[i % len(DRAFTS)], ("coupled", "greedy")[i % 2]) for i, cache in enumerate(CACHES)]


def model() -> Any:
    return copy.deepcopy(model_of("llama")).bfloat16()


@cache
def folder(kind: str) -> str:
    """What a spec names: heads, convolutions and models made for the toy."""
    place = Path(tempfile.mkdtemp())
    if kind == "heads":
        return str(heads_folder(place, "llama"))
    if kind == "other":
        return str(save_model(place, model(), OTHER))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if kind == "near":
            near = model()
            with torch.no_grad():
                near.model.layers[1].mlp.up_proj.weight.mul_(1.05)
            return str(save_model(place, near, TOKENIZER))
        shapes: list[LayerShape] = LLM((model(), TOKENIZER), "none", compile=False).target.cache.shapes
        heads = tuple(layer.heads for layer in shapes)
        if kind == "locret":
            write_heads(RetainingHeads(RetainingShape(Raw(model_of("llama")).widths, heads, 24)), place)
        else:
            dims = tuple((layer.key_dim, layer.value_dim) for layer in shapes)
            write_merging(Convolutions(MergingShape(dims, heads, 6)), place)
        return str(place)


def options(cache: str) -> dict[str, Any]:
    parts = []
    for part in cache.split("+"):
        name, bracket, rest = part.partition("[")
        parts.append(f"{name}:{folder(name)}{bracket}{rest}" if name in ("locret", "lococo") else part)
    budget = BUDGET if cache.partition("[")[0] in POLICIES else None
    return {"cache": "+".join(parts), "kv_budget": budget, "chunk_size": CHUNK, "compile": False, "exact": True}


def draft_of(draft: Any, texts: list[list[int]]) -> Any:
    if not isinstance(draft, str):
        return draft(texts_of(PROMPTS, texts), "sometimes", VOCAB)
    for kind in ("near", "other", "heads"):
        draft = draft.replace(f":{kind}", f":{folder(kind)}") if f":{kind}" in draft else draft
    return draft


def bits(done: list[Generation]) -> list[Any]:
    """Tokens and log probabilities."""
    return [(out.token_ids, [entry.top_logprobs for entry in out.trace]) for out in done]


def alone(llm: LLM, params: SamplingParams) -> list[Generation]:
    """Each prompt by itself, with the randomness that it has in the list."""
    engine = llm.engine
    return [engine.complete([engine.submit(p, params, key=(i,), live=False)])[0] for i, p in enumerate(PROMPTS)]


@pytest.mark.parametrize(("cache", "draft", "rule"), TABLE, ids=lambda value: getattr(value, "__name__", value))
def test_every_cache_and_draft(cache: str, draft: Any, rule: str) -> None:
    params, how = RULES[rule], options(cache)
    wanted = alone(LLM((model(), TOKENIZER), "none", **how), params)
    llm = LLM((model(), TOKENIZER), draft_of(draft, [out.token_ids for out in wanted]), strict=True, **how)
    done = llm.generate(PROMPTS, params)
    assert sum(out.stats.drafted for out in done) > 20, "nothing was read ahead"
    assert bits(done) == bits(wanted)


@pytest.mark.parametrize("cache", ["full", "h2o[local=8]", f"quant-4{QUANT}", f"infllm{SMALL['infllm']}"])
def test_prefixes_and_conversations(cache: str) -> None:
    """What goes on from a beginning, read ahead or not, has the bits of a request that reads it all."""
    beginning, ends = prompt(2 * CHUNK, 1), [prompt(9, 2), prompt(21, 3)]
    plain = LLM((model(), TOKENIZER), "none", **options(cache))
    whole = plain.generate([[*beginning, *end] for end in ends], GREEDY)
    assert bits(plain.generate(ends, GREEDY, prefix=plain.prefix(beginning))) == bits(whole)
    near = LLM((model(), TOKENIZER), draft_of("model:near", []), strict=True, **options(cache))
    done = near.generate(ends, GREEDY, prefix=near.prefix(beginning))
    assert sum(out.stats.accepted for out in done) > 10
    assert bits(done) == bits(whole)
    with plain.conversation() as slow, near.conversation() as fast:
        text = list(beginning)
        for turn in range(2):
            first, second = (turns.generate(text, GREEDY) for turns in (slow, fast))
            assert bits([first]) == bits([second])
            text += [*first.token_ids, *prompt(7, turn)]


def test_the_table_has_every_drafter_and_policy() -> None:
    """What is added to a registry is added here."""
    named = {part.partition(":")[0] for _, draft, _ in TABLE if isinstance(draft, str) for part in draft.split("+")}
    assert named == set(DRAFTERS)
    assert {part.partition("[")[0] for cache in CACHES for part in cache.split("+")} >= {*POLICIES, *SPARSE}

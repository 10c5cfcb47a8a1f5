"""Caches in 8, 4 and 2 bits, alone and with a budget: reading ahead changes no token of the quantized target's text.

The oracle of what attention sees is transformers with keys and values that are rounded in its own attention.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from architectures import CONFIGS, VOCAB, model_of, prompt
from drafters import Branching, Fading, texts_of
from sakiyomi import LLM, SamplingParams
from toys import character_tokenizer

TOKENIZER = character_tokenizer("".join(map(chr, range(0x3041, 0x3041 + VOCAB - 2))))
NEW, CHUNK, BUDGET = 100, 48, 72
PROMPTS = [prompt(150, 1), prompt(5, 2), prompt(100, 3)]
"""Longer than a tail and some groups, shorter than any, and one that ends within a chunk."""
SMALL = "[residual=16]"
OWN = ("falcon",)
"""Architectures that keep their own attention."""


def options(spec: str) -> dict[str, Any]:
    budget = None if spec.startswith("quant") else BUDGET
    return {"cache": spec, "kv_budget": budget, "chunk_size": CHUNK, "compile": False}


@cache
def plain(name: str, spec: str) -> list[list[int]]:
    """The text of each prompt alone, nothing drafted."""
    llm = LLM((model_of(name), TOKENIZER), "none", **options(spec))
    return [llm.generate([tokens], params())[0].token_ids for tokens in PROMPTS]


def params(**values: Any) -> SamplingParams:
    return SamplingParams(**({"max_new_tokens": NEW, "ignore_eos": True} | values))


def drafted(name: str, spec: str, skill: Any, gamma: int, **more: Any) -> list[list[int]]:
    """The same, all at once, by a drafter that is right now and then."""
    drafter = skill(texts_of(PROMPTS, plain(name, spec)), "sometimes", VOCAB)
    llm = LLM((model_of(name), TOKENIZER), drafter, **(options(spec) | more))
    done = llm.generate(PROMPTS, params(gamma=gamma))
    assert not llm.engine._drafting.broken, "the drafter raised"
    assert sum(out.stats.accepted for out in done) > 20, "nothing was read ahead"
    assert int(llm.target.cache.packed.count.max()) >= 128, "nothing was packed"
    return [out.token_ids for out in done]


@pytest.mark.parametrize("skill", [Branching, Fading])
@pytest.mark.parametrize("bits", [8, 4, 2])
def test_reading_ahead_changes_nothing(bits: int, skill: Any) -> None:
    """Trees and chains in a batch of unequal lengths, against each prompt alone."""
    spec = f"quant-{bits}{SMALL}"
    assert drafted("llama", spec, skill, 5) == plain("llama", spec)


@pytest.mark.parametrize("name", [name for name in (*CONFIGS, "gemma", "mixtral", "deepseek_v3") if name not in OWN])
def test_every_architecture(name: str) -> None:
    spec = f"quant-4{SMALL}"
    assert drafted(name, spec, Branching, 3) == plain(name, spec)

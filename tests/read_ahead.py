"""What tests of drafters that run beside a target share: prompts, texts, and what was drafted behind them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from architectures import VOCAB, greedy, prompt
from sakiyomi import LLM, Draft, SamplingParams
from sakiyomi.drafters.base import Context, Drafter
from toys import character_tokenizer, tiny_llama

NEW = 16
PROMPTS = [prompt(11, 1), prompt(3, 2), prompt(70, 3)]
TOKENIZER = character_tokenizer("".join(map(chr, range(0x3041, 0x3041 + VOCAB - 2))))
Guess = Callable[[list[int], int], list[int]]
"""From a text and a number of tokens to the chain of so many that the method itself guesses behind it."""


@cache
def deep_target() -> Any:
    """One whose hidden states differ enough to tell layers apart."""
    return tiny_llama(vocab=VOCAB, layers=8, seed=3)


def params(**values: Any) -> SamplingParams:
    return SamplingParams(**({"max_new_tokens": NEW, "ignore_eos": True} | values))


def llm_over(target: Any, draft: Any, **options: Any) -> LLM:
    return LLM((target, TOKENIZER), draft, **({"compile": False, "strict": True} | options))


@cache
def texts(target: Any) -> tuple[list[list[int]], list[list[int]]]:
    """Greedy as transformers has it, and sampled as without a draft."""
    sampled = llm_over(target, "none").generate(PROMPTS, params(temperature=1.0, seed=3))
    return [greedy(target, tokens, NEW) for tokens in PROMPTS], [out.token_ids for out in sampled]


def drafted(llm: LLM, **values: Any) -> list[tuple[list[int], list[int]]]:
    """The texts before the rounds of all requests, and the chains that were drafted."""
    out = llm.generate(PROMPTS, params(**({"gamma": 4, "tree": "chain"} | values)), rounds_trace=True)
    return [
        (tokens + [e.token_id for e in one.trace if e.round < entry.round], list(entry.tokens))
        for tokens, one in zip(PROMPTS, out, strict=True)
        for entry in one.rounds_trace or []
        if entry.tokens
    ]


def dealt(names: Sequence[str], sizes: Sequence[dict[str, Any]]) -> list[Any]:
    """The first of the drafts with every size, the others with every second one."""
    return [
        pytest.param(name, size, id=f"{name}-{size}")
        for row, name in enumerate(names)
        for column, size in enumerate(sizes)
        if not row or (row + column) % 2
    ]


def others(done: Sequence[tuple[list[int], list[int]]], guess: Guess) -> int:
    """How many of the chains are not what this guesses."""
    return sum(chain != guess(text, len(chain)) for text, chain in done)


def check_trees(llm: LLM, target: Any, size: dict[str, Any]) -> int:
    """Greedy as transformers has it, sampled as without a draft. Returns the draft tokens accepted in greedy text."""
    expected, sampled = texts(target)
    done = llm.generate(PROMPTS, params(**size))
    assert [out.token_ids for out in done] == expected
    assert size.get("gamma") == "auto" or sum(out.stats.drafted for out in done) > NEW
    values = params(temperature=1.0, seed=3, **size)
    assert [out.token_ids for out in llm.generate(PROMPTS, values)] == sampled
    return sum(out.stats.accepted for out in done)


def check_conversations(llm: LLM, target: Any, kind: type[Drafter], guess: Guess, patch: pytest.MonkeyPatch) -> None:
    """A drafter follows a conversation, whose next turn may contradict the end of the last, and a prefix."""
    propose = kind.propose
    asked: list[tuple[list[int], list[int]]] = []

    def noted(self: Drafter, contexts: Sequence[Context], gammas: Sequence[int]) -> list[Draft]:
        drafts = propose(self, contexts, gammas)
        asked.append((list(contexts[0].tokens), list(drafts[0].tree.tokens)))
        return drafts

    patch.setattr(kind, "propose", noted)

    def say(talk: Any, tokens: list[int]) -> list[int]:
        before = len(asked)
        out = talk.generate(tokens, params(gamma=3, tree="chain"))
        assert out.token_ids == greedy(target, tokens, NEW)
        assert sum(map(bool, (chain for _, chain in asked[before:]))) > NEW / 3
        return tokens + out.token_ids

    with llm.conversation() as talk:
        first = say(talk, PROMPTS[2])
        second = say(talk, first + PROMPTS[0])
        say(talk, first[:-5] + PROMPTS[1])  # the end of the first reply is another one
        say(talk, PROMPTS[1])
        say(talk, second + PROMPTS[1])
    wrong = [len(text) for text, chain in asked if chain != guess(text, len(chain))]
    assert not wrong, ([len(text) for text, _ in asked], wrong)
    with llm.conversation(llm.prefix(PROMPTS[2])) as talk:  # whose features are not known: the guesses are others
        say(talk, PROMPTS[2] + PROMPTS[0])


def refused(kind: str, folder: Path, error: type[Exception], *words: str) -> None:
    """What a folder holds is refused as a draft of this kind for ``deep_target``, and the message has these words."""
    with pytest.raises(error) as found:
        llm_over(deep_target(), f"{kind}:{folder}")
    assert all(word in str(found.value) for word in words), str(found.value)


def as_pickle(folder: Path) -> None:
    """Store a folder's tensors as pickle instead."""
    weights = folder / "model.safetensors"
    torch.save(load_file(weights), folder / "pytorch_model.bin")
    weights.unlink()

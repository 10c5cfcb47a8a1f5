"""A drafter that reads hidden states of three layers: of every token of prompt and text, whatever is drafted.

It is one class in this file, and nothing else knows of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from architectures import VOCAB, model_of, prompt
from sakiyomi import LLM, Draft, InputError, SamplingParams, UnsupportedError
from sakiyomi.drafters.base import Context, Drafter, HiddenStates
from sakiyomi.drafters.merged import MergedDrafter
from sakiyomi.model_executor.features import HEAD
from toys import tiny_tokenizer

TOKENIZER = tiny_tokenizer(VOCAB)
PROMPTS = [prompt(9), prompt(23, 1), prompt(40, 2)]
NEW = 24


class ThreeLayers(Drafter):
    """Drafts the right text, or a wrong one, and keeps what it is given."""

    name, kind = "three-layers", "chain"

    def __init__(self, texts: Mapping[tuple[int, ...], Sequence[int]], layers: tuple[int, ...]) -> None:
        self.hidden_states = HiddenStates(layers, "all")
        self._texts, self.given = texts, {}  # type: ignore[var-annotated]

    def observe(self, context: Context, first: int, states: Mapping[int, Tensor]) -> None:
        for layer, rows in states.items():
            known = self.given.setdefault((tuple(context.tokens[:5]), layer), {})
            for i, row in enumerate(rows):
                assert first + i not in known, "each token is given once"
                known[first + i] = row.clone()

    def propose(self, contexts: Sequence[Context], gammas: Sequence[int]) -> list[Draft]:
        drafts = []
        for context, gamma in zip(contexts, gammas, strict=True):
            text = next(text for start, text in self._texts.items() if tuple(context.tokens[: len(start)]) == start)
            ahead = list(text[len(context.tokens) : len(context.tokens) + gamma])
            if len(context.tokens) % 3 == 0 and ahead:
                ahead[-1] = (ahead[-1] + 1) % VOCAB
            drafts.append(Draft.chain(ahead, self.name) if ahead else Draft.empty())
        return drafts


def values(**more: Any) -> SamplingParams:
    return SamplingParams(**({"max_new_tokens": NEW, "ignore_eos": True, "gamma": 4} | more))


def texts() -> dict[tuple[int, ...], list[int]]:
    plain = LLM((model_of("llama"), TOKENIZER), "none", compile=False)
    done = plain.generate(PROMPTS, values())
    return {tuple(tokens): tokens + out.token_ids for tokens, out in zip(PROMPTS, done, strict=True)}


@pytest.mark.few(3)
@pytest.mark.parametrize("how", ["eager", "traced", "chunks", "merged"])
def test_every_token_of_prompt_and_text_is_given_once(how: str) -> None:
    model, known = model_of("llama"), texts()
    layers = (0, 1, model.config.num_hidden_layers - 1)
    drafter = ThreeLayers(known, layers)
    given: Any = drafter
    if how == "merged":
        from sakiyomi.drafters.lookup import PromptLookup

        given = MergedDrafter([PromptLookup(), drafter])
    llm = LLM(
        (model, TOKENIZER),
        given,
        compile="auto" if how == "traced" else False,
        chunk_size=7 if how == "chunks" else None,
        strict=True,
    )
    done = llm.generate(PROMPTS, values())
    for tokens, out in zip(PROMPTS, done, strict=True):
        whole = tokens + out.token_ids
        assert whole == known[tuple(tokens)]
        if how != "merged":
            assert 0 < out.stats.accepted < out.stats.drafted
        with torch.no_grad():
            expected = model.model(torch.tensor([whole]), output_hidden_states=True).hidden_states
        for layer in dict.fromkeys(layers):
            rows = drafter.given[tuple(tokens[:5]), layer]
            # The target never processes the last token; what a last draft brings too much is given all the same.
            assert set(range(len(whole) - 1)) <= rows.keys()
            if layer == layers[-1]:
                continue  # transformers gives the last layer behind the final norm
            for place in range(len(whole) - 1):
                torch.testing.assert_close(rows[place], expected[layer + 1][0, place], atol=1e-4, rtol=1e-4)


def test_layers_that_are_not_there_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"layers 0, 99 are wanted.*counted from 0"):
        LLM((model_of("llama"), TOKENIZER), ThreeLayers({}, (0, 99)), compile=False)


def test_all_rows_of_the_head_are_refused() -> None:
    with pytest.raises(InputError, match="of decoder layers"):
        LLM((model_of("llama"), TOKENIZER), ThreeLayers({}, (HEAD,)), compile=False)

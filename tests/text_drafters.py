"""The drafters that read nothing but text, as tests want them: in trees, and with what they need to be right often."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from sakiyomi.core.params import SamplingParams
from sakiyomi.core.tree import Draft
from sakiyomi.drafters import Context
from sakiyomi.drafters.lookup import PromptLookup
from sakiyomi.drafters.ngram import NgramDrafter
from sakiyomi.drafters.ngram_file import FileTables
from sakiyomi.drafters.suffix import SuffixDrafter
from sakiyomi.drafters.text_base import TextDrafter
from sakiyomi.sampling.rng import RequestNoise
from sakiyomi.train.ngram import count_tables

KINDS = ("prompt-lookup", "suffix", "ngram", "tables")


def text_drafter(kind: str, vocab_size: int, texts: Sequence[Sequence[int]] = ()) -> TextDrafter:
    """A drafter of one of ``KINDS``; "tables" are counted in ``texts``."""
    if kind == "prompt-lookup":
        return PromptLookup()
    if kind == "suffix":
        return SuffixDrafter()
    if kind == "ngram":
        return NgramDrafter(vocab_size)
    documents = [np.array(text, np.int64) for text in texts]
    return NgramDrafter(vocab_size, FileTables(4, count_tables(documents, 4, vocab_size, least=1)))


class Wide:
    """Asks a drafter for trees of three nodes a level, whatever the engine asks for."""

    def __init__(self, drafter: TextDrafter) -> None:
        self.drafter, self.name, self.kind = drafter, drafter.name, drafter.kind
        self.branched = 0

    def propose(self, contexts: Sequence[Context], gammas: Sequence[int]) -> list[Draft]:
        for context, gamma in zip(contexts, gammas, strict=True):
            context.nodes = 3 * gamma
        drafts = self.drafter.propose(contexts, gammas)
        self.branched += sum(len(set(draft.tree.parents)) < len(draft) for draft in drafts)
        return drafts

    def end(self, context: Context) -> None:
        self.drafter.end(context)


def context(tokens: Sequence[int], nodes: int = 4, rule: Any = "greedy", number: int = 0, **values: Any) -> Context:
    """A request by itself."""
    stop = frozenset(values.pop("stop_ids", ()))
    return Context(number, list(tokens), SamplingParams(**values), rule, RequestNoise(0), stop, nodes)

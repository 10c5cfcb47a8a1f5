"""What an EAGLE head is measured by: where the target's tokens stand among its guesses, trees, and speed here."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sakiyomi.core.outputs import Stats
from sakiyomi.core.params import SamplingParams
from sakiyomi.drafters.medusa_heads.ranks import LISTED, Ranks
from sakiyomi.engine.llm import LLM
from sakiyomi.engine.plain import EngineView
from sakiyomi.train.acceptance import Continuations
from sakiyomi.train.eagle_unrolled import TargetStates, UnrolledHead

__all__ = ["DEPTH", "NODES", "measured", "rank_continuations", "worth"]

DEPTH = 7
"""Draft tokens in a row that are looked at."""
NODES = 16
"""Of the trees that are measured."""
CHAIN = 4  # as in the measures of draft models
LAPS = 2
PROMPTS = 4
"""Of each file, for what is measured with the engine."""


@torch.inference_mode()
def rank_continuations(head: UnrolledHead, states: TargetStates, tokens: Tensor | None, texts: Continuations) -> Ranks:
    """Where the target's own greedy tokens stand among the head's guesses.

    At a place whose token is committed, the k-th column is the rank of the token k + 1 places on where all tokens
    between are drafted rightly, which is all that counts in greedy text.
    """
    found = []
    training = head.training
    head.eval()
    for prompt, text in zip(texts.prompts, texts.greedy, strict=True):
        if len(text) < 2:
            continue
        ids = torch.tensor([[*prompt, *text]])
        joined, _ = states(ids)
        ranks = np.full((len(text) - 1, DEPTH), -1, np.int16)
        for step, hidden in enumerate(head(ids[:, 1:], joined[:, :-1], DEPTH)):
            # Row r is that of the token r + 1, and foretells the next one.
            rows = hidden[0, len(prompt) - 1 + step : -1]
            if not len(rows):
                break
            ranks[: len(rows), step] = _ranks(head.head(rows), ids[0, len(prompt) + 1 + step :], tokens)
        found.append(ranks)
    head.train(training)
    return Ranks(found)


def _ranks(logits: Tensor, coming: Tensor, tokens: Tensor | None) -> np.ndarray:
    """Rank of each coming token, ``LISTED`` for higher ones and for tokens that the head does not know."""
    known = torch.ones_like(coming, dtype=torch.bool)
    if tokens is not None:
        places = torch.searchsorted(tokens, coming).clamp_max(len(tokens) - 1)
        known, coming = tokens[places] == coming, places
    logits = logits.float()
    above = (logits > logits.gather(1, coming[:, None])).sum(1).clamp_max(LISTED)
    found: np.ndarray = torch.where(known, above, LISTED).numpy()
    return found


def measured(ranks: Ranks) -> dict[str, float]:
    """Acceptance by position, tau of a chain and of the best fixed tree."""
    found = {f"position_{place}": chances[0] for place, chances in enumerate(ranks.accuracies(), start=1)}
    found[f"tau_chain_{CHAIN}"] = ranks.replay([(0,) * depth for depth in range(1, CHAIN + 1)])
    found[f"tau_{NODES}_nodes"] = ranks.replay(ranks.best(NODES))
    return found | {"tokens": ranks.places}


def worth(target: str, folder: str, texts: dict[str, Continuations], compile: bool) -> dict[str, dict[str, float]]:
    """What the finished head brings here, with the engine: by held-out file tau and speed against plain decoding.

    Args:
        target: its name.
        folder: of the head.
        texts: whose prompts are continued.
        compile: record passes, as the engine does if it is not told otherwise.
    """
    llm = LLM(target, f"eagle:{folder}", compile="auto" if compile else False)
    plain, found = EngineView(llm), {}
    for name, some in texts.items():
        prompts = some.prompts[:PROMPTS]
        values: dict[str, float] = {}
        for kind, temperature in (("greedy", 0.0), ("sampled", 1.0)):
            params: dict[str, Any] = {"max_new_tokens": some.new_tokens, "temperature": temperature, "seed": 1}
            tree = SamplingParams(**params, gamma=DEPTH, tree="best-first", nodes=NODES)
            values[f"tree_tau_{kind}"] = _lap(llm, prompts, tree).tau
            laps = [
                tuple(_lap(way, prompts, SamplingParams(**params)).tokens_per_second for way in (plain, llm))
                for _ in range(LAPS + 1)
            ]
            values[f"speedup_{kind}"] = statistics.median(ours / own for own, ours in laps[1:])
        found[name] = values
    return found


def _lap(way: Any, prompts: Sequence[list[int]], params: SamplingParams) -> Stats:
    """One prompt after the other."""
    return Stats.total(way.generate([prompt], params)[0].stats for prompt in prompts)

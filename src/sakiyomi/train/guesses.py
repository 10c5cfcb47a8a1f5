"""What a drafter is measured by: where the target's tokens stand among its guesses, trees, and speed here."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sakiyomi.core.outputs import Stats
from sakiyomi.core.params import SamplingParams
from sakiyomi.drafters.medusa_heads.ranks import LISTED, Ranks
from sakiyomi.engine.llm import LLM
from sakiyomi.engine.plain import EngineView
from sakiyomi.train.acceptance import Continuations

DEPTH = 7
"""Draft tokens in a row that are looked at."""
NODES = 16
"""Of the trees that are measured."""
CHAIN = 4  # as in the measures of draft models
LAPS = 2
PROMPTS = 4
"""Of each file, for what is measured with the engine."""
MEASURING = "measuring tau and speed with the engine"


def measured_on(target: str) -> str:
    """What the measures of a card mean."""
    return (
        f"On what {target} answers to held-out prompts, greedily: position k is right where the first guess for it is "
        f"what comes, all draft tokens before it being right. Trees of {NODES} nodes: a fixed one, and, with the "
        "engine, one grown by confidence (tree tau). Speed-ups are those of the engine, which chooses sizes itself, "
        "against its plain decoding on the machine of the run."
    )


@torch.inference_mode()
def ranked(
    module: nn.Module,
    texts: Continuations,
    ahead: int,
    guess: Callable[[Tensor, int], Iterable[Tensor]],
    tokens: Tensor | None = None,
) -> Ranks:
    """Where the target's own greedy tokens stand among a module's guesses.

    At a place whose token is committed, the k-th column is the rank of the token k + 1 places on, all tokens between
    being those of the text.

    Args:
        module: in evaluation mode meanwhile.
        texts: of the target.
        ahead: tokens that are guessed behind each.
        guess: gives logits for (1, T) ids and the place of the first one that the target wrote: for k = 0, 1, ... those
            of the token k + 1 places behind each token from that one on, (places, tokens), as far as there is one.
        tokens: that the module knows, ascending; None: all.
    """
    found = []
    training = module.training
    module.eval()
    for prompt, text in zip(texts.prompts, texts.greedy, strict=True):
        if len(text) < 2:
            continue
        ids = torch.tensor([[*prompt, *text]])
        ranks = np.full((len(text) - 1, ahead), -1, np.int16)
        for k, logits in zip(range(min(ahead, len(ranks))), guess(ids, len(prompt)), strict=False):
            ranks[: len(ranks) - k, k] = _rank_of(logits, ids[0, len(prompt) + 1 + k :], tokens)
        found.append(ranks)
    module.train(training)
    return Ranks(found)


def _rank_of(logits: Tensor, coming: Tensor, tokens: Tensor | None) -> np.ndarray:
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
    chain = min(CHAIN, ranks.heads)
    found[f"tau_chain_{chain}"] = ranks.replay([(0,) * depth for depth in range(1, chain + 1)])
    found[f"tau_{NODES}_nodes"] = ranks.replay(ranks.best(NODES))
    return found | {"tokens": ranks.places}


def worth(target: str, draft: str, texts: dict[str, Continuations], compile: bool) -> dict[str, dict[str, float]]:
    """What the finished drafter brings here, with the engine: by held-out file tau and speed against plain decoding.

    Args:
        target: its name.
        draft: as the engine takes it.
        texts: whose prompts are continued.
        compile: record passes, as the engine does if it is not told otherwise.
    """
    llm = LLM(target, draft, compile="auto" if compile else False)
    plain, found = EngineView(llm), {}
    for name, some in texts.items():
        prompts = some.prompts[:PROMPTS]
        values: dict[str, float] = {}
        for kind, temperature in (("greedy", 0.0), ("sampled", 1.0)):
            params: dict[str, Any] = {"max_new_tokens": some.new_tokens, "temperature": temperature, "seed": 1}
            tree = SamplingParams(**params, gamma=DEPTH, tree="best-first", nodes=NODES)
            values[f"tree_tau_{kind}"] = run_texts(llm, prompts, tree).tau
            laps = [
                tuple(run_texts(way, prompts, SamplingParams(**params)).tokens_per_second for way in (plain, llm))
                for _ in range(LAPS + 1)
            ]
            values[f"speedup_{kind}"] = statistics.median(ours / own for own, ours in laps[1:])
        found[name] = values
    return found


def run_texts(way: Any, prompts: Sequence[list[int]], params: SamplingParams) -> Stats:
    """One prompt after the other."""
    return Stats.total(way.generate([prompt], params)[0].stats for prompt in prompts)

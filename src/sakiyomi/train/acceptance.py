"""How well a drafter predicts a target: alpha, greedy speculation along its text, ranks of its tokens, speed here."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from sakiyomi.core.outputs import Stats
from sakiyomi.core.params import SamplingParams
from sakiyomi.drafters.medusa_heads.ranks import LISTED, Ranks
from sakiyomi.engine.llm import LLM
from sakiyomi.engine.plain import EngineView
from sakiyomi.train.draft_vocab import places_among
from sakiyomi.train.samples import sample_continuations

CHUNK_ROWS = 8
WIDTH_STEP = 32
# A held-out prompt, and what the target writes after it.
PROMPT_TOKENS, NEW_TOKENS = 64, 128


@dataclass(frozen=True)
class Continuations:
    """Prompts and what the target writes after them.

    Attributes:
        prompts: token ids of each prompt.
        greedy: the target's greedy continuations.
        sampled: its continuations at temperature 1; empty where they are not wanted.
        new_tokens: length limit of the continuations.
        ends: tokens that end one earlier.
    """

    prompts: list[list[int]]
    greedy: list[list[int]]
    sampled: list[list[int]]
    new_tokens: int
    ends: frozenset[int]


def continuations(
    llm: LLM, prompts: list[list[int]], *, new_tokens: int = NEW_TOKENS, sampled: bool = True
) -> Continuations:
    """Have the target continue prompts, by `new_tokens` as far as its positions allow that."""
    new_tokens = min(new_tokens, llm.max_context - max(map(len, prompts)))
    found = [
        sample_continuations(llm, prompts, new_tokens=new_tokens, temperature=temperature)
        for temperature in ((0.0, 1.0) if sampled else (0.0,))
    ]
    return Continuations(prompts, found[0], found[-1] if sampled else [], new_tokens, llm.engine.stop_ids)


@torch.inference_mode()
def acceptance(
    draft: PreTrainedModel, target: PreTrainedModel | None, texts: Continuations, gamma: int = 4
) -> dict[str, float]:
    """Measure a draft along the target's own continuations.

    Returns:
        `greedy_agreement` (share of the greedy tokens that are the draft's argmax), `acceptance_rate` and `tau` of
        greedy speculation with `gamma` drafts a round, `alpha` (mean over the sampled positions of sum min(p, q),
        temperature 1; not without a target) and `tokens` (greedy tokens looked at).
    """
    agreed = tokens = accepted = drafted = rounds = 0
    for logits, text in zip(_logits(draft, texts.prompts, texts.greedy), texts.greedy, strict=True):
        guesses = logits.argmax(dim=-1).tolist()
        counts = speculate(guesses, text, gamma, limit=texts.new_tokens, ends=texts.ends)
        agreed += sum(guess == token for guess, token in zip(guesses, text, strict=True))
        tokens += len(text)
        accepted, drafted, rounds = accepted + counts[0], drafted + counts[1], rounds + counts[2]
    found = {
        "greedy_agreement": agreed / max(tokens, 1),
        "acceptance_rate": accepted / max(drafted, 1),
        # The first token of each text comes from the prefill, no round commits it.
        "tau": (tokens - len(texts.greedy)) / max(rounds, 1),
        "tokens": tokens,
    }
    if target is not None:
        both = (_logits(model, texts.prompts, texts.sampled) for model in (target, draft))
        pairs = zip(*both, strict=True)
        overlaps = [torch.minimum(p.softmax(dim=-1), q.softmax(dim=-1).to(p.device)).sum(dim=-1) for p, q in pairs]
        found["alpha"] = float(torch.cat(overlaps).mean())
    return found


def speculate(
    guesses: Sequence[int], text: Sequence[int], gamma: int, *, limit: int, ends: frozenset[int]
) -> tuple[int, int, int]:
    """Count greedy speculation over one text as the engine does it, knowing the length limit but not the text's end.

    A round drafts up to `gamma` tokens, no further than the limit's last token but one, and no further than an end
    token that it guesses; it accepts those before the first wrong one and adds the target's own, unless an accepted end
    token has ended the text. What follows a wrong guess is not known here: a draft that would have ended there counts
    at full length.

    Args:
        guesses: the draft's likeliest token in the place of each token of `text`.
        text: what the target wrote. Its first token comes from the prefill, no round commits it.
        gamma: most drafts of a round.
        limit: most tokens of a text.
        ends: the end tokens; `text` holds one as its last token at most.

    Returns:
        Accepted drafts, drafts, rounds.
    """
    position, accepted, drafted, rounds = 1, 0, 0, 0
    while position < len(text):
        most = min(gamma, limit - position - 1)
        drafts = guesses[position : position + most]
        pairs = enumerate(zip(drafts, text[position:], strict=False))
        run = next((depth for depth, (guess, token) in pairs if guess != token), len(drafts))
        proposed = next((depth + 1 for depth, guess in enumerate(drafts[: run + 1]) if guess in ends), most)
        accepted, drafted, rounds = accepted + run, drafted + proposed, rounds + 1
        position += run + 1
    return accepted, drafted, rounds


def distinct_ngrams(texts: Sequence[Sequence[int]], n: int = 4) -> float:
    """Mean over texts of different n-grams / n-grams; low values are repetition. Texts shorter than n are left out."""
    shares = []
    for text in texts:
        grams = [tuple(text[index : index + n]) for index in range(len(text) - n + 1)]
        if grams:
            shares.append(len(set(grams)) / len(grams))
    return sum(shares) / max(len(shares), 1)


def _logits(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]]
) -> Iterator[Tensor]:
    """For each text the (len(text), V) logits before its tokens; prompts and texts are padded at the end."""
    # One shape for every call: a compiled model would compile anew for each other length.
    rows = [[*prompt, *text] for prompt, text in zip(prompts, texts, strict=True)]
    width = -(-max(map(len, rows), default=0) // WIDTH_STEP) * WIDTH_STEP
    for start in range(0, len(rows), CHUNK_ROWS):
        ids = torch.zeros(CHUNK_ROWS, width, dtype=torch.int64)
        some = rows[start : start + CHUNK_ROWS]
        for i, row in enumerate(some):
            ids[i, : len(row)] = torch.tensor(row)
        logits: Tensor = model(input_ids=ids.to(model.device), use_cache=False).logits
        for i, row in enumerate(some):
            yield logits[i, len(prompts[start + i]) - 1 : len(row) - 1].float()


# ---------------------------------------------------------------- ranks, trees and speed


DEPTH = 7
"""Draft tokens in a row that are looked at."""
NODES = 16
"""Of the trees that are measured."""
CHAIN = 4  # as in the measures of draft models
RUNS = 2
PROMPTS = 4
"""Prompts of each file in measurements with the engine."""
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
        ahead: tokens that are guessed after each.
        guess: gives logits for (1, T) ids and the place of the first one that the target wrote: for k = 0, 1, ... those
            of the token k + 1 places after each token from that one on, (places, tokens), as far as there is one.
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
    places, logits = coming if tokens is None else places_among(tokens, coming), logits.float()
    above = (logits > logits.gather(1, places.clamp_min(0)[:, None])).sum(1).clamp_max(LISTED)
    found: np.ndarray = torch.where(places >= 0, above, LISTED).numpy()
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
            runs = [
                tuple(run_texts(way, prompts, SamplingParams(**params)).tokens_per_second for way in (plain, llm))
                for _ in range(RUNS + 1)
            ]
            values[f"speedup_{kind}"] = statistics.median(ours / own for own, ours in runs[1:])
        found[name] = values
    return found


def run_texts(way: Any, prompts: Sequence[list[int]], params: SamplingParams) -> Stats:
    """One prompt after the other."""
    return Stats.total(way.generate([prompt], params)[0].stats for prompt in prompts)

"""How well a draft foretells a target: alpha, greedy agreement and an exact count of greedy speculation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sakiyomi.engine.llm import LLM
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

"""Row ``books``: perplexity of the text that follows a long context, and agreement with the full cache.

The text that follows is the next chapter if the book has chapters. It is read token by token, as in generation, so that
a system that evicts while decoding does so here too.
"""

from __future__ import annotations

import math
import operator
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessor

from sakiyomi.core.errors import InputError
from sakiyomi.core.params import SamplingParams
from sakiyomi.core.prompts import read_prompts, read_text, text_of
from sakiyomi.engine.llm import LLM
from sakiyomi.evaluation.bench.long.config import LongConfig
from sakiyomi.evaluation.bench.long.jobs import Bench, Line, Watch, means, row, spread
from sakiyomi.evaluation.bench.long.systems import ONE_SHOT, Loader, System
from sakiyomi.evaluation.bench.report import Row

CHARACTERS = 8
"""Characters tokenised per token that is needed, more than a token has on average: the book is not tokenised whole."""
_HEADING = re.compile(
    r"\n\s*\n(?=[ ]*(?:(?:CHAPTER|Chapter|BOOK|Book|PART|Part)\s+\S+|[IVXLC]+\.\s|[A-Z][A-Z ,.’'-]{5,60}\n))"
)
"""A blank line before a heading: a word and a number, a Roman number, or a line of capitals."""
_PARAGRAPH = re.compile(r"\n\s*\n")


@dataclass(frozen=True)
class Passage:
    """A context and the text after it.

    Attributes:
        seed: chose the place.
        context, following: token ids.
    """

    seed: int
    context: tuple[int, ...]
    following: tuple[int, ...]


def passages(config: LongConfig, tokenizer: Any, length: int) -> list[Passage]:
    """A place in each book for each seed: the beginning of a chapter, else of a paragraph, far enough into the book.

    Raises:
        LoadError: the file cannot be read.
        InputError: no book has so many tokens.
    """
    texts, found = read_books(config), list[Passage]()
    for seed in config.numbers("seeds"):
        rng = np.random.default_rng([seed, length])
        places = (_passage(text, rng, seed, length, config.follow, tokenizer) for text in texts)
        found += [passage for passage in places if passage is not None]
    if not found:
        raise InputError(
            f"no text in {config.books!r} has {length} tokens and {config.follow} that follow; give longer ones, or "
            "shorter --lengths"
        )
    return found


def read_books(config: LongConfig) -> list[str]:
    """The first ``config.count`` texts of the file.

    Raises:
        LoadError, InputError: it cannot be read, or holds none.
    """
    assert config.books is not None
    path = Path(config.books).expanduser()
    rows = path.name.removesuffix(".gz").endswith(".jsonl")
    return list(map(text_of, read_prompts(path, config.count))) if rows else [read_text(path)]


def _passage(text: str, rng: Any, seed: int, length: int, follow: int, tokenizer: Any) -> Passage | None:
    first, last = CHARACTERS * length, len(text) - CHARACTERS * follow
    found = ([one.end() for one in form.finditer(text, first, max(first, last))] for form in (_HEADING, _PARAGRAPH))
    places = next(filter(None, found), None)
    if places is None:
        return None
    place = places[int(rng.integers(len(places)))]
    context = list(tokenizer(text[place - first : place], verbose=False)["input_ids"])
    following = tokenizer(text[place : place + CHARACTERS * follow], add_special_tokens=False)["input_ids"][:follow]
    if len(context) < length or len(following) < follow:
        return None
    begin = context[:1] if context[0] == tokenizer.bos_token_id else []
    return Passage(seed, tuple(begin + context[len(context) - length + len(begin) :]), tuple(following))


class Forced(LogitsProcessor):
    """Makes a model write a given text after a prompt, and records its loss and best token at each place.

    Args:
        prompt_tokens: tokens of the prompt.
        following: token ids of the text.
    """

    def __init__(self, prompt_tokens: int, following: Sequence[int]) -> None:
        self._begin, self._following = prompt_tokens, following
        self.losses: dict[int, float] = {}
        self.best: dict[int, int] = {}

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """See transformers: (1, tokens so far) and (1, V)."""
        place = int(input_ids.shape[1]) - self._begin
        token, row = self._following[place], scores[0].float()
        self.losses[place] = float(row.logsumexp(-1) - row[token])
        self.best[place] = int(row.argmax())
        forced = torch.full_like(scores, -math.inf)
        forced[0, token] = 0.0
        return forced


def followed(llm: LLM, context: Sequence[int], following: Sequence[int]) -> tuple[list[float], list[int]]:
    """Losses (nats) of a text that follows a context, and the most probable token at each of its places."""
    forced = Forced(len(context), following)
    params = SamplingParams(max_new_tokens=len(following), ignore_eos=True, logits_processors=[forced])
    (done,) = llm.generate([list(context)], params)
    if len(done.token_ids) < len(following):
        raise InputError(
            f"the context and what follows it have {len(context) + len(following)} tokens; the model holds "
            f"{llm.max_context}: give shorter --lengths"
        )
    places = range(len(following))
    return [forced.losses[place] for place in places], [forced.best[place] for place in places]


def read(make: Loader, system: System, length: int, given: Sequence[Passage], watch: Watch) -> Line:
    """Mean loss and most probable tokens of a system for every passage; see ``jobs.Measure``."""
    running: Any = make(system, length)
    found = [followed(running.llm, passage.context, passage.following) for passage in given]
    return {
        "losses": [statistics.fmean(losses) for losses, _ in found],
        "best": [best for _, best in found],
        "kv_bytes": running.kv_bytes,
    }


def compared(
    given: Sequence[Passage], losses: Sequence[float], best: Sequence[Any], full: Sequence[Any] | None
) -> Line:
    """Perplexity, and agreement with the full cache, over all passages; their spread over seeds.

    Args:
        given: the passages, all of one length.
        losses: mean loss of each.
        best: the most probable tokens of each.
        full: those of the full cache; None: not known.
    """
    seeds = [passage.seed for passage in given]
    line: Line = {
        "perplexity": math.exp(statistics.fmean(losses)),
        "perplexity_spread": spread([math.exp(loss) for loss in means(seeds, losses).values()]),
    }
    if full is None:
        return line | {"agreement": None, "agreement_spread": None}
    shares = [statistics.fmean(map(operator.eq, own, theirs)) for own, theirs in zip(best, full, strict=True)]
    return line | {"agreement": statistics.fmean(shares), "agreement_spread": spread(means(seeds, shares).values())}


def books(bench: Bench) -> Row:
    """Perplexity and agreement of every system; the full cache is measured first, even if it was not asked for."""
    config = bench.config
    bench.note("books: tokens")
    given = {length: passages(config, bench.tokenizer, length) for length in config.numbers("lengths")}
    # one-shot computes what full does, and cannot be made to write a given text.
    others = (one for one in bench.systems if not one.query_first and one.cache not in ("full", ONE_SHOT))
    found, expected = list[Line](), dict[int, Any]()
    for system in (System("full", None), *others):
        for line in bench.lines("books", read, system, given):
            if "best" in line:
                length, losses, best = line["length"], line.pop("losses"), line.pop("best")
                if system.cache == "full":
                    expected[length] = best
                line |= compared(given[length], losses, best, expected.get(length))
            found.append(line)
    title = "perplexity of what follows a long context, and share of tokens that full expects too"
    conditions = {
        "books": Path(str(config.books)).name,
        "passages": len(next(iter(given.values()))),
        "seeds": ",".join(config.seeds),
        "follow": config.follow,
    }
    return row("books", title, found, conditions)

"""A target that drafts on an excerpt of its own cache, against its plain text, by the length of the context."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from own_rows.common import OwnConfig
from sakiyomi.core.errors import InputError
from sakiyomi.core.params import SamplingParams
from sakiyomi.engine.conversation import Conversation
from sakiyomi.engine.plain import EngineView
from sakiyomi.evaluation.bench.frame import PairRow, Race, Races, declared
from sakiyomi.evaluation.bench.meter import round_figures
from sakiyomi.evaluation.bench.models import Pair
from sakiyomi.evaluation.bench.runner import Spread, Standing, TimedRun

__all__ = ["evicted"]


@declared("tokens/s after the prompt, by its length")
def evicted(row: PairRow) -> Races:
    """Greedy, by the length of the context: what a token costs where a pass reads mostly keys and values.

    The context is prefilled once; seconds do not include it. With gamma "auto" the engine stops speculating where that
    is slower.

    Raises:
        InputError: the prompts are shorter than the longest context, or the target has fewer positions.
    """
    pair, config = row.pair, row.config
    assert isinstance(config, OwnConfig)
    draft = config.draft if config.draft.startswith("self-evicted:") else "self-evicted"
    llm = row.llm(draft)
    text = _text(pair, max(config.contexts))
    fixed = row.params(ignore_eos=True)
    for length in sorted(set(config.contexts)):
        prompt = text[:length]
        with ExitStack() as opened:
            ways = {
                "plain": (Conversation(EngineView(llm).engine), fixed),
                "self-evicted": (llm.conversation(), fixed),
                "self-evicted, gamma auto": (llm.conversation(), replace(fixed, gamma="auto")),
            }
            runs = {
                name: partial(_run, opened.enter_context(talk), prompt, params) for name, (talk, params) in ways.items()
            }
            yield Race(runs, pair.judge(llm, [prompt]), f"{length} tokens", partial(_line, length))
    return row.conditions(llm, [text], alone=True, draft=draft)


def _text(pair: Pair, tokens: int) -> list[int]:
    """So many tokens of the prompts, one after the other."""
    config = pair.config
    ids: list[int] = pair.target.tokenizer("\n\n".join(config.texts())).input_ids
    if len(ids) < tokens:
        raise InputError(
            f"contexts has {tokens} tokens, and the prompts together have {len(ids)}; give a longer text with "
            "--prompts and --count, or shorter contexts"
        )
    return ids[:tokens]


def _run(talk: Conversation, prompt: Sequence[int], params: SamplingParams) -> TimedRun:
    """Seconds after the prompt; only the first run reads more of it than the last token."""
    done = talk.generate(prompt, params)
    seconds = done.stats.seconds - done.stats.prefill_seconds
    return TimedRun(seconds, len(done.token_ids) - 1, (tuple(done.token_ids),), round_figures(done.stats))


def _line(length: int, standings: Sequence[Standing]) -> list[dict[str, Any]]:
    plain, fixed, auto = (standing.to_dict() for standing in standings)
    line = {
        "context": length,
        "plain_tokens_per_second": plain["tokens_per_second"],
        "speculative_tokens_per_second": fixed["tokens_per_second"],
        "ratio": fixed["ratio"],
        "auto": auto["ratio"],
        "A/A": Spread.shown(standings),
    }
    line |= {name: fixed[name] for name in ("acceptance_rate", "alpha", "tau", "draft_ms", "score_ms", "overhead_ms")}
    return [line | {"equal": fixed["equal"] and auto["equal"]}]

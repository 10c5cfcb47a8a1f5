"""A model with and without drafts, on kinds of prompts that come with the package.

Every prompt is a message of the user in the model's chat template, or plain text if the model has none.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from sakiyomi.core.chats import Chat, is_chat, question
from sakiyomi.core.embedded import FREE_DRAFT
from sakiyomi.core.errors import InputError, UnsupportedError
from sakiyomi.core.params import SamplingParams
from sakiyomi.engine.chat_template import Dialogue
from sakiyomi.engine.llm import LLM
from sakiyomi.engine.plain import EngineView
from sakiyomi.evaluation.bench.config import Note, silent
from sakiyomi.evaluation.bench.frame import generated
from sakiyomi.evaluation.bench.long.questions import middle_cut
from sakiyomi.evaluation.bench.models import NearTies
from sakiyomi.evaluation.bench.report import Row, of_race
from sakiyomi.evaluation.bench.runner import Contender, Spread, Standing, TimedRun, race
from sakiyomi.evaluation.bench.spec.results import chosen, own_questions

PLAIN, FREE = "plain", "free drafts"
TITLE = "greedy, one request at a time, tokens/s with the prompt's pass"
OWN = {"chat": ("writing", "humanities", "stem"), "code": ("coding",), "summary": ("summarization",)}
"""Kinds of prompts that come with the package, and the categories of ``bench spec`` that they are taken from."""
EACH = 3
"""Prompts of each of them."""
SHORTEST, LONGEST = 16, 64
"""New tokens of a text in ``Plan``."""


def own_prompts() -> dict[str, list[str | Chat]]:
    """The kinds of prompts that come with the package."""
    return {
        name: [one.turns[0] for one in chosen(own_questions(), categories, EACH // len(categories))]
        for name, categories in OWN.items()
    }


def as_tokens(llm: LLM, prompts: Sequence[str | Chat], new: int) -> list[list[int]]:
    """Token ids of prompts in the chat template; long ones are cut in the middle, so that ``new`` tokens have room.

    Raises:
        InputError: the context has no room for so many tokens.
        UnsupportedError: the model has an encoder.
    """
    if llm.target.weights.encoder is not None:
        raise UnsupportedError(
            f"{llm.name} has an encoder, and these prompts are for models that continue a text; use bench tasks"
        )
    room = llm.max_context - new
    if room < 2:
        raise InputError(f"max_new_tokens is {new} and the context has {llm.max_context} tokens; ask for fewer")
    dialogue = Dialogue(llm.tokenizer)
    chats = [list(prompt) if is_chat(prompt) else question(str(prompt)) for prompt in prompts]
    return [middle_cut(dialogue.read(chat), room) for chat in chats]


def ways(llm: LLM) -> dict[str, Any]:
    """How a model is run here: plain, with free drafts, and with the draft of the ``LLM`` if that is another one."""
    free, own = llm.drafter(FREE_DRAFT), llm.draft
    found: dict[str, Any] = {PLAIN: EngineView(llm)}
    if own is None or free is None or own.name != free.name:
        found[FREE] = EngineView(llm, free)
    if own is not None:
        found[FREE if FREE not in found else f"draft {own.name}"] = llm
    return found


@dataclass(frozen=True)
class Plan:
    """How much of ``measure`` a machine can do in about a minute.

    Attributes:
        texts: of each kind of prompts.
        new: most new tokens of each.
        repeats: measured runs.
        seconds: after which no further run begins.
    """

    texts: int
    new: int
    repeats: int = 3
    seconds: float = 60.0

    @classmethod
    def of(cls, llm: LLM, prompts: Mapping[str, Sequence[list[int]]], new: int | None) -> Plan:
        """Measure the speed of plain decoding here, and plan for it.

        Args:
            llm: is run twice on a prompt.
            prompts: token ids by kind.
            new: most new tokens of a text; None: as many as there is time for.
        """
        first = next(iter(prompts.values()))[:1]
        params = SamplingParams(max_new_tokens=SHORTEST, ignore_eos=True)
        speed = [_answered(EngineView(llm), first, params).speed for _ in range(2)][-1]
        runs = len(prompts) * 2 * (1 + cls.repeats)
        tokens = cls.seconds * speed / runs
        most = max(map(len, prompts.values()))
        texts = max(1, min(most, int(tokens / (new or LONGEST / 2))))
        return cls(texts, new or max(SHORTEST, min(LONGEST, int(tokens / texts))))


def measure(
    llm: LLM, prompts: Mapping[str, Sequence[list[int]]], params: SamplingParams, plan: Plan, note: Note = silent
) -> Iterator[Row]:
    """Plain against drafted decoding on each kind of prompts, interleaved; a row for each kind.

    Lines have the usual figures of a race, and ``prompts`` (the kind), ``draft``, ``first_token_seconds``, and
    ``faster``: true or false beyond the noise of two equal runs, otherwise null.

    Args:
        llm: is measured.
        prompts: token ids by kind.
        params: of all texts.
        plan: how often, and how long.
        note: receives lines of progress.
    """
    several, began = ways(llm), time.perf_counter()
    for place, (kind, every) in enumerate(prompts.items(), start=1):
        texts = every[: plan.texts]
        judge = NearTies(llm.target, texts)
        contenders = [Contender(name, partial(_answered, way, texts, params), judge) for name, way in several.items()]
        standings = race(
            contenders,
            repeats=plan.repeats,
            until=began + plan.seconds * place / len(prompts),
            note=lambda text, kind=kind: note(f"{kind}: {text}"),  # type: ignore[misc]
        )
        row = of_race("demo", TITLE, standings, where=kind)
        spread = Spread.of(standings)
        lines = [
            {**line, "prompts": kind, "draft": standing.name, "faster": _faster(standing, spread)}
            for line, standing in zip(row.lines, standings, strict=True)
        ]
        yield replace(row, lines=lines)


def _answered(way: Any, prompts: Sequence[list[int]], params: SamplingParams) -> TimedRun:
    run, done = generated(way, [([prompt], params) for prompt in prompts])
    return run.more(first_token_seconds=statistics.median(one.stats.prefill_seconds for one in done))


def _faster(standing: Standing, spread: Spread | None) -> bool | None:
    return None if spread is None or standing.ratio in spread else standing.ratio > 1

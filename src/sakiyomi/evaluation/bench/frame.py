"""What rows about a pair share: its models, prompts, runs over the prompts, and races between ways of running them.

A row is a generator: it yields one ``Race`` or several, receives the standings of each, and returns the conditions.
``declared`` runs the races and makes the table, the notes and the other conditions.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import Any

from sakiyomi.core.dtypes import dtype_name
from sakiyomi.core.outputs import Generation, Stats
from sakiyomi.core.params import SamplingParams
from sakiyomi.engine.llm import LLM
from sakiyomi.evaluation.audit.reference import EngineReference, HFReference
from sakiyomi.evaluation.bench.config import BenchConfig, Note
from sakiyomi.evaluation.bench.meter import Meter, round_figures
from sakiyomi.evaluation.bench.models import Pair, rounding
from sakiyomi.evaluation.bench.peers import Transformers
from sakiyomi.evaluation.bench.report import Row, of_race
from sakiyomi.evaluation.bench.runner import Contender, Judge, Run, Standing, TimedRun, race, timed
from sakiyomi.model_executor.weights import quantizes

__all__ = ["PairRow", "Race", "Races", "Run", "declared", "generated", "lengths", "run_ours", "run_peer"]

Prompts = Sequence[Sequence[int]]
Calls = Iterable[tuple[Prompts, SamplingParams]]
"""Prompts of one call, and their parameters."""


@dataclass(frozen=True)
class Race:
    """Contenders that run side by side, and their lines in the row's table.

    Attributes:
        contenders: the baseline first; or a function for each name.
        judge: of those that are given by name; None: their outputs are not compared.
        where: names the race, if the row has several.
        lines: lines of the table; by default one for each contender.
        until: value of ``time.perf_counter`` after which no further round of runs begins.
        warm_up: runs before the measured ones.
    """

    contenders: Mapping[str, Run] | Sequence[Contender]
    judge: Judge | None = None
    where: str = ""
    lines: Callable[[list[Standing]], Iterable[Mapping[str, Any]]] | None = None
    until: float = math.inf
    warm_up: int = 1


Races = Generator[Race, list[Standing], dict[str, Any]]
"""A row: yields races, is sent their standings, returns the conditions."""


def declared(title: str) -> Callable[[Callable[[PairRow], Races]], Callable[[PairRow], Row]]:
    """Make a row from a generator of races; ``title`` says what is measured, with the unit."""

    def decorate(races: Callable[[PairRow], Races]) -> Callable[[PairRow], Row]:
        @wraps(races)
        def measure(row: PairRow) -> Row:
            found = dict[str, Any]()
            with closing(races(row)) as several:  # closes what the row has opened, also where a race fails
                try:
                    asked = next(several)
                    while True:
                        standings = row.race(asked.contenders, asked.judge, asked.where, asked.until, asked.warm_up)
                        lines = None if asked.lines is None else list(asked.lines(standings))
                        part = of_race(row.name, title, standings, where=asked.where, lines=lines)
                        row.lines += map(dict, part.lines)
                        row.notes += part.notes
                        found |= part.conditions
                        asked = several.send(standings)
                except StopIteration as done:
                    conditions: dict[str, Any] = done.value
            if not any("perplexity" in line for line in row.lines):
                conditions.pop("perplexity_of", None)  # nothing was graded
            return Row(row.name, title, row.lines, conditions | found, row.notes)

        return measure

    return decorate


def generated(way: Any, calls: Calls) -> tuple[TimedRun, list[Generation]]:
    """Run an ``LLM`` or an ``EngineView`` on these calls, one after the other; the generations come too."""
    done: list[Generation] = []
    if way.engine.drafter is not None:
        way.engine.drafter.forget()

    def work() -> list[list[int]]:
        for prompts, params in calls:
            done.extend(way.generate([list(prompt) for prompt in prompts], params))
        return [result.token_ids for result in done]

    run = timed(work)
    return run.more(**round_figures(Stats.total(result.stats for result in done))), done


def run_ours(
    way: Any, prompts: Prompts, params: SamplingParams, *, together: bool = False, kept: list[Generation] | None = None
) -> TimedRun:
    """Run our engine on all prompts, one after the other or all at once, with its counts and what its passes read.

    Args:
        way: an ``LLM`` or an ``EngineView``.
        prompts: token ids.
        params: of all of them.
        together: all at once.
        kept: takes the generations.
    """
    with Meter(way.engine) as meter:
        run, done = generated(way, [(prompts, params)] if together else [([prompt], params) for prompt in prompts])
    if kept is not None:
        kept += done
    return run.more(**meter.figures(), latency_seconds=statistics.median(result.stats.seconds for result in done))


def run_peer(peer: Transformers, prompts: Prompts, params: SamplingParams, *, together: bool = False) -> TimedRun:
    """The same with transformers: all prompts, one after the other or all at once."""
    batches = [prompts] if together else [[prompt] for prompt in prompts]
    return timed(lambda: [text for batch in batches for text in peer.generate_batch(batch, params)])


class PairRow:
    """A row about a pair while it is measured.

    Args:
        name: of the row.
        config: what is measured, and how often.
        note: receives lines of progress.
        pair: target and draft of this configuration, if they are loaded already.

    Attributes:
        pair: target and draft.
        lines: of the table, so far.
        notes: below the table, so far.
    """

    def __init__(self, name: str, config: BenchConfig, note: Note, pair: Pair | None = None) -> None:
        self.name, self.config, self._note = name, config, note
        self.pair = pair or Pair(config)
        self.lines: list[dict[str, Any]] = []
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        """Report progress."""
        self._note(f"{self.name}: {text}")

    def say(self, text: str) -> None:
        """Log what was measured, so that it is not lost if the row is stopped."""
        logging.getLogger("sakiyomi").info("%s: %s", self.name, text)

    def changed(self, name: str | None = None, **settings: Any) -> PairRow:
        """The row with other settings, about a pair of its own."""
        return PairRow(name or self.name, replace(self.config, **settings), self._note)

    def llm(self, draft: Any = None, **options: Any) -> LLM:
        """Our engine on the pair, see ``Pair.llm``, with its passes recorded."""
        self.note("loading")
        llm = self.pair.llm(draft, **options)
        if self.config.compile:
            llm.wait()
        return llm

    def params(self, **more: Any) -> SamplingParams:
        """Sampling parameters: the configured length and gamma by default."""
        return SamplingParams(**{"max_new_tokens": self.config.max_new_tokens, "gamma": self.config.gamma} | more)

    def run(self, way: Any, *, prompts: Prompts | None = None, together: bool = False, **more: Any) -> Run:
        """A run of our engine, see ``run_ours``; the pair's prompts if no others are given, and ``params(**more)``."""
        prompts = self.pair.prompts if prompts is None else prompts
        return partial(run_ours, way, prompts, self.params(**more), together=together)

    def contenders(
        self, llm: LLM, ours: Mapping[str, Run], theirs: Mapping[str, Run] | None = None, prompts: Prompts | None = None
    ) -> list[Contender]:
        """Contenders with the same prompts, greedy: judged by the logits of their weights, and graded.

        Args:
            llm: runs ours. If its weights are quantized, ours are compared with the first of them.
            ours: runs of our engine, by name.
            theirs: runs of transformers, by name; they come first.
            prompts: others than the pair's.
        """
        pair, found = self.pair, []
        if theirs:
            judge = pair.judge(prompts=prompts)
            judged = [Contender(name, run, judge) for name, run in theirs.items()]
            found = pair.quality.grade(judged, HFReference(pair.target.model).logits)
        first = next(iter(ours)) if theirs and quantizes(llm.target.weights) else None
        judge = pair.judge(llm, prompts)
        own = [Contender(name, run, judge, first) for name, run in ours.items()]
        return found + pair.quality.grade(own, EngineReference(llm.target).logits)

    def race(
        self,
        contenders: Mapping[str, Run] | Sequence[Contender],
        judge: Judge | None = None,
        where: str = "",
        until: float = math.inf,
        warm_up: int = 1,
    ) -> list[Standing]:
        """Run contenders side by side, see ``Race``; optional ones that fail are left out, with a note."""
        if isinstance(contenders, Mapping):
            contenders = [Contender(name, run, judge) for name, run in contenders.items()]
        before = f"{where}, " if where else ""

        def tell(text: str) -> None:
            self.note(before + text)

        repeats = self.config.repeats
        return race(contenders, repeats=repeats, warm_up=warm_up, note=tell, lost=self.notes, until=until)

    def warm(self, runs: Mapping[str, Run], llm: LLM) -> None:
        """Run each once, so that passes of all sizes that they need are recorded."""
        for name, run in runs.items():
            self.note(f"warming up, {name}")
            run()
            llm.wait()

    def conditions(
        self, llm: LLM, prompts: Prompts | None = None, *, alone: bool = False, **more: Any
    ) -> dict[str, Any]:
        """The conditions of the row; called after its races.

        Args:
            llm: our engine.
            prompts: others than the pair's.
            alone: the row is about the target, without a draft model.
            more: further conditions.
        """
        config, pair = self.config, self.pair
        if alone:
            found: dict[str, Any] = {"target": config.target, "dtype": dtype_name(llm.target.dtype)}
        else:
            found = {**pair.names, **pair.dtypes}
        found |= {"gamma": config.gamma, "rounding": rounding(llm)}
        found["graphs"] = llm.target.mode if llm.target.recorded(config.gamma + 1) else "eager"
        return found | lengths(config, pair.prompts if prompts is None else prompts) | pair.quality.conditions | more


def lengths(config: BenchConfig, prompts: Prompts) -> dict[str, Any]:
    """For the conditions: how many prompts, and how long they are."""
    return {
        "prompts": len(prompts),
        "prompt_tokens": "-".join(str(n) for n in sorted({min(map(len, prompts)), max(map(len, prompts))})),
        "max_new_tokens": config.max_new_tokens,
    }

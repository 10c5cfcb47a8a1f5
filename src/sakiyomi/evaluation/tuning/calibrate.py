"""Measures drafters: acceptance on many texts, and the time of rounds on a few."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sakiyomi.core.errors import DraftError, InputError
from sakiyomi.core.params import SamplingParams
from sakiyomi.engine.llm import LLM
from sakiyomi.engine.plain import EngineView
from sakiyomi.evaluation.tuning.predict import (
    Chains,
    Expected,
    RoundCosts,
    by_chance,
    by_place,
    by_rank,
    calm,
    usual,
    weighed,
)
from sakiyomi.evaluation.tuning.watch import Heard, Round, watched

GAMMAS = (1, 2, 3, 4, 6, 8)
RUN = (1, 3, 6, 8)  # lengths that run; the others are interpolated
DEEP = RUN[-1]
ALONE = 8  # texts that are written one at a time
BATCH = 16
WARM = 16  # new tokens of texts that only warm up
OVER = "all texts end with their first token, so that there is no round to look at; give other prompts"
Prompts = Sequence[list[int]]
Note = Callable[[str], None]
Gamma = int | str


@dataclass
class Candidate:
    """A drafter on the target, with its measurements.

    Attributes:
        spec: how a user asks for it.
        heard: itself.
        fixed, weighing: engines for chains of a given length and for "auto": each learns from its own rounds alone.
        alone: rounds of texts that were written one at a time, by gamma.
        many: the same of texts that were written in batches.
        plain: rounds of plain decoding between those of ``alone``: what they are compared with.
    """

    spec: str
    heard: Heard
    fixed: EngineView
    weighing: EngineView
    alone: dict[Gamma, list[Sequence[Round]]] = field(default_factory=dict)
    many: dict[int, list[Sequence[Round]]] = field(default_factory=dict)
    plain: list[Round] = field(default_factory=list)

    @classmethod
    def on(cls, llm: LLM, spec: str) -> Candidate | None:
        """Make a drafter beside a target; None for "none".

        Raises:
            SakiyomiError: it cannot be used there.
        """
        drafter = llm.drafter(spec)
        if drafter is None:
            return None
        heard = Heard(drafter)
        return cls(spec, heard, EngineView(llm, heard, strict=True), EngineView(llm, heard, strict=True))

    def engine(self, gamma: Gamma) -> EngineView:
        """The one for this gamma."""
        return self.weighing if gamma == "auto" else self.fixed

    def write(self, prompts: Prompts, params: SamplingParams, gamma: Gamma) -> list[list[Round]]:
        """Rounds of texts that are written at once."""
        return watched(self.engine(gamma).engine, self.heard, prompts, replace(params, gamma=gamma))

    def chains(self) -> list[Round]:
        """All rounds of chains whose times are known."""
        return [part for gamma in RUN for text in self.alone[gamma] for part in text]


class Calibration:
    """Rounds of every drafter on the same texts.

    A few texts are written one at a time and give the time of rounds. All drafters write a text, with plain decoding
    between them, before the next text begins, because the speed of a machine drifts. Many texts are written in batches
    and give the acceptance, which does not depend on the batch.

    Args:
        llm: the target, without a drafter.
        params: of all texts.
        candidates: drafters.
        refused: drafters that cannot be used, and why; those that fail here are added.

    Attributes:
        texts: how many were written in batches.
        rows: rows that a pass over so many tokens has.
    """

    def __init__(
        self, llm: LLM, params: SamplingParams, candidates: Iterable[Candidate], refused: list[dict[str, str]]
    ) -> None:
        self.llm, self.params = llm, params
        self.candidates = {candidate.spec: candidate for candidate in candidates}
        self.refused = refused
        self.undrafted, self.rows = EngineView(llm), llm.target.padded
        self.plain: list[Sequence[Round]] = []
        self.texts = 0

    def warm(self, prompt: list[int]) -> None:
        """Write a first text with every drafter as a warm-up."""
        self._plain(prompt)
        short = replace(self.params, max_new_tokens=min(WARM, self.params.max_new_tokens))
        self._each(lambda candidate: [candidate.write([prompt], short, gamma) for gamma in (DEEP, "auto")])
        self.plain.clear()

    def time(self, prompt: list[int]) -> None:
        """Time one text at a time, with every drafter."""
        self._plain(prompt)
        self._each(functools.partial(self._time, prompt))

    def count(self, prompts: Prompts) -> None:
        """Count accepted tokens of texts in a batch, with every drafter."""
        self._each(functools.partial(self._count, prompts))
        self.texts += len(prompts)

    def _each(self, work: Callable[[Candidate], object]) -> None:
        for spec, candidate in list(self.candidates.items()):
            try:
                work(candidate)
            except DraftError as error:
                del self.candidates[spec]
                self.refused.append({"draft": spec, "refused": error.message})

    def _plain(self, prompt: list[int]) -> None:
        self.plain += watched(self.undrafted.engine, None, [prompt], self.params)

    def _time(self, prompt: list[int], candidate: Candidate) -> None:
        for gamma in (*RUN, "auto"):
            candidate.alone.setdefault(gamma, []).extend(candidate.write([prompt], self.params, gamma))
        self._plain(prompt)
        for rounds in self.plain[-2:]:  # before and after
            candidate.plain += rounds

    def _count(self, prompts: Prompts, candidate: Candidate) -> None:
        for gamma in RUN:
            candidate.many.setdefault(gamma, []).extend(candidate.write(prompts, self.params, gamma))

    # ------------------------------------------------------------ what follows

    @property
    def plain_seconds(self) -> float:
        """Of a plain round."""
        return usual([part for text in self.plain for part in text])

    def passes(self) -> dict[int, float]:
        """Seconds of a target pass by its rows, of all texts that were written alone."""
        found: dict[int, list[float]] = {}
        rounds = [part for text in self.plain for part in text]
        for candidate in self.candidates.values():
            rounds += candidate.chains()
        for part in calm(rounds):
            found.setdefault(self.rows(part.nodes + 1), []).append(part.score)
        return {rows: statistics.fmean(seconds) for rows, seconds in sorted(found.items())}

    def costs(self, candidate: Candidate) -> RoundCosts:
        """Of rounds of chains with this drafter."""
        return RoundCosts.of(candidate.chains(), self.rows, self.passes())

    def predict(self, candidate: Candidate) -> dict[Gamma, Expected]:
        """Of every length, and of "auto".

        A drafter is compared with the plain rounds that ran between its own, because a machine may be half as fast a
        minute later.
        """
        for texts in (self.plain, *candidate.alone.values(), *candidate.many.values()):
            if not any(texts):
                raise InputError(OVER)
        costs, plain, chains = self.costs(candidate), usual(candidate.plain), Chains(candidate.many)
        found: dict[Gamma, Expected] = {gamma: chains.expect(gamma, costs, self.rows, plain) for gamma in GAMMAS}
        found["auto"] = weighed(candidate.alone["auto"], candidate.alone[DEEP], candidate.many[DEEP], plain)
        return found

    def described(self, candidate: Candidate) -> dict[str, Any]:
        """Acceptance of a drafter by place, rank and confidence, and its times."""
        deep, costs = Chains(candidate.many).rounds(DEEP), self.costs(candidate)
        alphas, weighing = by_place(deep), [part for text in candidate.alone["auto"] for part in text]
        judged = sum(min(part.tokens, part.depth) for part in deep)
        step = costs.draft(DEEP) / DEEP
        return {
            "draft": candidate.spec,
            "alpha": sum(min(part.tokens - 1, part.depth) for part in deep) / judged if judged else 0.0,
            "hit": sum(part.depth > 0 for part in deep) / max(len(deep), 1),
            "alphas": alphas,
            "by_rank": by_rank(weighing),
            "by_confidence": by_chance(deep),
            "draft_ms": 1000 * step,
            "c": step / usual(candidate.plain),
            "overhead_ms": 1000 * costs.other(4),
        }

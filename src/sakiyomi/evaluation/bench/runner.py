"""Contenders side by side in one process: A B C A B C ..., a warm-up first, outputs compared in the same process.

Knows no model: a contender is a name and a function that runs once and returns a ``TimedRun``. A contender whose
outputs differ from those of the first one gets no speed.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sakiyomi.core.errors import InputError, UnsupportedError

__all__ = ["Agreement", "Contender", "Judge", "Run", "Spread", "Standing", "TimedRun", "figured", "race", "same_tokens"]
__all__ += ["timed"]

Outputs = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class TimedRun:
    """One run of one contender.

    Attributes:
        seconds: wall clock.
        tokens: new tokens, as the contender counts them.
        outputs: token ids of each text.
        figures: other figures, for instance tau; their medians are reported.
    """

    seconds: float
    tokens: int
    outputs: Outputs = ()
    figures: dict[str, float] = field(default_factory=dict)

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds if self.seconds else 0.0

    def more(self, **figures: float) -> TimedRun:
        """The same with further figures."""
        return replace(self, figures=self.figures | figures)


Run = Callable[[], TimedRun]
"""Runs a contender once."""


def figured(run: Run, figures: Callable[[TimedRun], Mapping[str, float]]) -> Run:
    """The same run with further figures, which are computed after the clock has stopped."""

    def more() -> TimedRun:
        timed_run = run()
        return timed_run.more(**figures(timed_run))

    return more


@dataclass(frozen=True)
class Agreement:
    """Whether two outputs are the same.

    Attributes:
        equal: to the last token; None: they were not compared.
        accepted: equal, or different in a way that is explained.
        note: where and by how much they differ.
    """

    equal: bool | None
    accepted: bool
    note: str = ""


Judge = Callable[[Outputs, Outputs], Agreement]
"""Compares the expected outputs with those of a contender."""


@dataclass(frozen=True)
class Contender:
    """One way of doing the same work.

    Attributes:
        name: shown in tables.
        run: runs it once.
        judge: compares its outputs with the baseline's; None: its outputs are its own (sampled text).
        against: name of the contender whose outputs are expected instead, because it has other weights than the
            baseline: its own name, or that of one with the same weights.
        optional: a program that may fail with an ``UnsupportedError``, and then is left out of the race.
    """

    name: str
    run: Run
    judge: Judge | None = None
    against: str | None = None
    optional: bool = False

    def figured(self, figures: Callable[[TimedRun], Mapping[str, float]]) -> Contender:
        """The same with further figures."""
        return replace(self, run=figured(self.run, figures))


@dataclass(frozen=True)
class Standing:
    """The result of one contender.

    Attributes:
        name: of the contender.
        runs: timed, without the warm-up.
        ratio: its speed / the baseline's in the same round of runs, the median over all.
        agreement: with the baseline's outputs, or with those of another.
        against: the other, which has the same weights; None: it was the baseline.
    """

    name: str
    runs: tuple[TimedRun, ...]
    ratio: float
    agreement: Agreement
    against: str | None = None

    @property
    def speeds(self) -> list[float]:
        """Tokens per second of each run."""
        return [run.speed for run in self.runs]

    def median(self, figure: str) -> float:
        """The median of a figure."""
        return statistics.median(run.figures[figure] for run in self.runs)

    def ratio_to(self, other: Standing) -> float:
        """Its speed / another's in the same round of runs, the median over all."""
        return _ratio(self.runs, other.runs)

    def to_dict(self) -> dict[str, Any]:
        """JSON values; no speed where the outputs are not accepted."""
        shown: dict[str, Any] = {
            "name": self.name,
            "tokens_per_second": statistics.median(self.speeds),
            "low": min(self.speeds),
            "high": max(self.speeds),
            "ratio": self.ratio,
        }
        if not self.agreement.accepted:
            shown = dict.fromkeys(shown, None) | {"name": self.name}
        for name in self.runs[0].figures:
            shown[name] = self.median(name)
        if self.against is not None:
            shown["weights"] = "other"
        return shown | {"tokens": self.runs[0].tokens, "equal": self.agreement.equal, "note": self.agreement.note}


@dataclass(frozen=True)
class Spread:
    """The noise (A/A): ratios between equal runs on this machine. A ratio within it shows no difference.

    Each run of a contender is compared with its next one, and the widest ratio of any contender counts, because with
    few runs a single contender may look steady by luck. The range is rather too wide than too narrow: two such runs are
    further apart in time than the two of a paired ratio, and a median of pairs is steadier than one pair. It needs no
    further runs. It is symmetric, because either of two equal things could be the baseline.

    Attributes:
        low, high: of the ratio; 1 / each other.
    """

    low: float
    high: float

    @classmethod
    def of(cls, standings: Sequence[Standing]) -> Spread | None:
        """Of one race; None if there is only one run, which tells nothing."""
        pairs = [pair for standing in standings for pair in itertools.pairwise(standing.speeds)]
        ratios = [max(a / b, b / a) for a, b in pairs if a and b]
        return cls(1 / max(ratios), max(ratios)) if ratios else None

    @classmethod
    def shown(cls, standings: Sequence[Standing]) -> str | None:
        """Of one race, in words."""
        spread = cls.of(standings)
        return None if spread is None else str(spread)

    def __contains__(self, ratio: float) -> bool:
        return self.low <= ratio <= self.high

    def __str__(self) -> str:
        return f"{self.low:.2f} to {self.high:.2f}"


def same_tokens(expected: Outputs, got: Outputs) -> Agreement:
    """Equal to the last token, or not accepted."""
    if expected == got:
        return Agreement(True, True)
    if len(expected) != len(got):
        return Agreement(False, False, f"{len(got)} texts instead of {len(expected)}")
    text = next(i for i, pair in enumerate(zip(expected, got, strict=True)) if pair[0] != pair[1])
    first, second = expected[text], got[text]
    shorter = min(len(first), len(second))
    place = next((i for i in range(shorter) if first[i] != second[i]), shorter)
    return Agreement(False, False, f"text {text} differs from token {place} on")


def race(
    contenders: Sequence[Contender],
    *,
    repeats: int,
    warm_up: int = 1,
    until: float = math.inf,
    note: Callable[[str], None] = lambda text: None,
    lost: list[str] | None = None,
) -> list[Standing]:
    """Run contenders interleaved; the first one is the baseline.

    Args:
        contenders: one or more.
        repeats: measured runs of each.
        warm_up: runs before them; their outputs are compared, their times do not count.
        until: value of ``time.perf_counter`` after which no further round of runs begins; at least one is measured.
        note: receives progress messages.
        lost: takes a line for each optional contender that failed and was left out.

    Raises:
        InputError: ``repeats`` is below 1, or two contenders have one name.
    """
    if repeats < 1:
        raise InputError(f"repeats is {repeats}; expected at least 1")
    names = [contender.name for contender in contenders]
    if len(set(names)) != len(names):
        raise InputError(f"two contenders have one name in {names}")
    runs: dict[str, list[TimedRun]] = {name: [] for name in names}
    for number in range(1 - warm_up, repeats + 1):
        if number > 1 and time.perf_counter() > until:
            break
        for contender in contenders:
            note(f"run {number} of {repeats}: {contender.name}")
            try:
                # The outputs of the warm-up count too: a text has to be the same in every run.
                runs[contender.name].append(contender.run())
            except UnsupportedError as error:
                if not contender.optional or lost is None:
                    raise
                lost.append(f"{contender.name} is left out: {error}")
                contenders = [other for other in contenders if other is not contender]
    baseline = runs[names[0]]
    return [
        Standing(
            contender.name,
            tuple(runs[contender.name][warm_up:]),
            _ratio(runs[contender.name][warm_up:], baseline[warm_up:]),
            _agreement(contender, runs[contender.name], runs[contender.against or names[0]][0].outputs),
            contender.against,
        )
        for contender in contenders
    ]


def timed(work: Callable[[], Sequence[Sequence[int]]]) -> TimedRun:
    """Time work that gives lists of token ids."""
    began = time.perf_counter()
    outputs = tuple(tuple(text) for text in work())
    seconds = time.perf_counter() - began
    return TimedRun(seconds, sum(map(len, outputs)), outputs)


def _ratio(runs: Sequence[TimedRun], baseline: Sequence[TimedRun]) -> float:
    return statistics.median(
        run.speed / other.speed if other.speed else 0.0 for run, other in zip(runs, baseline, strict=True)
    )


def _agreement(contender: Contender, runs: Sequence[TimedRun], expected: Outputs) -> Agreement:
    if contender.judge is None:
        return Agreement(None, True)
    different = list(dict.fromkeys(run.outputs for run in runs))
    found = [contender.judge(expected, outputs) for outputs in different]
    return min(found, key=lambda agreement: (agreement.accepted, agreement.equal))

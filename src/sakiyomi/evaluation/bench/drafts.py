"""Row ``oracle``: drafts of known rate at no cost."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from functools import partial
from typing import Any

from sakiyomi.drafters.oracle import Oracle
from sakiyomi.engine.plain import EngineView
from sakiyomi.evaluation.bench.frame import PairRow, Race, Races, Run, declared
from sakiyomi.evaluation.bench.meter import round_ms
from sakiyomi.evaluation.bench.runner import Standing, TimedRun
from sakiyomi.theory import expected_tokens

RATES = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
GAMMAS = (1, 2, 4, 8, 16)
"""At rate 1: passes against length."""


@declared("a draft of known rate at no cost: tokens a pass and speed-up")
def oracle(row: PairRow) -> Races:
    """Greedy text, one prompt at a time; the answers are known after the warm-up.

    Each line is a rate and a gamma. ``expected``: tokens a pass by theory, (1 - rate^(gamma + 1)) / (1 - rate), which
    would be the speed-up too if a pass over more rows cost no more; ``predicted``: the speed-up with what the passes
    and the bookkeeping took here. ``passes``: of the target, of all texts; ``least``: as few as theory allows.
    """
    llm = row.llm(draft="oracle")
    drafter = llm.draft
    assert isinstance(drafter, Oracle)
    points = [(rate, row.config.gamma) for rate in RATES]
    points += [(1.0, gamma) for gamma in GAMMAS if gamma != row.config.gamma]

    def run_at(rate: float, run: Run) -> TimedRun:
        drafter.rate = rate
        return run()

    def lines(standings: list[Standing]) -> Iterator[dict[str, Any]]:
        plain, *drafted = standings
        for (rate, gamma), standing in zip(points, drafted, strict=True):
            yield _point(rate, gamma, standing, plain, len(row.pair.prompts))

    runs = {"plain": row.run(EngineView(llm), ignore_eos=True)}
    runs |= {f"{r:g}, gamma {n}": partial(run_at, r, row.run(llm, gamma=n, ignore_eos=True)) for r, n in points}
    plain, *_ = yield Race(runs, row.pair.judge(llm), lines=lines)
    return row.conditions(llm, draft="oracle", plain_tokens_per_second=statistics.median(plain.speeds))


def _point(rate: float, gamma: int, standing: Standing, plain: Standing, texts: int) -> dict[str, Any]:
    shown = standing.to_dict()
    expected = expected_tokens(rate, gamma)
    length = standing.runs[0].tokens // texts - 1  # the first token of each text is the prompt's
    return {
        "rate": rate,
        "gamma": gamma,
        "expected": expected,
        "tau": statistics.fmean(run.figures["tau"] for run in standing.runs),
        "passes": round(length * texts / shown["tau"]),
        "least": math.ceil(length / (gamma + 1)) * texts if rate == 1.0 else None,
        "oracle_tokens_per_second": shown["tokens_per_second"],
        "ratio": shown["ratio"],
        "predicted": expected * round_ms(plain.to_dict(), draft=False) / round_ms(shown, draft=False),
        "equal": shown["equal"],
    }

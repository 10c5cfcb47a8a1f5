"""Tokens per pass and speed-up of a draft that costs nothing, by its acceptance rate, beside the theory."""

from __future__ import annotations

import math
import statistics
from functools import partial
from typing import Any

from sakiyomi.drafters.oracle import Oracle
from sakiyomi.engine.plain import EngineView
from sakiyomi.evaluation.bench.frame import PairRow, Run
from sakiyomi.evaluation.bench.report import Row
from sakiyomi.evaluation.bench.runner import Lap, Spread, Standing
from sakiyomi.theory import expected_tokens

__all__ = ["oracle"]

RATES = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
GAMMAS = (1, 2, 4, 8, 16)
"""At rate 1: passes against length."""


def oracle(row: PairRow) -> Row:
    """Greedy text, one prompt at a time; the answers are known after the warm-up lap.

    Each line is a rate and a gamma. ``expected``: tokens a pass by theory, (1 - rate^(gamma + 1)) / (1 - rate), which
    would be the speed-up too if a pass over more rows cost no more; ``predicted``: the speed-up with what the passes
    and the bookkeeping took here. ``passes``: of the target, of all texts; ``least``: as few as theory allows.
    """
    llm = row.llm(draft="oracle")
    drafter = llm.draft
    assert isinstance(drafter, Oracle)
    points = [(rate, row.config.gamma) for rate in RATES]
    points += [(1.0, gamma) for gamma in GAMMAS if gamma != row.config.gamma]

    def lap(rate: float, run: Run) -> Lap:
        drafter.rate = rate
        return run()

    runs = {"plain": row.run(EngineView(llm), ignore_eos=True)}
    runs |= {f"{r:g}, gamma {n}": partial(lap, r, row.run(llm, gamma=n, ignore_eos=True)) for r, n in points}
    plain, *drafted = row.race(runs, row.pair.judge(llm))
    texts = len(row.pair.prompts)
    lines = [_line(*point, standing, plain, texts) for point, standing in zip(points, drafted, strict=True)]
    spread = Spread.of([plain, *drafted])
    conditions = row.conditions(llm, laps=row.config.repeats, draft="oracle") | {"A/A": spread and str(spread)}
    conditions["plain_tokens_per_second"] = statistics.median(plain.speeds)
    notes = dict.fromkeys(found.agreement.note for found in (plain, *drafted) if found.agreement.note)
    return Row("oracle", "a draft of known rate at no cost: tokens a pass and speed-up", lines, conditions, list(notes))


def _line(rate: float, gamma: int, standing: Standing, plain: Standing, texts: int) -> dict[str, Any]:
    shown, base = standing.to_dict(), plain.to_dict()
    expected = expected_tokens(rate, gamma)
    # The first token of each text is the prompt's.
    length = standing.laps[0].tokens // texts - 1
    tokens = length * texts
    return {
        "rate": rate,
        "gamma": gamma,
        "expected": expected,
        "tau": statistics.fmean(lap.figures["tau"] for lap in standing.laps),
        "passes": round(tokens / shown["tau"]),
        "least": math.ceil(length / (gamma + 1)) * texts if rate == 1.0 else None,
        "oracle_tokens_per_second": shown["tokens_per_second"],
        "ratio": shown["ratio"],
        "predicted": expected * _round(base) / _round(shown),
        "equal": shown["equal"],
    }


def _round(figures: dict[str, Any]) -> float:
    """Milliseconds of a round; the draft's are none."""
    total: float = figures["score_ms"] + figures["overhead_ms"]
    return total

"""Forecasts what a drafter will bring when its training ends, from its held-out acceptance so far."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sakiyomi import theory
from sakiyomi.evaluation.tuning.kinds import Choice, Costs

PER_DOUBLING = 0.35
"""Growth of the log odds of acceptance while the training time doubles, where only one measurement is there: 0.38 for
an EAGLE head of SmolLM2-135M from 10,000 to 73,000 tokens."""
LEAST, MOST = 0.05, 0.5
"""Bounds of a growth that was measured: two measurements of a few texts are uncertain."""
PLACES = 7


@dataclass(frozen=True)
class Forecast:
    """At the end of the training.

    Attributes:
        tau: tokens a pass with the chain length `gamma`.
        speedup: over plain decoding.
        now: acceptance of a draft token so far.
    """

    tau: float
    gamma: int
    speedup: float
    now: float

    def __str__(self) -> str:
        return f"tau {self.tau:.1f} by then with drafts of {self.gamma}, about {self.speedup:.1f}x"


def acceptance_of(values: Mapping[str, float]) -> float:
    """The acceptance of a draft token that gives the measured tau, from what a recipe measures."""
    gamma = 4
    tau = next((value for name, value in values.items() if name in ("tau", "tau_chain_4")), None)
    if tau is None:
        places = [values[f"position_{k}"] for k in range(1, PLACES + 1) if f"position_{k}" in values]
        return places[0] if places else 0.0
    return theory.alpha_of(min(max(tau, 1.0), gamma + 1), gamma)


def forecast(held_out: Sequence[Mapping[str, Any]], end: float, choice: Choice, costs: Costs) -> Forecast:
    """What is to be expected at the end.

    The log odds of acceptance grow with the logarithm of the training time, as fast as between the first and the last
    measurement.

    Args:
        held_out: measurements of a run, see `train.progress.Progress`; at least one.
        end: seconds of the whole training.
        choice: what is trained.
        costs: measured here.
    """
    points = [(float(one["seconds"]), _log_odds(_mean(one["measures"]))) for one in held_out]
    (first, before), (last, now) = points[0], points[-1]
    growth = PER_DOUBLING
    if last > 1.3 * first:
        growth = min(max((now - before) / math.log2(last / first), LEAST), MOST)
    then = 1 / (1 + math.exp(-(now + growth * math.log2(max(end / last, 1.0)))))
    speedup, gamma = costs.best([then] * PLACES, choice.seconds)
    tokens = theory.expected_tokens(then, gamma or 1)
    return Forecast(tokens, gamma or 1, speedup, _mean(held_out[-1]["measures"]))


def _mean(measures: Mapping[str, Mapping[str, float]]) -> float:
    found = [acceptance_of(values) for values in measures.values()]
    return sum(found) / len(found)


def _log_odds(chance: float) -> float:
    chance = min(max(chance, 0.001), 0.999)
    return math.log(chance / (1 - chance))

"""What a draft is worth on this machine: the measured costs of a step, and the speed-up that follows from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from sakiyomi import theory
from sakiyomi.core.errors import SakiyomiError
from sakiyomi.train.config import DraftConfig
from sakiyomi.train.export import model_folder
from sakiyomi.train.report import Reporter

# Passes over more tokens are not timed.
LONGEST_GAMMA = 15


@dataclass(frozen=True)
class Speed:
    """Costs in plain target steps.

    Attributes:
        cost: of a draft step (c); None where it could not be measured.
        passes: of a target pass, by its number of tokens; linear between them, and as the last one beyond it.
        source: where the numbers are from, for the card.
    """

    cost: float | None
    passes: Mapping[int, float]
    source: str

    def verify(self, tokens: int) -> float:
        """Cost of a target pass over so many tokens."""
        return float(np.interp(tokens, list(self.passes), list(self.passes.values())))


def given_speed(cost: float) -> Speed:
    """Costs with a given c; a pass over more tokens is taken to cost as much as one, as theory has it."""
    return Speed(cost, {1: 1.0}, "given by --cost, a pass over more tokens taken to cost as much as one")


def measured_speed(config: DraftConfig, reporter: Reporter) -> Speed:
    """Time target and draft as the engine runs them; what cannot run there has no cost, and the reason is kept."""
    from sakiyomi.engine import machine
    from sakiyomi.engine.llm import LLM

    reporter.note("timing a step of the target and of the draft")
    try:
        llm = LLM(config.target, draft=f"model:{model_folder(config)}", compile=config.loop.compile)
        found = machine.costs(llm.target, llm.draft)
    except SakiyomiError as error:
        return Speed(None, {1: 1.0}, f"not measured: {error}")
    facts = machine.conditions()
    way = "compiled" if found["compiled"] else "not compiled"
    source = f"measured on {facts['processor']}, {facts['threads']} threads, target in {found['dtype']}, {way}"
    return Speed(found["c"], found["v"], source)


def expected(measured: Mapping[str, float], gamma: int, speed: Speed) -> dict[str, Any]:
    """What the measured rates come to: alpha for sampled text, the greedy agreement in its place for greedy."""
    found: dict[str, Any] = {}
    for rate, kind in (("alpha", "sampled"), ("greedy_agreement", "greedy")):
        alpha = min(measured[rate], 1.0)
        tokens = theory.expected_tokens(alpha, gamma)
        found[f"expected_tokens_{kind}"] = tokens
        if speed.cost is None:
            continue
        found[f"expected_speedup_{kind}"] = tokens / (gamma * speed.cost + speed.verify(gamma + 1))
        longest = max(gamma, LONGEST_GAMMA)
        found[f"optimal_gamma_{kind}"] = theory.marginal_gamma([alpha], speed.cost, speed.verify, 0.0, longest)[0]
    return found

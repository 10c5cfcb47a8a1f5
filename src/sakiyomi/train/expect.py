"""What a draft is worth on this machine: the measured costs of a step, and the speed-up that follows from them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from sakiyomi import theory
from sakiyomi.core.errors import SakiyomiError
from sakiyomi.core.params import SamplingParams
from sakiyomi.train.acceptance import Continuations
from sakiyomi.train.commands import TrainDraft
from sakiyomi.train.export import model_folder
from sakiyomi.train.report import Reporter

# Passes over more tokens are not timed.
LONGEST_GAMMA = 15
WORTH = 1.05  # times plain, from which on a draft is recommended
MEASURED_PROMPTS, MEASURED_TOKENS = 8, 64


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


def measured_speed(config: TrainDraft, reporter: Reporter) -> Speed:
    """Time target and draft as the engine runs them; what cannot run there has no cost, and the reason is kept."""
    from sakiyomi.engine import machine
    from sakiyomi.engine.llm import LLM

    reporter.note("timing a step of the target and of the draft")
    try:
        llm = LLM(
            config.target, draft=f"model:{model_folder(config)}", compile="auto" if config.loop.compile else False
        )
        found = machine.costs(llm.target, llm.draft)
    except SakiyomiError as error:
        return Speed(None, {1: 1.0}, f"not measured: {error}")
    facts = machine.conditions()
    way = "recorded passes" if found["compiled"] else "eager passes"
    source = f"measured on {facts['processor']}, {facts['threads']} threads, target in {found['dtype']}, {way}"
    return Speed(found["c"], found["v"], source)


def told_by(config: TrainDraft, held_out: Mapping[str, Continuations], reporter: Reporter) -> dict[str, Any]:
    """Texts of held-out prompts, plain and with the draft by turns: the speed-up here, in words, and the next command.

    Returns:
        ``measured`` (tokens/s of both, speed-up, tokens a pass) and ``verdict``; empty where the pair does not run.
    """
    from sakiyomi.engine.llm import LLM
    from sakiyomi.engine.plain import EngineView

    prompts = [prompt for texts in held_out.values() for prompt in texts.prompts][:MEASURED_PROMPTS]
    reporter.note(f"writing {len(prompts)} texts plain and with the draft")
    try:
        llm = LLM(config.target, draft=f"model:{model_folder(config)}", compile="auto")
    except SakiyomiError as error:
        return {"verdict": f"the pair does not run here: {error}"}
    ways: tuple[Callable[..., Any], ...] = (EngineView(llm).generate, llm.generate)
    params = SamplingParams(max_new_tokens=MEASURED_TOKENS)
    seconds, tokens, passes = [0.0, 0.0], 0, 0.0
    for lap in range(-1, len(prompts)):  # the first one warms up
        for way, run in enumerate(ways):
            began = time.perf_counter()
            done = run([prompts[max(lap, 0)]], params)[0]
            if lap >= 0:
                seconds[way] += time.perf_counter() - began
                tokens += done.stats.tokens * way
                passes += done.stats.tokens / done.stats.tau * way if done.stats.tau else 0
    speedup = seconds[0] / seconds[1]
    measured = {
        "texts": len(prompts),
        "plain_tokens_per_second": tokens / seconds[0],
        "tokens_per_second": tokens / seconds[1],
        "speedup": speedup,
        "tau": tokens / passes if passes else 1.0,
    }
    return {"measured": measured, "verdict": verdict(config, measured)}


def verdict(config: TrainDraft, measured: Mapping[str, float]) -> str:
    """What to expect of a draft on this machine, and what to type next."""
    figures = (
        f"{measured['plain_tokens_per_second']:.3g} tokens/s plain and {measured['tokens_per_second']:.3g} with the "
        f"draft ({measured['speedup']:.2f} times, {measured['tau']:.2f} tokens a pass) on {measured['texts']} held-out "
        "prompts, greedy, on this machine"
    )
    use = f'sakiyomi generate "..." --target {config.target} --draft model:{config.loop.out}'
    if measured["speedup"] >= WORTH:
        return f"the draft pays: {figures}\nuse it: {use}"
    return (
        f"the draft is not worth it yet: {figures}\nlonger training helps most (--minutes), then more text of the kind "
        f"that is to be written; without training: --draft suffix+prompt-lookup\nto try it all the same: {use}"
    )


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

"""What a draft is worth on this machine: the measured costs of a step, and the speed-up that follows from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from sakiyomi import theory
from sakiyomi.core.errors import SakiyomiError
from sakiyomi.core.outputs import Stats
from sakiyomi.core.params import SamplingParams
from sakiyomi.train.acceptance import Continuations, run_texts
from sakiyomi.train.commands import TrainDraft
from sakiyomi.train.export import model_folder
from sakiyomi.train.progress import Reporter

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


def measured_speed(
    config: TrainDraft, held_out: Mapping[str, Continuations], reporter: Reporter
) -> tuple[Speed, dict[str, Any]]:
    """Time the steps of target and draft as the engine runs them, and texts of held-out prompts, plain and drafted.

    Returns:
        The costs, none where the pair does not run; and for the card `verdict`, the speed-up here in words with the
        next command, and `measured`: tokens/s of both, speed-up, tokens a pass.
    """
    from sakiyomi.engine import machine
    from sakiyomi.engine.llm import LLM
    from sakiyomi.engine.plain import EngineView

    prompts = [prompt for texts in held_out.values() for prompt in texts.prompts][:MEASURED_PROMPTS]
    reporter.note(f"timing steps of the target and of the draft, and {len(prompts)} texts plain and with the draft")
    try:
        llm = LLM(config.target, draft=f"model:{model_folder(config)}")
        found, facts = machine.costs(llm.target, llm.draft), machine.conditions()
    except SakiyomiError as error:
        return Speed(None, {1: 1.0}, f"not measured: {error}"), {"verdict": f"the pair does not run here: {error}"}
    way = "recorded passes" if found["compiled"] else "eager passes"
    source = f"measured on {facts['processor']}, {facts['threads']} threads, target in {found['dtype']}, {way}"
    params = SamplingParams(max_new_tokens=MEASURED_TOKENS)
    texts = [[run_texts(one, [prompt], params) for one in (EngineView(llm), llm)] for prompt in (prompts[0], *prompts)]
    plain, drafted = (Stats.total(some) for some in zip(*texts[1:], strict=True))  # the first one warms up
    measured = {
        "texts": len(prompts),
        "plain_tokens_per_second": plain.tokens_per_second,
        "tokens_per_second": drafted.tokens_per_second,
        "speedup": drafted.tokens_per_second / plain.tokens_per_second,
        "tau": drafted.tau or 1.0,
    }
    return Speed(found["c"], found["v"], source), {"measured": measured, "verdict": verdict(config, measured)}


def verdict(config: TrainDraft, measured: Mapping[str, float]) -> str:
    """What to expect of a draft on this machine, and what to type next."""
    figures = (
        f"{measured['plain_tokens_per_second']:.3g} tokens/s plain and {measured['tokens_per_second']:.3g} with the "
        f"draft ({measured['speedup']:.2f} times, {measured['tau']:.2f} tokens a pass) on {measured['texts']} held-out "
        "prompts, greedy, on this machine"
    )
    use = f'sakiyomi generate "..." --target {config.target} --draft model:{config.loop.out}'
    if measured["speedup"] >= WORTH:
        return f"the draft makes it faster: {figures}\nuse it: {use}"
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

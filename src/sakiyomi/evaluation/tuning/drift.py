"""Checks whether the draft that ``tune`` chose is still accepted as often as then, on other texts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from sakiyomi.core.drops import Tau, change, fallen
from sakiyomi.core.errors import InputError
from sakiyomi.core.params import SamplingParams
from sakiyomi.evaluation.loading import load
from sakiyomi.evaluation.tuning.beginnings import prompts_of
from sakiyomi.evaluation.tuning.calibrate import OVER
from sakiyomi.evaluation.tuning.config import PairConfig


def watch(config: PairConfig, note: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """Measure tau of the draft that ``tune`` has chosen, with the length and the temperature of that time.

    Args:
        config: target and prompts.
        note: told what is being done.

    Returns:
        ``tau``, ``chosen_tau`` and their errors, ``change`` and ``fell``, as JSON values.

    Raises:
        InputError: no draft was chosen for this target here, or drafters were given.
    """
    if config.draft or config.drafts is not None:
        raise InputError("watch measures the draft that was chosen before; leave out --draft and --drafts")
    texts = config.texts()
    note(f"loading {config.target}")
    llm = load(config, "auto", strict=True)
    profile = llm.profile
    if profile is None or profile.chosen is None:
        why = "nothing was tuned" if profile is None else "no draft with a known tau was chosen"
        raise InputError(f"{why} for {config.target} here, so that nothing can be compared; run sakiyomi tune first")
    params = SamplingParams(
        max_new_tokens=int(profile.conditions["max_new_tokens"]),
        temperature=float(profile.conditions["temperature"]),
        gamma=profile.gamma,
    )
    found: list[tuple[float, float]] = []
    prompts = prompts_of(config, llm.tokenizer, texts)
    for number, prompt in enumerate(prompts, start=1):
        note(f"text {number} of {len(prompts)}")
        stats = llm.generate([prompt], replace(params, seed=number))[0].stats
        if stats.rounds:
            found.append((stats.committed, stats.rounds))
    if not found:
        raise InputError(OVER)
    now, then = Tau.of(found), profile.chosen
    return {
        "target": config.target,
        "draft": profile.draft,
        "gamma": profile.gamma,
        "texts": len(found),
        "tau": now.value,
        "tau_error": now.error,
        "chosen_tau": then.value,
        "chosen_error": then.error,
        "chosen_on": profile.conditions.get("prompts"),
        "change": change(now, then),
        "fell": fallen(now, then),
    }

"""What a round costs outside the models' forwards, at a vocabulary of 32000 and a batch of one."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from forward_clock import ForwardClock
from random_models import Numbers, random_llama, random_prompts
from sakiyomi.core.params import SamplingParams
from sakiyomi.drafters.model import ModelDrafter
from sakiyomi.engine.llm import LLM
from sakiyomi.evaluation.bench.frame import PairRow, Race, Races, declared
from sakiyomi.evaluation.bench.peers import Transformers
from sakiyomi.evaluation.bench.runner import Standing, TimedRun, timed
from sakiyomi.model_executor.build import build_runner

__all__ = ["bookkeeping"]

VOCAB = 32000
CASES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 0.8, "acceptance": "ratio"},
    "top-k": {"temperature": 0.8, "top_k": 50, "acceptance": "ratio"},
    "top-p": {"temperature": 0.8, "top_p": 0.95, "acceptance": "ratio"},
    "coupled": {"temperature": 0.8, "acceptance": "coupled"},
}


@declared("milliseconds a round outside forwards (median of runs)")
def bookkeeping(row: PairRow) -> Races:
    """Milliseconds a round, ours and transformers', for drafts that are all rejected and all accepted."""
    config = row.config
    target = random_llama(64, 2, 4, 128, VOCAB, torch.float32, device=config.device)
    drafts = {
        "random": random_llama(32, 1, 4, 64, VOCAB, torch.float32, seed=1, device=config.device),
        "the target itself": target,
    }
    prompt = random_prompts(1, config.prompt_tokens, VOCAB)[0]
    for name, draft in drafts.items():
        row.note(f"draft {name}")
        llm = LLM((target, Numbers()), draft=ModelDrafter(build_runner(draft), VOCAB))
        # Both recorded, as in use: an eager forward leaves nothing of the bookkeeping's own code in the caches.
        llm.generate([prompt], SamplingParams(max_new_tokens=8, gamma=config.gamma, ignore_eos=True))
        recorded = llm.wait()
        peer = Transformers(target, draft, config.gamma)
        for case, options in CASES.items():
            params = SamplingParams(
                max_new_tokens=config.max_new_tokens, gamma=config.gamma, ignore_eos=True, seed=0, **options
            )
            runs = {"ours": partial(_ours, llm, prompt, params)}
            if config.peers and case != "coupled":
                runs["transformers"] = partial(_theirs, peer, prompt, params)
            yield Race(runs, where=f"draft {name}, {case}", lines=partial(_line, case, name))
    return {
        "models": "random, 2 and 1 layers, standard deviation of logits 3",
        "vocabulary": VOCAB,
        "batch": 1,
        "gamma": config.gamma,
        "dtype": "float32",
        "recorded": recorded,
        "prompt_tokens": config.prompt_tokens,
        "max_new_tokens": config.max_new_tokens,
    }


def _line(case: str, draft: str, standings: Sequence[Standing]) -> list[dict[str, Any]]:
    ours, *others = standings
    values = [run.figures["ms"] for run in ours.runs]
    line = {"sampling": case, "draft": draft, "ours_ms": statistics.median(values)}
    line |= {"low": min(values), "high": max(values), "transformers_ms": others[0].median("ms") if others else None}
    return [line | {"rounds": ours.median("rounds"), "tau": ours.median("tau")}]


def _ours(llm: Any, prompt: list[int], params: SamplingParams) -> TimedRun:
    stats = llm.generate([prompt], params)[0].stats
    figures = {"ms": 1000 * stats.overhead_seconds / stats.rounds, "rounds": stats.rounds, "tau": stats.tau}
    return TimedRun(stats.seconds, stats.tokens, figures=figures)


def _theirs(peer: Transformers, prompt: list[int], params: SamplingParams) -> TimedRun:
    """Wall clock without the forwards, by target passes; the set-up of a call is spread over its rounds."""
    models = [peer.model] if peer.assistant is peer.model else [peer.model, peer.assistant]
    with ForwardClock(models) as clock:
        run = timed(lambda: [peer.generate(prompt, params)])
    # Where a model drafts for itself, gamma of gamma + 1 calls are drafts.
    rounds = clock.calls[0] / (params.gamma + 1) if len(models) == 1 else clock.calls[0]  # type: ignore[operator]
    return run.more(ms=1000 * (run.seconds - clock.seconds) / rounds, rounds=rounds, tau=run.tokens / rounds)

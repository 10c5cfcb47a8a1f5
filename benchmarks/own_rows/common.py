"""What rows about sakiyomi's own code share: their settings, and a run of transformers that counts its passes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sakiyomi.core.errors import InputError
from sakiyomi.core.params import SamplingParams
from sakiyomi.evaluation.bench.config import BenchConfig
from sakiyomi.evaluation.bench.peers import Transformers
from sakiyomi.evaluation.bench.runner import TimedRun, timed

__all__ = ["OwnConfig", "run_counted"]


@dataclass(frozen=True, kw_only=True)
class OwnConfig(BenchConfig):
    """What is measured, and how often.

    Attributes:
        rows: rows to run (--rows again for each); without any all but cross, evicted, heads, learning and
            medusa.
        draft: auto (tales-draft, for tales alone), or model:FOLDER; of row evicted self-evicted:PAIRS.
        heads: for row medusa, Medusa heads of the target; for row heads a folder of any heads, measured beside the
            known drafters of the target.
        cross: for row cross, a draft of another tokenizer beside that one: model:FOLDER.
        contexts: context lengths of row evicted, in tokens of the joined prompts (again for each).
    """

    cross: str | None = None
    contexts: tuple[int, ...] = (1024, 2048, 4096, 8192)

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.contexts, default=0) < 1:
            raise InputError(f"contexts is {self.contexts}; expected one size of at least 1, or more")


def run_counted(peer: Transformers, calls: Iterable[tuple[Sequence[int], SamplingParams]]) -> TimedRun:
    """Run transformers on prompts with parameters of their own; tau is counted by the target's forwards."""
    calls = list(calls)
    forwards: list[None] = []
    hook = peer.model.register_forward_hook(lambda *_: forwards.append(None))
    try:
        run = timed(lambda: [peer.generate(prompt, params) for prompt, params in calls])
    finally:
        hook.remove()
    # As with ours, the first pass and the first token of a text belong to the prompt. But with a draft model the first
    # forward over the prompt already verifies a draft.
    first = 0 if peer.assistant is not None else len(calls)
    return run.more(tau=(run.tokens - first) / max(len(forwards) - first, 1))

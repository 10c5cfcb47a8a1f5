"""The target of an ``LLM`` without its drafter, or with another one: the same weights, recorded passes and cache."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from sakiyomi.core.outputs import Generation
from sakiyomi.core.params import SamplingParams
from sakiyomi.drafters import Drafter, Proposer
from sakiyomi.engine.engine import Engine
from sakiyomi.engine.llm import LLM
from sakiyomi.engine.request import Request


class EngineView:
    """Another engine on the target of an ``LLM``, without a second copy of the model and without compiling again.

    Args:
        llm: whose target it is; the two must not run at the same time.
        drafter: in the place of the LLM's own; None: plain.
        strict: as of ``LLM``.
    """

    def __init__(self, llm: LLM, drafter: Drafter | Proposer | None = None, *, strict: bool = False) -> None:
        own = llm.engine
        self.engine = Engine(
            llm.target,
            drafter,
            llm.tokenizer,
            stop_ids=sorted(own.stop_ids),
            max_context=own.max_context,
            chunk_size=own.chunk_size,
            exact=own.exact,
            strict=strict,
        )

    def submit(self, prompts: Iterable[Sequence[int]], params: SamplingParams, **options: Any) -> list[Request]:
        """Queue a list of prompts (token ids) with ``options`` of ``Engine.submit``: request i draws from (seed, i)."""
        return [self.engine.submit(prompt, params, key=(i,), live=False, **options) for i, prompt in enumerate(prompts)]

    def generate(self, prompts: Iterable[Sequence[int]], params: SamplingParams, **options: Any) -> list[Generation]:
        """As ``LLM.generate`` with a list of token-id lists and n = 1; see ``submit`` for ``options``."""
        return self.engine.complete(self.submit(prompts, params, **options))

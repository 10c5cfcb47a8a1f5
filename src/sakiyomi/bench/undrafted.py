"""The target of an ``LLM`` alone: the same weights, graphs and cache, and no draft."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sakiyomi.generate import Engine
from sakiyomi.outputs import Generation
from sakiyomi.params import SamplingParams

if TYPE_CHECKING:
    from sakiyomi.llm import LLM

__all__ = ["Undrafted"]


class Undrafted:
    """Plain generation beside the drafted one, without a second copy of the model and without compiling again.

    Args:
        llm: whose target it is; the two must not run at the same time.
    """

    def __init__(self, llm: LLM) -> None:
        own = llm.engine
        self.engine = Engine(
            llm.target,
            None,
            llm.tokenizer,
            stop_ids=sorted(own.stop_ids),
            max_context=own.max_context,
            chunk_size=own.chunk_size,
            exact=own.exact,
        )

    def generate(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[Generation]:
        """As ``LLM.generate`` with a list of token-id lists and n = 1."""
        engine = self.engine
        return engine.complete(engine.submit(prompt, params, key=(i,), live=False) for i, prompt in enumerate(prompts))

"""Prefixes of an `LLM`: beginnings of prompts that are read once and used again by later requests."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

from sakiyomi.cache.prefix import Prefix, read_prefix
from sakiyomi.core.cache_specs import without_place
from sakiyomi.core.dtypes import dtype_name
from sakiyomi.core.params import SamplingParams
from sakiyomi.engine.conversation import Conversation
from sakiyomi.engine.engine import Engine
from sakiyomi.model_executor.weights import rounding_of


class Prefixes:
    """Makes prefixes on an engine, and reads them from files; refuses those of other models.

    Args:
        engine: reads them and continues them.
        cache, kv_budget: how its target's cache is kept, as of ``LLM``.
    """

    def __init__(self, engine: Engine, cache: str, kv_budget: int | str | None) -> None:
        self._engine, self._cache, self._kv_budget = engine, cache, kv_budget

    def recipe(self) -> dict[str, str]:
        """See ``LLM.recipe``."""
        from sakiyomi.cache.policies.retaining.formats import fingerprint

        target = self._engine.target
        shapes = target.cache.shapes
        apart = any(len(shape.stored) < 2 for shape in shapes)  # latents, or layers that share
        return {
            **fingerprint(target.module, self._engine.tokenizer),
            "dtype": dtype_name(target.dtype),
            "quantize": str(rounding_of(target.weights)),
            "cache": without_place(self._cache),
            "kv_budget": str(self._kv_budget),
            "chunk_size": str(self._engine.chunk_size),
            **({"stored": str([shape.heads * shape.width for shape in shapes])} if apart else {}),
        }

    def make(self, text: str | Sequence[int]) -> Prefix:
        """See ``LLM.prefix``."""
        with Conversation(self._engine, beginning=True) as conversation:
            ids = self._ids(text, begin=True)
            conversation.generate(ids, SamplingParams(max_new_tokens=1, ignore_eos=True))
            return conversation.snapshot(text if isinstance(text, str) else "", self.recipe())

    def load(self, path: str | os.PathLike[str]) -> Prefix:
        """See ``LLM.load_prefix``."""
        prefix = read_prefix(path)
        prefix.check(self.recipe(), str(path))
        return prefix

    def prepend(self, prefix: Prefix, prompts: Iterable[Any]) -> list[list[int]]:
        """The prompts as token ids behind those of the prefix.

        Raises:
            InputError: the prefix was made by another model, or its cache is kept in another way.
        """
        prefix.check(self.recipe())
        return [[*prefix.tokens, *self._ids(prompt)] for prompt in prompts]

    def _ids(self, prompt: Any, *, begin: bool = False) -> list[int]:
        """Token ids of a text; behind a prefix without the special tokens that begin a text."""
        if not isinstance(prompt, str):
            return list(prompt)
        return list(self._engine.tokenizer(prompt, add_special_tokens=begin).input_ids)

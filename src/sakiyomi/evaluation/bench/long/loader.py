"""Makes the systems of the comparison, one at a time."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from sakiyomi.core.errors import MemoryLimitError, SakiyomiError
from sakiyomi.engine.llm import LLM
from sakiyomi.evaluation.bench.long.systems import ONE_SHOT, OneShot, Ours, Running, System
from sakiyomi.model_executor.loading import load_model, stop_tokens

__all__ = ["Loader", "caught"]


@contextmanager
def caught(length: int) -> Iterator[dict[str, Any]]:
    """Keep an error inside the block as a record if a user could have caused it; other errors are raised.

    Args:
        length: of the context that was tried.
    """
    record: dict[str, Any] = {}
    try:
        yield record
    except (MemoryLimitError, MemoryError, torch.OutOfMemoryError) as error:
        record |= {"length": length, "error": str(error) or "no memory is left", "over": True}
    except SakiyomiError as error:
        record |= {"length": length, "error": error.message, "over": False}


class Loader:
    """Makes systems, one at a time: the one before is freed first.

    Args:
        options: arguments of ``LLM``, beside those that make a system; target, dtype and device are among them.
        shared: keep the transformers model between them; else each reads the files anew and packs them, as it would
            alone.
    """

    def __init__(self, options: dict[str, Any], *, shared: bool) -> None:
        self._options, self._shared = options, shared
        self._loaded: Any = None
        self._key: tuple[str, int | None] | None = None
        self._running: Running | None = None

    def __call__(self, system: System, length: int) -> Running:
        """The system for contexts of so many tokens; the same object as before where nothing differs.

        Raises:
            SakiyomiError: it cannot be.
        """
        key = (system.cache, system.pairs(length))
        if key != self._key or self._running is None:
            self.release()
            self._running = self._one_shot() if system.cache == ONE_SHOT else self._ours(*key)
            self._key = key
        return self._running

    def release(self) -> None:
        """Free the system."""
        self._running = self._key = None
        gc.collect()

    def _model(self) -> Any:
        if self._loaded is None:
            self._loaded = load_model(**{name: self._options[name] for name in ("target", "dtype", "device")})
        return self._loaded

    def _one_shot(self) -> Running:
        loaded = self._model()
        loaded.model.set_attn_implementation("eager")
        return OneShot(loaded.model, loaded.tokenizer, stop_tokens(loaded.model, loaded.tokenizer))

    def _ours(self, spec: str, budget: int | None) -> Running:
        shared = {"target": (self._model().model, self._model().tokenizer)} if self._shared else {}
        return Ours(LLM(**self._options | shared, draft="none", cache=spec, kv_budget=budget, max_batch=1))

"""Makes the systems of the comparison, one at a time."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Any

from sakiyomi.engine.llm import LLM
from sakiyomi.evaluation.bench.long.systems import ONE_SHOT, OneShot, Ours, Running, System
from sakiyomi.model_executor.loading import load_model, stop_tokens

__all__ = ["Loader", "Options"]


@dataclass(frozen=True)
class Options:
    """How systems are loaded: fields of ``LongConfig``, in a form that goes into a job."""

    target: Any
    dtype: str = "auto"
    device: str = "auto"
    compile: bool = False
    chunk_size: int | None = None


class Loader:
    """Makes systems, one at a time: the one before is freed first.

    Args:
        options: how.
        shared: keep the transformers model between them; else each reads the files anew and packs them, as it would
            alone.
    """

    def __init__(self, options: Options, *, shared: bool) -> None:
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
            self._loaded = load_model(self._options.target, dtype=self._options.dtype, device=self._options.device)
        return self._loaded

    def _one_shot(self) -> Running:
        loaded = self._model()
        loaded.model.set_attn_implementation("eager")
        return OneShot(loaded.model, loaded.tokenizer, stop_tokens(loaded.model, loaded.tokenizer))

    def _ours(self, spec: str, budget: int | None) -> Running:
        options = self._options
        target = options.target
        if self._shared:
            target = (self._model().model, self._model().tokenizer)
        return Ours(
            LLM(
                target,
                draft="none",
                cache=spec,
                kv_budget=budget,
                chunk_size=options.chunk_size,
                dtype=options.dtype,
                device=options.device,
                compile=options.compile,
                max_batch=1,
            )
        )

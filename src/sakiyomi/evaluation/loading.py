"""Loads the target that a configuration names."""

from __future__ import annotations

from typing import Any

from sakiyomi.engine.llm import LLM


def load(config: Any, draft: Any, **options: Any) -> LLM:
    """The engine of a configuration.

    Args:
        config: has ``target``, ``dtype``, ``device`` and ``quantize``; where its ``compile`` is off, passes are eager.
        draft: as ``LLM`` takes it.
        options: other arguments of ``LLM``; they come before what the configuration says.
    """
    own = {name: getattr(config, name) for name in ("dtype", "device", "quantize")}
    if not getattr(config, "compile", True):
        own["compile"] = False
    return LLM(config.target, draft, **own | options)

"""sakiyomi: reading ahead. Faster text from the language model that you already have, with the same output.

Public names are imported on first use, so that ``import sakiyomi`` stays light: no torch, no transformers, no command
line library is loaded until a name that needs it is touched.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

# These import only the standard library.
from sakiyomi.core.embedded import embedded
from sakiyomi.core.errors import (
    DivergedError,
    DraftError,
    InputError,
    LoadError,
    MemoryLimitError,
    RemovedError,
    SakiyomiError,
    UnsupportedError,
)
from sakiyomi.core.version import __version__

if TYPE_CHECKING:
    from sakiyomi import theory
    from sakiyomi.core.audio import Audio
    from sakiyomi.core.images import ImagePrompt
    from sakiyomi.core.outputs import Generation, Stats, Step, TokenTrace
    from sakiyomi.core.params import SamplingParams
    from sakiyomi.core.transcripts import Transcript, TranscriptionParams
    from sakiyomi.core.tree import Draft, TokenTree, Verdict
    from sakiyomi.engine.engine import Engine
    from sakiyomi.engine.hf_generate import custom_generate
    from sakiyomi.engine.llm import LLM

__all__ = [
    "LLM",
    "Audio",
    "DivergedError",
    "Draft",
    "DraftError",
    "Engine",
    "Generation",
    "ImagePrompt",
    "InputError",
    "LoadError",
    "MemoryLimitError",
    "RemovedError",
    "SakiyomiError",
    "SamplingParams",
    "Stats",
    "Step",
    "TokenTrace",
    "TokenTree",
    "Transcript",
    "TranscriptionParams",
    "UnsupportedError",
    "Verdict",
    "__version__",
    "custom_generate",
    "embedded",
    "theory",
]

# Where each name that costs an import lives.
_HOME = {
    "LLM": "sakiyomi.engine.llm",
    "Audio": "sakiyomi.core.audio",
    "ImagePrompt": "sakiyomi.core.images",
    "custom_generate": "sakiyomi.engine.hf_generate",
    "Engine": "sakiyomi.engine.engine",
    "SamplingParams": "sakiyomi.core.params",
    "Generation": "sakiyomi.core.outputs",
    "Stats": "sakiyomi.core.outputs",
    "Step": "sakiyomi.core.outputs",
    "TokenTrace": "sakiyomi.core.outputs",
    "TokenTree": "sakiyomi.core.tree",
    "Transcript": "sakiyomi.core.transcripts",
    "TranscriptionParams": "sakiyomi.core.transcripts",
    "Draft": "sakiyomi.core.tree",
    "Verdict": "sakiyomi.core.tree",
}


def __getattr__(name: str) -> Any:
    if name == "theory":
        return import_module("sakiyomi.theory")
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'sakiyomi' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    # Kept, so that the next look-up is a plain one.
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))

"""sakiyomi: reading ahead. Faster text from the language model that you already have, with the same output.

Public names are imported on first use, so that ``import sakiyomi`` stays light: no torch, no transformers, no command
line library is loaded until a name that needs it is touched.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

# These two modules import only the standard library. embedded must come now, not on first use: whoever imports the
# submodule sakiyomi.embedded later would otherwise bind that module over the function of the same name.
from sakiyomi.embedded import embedded
from sakiyomi.errors import (
    DraftError,
    InputError,
    LoadError,
    MemoryLimitError,
    RemovedError,
    SakiyomiError,
    UnsupportedError,
)

if TYPE_CHECKING:
    from sakiyomi import theory
    from sakiyomi.audio import Audio
    from sakiyomi.dropin import custom_generate
    from sakiyomi.generate import Engine
    from sakiyomi.llm import LLM
    from sakiyomi.outputs import Generation, Stats, Step, TokenTrace
    from sakiyomi.params import SamplingParams
    from sakiyomi.tree import Draft, TokenTree, Verdict

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "Audio",
    "Draft",
    "DraftError",
    "Engine",
    "Generation",
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
    "UnsupportedError",
    "Verdict",
    "__version__",
    "custom_generate",
    "embedded",
    "theory",
]

# Where each name that costs an import lives.
_HOME = {
    "LLM": "sakiyomi.llm",
    "Audio": "sakiyomi.audio",
    "custom_generate": "sakiyomi.dropin",
    "Engine": "sakiyomi.generate",
    "SamplingParams": "sakiyomi.params",
    "Generation": "sakiyomi.outputs",
    "Stats": "sakiyomi.outputs",
    "Step": "sakiyomi.outputs",
    "TokenTrace": "sakiyomi.outputs",
    "TokenTree": "sakiyomi.tree",
    "Draft": "sakiyomi.tree",
    "Verdict": "sakiyomi.tree",
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

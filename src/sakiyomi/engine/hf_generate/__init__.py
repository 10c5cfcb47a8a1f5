"""``custom_generate``: transformers' own ``generate`` with speculative decoding.

The object is made when it is first asked for, because making it changes transformers (``CustomGenerate``).
"""

from typing import Any

from sakiyomi.engine.hf_generate.generate import CustomGenerate

__all__ = ["CustomGenerate", "custom_generate"]

custom_generate: CustomGenerate


def __getattr__(name: str) -> Any:
    if name != "custom_generate":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = made = CustomGenerate()
    return made

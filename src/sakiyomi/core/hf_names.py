"""What transformers calls the cache of a model: `cache` from version 5.24 on, `past_key_values` before."""

from __future__ import annotations

import inspect
from importlib.metadata import version
from typing import Any

OLD = "past_key_values"
CACHE = "cache" if tuple(map(int, version("transformers").split(".")[:2])) >= (5, 24) else OLD
"""The argument's name in transformers' own classes."""


def cache_argument(model: Any) -> str:
    """The name of the cache argument of a model's forward; the class may be one that transformers does not have."""
    taken = inspect.signature(type(model).forward).parameters
    return next((name for name in (CACHE, OLD) if name in taken), CACHE)


def cache_of(output: Any) -> Any:
    """The cache in what a model gives; None: it gives none."""
    found = getattr(output, CACHE, None)
    return getattr(output, OLD, None) if found is None and CACHE != OLD and OLD in output else found

"""Other processes, which find what this one imports, and waiting for what they do."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

__all__ = ["own_environment", "until"]


def own_environment(**more: str) -> dict[str, str]:
    """The environment of this process, with its own places of modules."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)} | more


def until(true: Callable[[], bool], seconds: float = 20) -> None:
    """Wait for it."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.01)

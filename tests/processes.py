"""Other processes that find what this one imports."""

from __future__ import annotations

import os
import sys

__all__ = ["own_environment"]


def own_environment(**more: str) -> dict[str, str]:
    """The environment of this process, with its own places of modules."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)} | more

"""Files that others made and that are not shipped, below the folder ``SAKIYOMI_REAL``."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

GGUF = "smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
FOLDER = "smollm2-hf"
"""A chat model as a GGUF file, and as a folder."""


def real(name: str) -> Path:
    """The file or folder ``name``; the test is skipped where it is not at hand."""
    folder = os.environ.get("SAKIYOMI_REAL")
    if not folder:
        pytest.skip("SAKIYOMI_REAL, a folder of files that others made, is not set")
    place = Path(folder) / name
    if not place.exists():
        pytest.skip(f"SAKIYOMI_REAL has no {name}")
    return place

"""Parts of error messages."""

from __future__ import annotations


def one_line(error: Exception) -> str:
    """An error of another library in one line, for a message of ours."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"

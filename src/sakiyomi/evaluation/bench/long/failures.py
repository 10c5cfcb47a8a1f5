"""Turns errors of a measured system into a record beside those of the other systems."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch

from sakiyomi.core.errors import MemoryLimitError, SakiyomiError

__all__ = ["caught"]


class caught:
    """Keeps an error inside the block as a record if a user could have caused it; other errors are raised.

    Args:
        length: of the context that was tried.
    """

    def __init__(self, length: int) -> None:
        self._length = length
        self.record: dict[str, Any] | None = None

    def __enter__(self) -> caught:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> bool:
        if isinstance(error, (MemoryLimitError, MemoryError, torch.OutOfMemoryError)):
            text = str(error) or "no memory is left"
            self.record = {"length": self._length, "error": text, "over": True}
        elif isinstance(error, SakiyomiError):
            self.record = {"length": self._length, "error": error.message, "over": False}
        return self.record is not None

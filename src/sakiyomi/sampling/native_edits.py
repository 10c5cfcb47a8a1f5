"""What a request's options change in rows of logits, for the compiled kernels: they apply bias and repetition penalty
themselves, and call Python for the rest, one row at a time, as they come to it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

_CALL = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64, ctypes.POINTER(ctypes.c_int64))


class _Edits(ctypes.Structure):  # Edits in edits.h
    _fields_: ClassVar = [
        ("row", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("known", ctypes.c_void_p),
        ("seen", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("penalty", ctypes.c_double),
        ("call", _CALL),
    ]


class Changes(Protocol):
    """What Python changes of rows.

    Attributes:
        text: tokens behind which rows are changed.
    """

    text: Sequence[int]

    def behind(self, path: Sequence[int], scores: Tensor) -> Tensor:
        """Scores (V,) float32 behind the text and these tokens, perhaps changed in place."""


class _Calls:
    """Calls Python's changes for the kernels. They hold it, so that it does not hold them."""

    def __init__(self, changes: Changes, row: Tensor) -> None:
        self._changes, self._row = changes, row
        self.interrupt: BaseException | None = None

    def __call__(self, count: int, path: Any) -> int:
        """Change the row behind so many tokens of a draft; 0 where that fails: Python then finds out why."""
        try:
            changed = self._changes.behind(path[:count], self._row)
            if changed is not self._row:
                self._row.copy_(changed)
        except Exception:
            return 0
        except BaseException as error:  # Ctrl-C
            self.interrupt = error
            return 0
        return 1


class NativeEdits:
    """A request's options in the memory that the kernels read.

    Args:
        vocab_size: width of rows.
        bias: (V,) float32 that is added to rows; None: none.
        penalty: of tokens that the text has; 1: none.
        changes: of Python, behind these; None: there are none.

    Attributes:
        address: where the kernels read it.
    """

    def __init__(self, vocab_size: int, bias: Tensor | None, penalty: float, changes: Changes | None) -> None:
        row = torch.empty(vocab_size)
        self._changes, self._calls = changes, _Calls(changes, row) if changes is not None else None
        self._known, self._seen, self._read = bytearray(vocab_size), (ctypes.c_int64 * 0)(), 0
        known = (ctypes.c_char * vocab_size).from_buffer(self._known)
        self._held = row, bias, known
        edits = self._edits = _Edits(row.data_ptr(), None, ctypes.addressof(known), None, 0, penalty)
        if bias is not None:
            edits.bias = bias.data_ptr()
        if self._calls is not None:
            edits.call = _CALL(self._calls)
        self.address = ctypes.addressof(edits)

    def follow(self, tokens: Sequence[int]) -> None:
        """Take the text as it stands, (length,): that of the call before, or longer."""
        if self._changes is not None:
            self._changes.text = tokens
        edits, known = self._edits, self._known
        if edits.penalty == 1:
            return
        more = tokens[self._read :]
        self._read = len(tokens)
        if edits.count + len(more) > len(self._seen):
            seen = (ctypes.c_int64 * (2 * (edits.count + len(more))))()
            seen[: edits.count] = self._seen[: edits.count]
            self._seen, edits.seen = seen, ctypes.addressof(seen)
        for token in more:
            if token < len(known) and not known[token]:  # some embeddings are wider than logits
                known[token] = 1
                self._seen[edits.count] = token
                edits.count += 1

    def raise_interrupt(self) -> None:
        """Raise Ctrl-C that came while the kernels called Python."""
        if self._calls is not None and self._calls.interrupt is not None:
            found, self._calls.interrupt = self._calls.interrupt, None
            raise found

"""What a request's options change in rows of logits, for the compiled kernels: they apply bias and repetition penalty
themselves, and call Python for the rest, one row at a time, as they come to it.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

logger = logging.getLogger("sakiyomi")
_CALL = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64, ctypes.POINTER(ctypes.c_int64))


class _Edits(ctypes.Structure):  # Edits in edits.h
    _fields_: ClassVar = [
        ("row", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("in_text", ctypes.c_void_p),
        ("seen", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("penalty", ctypes.c_double),
        ("call", _CALL),
    ]


Change = Callable[[Sequence[int], Sequence[int], Tensor], Tensor]
"""From a text, tokens of a draft behind it, and a row, (V,) float32, to that row, which may be changed in place."""


class _Calls:
    """Calls Python for the kernels. They hold it, so that it does not hold them.

    Attributes:
        text: behind which rows are changed.
        interrupt: Ctrl-C that came meanwhile.
    """

    def __init__(self, change: Change, row: Tensor) -> None:
        self._change, self._row = change, row
        self.text: Sequence[int] = ()
        self.interrupt: BaseException | None = None

    def __call__(self, count: int, path: Any) -> int:
        """Change the row behind so many tokens of a draft; 0 where that fails: Python then comes to the row itself, and
        raises what it finds.
        """
        try:
            changed = self._change(self.text, path[:count], self._row)
            if changed is not self._row:
                self._row.copy_(changed)
        except Exception as error:
            logger.debug("a row could not be changed in the kernels: %r", error)
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
        change: of Python, behind these; None: there is none.

    Attributes:
        address: where the kernels read it.
    """

    def __init__(self, vocab_size: int, bias: Tensor | None, penalty: float, change: Change | None) -> None:
        row = torch.empty(vocab_size)
        self._calls = _Calls(change, row) if change is not None else None
        self._text: Sequence[int] = ()
        self._in_text, self._seen, self._read = bytearray(vocab_size), (ctypes.c_int64 * 0)(), 0
        in_text = (ctypes.c_char * vocab_size).from_buffer(self._in_text)
        self._held = row, bias, in_text
        edits = self._edits = _Edits(row.data_ptr(), None, ctypes.addressof(in_text), None, 0, penalty)
        if bias is not None:
            edits.bias = bias.data_ptr()
        if self._calls is not None:
            edits.call = _CALL(self._calls)
        self.address = ctypes.addressof(edits)

    def follow(self, tokens: Sequence[int]) -> None:
        """Take the text as it stands, (length,). The same list is expected to be longer than before, or equal."""
        if self._calls is not None:
            self._calls.text = tokens
        edits, in_text = self._edits, self._in_text
        if edits.penalty == 1:
            return
        if tokens is not self._text or len(tokens) < self._read:
            self._text, self._read, edits.count = tokens, 0, 0
            in_text[:] = bytes(len(in_text))
        more = tokens[self._read :]
        self._read = len(tokens)
        if edits.count + len(more) > len(self._seen):
            seen = (ctypes.c_int64 * (2 * (edits.count + len(more))))()
            seen[: edits.count] = self._seen[: edits.count]
            self._seen, edits.seen = seen, ctypes.addressof(seen)
        for token in more:
            if token < len(in_text) and not in_text[token]:  # some embeddings are wider than logits
                in_text[token] = 1
                self._seen[edits.count] = token
                edits.count += 1

    def raise_interrupt(self) -> None:
        """Raise Ctrl-C that came while the kernels called Python."""
        if self._calls is not None and self._calls.interrupt is not None:
            found, self._calls.interrupt = self._calls.interrupt, None
            raise found

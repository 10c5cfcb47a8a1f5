"""Which timestamps Whisper may write where, as a logits processor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from sakiyomi.core.row_processor import RowProcessor

if TYPE_CHECKING:
    from sakiyomi.core.row_processor import Scores


class TimestampRules(RowProcessor):
    """Makes timestamps come in pairs and never go back, and prefers them where together they are most probable.

    The rules are those of ``WhisperTimeStampLogitsProcessor`` (Radford et al. 2022, arXiv 2212.04356). A row is judged
    by its history alone, so that rows of drafts have their own.

    Args:
        begin: number of tokens that the decoder begins with.
        silent: token of no timestamps; that of 0.00 seconds follows it.
        end: end token; what lies below it is text.
        first: most steps of 0.02 seconds that the first timestamp may be; None: any.
    """

    def __init__(self, begin: int, silent: int, end: int, first: int | None) -> None:
        self._begin, self._silent, self._zero, self._end, self._first = begin, silent, silent + 1, end, first

    def change(self, text: Sequence[int], path: Sequence[int], scores: Scores) -> None:
        """See ``RowProcessor``."""
        zero = self._zero
        written = [*text[self._begin :], *path]
        scores[self._silent] = -np.inf
        if not written:
            scores[:zero] = -np.inf
            if self._first is not None:
                scores[zero + self._first + 1 :] = -np.inf
            return
        after_time = written[-1] >= zero
        paired = len(written) < 2 or written[-2] >= zero
        if after_time and paired:
            scores[zero:] = -np.inf
        elif after_time:
            scores[: self._end] = -np.inf
        last = next((token for token in reversed(written) if token >= zero), None)
        if last is not None:  # the second of a pair may be equal to the first
            scores[zero : last + (not after_time or paired)] = -np.inf
        times = scores[zero:]
        largest = times.max()
        if largest > -np.inf and np.log(np.exp(times - largest).sum()) + largest > scores[:zero].max():
            scores[:zero] = -np.inf

"""Logits processors that change one row of logits in place."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    Scores = np.ndarray[Any, np.dtype[np.float32]]


class RowProcessor(ABC):
    """Changes one row of logits in place; may be listed in ``SamplingParams.logits_processors``.

    Rows of a draft's tree come in any order, and each is judged by its tokens alone.
    """

    @abstractmethod
    def change(self, text: Sequence[int], path: Sequence[int], scores: Scores) -> None:
        """Change a row in place.

        Args:
            text: all tokens that are committed, prompt included.
            path: tokens of a draft behind them.
            scores: (V,) logits of the token that follows.

        Raises:
            InputError: there is no such token; it ends the request.
        """

"""Tokens that a model's generation settings forbid, everywhere or as its first ones.

transformers' processors compare the whole vocabulary with the list in every call: 0.7 ms for 51,865 tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from sakiyomi.core.row_processor import RowProcessor

if TYPE_CHECKING:
    from transformers import LogitsProcessor

    from sakiyomi.core.row_processor import Scores


class SuppressedTokens(RowProcessor):
    """Forbids tokens.

    Args:
        tokens: their ids; those beyond the vocabulary are ignored.
        begin: number of tokens before the only one that is concerned; None: all are.
    """

    def __init__(self, tokens: Sequence[int], begin: int | None = None) -> None:
        self.tokens, self.begin = np.array(tokens, np.int64), begin

    def change(self, text: Sequence[int], path: Sequence[int], scores: Scores) -> None:
        """See ``RowProcessor``."""
        if self.begin in (None, len(text) + len(path)):
            scores[self.tokens[self.tokens < len(scores)]] = -np.inf


def forbidding(settings: Any, begin: int) -> list[SuppressedTokens]:
    """The processors of generation settings that forbid tokens, in transformers' order.

    Args:
        settings: suppress_tokens and begin_suppress_tokens, lists of ids or None.
        begin: number of tokens that the decoder begins with.
    """
    lists = (settings.suppress_tokens, None), (settings.begin_suppress_tokens, begin)
    return [SuppressedTokens(tokens, at) for tokens, at in lists if tokens is not None]


def lighter(processor: LogitsProcessor | SuppressedTokens) -> Any:
    """The same for two of transformers' processors; any other one is given back."""
    if isinstance(processor, SuppressedTokens):
        return processor
    from transformers import SuppressTokensAtBeginLogitsProcessor, SuppressTokensLogitsProcessor

    if type(processor) is SuppressTokensLogitsProcessor:
        return SuppressedTokens(processor.suppress_tokens.tolist())
    if type(processor) is SuppressTokensAtBeginLogitsProcessor:
        return SuppressedTokens(processor.begin_suppress_tokens.tolist(), processor.begin_index)
    return processor

"""A short name of a tokenizer: files that hold token ids say whose they are."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from sakiyomi.core.errors import UnsupportedError

__all__ = ["tokenizer_digest"]


def tokenizer_digest(tokenizer: Any) -> str:
    """Of the numbers that it gives to its pieces, as hexadecimal digits.

    Raises:
        UnsupportedError: it does not tell them.
    """
    if not hasattr(tokenizer, "get_vocab"):
        raise UnsupportedError(
            f"the tokenizer {type(tokenizer).__name__} has no vocabulary to tell it by; a file of tokens needs a "
            "transformers tokenizer"
        )
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()

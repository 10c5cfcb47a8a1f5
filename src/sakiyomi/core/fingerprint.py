"""A digest of a tokenizer, by which files of token ids say which tokenizer they belong to."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from sakiyomi.core.errors import UnsupportedError


def tokenizer_digest(tokenizer: Any) -> str:
    """A digest of a tokenizer's vocabulary, as hexadecimal digits.

    Raises:
        UnsupportedError: the tokenizer does not give its vocabulary.
    """
    if not hasattr(tokenizer, "get_vocab"):
        raise UnsupportedError(
            f"the tokenizer {type(tokenizer).__name__} does not give its vocabulary (get_vocab); a file of tokens "
            "needs a transformers tokenizer"
        )
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()

"""The token that stands for one to be guessed."""

from __future__ import annotations

from typing import Any

from sakiyomi.core.errors import InputError

__all__ = ["mask_token"]


def mask_token(wanted: int, tokenizer: Any, vocab: int) -> int:
    """The token of masks: as wanted, else one that the tokenizer does not have, else its padding.

    Args:
        wanted: of the settings; -1: any.
        tokenizer: of the target.
        vocab: rows of the target's embedding.

    Raises:
        InputError: it lies outside the vocabulary; or none was wanted, and texts may hold all tokens.
    """
    if wanted >= vocab:
        raise InputError(f"mask is {wanted}, and the target has {vocab} tokens; set --mask to 0 .. {vocab - 1}")
    if wanted >= 0:
        return wanted
    if len(tokenizer) < vocab:
        return vocab - 1
    pad = tokenizer.pad_token_id
    if pad is None or pad in (tokenizer.eos_token_id, tokenizer.bos_token_id):
        raise InputError(
            f"all {vocab} tokens of the target may stand in texts: none is free for masks; set --mask to one that your "
            "texts do not hold"
        )
    return int(pad)

"""Cuts the vocabulary that a drafter proposes to the most frequent tokens of what it learns."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from sakiyomi.core.errors import InputError
from sakiyomi.train.data import Ids, TextSpec

DRAFT_VOCAB = 8192
"""Tokens that a drafter proposes for a target with many. The rest of a chat's tokens are a few in a hundred."""


def check_draft_vocab(wanted: int, target: str, vocab: int) -> None:
    """Refuse a draft vocabulary that is larger than the target's.

    Args:
        wanted: `--draft-vocab`.
        target: its name, for the message.
        vocab: its tokens.

    Raises:
        InputError: with both.
    """
    if wanted > vocab:
        raise InputError(
            f"draft_vocab is {wanted}, and {target} has {vocab} tokens; set --draft-vocab lower, or 0 for all"
        )


def frequent(wanted: int, sources: Sequence[TextSpec], texts: Sequence[Sequence[Ids]], vocab: int) -> Tensor | None:
    """The most frequent tokens of what is learnt, ascending; None: all are proposed.

    Args:
        wanted: `--draft-vocab`: so many; 0: all; -1: `DRAFT_VOCAB` where the target has four times as many, else all.
        sources: files, with the shares of their rows.
        texts: documents of each, with marks.
        vocab: of the target.
    """
    count = wanted if wanted >= 0 else DRAFT_VOCAB if vocab >= 4 * DRAFT_VOCAB else 0
    if not count or count == vocab:
        return None
    seen = np.zeros(vocab)
    for source, documents in zip(sources, texts, strict=True):
        ids = np.concatenate([*documents])
        learnt = ids[ids >= 0]
        seen += source.decay / max(len(learnt), 1) * np.bincount(learnt, minlength=vocab)
    # Tokens that never came stand in the tokenizer's order, which is that of frequency in its own texts.
    return torch.from_numpy(np.sort(np.argsort(-seen, kind="stable")[:count]))


def places_among(tokens: Tensor, ids: Tensor) -> Tensor:
    """Where ids of any shape stand among ascending `tokens`; -1 for those that are not there."""
    places = torch.searchsorted(tokens, ids).clamp_max(len(tokens) - 1)
    return torch.where(tokens[places] == ids, places, -1)


def proposing(known: Tensor | None) -> str:
    """What a card says of a cut vocabulary."""
    return "" if known is None else f"; {len(known)} of its tokens are proposed"

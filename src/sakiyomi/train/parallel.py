"""Rows from which a draft learns to guess several tokens per pass: masks follow the text, each guesses a token.

PARD, arXiv 2504.18583. The mask k tokens after a token sees the text up to that token and the k - 1 masks
before it, as it will when drafts are wanted. Deeper masks teach less and cost as much: a share of them is left out
(section 3.2, conditional drop of tokens), always the last masks of a token, since a mask sees those before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from sakiyomi.core.errors import InputError
from sakiyomi.drafters.medusa_heads.ranks import Ranks
from sakiyomi.train.acceptance import Continuations, ranked

KEPT, LEAST_KEPT = 0.7, 0.2
"""Share of masks that is kept from one depth to the next, and the share that is kept of all at least."""


class MaskedRows:
    """Rows of a pass: the tokens of a text, and masks after some of them.

    Args:
        length: tokens of the text.
        anchors: for each depth from 1 on the tokens that have a mask so far after them; each depth's are among those
            of the depth before, and all masks lie within the text.

    Attributes:
        places: (rows,) positions. What a row predicts is the token after its position, whether it is a mask or not.
        depths: (rows,) 0 of tokens.
    """

    def __init__(self, length: int, anchors: Iterable[Tensor]) -> None:
        tokens = torch.arange(length)
        places, depths = [tokens], [torch.zeros_like(tokens)]
        for depth, some in enumerate(anchors, start=1):
            places.append(some + depth)
            depths.append(torch.full_like(some, depth))
        self.places, self.depths = torch.cat(places), torch.cat(depths)
        anchor, masked = self.places - self.depths, self.depths > 0
        text = ~masked & (self.places <= anchor[:, None])
        own = masked & (anchor == anchor[:, None]) & (self.depths <= self.depths[:, None])
        self._seen = (text | own)[None, None]

    @classmethod
    def drawn(cls, length: int, count: int, rng: np.random.Generator) -> MaskedRows:
        """Masks for guesses of `count` tokens after tokens that are drawn."""
        order = torch.from_numpy(rng.permutation(length - count + 1))
        shares = [max(KEPT**depth, LEAST_KEPT) for depth in range(1, count)]
        return cls(length, [order[: round(share * len(order))] for share in shares])

    @classmethod
    def behind(cls, first: int, length: int, count: int) -> MaskedRows:
        """All masks after tokens from `first` on."""
        return cls(length, [torch.arange(first, max(first, length - depth)) for depth in range(1, count)])

    def read(self, model: Any, ids: Tensor, mask: int) -> Tensor:
        """What the model's head reads of every row, (B, rows, hidden).

        Args:
            model: with its decoder as `model`.
            ids: (B, length) of the text.
            mask: the token that masks are.
        """
        masks = ids.new_full((len(ids), len(self.places) - ids.shape[1]), mask)
        found = model.model(
            input_ids=torch.cat([ids, masks], 1),
            attention_mask=self._seen,
            position_ids=self.places[None],
            use_cache=False,
        )
        hidden: Tensor = found.last_hidden_state
        return hidden


def rank_parallel(draft: Any, mask: int, count: int, texts: Continuations) -> Ranks:
    """Where the target's own greedy tokens stand among a draft's guesses of one pass.

    Args:
        draft: the model.
        mask: its mask token.
        count: tokens of a pass.
        texts: of the target.
    """
    both = zip(texts.prompts, texts.greedy, strict=True)
    width = max((len(prompt) + len(text) for prompt, text in both), default=0)  # one shape: it is compiled once

    def guess(ids: Tensor, first: int) -> Iterator[Tensor]:
        length = ids.shape[1]
        rows = MaskedRows.behind(first, width, count)
        hidden = rows.read(draft, F.pad(ids, (0, width - length)), mask)[0]
        for depth in range(count):
            wanted = (rows.depths == depth) & (rows.places - depth >= first) & (rows.places < length - 1)
            yield draft.lm_head(hidden[wanted])

    return ranked(draft, texts, count, guess)


# ---------------------------------------------------------------- the mask token


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

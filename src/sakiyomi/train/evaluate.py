"""Held-out measures: bits per character of a model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from sakiyomi.train.counted import encode_texts
from sakiyomi.train.data import Ids
from sakiyomi.train.losses import next_token_loss

ROW_TOKENS = 512
BATCH_ROWS = 8


@dataclass(frozen=True)
class HeldOut:
    """A held-out file as one token stream.

    Attributes:
        name: what reports call it.
        tokens: (N,) ids, documents in file order, each led by the end token.
        characters: characters that the tokens stand for.
    """

    name: str
    tokens: Ids
    characters: int


def encode_held_out(name: str, texts: Sequence[str], tokenizer: Any) -> HeldOut:
    """Texts as the token stream that is measured."""
    return HeldOut(name, np.concatenate(encode_texts(texts, tokenizer)), sum(map(len, texts)))


@torch.inference_mode()
def bits_per_character(model: PreTrainedModel, held_out: HeldOut, limit: int | None = None) -> dict[str, float]:
    """Loss on the first `limit` tokens of a held-out file, in rows of 512 tokens without context across rows.

    Returns:
        `nats_per_token`, `bits_per_character` and `tokens` scored.
    """
    causal: Any = model
    length = min(ROW_TOKENS, len(held_out.tokens) - 1)
    count = max(min(limit or len(held_out.tokens), len(held_out.tokens) - 1) // length, 1)
    inputs = torch.from_numpy(held_out.tokens[: count * length]).view(count, length)
    labels = torch.from_numpy(held_out.tokens[1 : count * length + 1]).view(count, length)
    total = 0.0
    training = model.training
    model.eval()
    for start in range(0, count, BATCH_ROWS):
        rows = inputs[start : start + BATCH_ROWS].to(model.device)
        with torch.autocast(model.device.type, dtype=torch.bfloat16):
            hidden = causal.model(input_ids=rows, use_cache=False).last_hidden_state
            loss = next_token_loss(hidden, causal.lm_head.weight, labels[start : start + BATCH_ROWS].to(model.device))
        total += float(loss) * rows.numel()
    model.train(training)
    tokens = inputs.numel()
    characters = held_out.characters * tokens / len(held_out.tokens)
    return {"nats_per_token": total / tokens, "bits_per_character": total / math.log(2) / characters, "tokens": tokens}

"""Held-out measures: bits per character of a model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from sakiyomi.core.errors import InputError
from sakiyomi.train.data import Encoder, Ids, encode_documents, read_documents
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


def parse_valid(specs: Sequence[str]) -> dict[str, Path]:
    """Held-out files by name, given as NAME=FILE.

    Raises:
        InputError: a name or a file is missing, or a name is given twice.
    """
    found: dict[str, Path] = {}
    for spec in specs:
        name, _, path = spec.partition("=")
        if not name or not path:
            raise InputError(f"valid is {spec!r}, expected NAME=FILE")
        if name in found:
            raise InputError(f"valid names {name!r} twice; give each file a name of its own")
        found[name] = Path(path)
    return found


def read_held_out(path: Path) -> list[str]:
    """The texts of a held-out file.

    Raises:
        InputError: it holds token ids.
    """
    documents = list(read_documents(path))
    texts = [document for document in documents if isinstance(document, str)]
    if len(texts) < len(documents):
        raise InputError(f"held-out file {path} holds token ids, expected text: bits per character need characters")
    return texts


def encode_held_out(name: str, texts: Sequence[str], tokenizer: Encoder) -> HeldOut:
    """Texts as the token stream that is measured."""
    return HeldOut(name, np.concatenate(encode_documents(texts, tokenizer)), sum(map(len, texts)))


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

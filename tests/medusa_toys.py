"""Medusa heads for the tests: random ones, and some that have learnt what a tiny target writes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from architectures import VOCAB, greedy, model_of, prompt
from sakiyomi.drafters.medusa_heads.backbone import Backbone
from sakiyomi.drafters.medusa_heads.formats import write_heads
from sakiyomi.drafters.medusa_heads.heads import HeadsShape, MedusaHeads

PROMPTS = [prompt(11, 1), prompt(3, 2), prompt(19, 3)]


def new_heads(model: Any, *, heads: int = 3, layers: int = 1, own: bool = False, scale: float = 0.1) -> MedusaHeads:
    """Heads with random blocks."""
    backbone = Backbone(model)
    vocab, width = backbone.weight.shape
    made = MedusaHeads(HeadsShape(heads, layers, width, vocab, heads * own))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        made.weights.copy_(torch.randn(made.weights.shape, generator=generator) * scale)
    made.begin_from(backbone.weight)
    return made


def fitted_heads(model: Any, texts: Sequence[list[int]], *, steps: int = 120, **shape: Any) -> MedusaHeads:
    """Heads that foretell most of these texts, though not all."""
    backbone = Backbone(model)
    made = new_heads(model, scale=0.01, **shape)
    count = made.shape.heads
    rows = []
    for text in texts:
        with torch.no_grad():
            hidden = backbone(torch.tensor([text]))[0, : len(text) - 1 - count].float()
        labels = torch.stack([torch.tensor(text[2 + k : 2 + k + len(hidden)]) for k in range(count)])
        rows.append((hidden, labels))
    hidden, labels = torch.cat([pair[0] for pair in rows]), torch.cat([pair[1] for pair in rows], 1)
    optimizer = torch.optim.AdamW(made.parameters(), lr=0.02, weight_decay=0.0)
    for _ in range(steps):
        loss = F.cross_entropy(made(hidden, backbone.weight.float()).flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return made


def heads_folder(folder: Path, name: str = "llama", *, fitted: bool = True, **shape: Any) -> Path:
    """The heads of an architecture's tiny model, written."""
    model = model_of(name)
    if fitted:
        # All but the last text: on that one they are wrong often.
        texts = [tokens + greedy(model, tokens, 40) for tokens in PROMPTS[:2]]
        made = fitted_heads(model, texts, **shape)
    else:
        made = new_heads(model, **shape)
    write_heads(made, folder / name)
    return folder / name


__all__ = ["PROMPTS", "VOCAB", "fitted_heads", "heads_folder", "new_heads"]

"""Weights to start the retrieval model from: heads that look a few tokens back, and heads that look for the same again.

From random weights, both kinds of head have to be found before either is of use, and most of a short training is spent
on that (the phase change of Olsson et al. 2022, arXiv 2209.11895). Here they are there from the first step, roughly;
all weights are trained on.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

SCALE = 0.1
"""Standard deviation of the embeddings, and of what the first layer adds to them."""
CONSTANT = 4.0
"""Channel 0 of every embedding, in standard deviations: what a head reads that attends by distance alone."""
SHARPNESS, SLOWER = 8.0, 0.75
"""Logit of the fastest pair of the rotary embedding in a head that looks back, and that of each next pair to it."""
MATCH = 2.5
"""Size of the queries and keys of heads that look for the same again."""


@torch.no_grad()
def start_looking_back(model: LlamaForCausalLM, seed: int) -> None:
    """Set first weights in place.

    Heads of the first layer look 1, 2, 3, ... tokens back and write what they read into directions of their own. In
    the other layers, heads of one half of the key/value heads look where what stands now stood one token before, those
    of the other half where what stood one token before stood two tokens before.

    Args:
        model: with untouched random weights.
        seed: of the directions.
    """
    inner: Any = model.model
    config: Any = model.config
    width, heads, groups = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
    size = width // heads
    generator = torch.Generator().manual_seed(seed)
    embedding = inner.embed_tokens.weight
    embedding.copy_(torch.randn(embedding.shape, generator=generator) * SCALE)
    embedding[:, 0] = CONSTANT * SCALE
    # What the constant is behind the first norm.
    constant = CONSTANT / math.sqrt((CONSTANT**2 + width - 1) / width)
    speeds = inner.rotary_emb.inv_freq
    pairs = torch.arange(size // 2)
    lengths = (SHARPNESS * SLOWER**pairs * math.sqrt(size)).sqrt()

    first = inner.layers[0].self_attn
    queries, keys, values = (part.weight for part in (first.q_proj, first.k_proj, first.v_proj))
    for group in range(groups):
        keys[group * size : (group + 1) * size, 0] = torch.cat((lengths, torch.zeros_like(lengths))) / constant
    for head in range(heads):
        turn = (head + 1) * speeds
        queries[head * size : (head + 1) * size, 0] = (
            torch.cat((lengths * turn.cos(), -lengths * turn.sin())) / constant
        )
    values.copy_(torch.randn(values.shape, generator=generator) / math.sqrt(width))
    values[:, 0] = 0
    spread, _ = torch.linalg.qr(torch.randn(width, width, generator=generator))
    first.o_proj.weight.copy_(spread * SCALE)

    # Pairs that turn slowly: a match does not depend on the distance.
    slow = ((pairs >= size // 4).repeat(2) * MATCH)[:, None]
    now = values[:size]
    before, two_before = spread[:, :size].T, spread[:, size : 2 * size].T

    def put(weight: Tensor, number: int, read: Tensor) -> None:
        weight[number * size : (number + 1) * size] += slow * read

    near = max(1, groups // 2)
    for layer in inner.layers[1:]:
        attention = layer.self_attn
        for group in range(groups):
            put(attention.k_proj.weight, group, before if group < near else two_before)
        for head in range(heads):
            put(attention.q_proj.weight, head, now if head * groups // heads < near else before)

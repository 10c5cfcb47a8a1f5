"""Losses of the training commands; each is a mean over positions, in nats."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# Mass below this is noise of float32 sums; its logarithm must not reach the loss.
SMALLEST_MASS = 1e-6


def next_token_loss(hidden: Tensor, head: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of the next token.

    Args:
        hidden: (B, T, H) last hidden states.
        head: (V, H) output embedding.
        labels: (B, T) token ids.
    """
    logits = F.linear(hidden, head).flatten(0, 1)
    return F.cross_entropy(logits.float(), labels.flatten())


def distillation_loss(
    hidden: Tensor, head: Tensor, top_ids: Tensor, top_probs: Tensor, greedy_weight: float = 0.0
) -> Tensor:
    """Forward KL(p || q) with the target's K likeliest tokens and one bucket for the rest, temperature 1.

    The bucket makes it a lower bound of the full KL, and the full KL itself when K = V. Rows so short can be kept and
    used again: most of the cost of a distillation step is the target's forward pass.

    Args:
        hidden: (B, T, H) the draft's last hidden states.
        head: (V, H) the draft's output embedding.
        top_ids: (B, T, K) the target's likeliest tokens, likeliest first.
        top_probs: (B, T, K) their probabilities.
        greedy_weight: adds this times -log q(the target's likeliest token); greedy drafting needs the argmax alone.
    """
    log_draft = torch.log_softmax(F.linear(hidden, head).float(), dim=-1).gather(-1, top_ids)
    top_probs = top_probs.float()
    log_target = top_probs.clamp_min(SMALLEST_MASS).log()
    inside = (top_probs * (log_target - log_draft)).sum(dim=-1)
    target_rest = (1 - top_probs.sum(dim=-1)).clamp_min(0)
    draft_rest = (1 - log_draft.exp().sum(dim=-1)).clamp_min(SMALLEST_MASS)
    outside = target_rest * (target_rest.clamp_min(SMALLEST_MASS).log() - draft_rest.log())
    greedy = -log_draft[..., 0]
    return (inside + outside + greedy_weight * greedy).mean()

"""Losses of the training commands; each is a mean over positions, in nats."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

TOPS = 5  # first guesses in which a label is looked for
# Logits that a loss holds at a time, in numbers: 8 MiB in bfloat16; products of fewer rows are slower on AMX.
LOGITS_AT_ONCE = 1 << 22
SMALLEST_NUMBER = 1e-37  # of float32, about: a probability that is 0 would have an infinite loss
# Mass below this is noise of float32 sums; its logarithm must not become part of the loss.
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


def heads_loss(
    features: Tensor, head: Tensor, labels: Tensor, weights: Tensor, divisors: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Weighted cross-entropy of several heads, without ever holding the logits of more than a piece of the positions.

    Their gradient is computed with the loss, piece by piece, as there is no second use for them: the memory is that of
    the features and does not depend on the vocabulary.

    Args:
        features: (K, n, H) what each head's head over the vocabulary reads.
        head: (V, H), one for all, or (K, V, H).
        labels: (K, n) token ids.
        weights: (K, n) float32, 0 where a position does not count.
        divisors: (K,) what the sums are divided by; None: the positions that count, which makes them means.

    Returns:
        The sum over heads of each one's weighted mean, and plain means of each, (K, 1 + TOPS), without gradient: of the
        loss in nats, then of whether the label is among the head's first 1, 2, ... guesses.
    """
    counts = (weights > 0).sum(1).clamp_min(1) if divisors is None else divisors
    scale = weights / counts[:, None]
    found = features.new_zeros(*labels.shape, 1 + TOPS, dtype=torch.float32)
    # A head for all reads one long row: it is cast once, and has one gradient.
    several = [(slice(None), head)] if head.dim() == 2 else [(slice(k, k + 1), own) for k, own in enumerate(head)]
    losses = []
    for k, over in several:
        right, share = labels[k].reshape(-1, 1), scale[k].reshape(-1, 1)
        each = functools.partial(_hard, right, share > 0, found[k].flatten(0, 1))
        losses.append(_piecewise(features[k].flatten(0, 1), over, share, each))
    return torch.stack(losses).sum(), found.sum(1) / counts[:, None]


def _hard(right: Tensor, counted: Tensor, found: Tensor, some: slice, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy with labels (n, 1), see `Pointwise`; `found`, (n, 1 + TOPS), takes what `heads_loss` reports."""
    right, counted = right[some], counted[some]
    grad = torch.softmax(logits, 1, out=logits)
    chance = grad.gather(1, right)
    each = -chance.float().clamp_min(SMALLEST_NUMBER).log()
    before = (grad > chance).sum(1, keepdim=True)  # guesses that the head prefers to the label
    tops = torch.arange(1, 1 + TOPS, device=logits.device)
    found[some] = torch.cat([each * counted, ((before < tops) & counted).to(each.dtype)], 1)
    return each, _put(grad, right, chance - 1)


def soft_loss(
    features: Tensor,
    head: Tensor,
    wanted: Tensor,
    weights: Tensor,
    kind: str = "ce",
    *,
    tokens: Tensor | None = None,
    places: Tensor | None = None,
    added: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """How far a head's distributions are from wanted ones, computed piece by piece with its gradient as `heads_loss`.

    Rows that do not count are left out. Logits stay in the precision of the features: a bfloat16 run passes over them
    in bfloat16, and with `tokens` no other array is as wide as the vocabulary.

    Args:
        features: (n, H) what the head over the vocabulary reads.
        head: (V, H).
        wanted: (n, V) probabilities, or (n, K) with `tokens`; as many rows as `places` asks for.
        weights: (n,) float32, 0 where a position does not count; the loss is the weighted mean.
        kind: "ce", the cross-entropy; "tv", the total variation distance, which is the chance that a drawn draft token
            is rejected; "lk", minus the logarithm of the chance that it is accepted (arXiv 2602.23881), whose gradient
            does not vanish where hardly any is.
        tokens: (n, K) the tokens that `wanted` speaks of, each once a row; all others have probability 0. None: all,
            in their order.
        places: (n,) rows of `wanted`; None: they are the features' own.
        added: (n, R) features and (V, R), whose products are added to the logits. Where a head is frozen, only the
            gradient of these is computed, which is short.
    """
    counts = weights > 0
    if not bool(counts.all()):
        rows = counts.nonzero()[:, 0]
        places = rows if places is None else places[rows]
        features, weights = features[rows], weights[rows]
        added = None if added is None else (added[0][rows], added[1])

    def each(some: slice, logits: Tensor) -> tuple[Tensor, Tensor]:
        rows = some if places is None else places[some]
        return _pointwise(kind, logits, wanted[rows].float(), None if tokens is None else tokens[rows])

    scale = (weights / weights.sum().clamp_min(SMALLEST_MASS))[:, None]
    return _piecewise(features, head, scale, each, added)


def _pointwise(kind: str, logits: Tensor, wanted: Tensor, tokens: Tensor | None) -> tuple[Tensor, Tensor]:
    """The loss of each row, (rows, 1) float32, and its gradient by the logits, (rows, V).

    Args:
        kind: of the loss.
        logits: (rows, V).
        wanted: (rows, K) float32, see `soft_loss`.
        tokens: (rows, K); None: K is V.
    """
    grad = torch.softmax(logits, 1, out=logits)
    own = (grad if tokens is None else grad.gather(1, tokens)).float()
    if kind == "ce":
        loss, less = -(wanted * own.clamp_min(SMALLEST_NUMBER).log()).sum(1, keepdim=True), wanted
    else:
        accepted = torch.minimum(own, wanted).sum(1, keepdim=True).clamp_min(SMALLEST_MASS)
        less = own * (own < wanted)  # a token that has too little gains what is accepted
        times = less.sum(1, keepdim=True)
        loss = 1 - accepted
        if kind == "lk":
            loss, times, less = -accepted.log(), times / accepted, less / accepted
        own = own * times
        if tokens is not None:
            grad.mul_(times)
    changed = (own - less).to(grad.dtype)
    return loss, changed if tokens is None else _put(grad, tokens, changed)


def _put(rows: Tensor, places: Tensor, values: Tensor) -> Tensor:
    """Write (n, K) values at (n, K) places of (n, V) rows; `scatter_` copies all rows and takes 25 times as long."""
    return rows.put_(places + torch.arange(len(rows), device=rows.device)[:, None] * rows.shape[1], values)


# ---------------------------------------------------------------- piece by piece

Pointwise = Callable[[slice, Tensor], tuple[Tensor, Tensor]]
"""Of some rows and their logits, (rows, V): each row's loss, (rows, 1) float32, and its gradient in place of logits."""


def _piecewise(
    features: Tensor, head: Tensor, scale: Tensor, each: Pointwise, added: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """The sum over rows of scale times loss, without ever holding the logits of more than a piece of the rows.

    Args:
        features: (n, H).
        head: (V, H).
        scale: (n, 1) float32.
        each: loss of a row.
        added: (n, R) and (V, R), whose products are added to the logits.
    """
    device = features.device.type
    more, table = added or (features[:, :0], head[:, :0])
    if torch.is_autocast_enabled(device):
        features, more = (part.to(torch.get_autocast_dtype(device)) for part in (features, more))
    loss: Tensor = _Piecewise.apply(features, head, more, table, scale, each)  # type: ignore[no-untyped-call]
    return loss


class _Piecewise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, features: Tensor, head: Tensor, more: Tensor, table: Tensor, scale: Tensor, each: Pointwise
    ) -> Tensor:
        dtype = features.dtype
        parts = [(features, head.to(dtype)), (more, table.to(dtype))]
        # In float32: a loss may be scaled afterwards, for a precision in which small gradients vanish.
        grads = [torch.empty_like(read, dtype=torch.float32) for read, _ in parts]
        own = [
            torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[place] else None
            for place, weight in ((1, head), (3, table))
        ]
        total = features.new_zeros((), dtype=torch.float32)
        piece = max(1, LOGITS_AT_ONCE // len(head))
        with torch.autocast(features.device.type, enabled=False):
            for at in range(0, len(features), piece):
                some = slice(at, at + piece)
                share = scale[some]
                logits = features[some] @ parts[0][1].T
                if more.shape[1]:
                    logits = logits.addmm_(more[some], parts[1][1].T)
                losses, grad = each(some, logits)
                total += (losses * share).sum()
                # The gradient of the logits without the scale of each row: that is cheaper to apply to the product.
                for (read, wide), into, weight_grad in zip(parts, grads, own, strict=True):
                    if not wide.shape[1]:
                        continue
                    into[some] = (grad @ wide) * share
                    if weight_grad is not None:
                        weight_grad.add_((grad.T @ (read[some] * share.to(dtype))).float())
        ctx.save_for_backward(*grads, *own)
        ctx.dtype = dtype
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        read, more, *own = ctx.saved_tensors
        head, table = (None if kept is None else kept * grad for kept in own)
        return (read * grad).to(ctx.dtype), head, (more * grad).to(ctx.dtype), table, None, None

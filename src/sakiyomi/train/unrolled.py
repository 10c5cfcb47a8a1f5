"""Heads that are run step by step over whole texts, with the target's features and then with their own.

In step k every token is read with the feature that the head itself gave in step k - 1, as the k-th draft token behind
one with a feature of the target (training-time test; Li et al. 2025, arXiv 2503.01840, section 3.2).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sakiyomi.drafters.medusa_heads.ranks import Ranks
from sakiyomi.train.acceptance import DEPTH, Continuations, ranked
from sakiyomi.train.config import UnrolledConfig
from sakiyomi.train.head_recipe import HeadRecipe
from sakiyomi.train.hidden import TargetStates
from sakiyomi.train.losses import soft_loss

Settings = TypeVar("Settings", bound=UnrolledConfig)


class Unrolled(nn.Module):
    """A head that reads its own features in the place of the target's."""

    @abstractmethod
    def forward(self, ids: Tensor, states: Tensor, steps: int) -> Iterator[Tensor]:
        """What the head over the vocabulary reads in every step.

        Args:
            ids: (B, T) tokens.
            states: (B, T, joined) the target's for the token before each.
            steps: at most; row t of step k is that of the token t as k-th draft token: rows before k mean nothing.

        Yields:
            (B, T, hidden) of each step.
        """

    @abstractmethod
    def weight(self) -> Tensor:
        """Of the head over the vocabulary, (tokens, hidden)."""


class UnrolledRecipe(HeadRecipe[Settings]):
    """Such a head learns to foretell the target.

    Attributes:
        known: tokens that it proposes; None: all.
    """

    head: Unrolled
    known: Tensor | None = None

    def check_target(self) -> None:
        """See `Taught`."""
        super().check_target()
        self.positions_ahead = self.config.unroll

    def losses(self, ids: Tensor, step: int) -> Tensor:
        """See `HeadRecipe`."""
        config, head = self.config, self.head
        joined, last = self.states(ids)
        wanted, counts = self.wanted(last[:, 1:].flatten(0, 1), self.known)
        found = []
        for ahead, hidden in enumerate(head(ids[:, 1:], joined[:, :-1], config.unroll)):
            weights = counts.view(hidden.shape[:2]).float()
            weights[:, :ahead] = 0
            found.append(soft_loss(hidden.flatten(0, 1), head.weight(), wanted, weights.flatten(), config.loss))
        return torch.stack(found)

    def ranks(self, texts: Continuations) -> Ranks:
        """See `HeadRecipe`."""
        return rank_continuations(self.head, self.states, self.known, texts)


def attend(q: Tensor, k: Tensor, v: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """Attention of a step to tokens with the target's features and, behind them, to the draft tokens so far.

    Args:
        q: (B, heads, T, width), scaled; turned as keys are.
        k, v: (B, KV heads, T, width) of this step.
        keys, values: (B, heads, T, width) of the steps before; those of this step are added.

    Returns:
        (B, heads, T, width of values).
    """
    times = q.shape[1] // k.shape[1]
    keys.append(k.repeat_interleave(times, 1))
    values.append(v.repeat_interleave(times, 1))
    step, length = len(keys) - 1, q.shape[2]
    # Step k's row t sees tokens up to t - k as the target read them, and t - k + j as the j-th draft token.
    seen = torch.ones(length, length, dtype=torch.bool, device=q.device).tril(-step)
    whole = (q @ keys[0].transpose(2, 3)).float().masked_fill(~seen, -torch.inf)
    own = [(q * behind(keys[j], step - j)).sum(-1, keepdim=True).float() for j in range(1, step + 1)]
    weights = torch.softmax(torch.cat([whole, *own], -1), -1).to(v.dtype)
    mixed = weights[..., :length] @ values[0]
    for j in range(1, step + 1):
        mixed = mixed + weights[..., length + j - 1, None] * behind(values[j], step - j)
    return mixed


def behind(rows: Tensor, count: int) -> Tensor:
    """Each row's values in the place of the row so many behind it; (..., T, width)."""
    return F.pad(rows, (0, 0, count, 0))[..., : rows.shape[-2], :] if count else rows


def rank_continuations(head: Unrolled, states: TargetStates, tokens: Tensor | None, texts: Continuations) -> Ranks:
    """Where the target's own greedy tokens stand among the guesses, where all tokens between are drafted rightly.

    That is all that counts in greedy text.
    """

    def guess(ids: Tensor, first: int) -> Iterator[Tensor]:
        joined, _ = states(ids)
        for step, hidden in enumerate(head(ids[:, 1:], joined[:, :-1], DEPTH)):
            rows = hidden[0, first - 1 + step : -1]  # row r is that of the token r + 1, and foretells the next one
            yield F.linear(rows, head.weight().to(rows.dtype))

    return ranked(head, texts, DEPTH, guess, tokens)

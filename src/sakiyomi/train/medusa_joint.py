"""The loss of Medusa heads, alone and together with low-rank adapters of their target.

Cai et al. 2024, arXiv 2401.10774, section 2.2.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sakiyomi.core.errors import UnsupportedError
from sakiyomi.drafters.medusa_heads.backbone import Backbone
from sakiyomi.drafters.medusa_heads.heads import MedusaHeads
from sakiyomi.train.checkpoint import writing
from sakiyomi.train.commands import TrainMedusa
from sakiyomi.train.draft_vocab import places_among
from sakiyomi.train.losses import heads_loss
from sakiyomi.train.workers import ALONE, Workers

PIECE = 512  # positions whose logits over the vocabulary are held at a time


def guess_loss(
    config: TrainMedusa,
    heads: MedusaHeads,
    hidden: Tensor,
    rows: Tensor,
    weight: Tensor,
    step: int,
    workers: Workers = ALONE,
) -> tuple[Tensor, Tensor]:
    """Loss of the heads on a batch, and each head's own means, see ``losses.heads_loss``.

    Args:
        config: of the run.
        heads: being trained.
        hidden: (B, T, hidden) of the target.
        rows: (B, T + 1) token ids, complements of those that do not count. Tokens that the heads do not propose do not
            count either.
        weight: of the target's head.
        step: chooses the positions.
        workers: whose batches are parts of one, whose loss is the mean of theirs.
    """
    length = rows.shape[1] - 1 - heads.shape.heads  # a place for which every head has a label
    labels = torch.stack([rows[:, 2 + k : 2 + k + length] for k in range(heads.shape.heads)])
    labels = labels.flatten(1)
    if heads.token_map is not None:
        labels = places_among(heads.token_map, labels)
    places = _places(labels, config.positions, (config.loop.seed, step), workers)
    labels = labels[:, places]
    states = hidden[:, :length].flatten(0, 1)[places]
    if not torch.is_autocast_enabled(states.device.type):
        states = states.to(heads.weights.dtype)
    decay = torch.tensor([config.head_decay**k for k in range(len(labels))], device=rows.device)
    weights = (labels >= 0) * decay[:, None]
    head = weight if heads.own is None else heads.own[0] if len(heads.own) == 1 else heads.own
    divisors = workers.divisor((weights > 0).sum(1))
    return heads_loss(heads.features(states), head, labels.clamp_min(0), weights, divisors)


def _places(labels: Tensor, share: float, seed: tuple[int, int], workers: Workers) -> Tensor:
    """Positions to learn from: so many in every batch of all workers, those that count before the others."""
    own = labels.shape[1]
    if share >= 1.0:
        return torch.arange(own, device=labels.device)
    counting = workers.gathered((labels >= 0).any(0))
    order = torch.from_numpy(np.random.default_rng(seed).permutation(len(counting))).to(labels.device)
    counts = counting[order]
    order = torch.cat([order[counts], order[~counts]])[: max(1, round(share * len(counting)))]
    order = order - workers.number * own
    return order[(order >= 0) & (order < own)]


class Joint(nn.Module):
    """Heads and target together: the target keeps to what it was by the divergence from itself without adapters."""

    def __init__(self, config: TrainMedusa, target: Any, heads: MedusaHeads) -> None:
        super().__init__()
        peft = _peft()
        self.heads, self._config = heads, config
        settings = peft.LoraConfig(
            r=config.joint.lora_rank,
            lora_alpha=config.joint.lora_alpha,
            target_modules="all-linear",
            task_type="CAUSAL_LM",
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # peft asks transformers by a name that it will lose
            self.model = peft.get_peft_model(target, settings)
        self._backbone = Backbone(target)

    def train(self, mode: bool = True) -> Joint:
        """The target stays in evaluation mode, without dropout: it is compared with what it gave before."""
        super().train(mode)
        self.model.eval()
        return self

    def loss(self, rows: Tensor, step: int, workers: Workers = ALONE) -> tuple[Tensor, Tensor]:
        """Loss of both on a batch, and each head's own means; see `guess_loss`."""
        config, weight = self._config, self._backbone.weight
        ids = torch.where(rows < 0, ~rows, rows)[:, :-1]
        hidden = self._backbone(ids)
        with torch.no_grad(), self.model.disable_adapter():
            before = self._backbone(ids)
        loss, each = guess_loss(config, self.heads, hidden, rows, weight, step, workers)
        counted = (rows[:, 1:] >= 0).flatten().nonzero()[:, 0]
        divergence = self._divergence(before.flatten(0, 1)[counted], hidden.flatten(0, 1)[counted], weight)
        divergence = divergence / workers.divisor(torch.tensor([len(counted)])).to(divergence.device)[0]
        return divergence + config.joint.heads_weight * loss, each

    @staticmethod
    def _divergence(before: Tensor, after: Tensor, weight: Tensor) -> Tensor:
        """Sum of KL(before || after) of the next token; a piece of the positions at a time."""
        total = after.new_zeros((), dtype=torch.float32)
        for old, new in zip(before.split(PIECE), after.split(PIECE), strict=True):
            total = total + checkpoint(_kl, old, new, weight, use_reentrant=False)
        return total

    @property
    def adapter_bytes(self) -> int:
        """Bytes of the adapters' weights."""
        own = {id(weight) for weight in self.heads.parameters()}
        return sum(4 * weight.numel() for weight in self.parameters() if weight.requires_grad and id(weight) not in own)

    def merged(self) -> Any:
        """The target with its adapters in it."""
        return self.model.merge_and_unload()


def _kl(before: Tensor, after: Tensor, weight: Tensor) -> Tensor:
    old, new = ((hidden.to(weight.dtype) @ weight.T).float().log_softmax(-1) for hidden in (before, after))
    return torch.nn.functional.kl_div(new, old, log_target=True, reduction="sum")


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise UnsupportedError(
            "training the target too needs peft: pip install 'sakiyomi[train]', or leave --joint out"
        ) from error
    return peft


def save_tuned(target: Any, tokenizer: Any, folder: Path) -> None:
    """Write the tuned target and its tokenizer, a folder in Hugging Face format."""
    with writing(folder):
        target.to(torch.bfloat16).save_pretrained(folder)
        tokenizer.save_pretrained(folder)

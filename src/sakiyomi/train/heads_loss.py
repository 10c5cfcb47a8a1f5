"""What retaining heads are taught, and how well they choose.

Huang et al. 2024, arXiv 2410.01805, section 3.2. A row is a prompt with its answer; one pass of the target over it
gives each layer's projections, from which its heads score the prompt's tokens, and the layer's queries and keys, from
which the labels are made. Both are there at the same time, so a layer's loss is propagated at once, and nothing of it
is held when the next layer comes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from sakiyomi.cache.policies.retaining.heads import RetainingHeads
from sakiyomi.cache.policies.retaining.raw import Raw
from sakiyomi.drafters.medusa_heads.backbone import Backbone
from sakiyomi.train.beside import Rows
from sakiyomi.train.commands import TrainRetaining
from sakiyomi.train.loop import compiled_loss
from sakiyomi.train.retaining_labels import attention_observed, largest_chances, largest_logits

TOP = 0.1
"""Share of a prompt's tokens whose choice is compared, as the paper's training does."""
Each = Callable[[int, Tensor, Tensor], None]
"""Told of a layer, its projections (tokens, width) and its labels (tokens, kv_heads)."""


@dataclass(frozen=True)
class Measured:
    """How heads choose on held-out rows.

    Attributes:
        overlap: of each layer and KV head: share of the labels' top tokens that are the heads' too.
        recent: the same for the prompt's last tokens, a mean over all.
        loss: smooth L1 of scores and labels.
        rows: that were measured.
    """

    overlap: list[list[float]]
    recent: float
    loss: float
    rows: int

    def values(self) -> dict[str, float]:
        """As numbers by name."""
        heads = [each for layer in self.overlap for each in layer]
        return {
            "overlap": sum(heads) / len(heads),
            "overlap_of_the_worst_head": min(heads),
            "recent": self.recent,
            "loss": self.loss,
            "rows": float(self.rows),
        }


def heads_loss(scores: Tensor, labels: Tensor, huber: float, smooth: float, share: float) -> Tensor:
    """Loss of one layer's heads.

    Args:
        scores, labels: (tokens, kv_heads); of labels that are -inf nothing is learnt.
        huber: beta of the smooth L1 loss.
        smooth: weight of the mean squared difference of neighbouring tokens' scores.
        share: of the layer's KV heads in all of the model's, so that layers sum to a mean over all.
    """
    scores = scores.float()
    neighbours = F.mse_loss(scores[:-1], scores[1:])
    return share * F.smooth_l1_loss(scores, _known(labels, scores), beta=huber) + smooth * neighbours


def _known(labels: Tensor, scores: Tensor) -> Tensor:
    """Labels, and the scores themselves where a layer's window reached a token from no row of the answer."""
    return torch.where(labels.isneginf(), scores.detach(), labels)


def overlap(one: Tensor, other: Tensor) -> Tensor:
    """Share of the top tokens of both (tokens, kv_heads) that are the same, (kv_heads)."""
    count = max(1, round(TOP * len(one)))
    chosen = [
        torch.zeros_like(each, dtype=torch.bool).scatter_(0, each.topk(count, 0).indices, True) for each in (one, other)
    ]
    return (chosen[0] & chosen[1]).sum(0) / count


class HeadsLoss:
    """Passes of a target whose layers teach their heads on the way.

    Args:
        config: of the run.
        target: frozen, a transformers causal LM.
        heads: being trained.

    Raises:
        UnsupportedError: the target has no head over the vocabulary, or its projections are not known.
    """

    def __init__(self, config: TrainRetaining, target: Any, heads: RetainingHeads) -> None:
        self._config, self._target, self._heads = config, target, heads
        self._backbone = Backbone(target)  # logits over the vocabulary are not needed here
        self._raw = Raw(target, then=self._note)
        self._qkv: Tensor | None = None
        self._prompt = 0
        self._each: Each = _nothing
        self._term = compiled_loss(self._scored_loss, config.loop.compile, dynamic=True)

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Around everything but `passes`: hooks see what the target's layers project and attend to."""
        with attention_observed(self._target, self._observe), self._raw:
            yield

    def __call__(self, rows: Rows) -> Tensor:
        """Mean loss of a batch's rows, without gradient: that is in the heads already."""
        kv_heads = self._heads.shape.kv_heads
        total = torch.zeros((), device=self._target.device)

        def learn(layer: int, qkv: Tensor, labels: Tensor) -> None:
            with torch.enable_grad():
                with self._precision(qkv):
                    loss = self._term(layer, qkv, labels, kv_heads[layer] / sum(kv_heads)) / len(rows)
                loss.backward()
            total.add_(loss.detach())

        for ids, prompt in rows:
            self._pass(ids, prompt, learn)
        return total

    def passes(self, rows: Rows) -> None:
        """The target's plain passes over a batch's rows, for their time."""
        with torch.no_grad():
            for ids, _ in rows:
                self._backbone(ids[None])

    def measure(self, rows: Rows) -> Measured:
        """How the heads choose on a batch's rows."""
        shape = self._heads.shape
        found = [torch.zeros(count, device=self._target.device) for count in shape.kv_heads]
        recent, loss = [], []

        def compare(layer: int, qkv: Tensor, labels: Tensor) -> None:
            with self._precision(qkv):
                scores = self._heads(layer, qkv).float()
            found[layer] += overlap(labels, scores) / len(rows)
            places = torch.arange(len(labels), device=labels.device, dtype=torch.float32)[:, None].expand_as(labels)
            recent.append(overlap(labels, places).mean())
            loss.append(F.smooth_l1_loss(scores, _known(labels, scores), beta=self._config.huber))

        for ids, prompt in rows:
            self._pass(ids, prompt, compare)
        means = [float(torch.stack(each).mean()) for each in (recent, loss)]
        return Measured([layer.tolist() for layer in found], means[0], means[1], len(rows))

    def _scored_loss(self, layer: int, qkv: Tensor, labels: Tensor, share: float) -> Tensor:
        config = self._config
        return heads_loss(self._heads(layer, qkv), labels, config.huber, config.smooth, share)

    def _precision(self, qkv: Tensor) -> torch.autocast:
        # Without its cache: a weight's bf16 copy would belong to a graph that is gone with the layer's loss.
        enabled = self._target.dtype == torch.bfloat16
        return torch.autocast(qkv.device.type, torch.bfloat16, enabled=enabled, cache_enabled=False)

    def _pass(self, ids: Tensor, prompt: int, each: Each) -> None:
        self._prompt, self._each = prompt, each
        with torch.no_grad(), torch.autocast(ids.device.type, enabled=False):
            self._backbone(ids[None])
        self._each = _nothing

    def _note(self, layer: int, qkv: Tensor) -> None:
        self._qkv = qkv

    def _observe(self, layer: int, queries: Tensor, keys: Tensor, scaling: float, softcap: float, window: int) -> None:
        qkv, prompt = self._qkv, self._prompt
        assert qkv is not None, "a layer projects before it attends"
        if self._config.queries == "writing":  # the row before a token is the one that writes it
            first, end = prompt - 1, queries.shape[1] - 1
        else:
            first, end = prompt, queries.shape[1]
        rows, seen = queries[:, first:end], keys[:, :end]
        if self._config.labels == "chances":
            labels = largest_chances(rows, seen, prompt, scaling, softcap, window=window)
        else:
            labels = largest_logits(rows, seen[:, :prompt], scaling, softcap, window=window, first=first)
        self._each(layer, qkv[:prompt], labels.T)
        self._qkv = None


def _nothing(layer: int, qkv: Tensor, labels: Tensor) -> None:
    """Between passes nothing is done with them."""

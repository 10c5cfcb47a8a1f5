"""Train retaining heads (Locret): heads that score keys and values of a frozen target.

Huang et al. 2024, arXiv 2410.01805, section 3.2. A row is a prompt with its answer. One pass of the target over it
gives each layer's projections, from which its heads score the prompt's tokens, and the layer's queries and keys, from
which the labels are made. A layer's loss is propagated as soon as the pass has computed that layer, so nothing of it
is held when the next layer comes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sakiyomi.cache.policies.retaining.formats import write_heads
from sakiyomi.cache.policies.retaining.heads import RetainingHeads, RetainingShape, default_width
from sakiyomi.cache.policies.retaining.raw import Raw
from sakiyomi.drafters.medusa_heads.backbone import Backbone
from sakiyomi.train.beside import BesideTarget, Rows, as_written
from sakiyomi.train.checkpoint import writing
from sakiyomi.train.commands import TrainRetaining
from sakiyomi.train.export import Result, model_folder
from sakiyomi.train.loop import compiled_loss
from sakiyomi.train.plot import plot_overlaps
from sakiyomi.train.recipe import train
from sakiyomi.train.retaining_labels import attention_observed, kv_heads_of, largest_chances, largest_logits

TOP = 0.1
"""Share of a prompt's tokens whose choice is compared, as the paper's training does."""
Each = Callable[[int, Tensor, Tensor], None]
"""Told of a layer, its projections (tokens, width) and its labels (tokens, kv_heads)."""


def train_retaining(config: TrainRetaining, command: str = "") -> dict[str, Any]:
    """Run `sakiyomi train retaining`, see `recipe.train`."""
    return train(Retaining(config), command)


class Retaining(BesideTarget[TrainRetaining]):
    """Heads learn which keys and values the answers look at."""

    clip_values = True

    def check_target(self) -> None:
        """See `BesideTarget`."""
        self.kv_heads, self.widths = kv_heads_of(self.target), Raw(self.target).widths

    def make(self) -> nn.Module:
        """See `Recipe`."""
        config, text = self.config, self.target.config.get_text_config()
        activation = getattr(text, "hidden_act", None) or getattr(text, "activation_function", None) or "silu"
        width = config.width or default_width(int(text.hidden_size))
        self.heads = RetainingHeads(RetainingShape(self.widths, self.kv_heads, width, str(activation))).to(self.device)
        self.rows_loss = self.heads_loss = HeadsLoss(config, self.target, self.heads)
        return self.heads

    def hooks(self) -> AbstractContextManager[object]:
        """See `Recipe`."""
        return self.heads_loss.hooks()

    def finish(self) -> Result:
        """See `Recipe`."""
        config, folder, heads = self.config, model_folder(self.config), self.heads
        names = ("labels", "queries", "query_aware", "query_tokens", "smooth", "huber", "tasks", "seed")
        with writing(folder):
            written = as_written(heads, RetainingHeads(heads.shape, torch.bfloat16))
            write_heads(written, folder, config=self.target.config, **self.origin(names))
        with self.hooks():
            found = self._measured()
        overlaps = {name: one.overlap for name, one in found.items()}
        with writing(folder):
            drawn = plot_overlaps(self.loop.progress, overlaps, folder / "overlap.png")
        shape, aware = heads.shape, ", for prompts with the question in front" if config.query_aware else ""
        more = {
            "about": f"Retaining heads (Locret) of width {shape.hidden} for the {shape.layers} layers of "
            f"{config.target}{aware}",
            "unit": "",
            "measured_on": f"Of a held-out prompt's tokens, labels and heads each choose {TOP:.0%}, in every layer and "
            f"KV head: `overlap` is the share of the labels' choice that is the heads' too; chance is {TOP:g}, "
            "`recent` the share that the prompt's last tokens have.",
            "overlaps": overlaps,
            "accuracy_curve": "overlap.png" if drawn else None,
        }
        measures = {name: one.values() for name, one in found.items()}
        return self.result(heads, shape.layers, measures, more)

    def measures(self, model: Any) -> dict[str, dict[str, float]]:
        """See `Recipe`."""
        return {name: one.values() for name, one in self._measured().items()}

    def _measured(self) -> dict[str, Measured]:
        return {name: self.heads_loss.measure(batch) for name, batch in self.held_out.items()}


# ---------------------------------------------------------------- what heads are taught, and how well they choose


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


def layer_loss(scores: Tensor, labels: Tensor, huber: float, smooth: float, share: float) -> Tensor:
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
        """Around passes: hooks see what the target's layers project and attend to."""
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
        return layer_loss(self._heads(layer, qkv), labels, config.huber, config.smooth, share)

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

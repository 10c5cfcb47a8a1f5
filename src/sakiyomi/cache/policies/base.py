"""The interface of policies: a score for every pair of key and value, and pairs that stay regardless of their score.

A policy only says which pairs stay. Storage, the time of eviction and freeing memory are the same for all policies
(``eviction.py``). Pairs are evicted at boundaries that depend on the request alone, from observations of committed
tokens, so a drafted text keeps the same pairs as a plainly decoded one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from sakiyomi.cache.host import CacheHost, ModelHost


@dataclass(frozen=True, eq=False, slots=True)
class View:
    """The input of a policy at an eviction boundary: heads of one layer of a request with equally many pairs.

    Attributes:
        layer: which.
        heads: which of its key heads, h of them.
        all_heads: key heads of the layer.
        prompt: tokens of the prompt, without those that are kept in addition to the budget (``Policy.beside``).
        length: tokens in the cache, dropped ones included.
        budget: pairs of these heads that may stay.
        new_count: pairs, the last ones, that have come since the last boundary.
        moved: by how many positions the text has moved together, where positions are reassigned.
        places: (h, n) int64, each pair's place in the text, ascending.
        keys, values: (h, n, dim), keys after their rotation.
        observations: (new_count, width) what ``Policy.observe`` gave for the rows that have come; None: nothing.
        neg_log_prob: (new_count,) -log p of each token that has come; None where ``Policy.needs_log_probs`` is off.
        previous_scores: (h, n - new_count) what the policy said of the others at the last boundary.
    """

    layer: int
    heads: slice
    all_heads: int
    prompt: int
    length: int
    budget: int
    new_count: int
    moved: int
    places: Tensor
    keys: Tensor
    values: Tensor
    observations: Tensor | None
    neg_log_prob: Tensor | None
    previous_scores: Tensor

    @property
    def final(self) -> bool:
        """Whether the part of the prompt whose pairs may be dropped has been read."""
        return self.length >= self.prompt


class Merger(Protocol):
    """Merges the pairs that a policy drops into the last of those that stay."""

    @property
    def merged(self) -> int:
        """Merged pairs of each head, among those that stay."""

    def prepare(self, model: CacheHost) -> None:
        """Check that it fits the model, before its first request."""

    def merge(self, view: View, scores: Tensor, best: Tensor) -> Tensor:
        """Write merged pairs into the view's keys and values; returns the scores with theirs."""


@dataclass(kw_only=True, eq=False)
class Policy:
    """Base of all: options that every policy has.

    Attributes:
        sinks: first tokens of the text that always stay.
        local: last tokens that stay at an eviction boundary.
        recent: share of the budget for the last tokens, where that is more than ``local``.
        ends: share of the budget that is reserved for both ends of the prompt, half for each: most scorers lose the
            question or the instruction without it (arXiv 2605.18053).
        positions: "kept": pairs keep their positions; "reassigned": at every boundary the remaining pairs move
            together, so a text may be longer than the model's context.
        pyramid: of the budget beside the pairs that always stay, the last layer has 1 / pyramid, and the layers before
            it evenly more (PyramidKV, arXiv 2406.02069); 0: all layers have the same.
        where: "both": pairs are dropped between the chunks of a prompt and while text is generated; "prompt": only in
            the prompt.
        beside: last tokens of a prompt that are kept in addition to the budget. Earlier pairs are reduced to the
            budget, and nothing is dropped afterwards. Only with ``where="prompt"``.
        merger: merges dropped pairs into the last of those that stay; None: they are lost.
    """

    name: ClassVar[str] = ""
    needs_queries: ClassVar[bool] = False
    """Whether passes store observations for the policy, see ``observe``."""
    needs_log_probs: ClassVar[bool] = False
    """Whether it reads the probability of every token, so logits of all rows are computed."""
    recalls: ClassVar[bool] = False
    """Whether all pairs stay in main memory, and those for attention are chosen again at every boundary."""
    interval: ClassVar[int] = 64
    """Generated tokens between two boundaries."""
    reread_tokens: ClassVar[int] = 0
    """Where pairs are recalled: number of a prompt's last tokens that are read again, with pairs that they chose."""

    published: ClassVar[Mapping[str, Any]] = {}
    """Options that ``paper`` sets: the authors' own, with counts as shares of their budget."""

    sinks: int = 4
    local: int = 16
    recent: float = 0.0
    ends: float = 0.0
    pyramid: float = 0.0
    positions: Literal["kept", "reassigned"] = "kept"
    where: Literal["both", "prompt"] = "both"
    beside: int = field(default=0, init=False)
    merger: Merger | None = field(default=None, init=False)

    def least_of(self, budget: int) -> int:
        """Pairs of a head that stay in any case; a budget must be larger."""
        end = int(self.ends / 2 * budget)
        return max(self.sinks, end) + self.last_of(budget) + end

    def listen(self, model: ModelHost) -> None:
        """Attach to modules of the model, where queries are not enough.

        Called if ``needs_queries`` is set, before the model's first pass, and again after the model has changed its
        kernels.

        Raises:
            LoadError, UnsupportedError: what belongs to the policy cannot be read, or not with this model.
        """

    def prepare(self, model: CacheHost) -> None:
        """Check the model and measure what is needed of it, when it can run and before its first request.

        Raises:
            UnsupportedError: the policy is not for this model.
        """

    def leave(self) -> None:
        """Detach from the model's modules."""

    def observe(self, layer: int, queries: Tensor, scaling: float) -> Tensor:
        """What a pass stores for the policy, (rows, width); recorded with the pass. Called if ``needs_queries`` is set.

        Args:
            layer: which.
            queries: (1, heads, rows, dim), rotated.
            scaling: factor of scores.
        """
        raise NotImplementedError

    def score(self, view: View) -> Tensor:
        """Score of each pair, (h, n) float32; at the next boundary it is ``View.previous_scores``."""
        raise NotImplementedError

    def rank(self, view: View, scores: Tensor) -> Tensor:
        """What decides which pairs stay, the largest first, (h, n): their scores, unless the policy says otherwise."""
        return scores

    def pinned(self, view: View) -> Tensor:
        """Pairs that stay regardless of their score, (h, n) bool."""
        end = int(self.ends / 2 * view.budget)
        first, last = view.places < max(self.sinks, end), view.places >= view.length - self.last_of(view.budget)
        if end:
            last |= (view.places < view.prompt) & (view.places >= view.prompt - end)
        return first | last

    def best(self, view: View, scores: Tensor, window: int) -> Tensor | None:
        """Columns that stay of more than the budget, (h, budget), the best first; None: all stay.

        Args:
            view: at an eviction boundary.
            scores: what `score` gave.
            window: of the layer, in tokens; 0: none. Such a layer sees its last tokens alone; and they must lie side by
                side, since its kernels count the window in columns.
        """
        drops = self.where == "both" or view.length <= view.prompt
        if scores.shape[1] <= view.budget or not drops:
            return None
        ranked = view.places if window else self.rank(view, scores).masked_fill(self.pinned(view), torch.inf)
        # Of pairs with equal scores the later ones stay; topk does not specify which.
        best = ranked.flip(1).argsort(dim=1, descending=True, stable=True)[:, : view.budget]
        return ranked.shape[1] - 1 - best

    def last_of(self, budget: int) -> int:
        """Last tokens that stay in any case."""
        return max(self.local, int(self.recent * budget))

    def budgets(self, budget: int, heads: Sequence[int]) -> list[list[int]]:
        """Pairs of each layer's heads, where a head on average has so many.

        Args:
            budget: pairs of a head.
            heads: key heads of each layer.
        """
        layers = len(heads)
        if not self.pyramid or layers == 1:
            return [[budget] * count for count in heads]
        least = self.least_of(budget)
        last = (budget - least) / self.pyramid
        first = 2 * (budget - least) - last
        own = [least + round(first - i * (first - last) / (layers - 1)) for i in range(layers)]
        return [[pairs] * count for pairs, count in zip(own, heads, strict=True)]

"""Passes of a frozen target over a text whose keys and values are kept within a budget, with gradients.

A policy and a merger do at the boundaries of a prompt's chunks what they do in a cache (``eviction.py``), on tensors
that autograd follows: the loss of what comes after a boundary tells the merger what its mixtures should have held.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from sakiyomi.cache.layout import LayerShape
from sakiyomi.cache.policies import Policy, View, read_cache
from sakiyomi.cache.policies.merging.convolutions import Convolutions
from sakiyomi.core.errors import InputError
from sakiyomi.drafters.medusa_heads.backbone import Backbone
from sakiyomi.train.retaining_labels import attention_by, attention_logits, layer_shapes


def policy_of(spec: str, budget: int, merged: int) -> Policy:
    """The policy that says what stays while convolutions are trained.

    Args:
        spec: as ``cache`` takes it.
        budget: pairs of a head.
        merged: of those.

    Raises:
        InputError: it is none, or one that needs what is not there in training, or leaves no room for merged pairs.
    """
    policy, *others = read_cache(spec)
    if (
        policy is None
        or any(others)
        or policy.merger is not None
        or policy.recalls
        or policy.needs_log_probs
        or type(policy).prepare is not Policy.prepare
    ):
        raise InputError(f"scores is {spec!r}; expected a policy that reads attention or heads, as h2o or locret:HEADS")
    if policy.positions != "kept":
        raise InputError(f"scores is {spec!r}; positions are kept in training: leave that option out")
    if budget <= (least := policy.least_of(budget) + merged):
        raise InputError(
            f"kv_budget is {budget}, and {policy.name} keeps {least} in any case, {merged} merged ones among them; "
            "give a larger --kv-budget, or a smaller --merged"
        )
    return policy


@dataclass
class _Layer:
    """What a layer holds of the text so far; see ``View``."""

    keys: Tensor
    values: Tensor
    places: Tensor
    scores: Tensor
    notes: Tensor | None = None


class Compressed:
    """Passes chunk by chunk, with a boundary after each.

    Args:
        target: frozen, a transformers causal LM.
        policy: see `policy_of`.
        budget: pairs of a head that stay; 0: all do.
        chunk: tokens of a prompt from boundary to boundary.

    Attributes:
        shapes: of the target's layers.
        head: weight of the target's head over the vocabulary.

    Raises:
        UnsupportedError: the target's attention is its own, or the policy is not for it.
        InputError: the policy gives heads of a layer different budgets.
    """

    def __init__(self, target: Any, policy: Policy, budget: int, chunk: int) -> None:
        self._target, self._policy, self._chunk = target, policy, chunk
        self._backbone = Backbone(target)
        self.head = self._backbone.weight
        self.shapes: list[LayerShape] = layer_shapes(target)
        budgets = policy.budgets(budget, [shape.heads for shape in self.shapes])
        if any(len(set(layer)) != 1 for layer in budgets):
            raise InputError(f"{policy.name} gives heads of one layer different budgets; take other scores")
        self._budgets = [layer[0] if budget else 1 << 30 for layer in budgets]
        self._layers: list[_Layer] = []
        self._rows = range(0)

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Around all passes: the target's attention is computed here, and the policy observes its modules."""
        device, dtype = self._target.device, self._target.dtype
        # What policies that observe a model read of it.
        cache = SimpleNamespace(shapes=self.shapes)
        model = SimpleNamespace(module=self._target, cache=cache, device=device, dtype=dtype, packed_weights=None)
        if self._policy.needs_queries:
            self._policy.listen(cast(Any, model))
        try:
            with attention_by(self._target, self._attend):
                yield
        finally:
            self._policy.leave()

    def __call__(self, ids: Tensor, prompt: int, merger: Convolutions | None) -> Iterator[tuple[int, Tensor]]:
        """Read a text; after its prompt there is no boundary.

        Args:
            ids: (T,) of the text.
            prompt: tokens of its prompt.
            merger: merges what goes; None: it is lost.

        Yields:
            The place of each chunk's first row, and its hidden states as the head over the vocabulary reads them,
            (rows, hidden).
        """
        self._layers = [self._nothing(shape) for shape in self.shapes]
        boundaries = [*range(self._chunk, prompt, self._chunk), prompt]
        for first, end in zip([0, *boundaries], [*boundaries, len(ids)], strict=True):
            if first == end:
                break
            self._rows = range(first, end)
            places = torch.arange(first, end, device=ids.device)[None]
            yield first, self._backbone(ids[None, first:end], position_ids=places)[0]
            if end <= prompt:
                for layer in range(len(self.shapes)):
                    self._settle(layer, prompt, end, merger)
        self._layers = []

    def _nothing(self, shape: LayerShape) -> _Layer:
        def empty(*size: int, dtype: torch.dtype = self._target.dtype) -> Tensor:
            return torch.zeros(shape.heads, 0, *size, dtype=dtype, device=shape.device)

        places, scores = empty(dtype=torch.int64), empty(dtype=torch.float32)
        return _Layer(empty(shape.key_dim), empty(shape.value_dim), places, scores)

    def _attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, softcap: float, window: int
    ) -> Tensor:
        held = self._layers[layer]
        rows = torch.arange(self._rows.start, self._rows.stop, device=key.device)
        held.keys = torch.cat([held.keys.to(key.dtype), key[0]], 1)
        held.values = torch.cat([held.values.to(value.dtype), value[0]], 1)
        held.places = torch.cat([held.places, rows.expand(len(held.places), -1)], 1)
        if self._policy.needs_queries:
            with torch.no_grad():
                held.notes = self._policy.observe(layer, query, scale)
        logits = attention_logits(query[0], held.keys, scale, softcap)
        hidden = held.places[:, None] > rows[:, None]
        if window:
            hidden = hidden | (held.places[:, None] <= rows[:, None] - window)
        chances = logits.masked_fill(hidden[:, None], -torch.inf).softmax(-1).to(value.dtype)
        out: Tensor = chances @ held.values[:, None]
        return out.flatten(0, 1)[None]

    def _settle(self, layer: int, prompt: int, length: int, merger: Convolutions | None) -> None:
        held, shape = self._layers[layer], self.shapes[layer]
        every = slice(0, shape.heads)
        with torch.no_grad():
            view = View(
                layer=layer,
                heads=every,
                all_heads=shape.heads,
                prompt=prompt,
                length=length,
                budget=self._budgets[layer],
                new_count=len(self._rows),
                moved=0,
                places=held.places,
                keys=held.keys,
                values=held.values,
                observations=held.notes,
                neg_log_prob=None,
                previous_scores=held.scores,
            )
            held.scores = self._policy.score(view).float()
            best = self._policy.best(view, held.scores, shape.window)
        if best is None:
            return
        keys, values = held.keys, held.values
        if merger is not None and not shape.window:
            anchors, *mixed = merger(layer, keys, values, best, every)
            keys, values = (
                pairs.scatter(1, anchors[..., None].expand(-1, -1, pairs.shape[2]), new)
                for pairs, new in zip((keys, values), mixed, strict=True)
            )
            held.scores = merger.scored(held.scores, anchors)
        stay = best.sort(1).values
        held.keys, held.values = (
            pairs.gather(1, stay[..., None].expand(-1, -1, pairs.shape[2])) for pairs in (keys, values)
        )
        held.places, held.scores = held.places.gather(1, stay), held.scores.gather(1, stay)

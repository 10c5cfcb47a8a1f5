"""Locret: heads trained to say how important a pair will be (Huang et al. 2024, arXiv 2410.01805).

A pair's score is computed once, from its layer's projections of its token, and never changes. Between the chunks of a
prompt the last tokens always stay (stabilizers), since the next chunk continues their text. Pairs are also dropped
while text is generated, with the same heads; the paper lets the cache grow there.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from sakiyomi.cache.policies.base import Policy, View
from sakiyomi.core.errors import InputError
from sakiyomi.kernels.pack import linear_beside

if TYPE_CHECKING:
    from sakiyomi.cache.host import ModelHost
    from sakiyomi.cache.policies.retaining.heads import RetainingHeads
    from sakiyomi.cache.policies.retaining.raw import Raw

logger = logging.getLogger("sakiyomi")


@dataclass(kw_only=True, eq=False)
class Locret(Policy):
    """Scores of retaining heads.

    Attributes:
        file: folder or embedded name of the heads.
        stabilizers: share of the budget that the last tokens have between the chunks of a prompt.
    """

    name: ClassVar[str] = "locret"
    needs_queries: ClassVar[bool] = True
    published: ClassVar[Mapping[str, Any]] = {
        "sinks": 0,
        "local": 0,
        "ends": 0.0,
        "stabilizers": 2500 / 6000,
        "where": "prompt",
        "beside": 100,
    }

    file: str = ""
    ends: float = 0.1
    stabilizers: float = 0.25
    beside: int = 0
    _heads: RetainingHeads | None = field(default=None, init=False, repr=False)
    _raw: Raw | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if not self.file:
            raise InputError("cache='locret' without heads; give their folder as 'locret:FOLDER', or an embedded name")
        if self.beside and self.where != "prompt":
            raise InputError(
                f"locret with beside={self.beside}: what is written would push these tokens out again; add where=prompt"
            )

    def least_of(self, budget: int) -> int:
        """The stabilizers too."""
        return super().least_of(budget) + max(0, int(self.stabilizers * budget) - self.local)

    def listen(self, model: ModelHost) -> None:
        """Read the heads, and attach to the layers' projections."""
        from sakiyomi.cache.policies.retaining.formats import fingerprint, read_heads
        from sakiyomi.cache.policies.retaining.raw import Raw

        found = read_heads(self.file)
        self._raw = Raw(model.module)
        heads_of = [shape.heads for shape in model.cache.shapes]
        if found.check(self._raw.widths, heads_of, fingerprint(model.module, None)):
            logger.warning(
                "the heads in %s were trained for %s, and this model has other weights: they may choose worse",
                self.file,
                found.base or "another model",
            )
        heads = found.heads.to(model.device, model.dtype).requires_grad_(False)
        for layers in (heads.first, heads.second):
            for i, layer in enumerate(layers):
                layers[i] = linear_beside(model.packed_weights, layer.get_parameter("weight"))
        self._heads = heads
        self._raw.listen()

    def leave(self) -> None:
        """Detach from the layers' projections."""
        if self._raw is not None:
            self._raw.leave()

    def observe(self, layer: int, queries: Tensor, scaling: float) -> Tensor:
        """The heads' scores, (rows, kv heads)."""
        assert self._raw is not None and self._heads is not None
        projected = self._raw.read[layer]
        assert projected is not None
        scores: Tensor = self._heads(layer, projected)
        return scores

    def score(self, view: View) -> Tensor:
        """As each was when its token came."""
        assert view.observations is not None
        return torch.cat([view.previous_scores, view.observations[:, view.heads].T.to(view.previous_scores)], 1)

    def rank(self, view: View, scores: Tensor) -> Tensor:
        """As scored, to 11 bits: in the first layer a token is worth the same wherever it stands, but for how its pass
        rounds, which depends on what is read beside it.
        """
        return scores.half()

    def pinned(self, view: View) -> Tensor:
        """Stabilizers, as long as more of the prompt comes."""
        last = self.local if view.final else int(self.stabilizers * view.budget)
        return super().pinned(view) | (view.places >= view.length - last)

"""Expected attention of future queries (Devoto et al. 2025, arXiv 2510.00636)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from sakiyomi.cache.policies.base import View
from sakiyomi.cache.policies.looking import Looking

if TYPE_CHECKING:
    from sakiyomi.cache.host import CacheHost
    from sakiyomi.cache.rotary import Turn


@dataclass(kw_only=True, eq=False)
class Expected(Looking):
    """Attention that queries drawn like the last rows', at the next positions, would have; times the value's length.

    Queries before their rotation are taken to be normal, with the mean and covariance of the rows that came since the
    last boundary; both are turned by the mean rotation of the next ``ahead`` positions. The mean of exp(q k) is then
    exp(mu k + k S k / 2).

    Attributes:
        ahead: positions.
        floor: added to the attention, so that long values count everywhere.
    """

    name: ClassVar[str] = "expected"
    ahead: int = 512
    floor: float = 0.02
    _turn: Turn | None = field(default=None, init=False, repr=False)
    _rotation: tuple[int, Tensor] | None = field(default=None, init=False, repr=False)

    def prepare(self, model: CacheHost) -> None:
        """How the model's positions turn keys and queries."""
        from sakiyomi.cache.rotary import make_turn

        self._turn = make_turn(model)

    def score(self, view: View) -> Tensor:
        """Mean over the query heads of a head."""
        assert view.observations is not None and self._turn is not None
        heads, _, dim = view.keys.shape
        group = view.observations.shape[1] // (view.all_heads * dim)
        own = (
            view.observations.view(view.new_count, view.all_heads, group, dim)[:, view.heads]
            .flatten(1, 2)
            .transpose(0, 1)
        )
        end = view.length - view.moved
        back = -torch.arange(end - view.new_count, end, device=own.device).expand(len(own), -1)
        raw = self._turn(view.layer, own.float(), back)
        rotation = self._mean_rotation(view, end)
        mean = (raw.mean(1) @ rotation).view(heads, group, dim)
        spread = torch.zeros(len(raw), dim, dim, device=raw.device)
        if view.new_count > 1:
            away = raw - raw.mean(1, keepdim=True)
            spread = rotation.T @ (away.transpose(1, 2) @ away / view.new_count) @ rotation
        keys = view.keys.float()
        first = mean @ keys.transpose(1, 2)
        wide = keys[:, None].expand(-1, group, -1, -1)
        second = ((wide @ spread.view(heads, group, dim, dim)) * wide).sum(-1) / 2
        looks = (first + second).softmax(-1).mean(1)
        lengths: Tensor = torch.linalg.vector_norm(view.values.float(), dim=-1)
        return (looks + self.floor / view.keys.shape[1]) * lengths

    def _mean_rotation(self, view: View, end: int) -> Tensor:
        """(dim, dim): a row of numbers times this is its mean over the next positions; of all layers the same."""
        assert self._turn is not None
        dim, device = view.keys.shape[2], view.keys.device
        known = self._rotation
        if known is None or known[0] != end or known[1].shape[0] != dim or known[1].device != device:
            by = torch.arange(end, end + self.ahead, device=device)[:, None].expand(-1, dim)
            turned = self._turn(view.layer, torch.eye(dim, device=device).expand(self.ahead, -1, -1), by)
            known = self._rotation = end, turned.mean(0)
        return known[1]

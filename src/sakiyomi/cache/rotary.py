"""Turns keys from one position to another with the model's own rotary embedding, and tests that on the model."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sakiyomi.cache.slots import SlotCache
from sakiyomi.core.errors import UnsupportedError

if TYPE_CHECKING:
    from sakiyomi.cache.host import CacheHost

Turn = Callable[[int, Tensor, Tensor], Tensor]
"""From layer, keys (heads, n, dim) and by how many positions each moves, (heads, n), to the keys turned."""

Positions = list[list[Tensor]]
"""By layer and head, (n,) int64."""

FAR = 37  # positions, of the proof
GROUP = 32  # positions that share a row of the far table


def make_turn(model: CacheHost, asked: str = "positions='reassigned'", instead: str = "use 'kept'") -> Turn:
    """How keys of this model move from one position to another.

    Rotary embeddings turn pairs of numbers by an angle that is the position times a frequency, so a key moves by d
    positions when it is rotated for position d once more. A test shows whether the model does nothing else with
    positions: a single token is read at two positions, and its turned keys must be equal in every layer.

    Args:
        model: that is asked.
        asked, instead: for the message, what needs this, and what to do without it.

    Raises:
        UnsupportedError: they are not.
    """
    module = model.module
    found = [m for name, m in module.named_modules() if name.rsplit(".", 1)[-1] == "rotary_emb"]
    apply = getattr(sys.modules[type(module).__module__], "apply_rotary_pos_emb", None)
    unserved = UnsupportedError(
        f"{asked}: keys of {type(module).__name__} cannot be turned to another position; {instead}"
    )
    if not found or apply is None:
        raise unserved
    rotary: Any = found[0]

    def turn(layer: int, keys: Tensor, by: Tensor) -> Tensor:
        cos, sin = rotary(keys.float(), by)
        scale = float(getattr(rotary, "attention_scaling", 1.0) or 1.0)
        width = cos.shape[-1]
        part = keys[..., :width].float()[:, None]
        turned, _ = apply(part, part, cos.float() / scale, sin.float() / scale)
        return torch.cat([turned[:, 0], keys[..., width:].float()], -1).to(keys.dtype)

    try:
        proven = _proven(model, turn)
    except (TypeError, ValueError, RuntimeError, IndexError) as error:
        raise unserved from error
    if not proven:
        raise unserved
    return turn


def _proven(model: CacheHost, turn: Turn) -> bool:
    keys = []
    for position in (0, FAR):
        with model.cache.lent(1) as slot:
            model.read_alone(slot, 1 % model.vocab_size, position)
            layers = range(len(model.cache.shapes))
            keys.append([torch.cat([part.keys[:, :1].clone() for part in model.cache.parts(i, slot)]) for i in layers])
    for layer, (near, far) in enumerate(zip(*keys, strict=True)):
        by = torch.full(near.shape[:2], FAR, device=near.device)
        for start, end, way in ((near, far, by), (far, near, -by)):
            gap = (turn(layer, start, way).float() - end.float()).abs().max()
            if not bool(gap <= (1e-3 if near.dtype == torch.float32 else 0.05) * end.float().abs().max()):
                return False
    return True


class Rotation:
    """The rotation of keys to places of a text, small enough to be kept: by tables of cosines and sines.

    The angle of position p = 32 * g + r is the sum of those of 32 * g and of r, so the tables have a row for every
    group of 32 positions and 32 more. The pairs of numbers and their angles are read from the model's own turning
    (``make_turn``).

    Args:
        turn: of the model.
        dim: of a key.
        most: positions of the model; none beyond is asked for, since some embeddings change there.
        device: of the keys.

    Attributes:
        pairs: (n, 2) int32, the numbers that are turned together.
        near: float32 (2, 2, n, 16), cosines and sines of 16 positions side by side, from 0 and from 16 on.
        far: float32 (groups, n, 2), cosines and sines of positions 32 * g.
    """

    def __init__(self, turn: Turn, dim: int, most: int, device: torch.device) -> None:
        self._turn, self._most = turn, most
        images = turn(0, torch.eye(dim, device=device)[None], torch.ones(1, dim, dtype=torch.int64, device=device))[0]
        aside = images.abs().fill_diagonal_(0).triu()
        firsts = aside.amax(1).nonzero()[:, 0]
        self.pairs = torch.stack([firsts, aside[firsts].argmax(1)], 1).int()
        self._first = torch.zeros(dim, device=device)
        self._first[firsts] = 1
        near = self._angles(torch.arange(GROUP, device=device))  # (32, n, 2)
        self.near = near.unflatten(0, (2, 16)).permute(0, 3, 2, 1).contiguous()
        self.far = self._angles(torch.zeros(1, dtype=torch.int64, device=device))
        noise = torch.randn(1, GROUP, dim, generator=torch.Generator().manual_seed(0)).to(device)
        where = torch.arange(GROUP, device=device)[None]
        if not torch.allclose(self(noise, 0), turn(0, noise, where), atol=1e-4):
            raise UnsupportedError("keys of this model are not rotated in pairs; use cache='quant-4'")

    def _angles(self, places: Tensor) -> Tensor:
        """Cosines and sines, (places, n, 2) float32."""
        # The image of a one at the first place of every pair is the cosine there, and the sine at the second.
        keys = self._first.expand(1, len(places), -1)
        images = self._turn(0, keys, places.clamp_max(self._most - 1)[None])[0]
        return torch.stack([images[:, self.pairs[:, 0]], images[:, self.pairs[:, 1]]], -1)

    def reach(self, places: int) -> None:
        """Have rows for so many positions, a multiple of 32."""
        if places // GROUP > len(self.far):
            self.far = self._angles(torch.arange(0, places, GROUP, device=self.far.device)).contiguous()

    def __call__(self, keys: Tensor, first: int, *, back: bool = False) -> Tensor:
        """Keys (heads, n, dim) float32, rotated to places first, first + 1, ...; or from there.

        ``first`` and n are multiples of 32, and within ``reach``.
        """
        near = self.near.permute(0, 3, 2, 1).flatten(0, 1)  # (32, n, 2)
        far = self.far[first // GROUP : (first + keys.shape[1]) // GROUP, None]
        cos = (far[..., 0] * near[..., 0] - far[..., 1] * near[..., 1]).flatten(0, 1)
        sin = (far[..., 1] * near[..., 0] + far[..., 0] * near[..., 1]).flatten(0, 1)
        sin = -sin if back else sin
        a, b = (keys[..., side] for side in self.pairs.long().unbind(1))
        turned = keys.clone()
        turned[..., self.pairs[:, 0].long()] = a * cos - b * sin
        turned[..., self.pairs[:, 1].long()] = a * sin + b * cos
        return turned


class Repositioner:
    """Rotates keys of a cache to the positions that they have after an eviction.

    Args:
        cache: whose keys.
        turn: of the model.
    """

    def __init__(self, cache: SlotCache, turn: Turn) -> None:
        self._cache, self._turn = cache, turn

    def positions(self, slot: int, length: int) -> Positions:
        """The position that each column's key was rotated for: of a layer's heads the last ones are the same."""
        end = length - self._cache.least(slot)
        found: Positions = []
        for layer in range(len(self._cache.shapes)):
            heads: list[Tensor] = []
            for part in self._cache.parts(layer, slot):
                own = torch.arange(end - length + part.dropped, end, device=part.keys.device)
                heads += [own] * (part.heads.stop - part.heads.start)
            found.append(heads)
        return found

    def move(self, slot: int, length: int, kept: Sequence[Sequence[Tensor]], before: Positions) -> None:
        """Rotate what is left.

        Args:
            slot: after the eviction.
            length: tokens of its text.
            kept: by layer and head, the columns that stayed.
            before: positions of the columns that they were taken from.
        """
        for layer, new in enumerate(self.positions(slot, length)):
            for part in self._cache.parts(layer, slot):
                heads = range(part.heads.start, part.heads.stop)
                old = torch.stack([before[layer][head].gather(0, kept[layer][head]) for head in heads])
                by = torch.stack([new[head] for head in heads]) - old.to(part.keys.device)
                n = by.shape[1]
                part.keys[:, :n] = self._turn(layer, part.keys[:, :n], by)

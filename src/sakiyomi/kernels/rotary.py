"""Keys that were rotated for one position, turned to another: by the model's own rotary embedding, and proven on it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sakiyomi.errors import UnsupportedError

if TYPE_CHECKING:
    from sakiyomi.model import PackedModel

__all__ = ["Turn", "make_turn"]

Turn = Callable[[int, Tensor, Tensor], Tensor]
"""From layer, keys (heads, n, dim) and by how many positions each moves, (heads, n), to the keys turned."""

FAR = 37  # positions, of the proof


def make_turn(model: PackedModel) -> Turn:
    """How keys of this model move from one position to another.

    Rotary embeddings turn pairs of numbers by an angle that is the position times a frequency, so a key moves by d
    positions when it is rotated for position d once more. Whether that is all the model does to a position is tried
    out: one token alone is read at two positions, and its keys, turned, must be each other's in every layer.

    Raises:
        UnsupportedError: they are not.
    """
    module = model.module
    found = [m for name, m in module.named_modules() if name.rsplit(".", 1)[-1] == "rotary_emb"]
    apply = getattr(sys.modules[_code_of(module)], "apply_rotary_pos_emb", None)
    if not found or apply is None:
        raise _unserved(module)
    rotary: Any = found[0]

    def turn(layer: int, keys: Tensor, by: Tensor) -> Tensor:
        cos, sin = rotary(keys.float(), by)
        scale = float(getattr(rotary, "attention_scaling", 1.0) or 1.0)
        width = cos.shape[-1]
        part = keys[..., :width].float()[:, None]
        turned, _ = apply(part, part, cos.float() / scale, sin.float() / scale)
        return torch.cat([turned[:, 0], keys[..., width:].float()], -1).to(keys.dtype)

    try:
        _prove(model, turn)
    except (TypeError, ValueError, RuntimeError, IndexError) as error:
        raise _unserved(module) from error
    return turn


def _code_of(module: nn.Module) -> str:
    return type(module).__module__


def _unserved(module: nn.Module) -> UnsupportedError:
    return UnsupportedError(
        f"positions='reassigned': keys of {type(module).__name__} cannot be turned to another position; use 'kept'"
    )


def _prove(model: PackedModel, turn: Turn) -> None:
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
                raise _unserved(model.module)

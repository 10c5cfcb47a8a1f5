"""Positions for model classes whose forward takes none: the decoders of bart and its kin count columns of their cache.

Ours holds the rows of several requests, and of trees, so that every row is given its own position.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["take_positions"]


class _GivenPositions(nn.Module):
    """Embeds the positions that the pass was given, whatever it is called with.

    Args:
        table: the model's own, a row for each position behind the first ``offset``.
    """

    def __init__(self, table: nn.Embedding) -> None:
        super().__init__()
        self.weight, self.offset = table.weight, int(getattr(table, "offset", 0))
        self.positions: Tensor | None = None

    def forward(self, *_: Any, **__: Any) -> Tensor:
        """(1, N, width) of positions (1, N)."""
        assert self.positions is not None, "the model's forward was called without position_ids"
        return F.embedding(self.positions + self.offset, self.weight)


def take_positions(model: nn.Module) -> None:
    """Have a model take ``position_ids`` (1, N), if its class does not, and has one table of positions.

    Args:
        model: our structural copy; changed in place. Without ``position_ids`` its positions are 0, 1, 2, ...
    """
    if "position_ids" in inspect.signature(model.forward).parameters:
        return
    tables = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) and name.rpartition(".")[2] == "embed_positions"
    ]
    if len(tables) != 1:
        return
    given = _GivenPositions(model.get_submodule(tables[0]))  # type: ignore[arg-type]
    model.set_submodule(tables[0], given)

    def take(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        positions = kwargs.pop("position_ids", None)
        if positions is None:
            ids = kwargs["input_ids"]
            positions = torch.arange(ids.shape[1], device=ids.device)[None]
        given.positions = positions
        return args, kwargs

    model.register_forward_pre_hook(take, with_kwargs=True)

"""Positions for model classes that do not count them from 0, or count columns of their cache; context limits.

A pass has the rows of several requests and of trees, so every row has its own position. The forwards of Bart and its
relatives take no positions. RoBERTa and its relatives count from the position behind the padding's.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ENDLESS = 1 << 30
"""Number of positions of a model without a limit."""
_STRETCHED = ("linear", "llama3", "longrope", "yarn")
"""Kinds of rotary embeddings that extend the context of the training by a factor."""


class _GivenPositions(nn.Module):
    """Embeds the positions of the pass, whatever it is called with.

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


def take_positions(model: nn.Module) -> int:
    """Have a model take ``position_ids`` (1, N) that count from 0, if its class does not.

    Args:
        model: our structural copy; changed in place. Called without ``position_ids``, its positions are 0, 1, 2, ...

    Returns:
        The number of positions before the first one of a text.
    """
    if "position_ids" in inspect.signature(model.forward).parameters:
        behind = [m.padding_idx for m in model.modules() if hasattr(m, "create_position_ids_from_input_ids")]
        if not behind:
            return 0
        padding = int(behind[0])  # type: ignore[arg-type]

        def shift(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if (given := kwargs.get("position_ids")) is None:
                return args, kwargs
            found = (given + padding + 1).masked_fill(kwargs["input_ids"] == padding, padding)
            return args, kwargs | {"position_ids": found}

        model.register_forward_pre_hook(shift, with_kwargs=True)
        return padding + 1
    tables = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) and name.rpartition(".")[2] == "embed_positions"
    ]
    if len(tables) != 1:
        return 0
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
    return 0


def position_count(config: Any, wanted: int | None = None) -> int:
    """Most tokens of a text, by the model's positions.

    A rotary embedding that extends the original context by a factor has as many positions as the product, if
    ``max_position_embeddings`` is still the original number, as in model cards for YaRN.

    Args:
        config: of the model's text part.
        wanted: tokens that the caller asks for. If ``max_position_embeddings`` is not the original context, or the
            original context is not given, only ``wanted`` raises the result above ``max_position_embeddings``.
    """
    declared = int(getattr(config, "max_position_embeddings", 0) or 0)
    if declared <= 0:
        return ENDLESS
    rope = _rope(config)
    if rope.get("rope_type") not in _STRETCHED or not rope.get("factor"):
        return declared
    original = _original(config, rope)
    most = max(declared, int((original or declared) * rope["factor"]))
    return most if original >= declared else min(most, max(declared, wanted or 0))


def rope_limit(config: Any) -> int:
    """The longest context in which a position's rotary embedding depends on the position alone.

    "longrope" changes the frequencies of all positions as soon as one lies beyond the original context: keys in the
    cache would then be wrong, and requests of one pass would change each other's results. "dynamic" does so beyond
    ``max_position_embeddings``, which no text exceeds.
    """
    rope = _rope(config)
    if rope.get("rope_type") != "longrope" or rope.get("long_factor") == rope.get("short_factor"):
        return ENDLESS
    return _original(config, rope) or ENDLESS


def context_note(config: Any, limit: int) -> str:
    """For messages: why a text may not have more positions; "": the model has no more."""
    positions, kind = position_count(config), _rope(config).get("rope_type")
    if limit < positions and limit == rope_limit(config):
        return (
            f"; the model has {positions} positions, but its rotary embedding (longrope) changes all of them when a "
            f"text grows beyond {limit}; with max_context={positions} each text goes through the model's own forward "
            "by itself, which is slower, and is read anew there"
        )
    if kind == "dynamic":
        return "; its rotary embedding (dynamic) changes all positions of a longer text"
    if (most := position_count(config, ENDLESS)) > limit >= positions:
        return f"; its rotary embedding ({kind}) supports {most} positions: pass max_context={most} for these"
    return ""


def _rope(config: Any) -> Mapping[str, Any]:
    """Parameters of the rotary embedding, if all layers have the same."""
    return getattr(config, "rope_parameters", None) or {}


def _original(config: Any, rope: Mapping[str, Any]) -> int:
    own = rope.get("original_max_position_embeddings")
    return int(own or getattr(config, "original_max_position_embeddings", None) or 0)

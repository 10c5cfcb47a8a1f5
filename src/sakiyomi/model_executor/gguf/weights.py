"""Weights of a model in a GGUF file, by the names that they have in transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sakiyomi.core.errors import LoadError
from sakiyomi.core.gguf import LAYER, GgufFile, GgufTensor
from sakiyomi.model_executor.gguf.architectures import Architecture
from sakiyomi.model_executor.gguf.blocks import dequantize
from sakiyomi.model_executor.gguf.changes import SAME, Change
from sakiyomi.model_executor.gguf.config import ROPE_TENSORS


@dataclass(frozen=True)
class Weight:
    """A tensor of the model.

    Attributes:
        name: in the model.
        sources: of which it is made, in the file.
        change: makes it.
    """

    name: str
    sources: tuple[GgufTensor, ...]
    change: Change

    def numbers(self, config: Any, dtype: torch.dtype) -> Tensor:
        """The tensor in this dtype."""
        made = self.made_of([numbers_of(source) for source in self.sources], config)
        return (made.mT if self.change.turned else made).to(dtype).contiguous()

    def made_of(self, given: Sequence[Tensor], config: Any) -> Tensor:
        """The tensor of these numbers, or bytes, of its sources; a matrix as (out, in).

        Raises:
            LoadError: their shapes do not agree with the metadata.
        """
        try:
            return self.change.undo(given, config)
        except (RuntimeError, IndexError, ValueError) as error:
            source = self.sources[0]
            raise LoadError(
                f"{source.path} has {source.name} of {list(source.shape)}, which does not agree with its metadata; "
                "download it again"
            ) from error

    def check(self, shape: Sequence[int], wanted: Sequence[int]) -> None:
        """Refuse a tensor of another shape than the model's.

        Raises:
            LoadError: says both shapes.
        """
        if tuple(shape) != tuple(wanted):
            source = self.sources[0]
            raise LoadError(
                f"{source.path} has {source.name} of {list(shape)}, and its metadata speak of {list(wanted)}; "
                "download it again"
            )


def numbers_of(source: GgufTensor) -> Tensor:
    """A tensor of a file in float32, in its shape."""
    return dequantize(source.kind, torch.from_numpy(source.bytes())).view(source.shape)


def weights_of(file: GgufFile, architecture: Architecture, config: Any) -> tuple[list[Weight], list[str]]:
    """The tensors of the model, and the names of those in the file that belong to none.

    Args:
        config: of the model.
    """
    found: list[Weight] = []
    waiting: dict[str, dict[str, GgufTensor]] = {}
    unused: list[str] = []
    layers = int(config.num_hidden_layers)
    parts = {**architecture.parts, **architecture.renamed(config)}
    for name, tensor in file.tensors.items():
        match = LAYER.fullmatch(name)
        prefix, part = ("", name) if match is None else (f"{architecture.layers}.{match[1]}.", match[2])
        if match is not None and int(match[1]) >= layers:
            unused.append(name)
        elif (join := _join_of(architecture, part)) is not None and match is not None:
            waiting.setdefault(prefix + join, {})[part] = tensor
        elif (own := _name_of(parts, part)) is not None:
            leaf = part.rpartition(".")[0]
            change = architecture.changes.get(part, architecture.changes.get(leaf, SAME))
            found.append(Weight(prefix + own, (tensor,), change))
        elif name not in ROPE_TENSORS:
            unused.append(name)
    for name, held in waiting.items():
        held_by, change = next(join for each, join in architecture.joins.items() if name.endswith(f".{each}"))
        if all(part in held for part in held_by):
            found.append(Weight(name, tuple(held[part] for part in held_by), change))
        else:
            unused += [tensor.name for tensor in held.values()]
    return found, unused


def _name_of(parts: Mapping[str, str], part: str) -> str | None:
    """What a part is called in the model, with its suffix; None: it belongs to none."""
    if part in parts:
        return parts[part]
    leaf, _, suffix = part.rpartition(".")
    own = parts.get(leaf)
    return None if own is None else f"{own}.{suffix}"


def _join_of(architecture: Architecture, part: str) -> str | None:
    """The tensor of the model that is made of this part and others."""
    return next((name for name, (parts, _) in architecture.joins.items() if part in parts), None)

"""Packed layers that stay in mapped files: each is read for its product, and its pages are dropped behind it.

The kernels multiply the pages of the file as they are: nothing is copied, and no number differs from a model in memory.
The system reads the next layers while one computes. Of embeddings and experts a pass reads only the rows and the
experts that it needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from sakiyomi.kernels.native import PackedEmbedding, PackedExperts, PackedLayer
from sakiyomi.kernels.weight_memory import MappedMemory
from sakiyomi.model_executor.loading import stream
from sakiyomi.model_executor.loading.read_ahead import ReadAhead, fetch


class PackedStream:
    """Reads packed layers from files in every pass.

    Args:
        memory: maps the files.
        stays: bytes of layers that stay in memory; those used first.

    Attributes:
        memory: as given.
        bytes_read: bytes of weights that passes have used so far, of layers that do not stay.
        layers: those layers, by name; empty before ``attach``.
    """

    def __init__(self, memory: MappedMemory, *, stays: int = 0) -> None:
        self.memory, self._stays = memory, stays
        self.bytes_read = 0
        self.layers: dict[str, PackedLayer] = {}
        self._ahead: ReadAhead | None = None

    @property
    def files(self) -> list[Path]:
        """The files that passes read, as far as they have names."""
        places = [self.memory.place(tensor) for layer in self.layers.values() for tensor in _large(layer)]
        return sorted({Path(place.file.name) for place in places if place and isinstance(place.file.name, str)})

    def attach(self, model: nn.Module, count: int) -> None:
        """Have the packed layers of a model, which lie in the memory, read and dropped in its passes.

        Args:
            model: the model as it runs.
            count: number of its layers; as many bytes as one has are read ahead.
        """
        found = {name: part for name, part in model.named_modules() if isinstance(part, PackedLayer)}
        left = self._stays
        for name, layer in sorted(found.items(), key=lambda item: item[1].index):
            size = _size(layer)
            self.drop(layer)
            if size <= left:
                left -= size
            else:
                self.layers[name] = layer
                layer.register_forward_pre_hook(lambda layer, given, name=name: self._begin(name, layer, given))
                layer.register_forward_hook(lambda layer, given, made: self.drop(layer))
        whole = {name: _size(layer) for name, layer in self.layers.items() if _is_whole(layer)}
        budget = max([*whole.values(), sum(whole.values()) // max(count, 1)], default=0)
        self._ahead = ReadAhead(whole, lambda name: self._fetch(_large(self.layers[name])), budget=budget)

    def drop(self, layer: nn.Module) -> None:
        """Drop a layer's pages from memory."""
        assert isinstance(layer, PackedLayer)
        for tensor in _large(layer):
            self.memory.drop(tensor)

    def _begin(self, name: str, layer: nn.Module, given: tuple[Any, ...]) -> None:
        """A layer is about to run on this."""
        assert isinstance(layer, PackedLayer) and self._ahead is not None
        size = _size(layer)
        if isinstance(layer, PackedEmbedding):
            self.bytes_read += len(given[0].unique()) * size // layer.out_features
        elif isinstance(layer, PackedExperts):
            chosen = given[1].unique().tolist()
            self.bytes_read += len(chosen) * size // int(layer.count or 1)
            self._fetch([tensor[expert] for tensor in _large(layer) for expert in chosen])
        else:
            self.bytes_read += size
            self._ahead.note(name)
            self._ahead.look(name)

    def _fetch(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            if (place := self.memory.place(tensor)) is not None:
                fetch(place.file.fileno(), place.offset, place.size)


def _is_whole(layer: PackedLayer) -> bool:
    """Whether a pass reads all of a layer."""
    return not isinstance(layer, PackedEmbedding | PackedExperts)


def _large(layer: PackedLayer) -> list[Tensor]:
    """What is read in every pass; smaller tensors stay in memory."""
    return [tensor for tensor in layer.tensors().values() if tensor.nbytes > stream.SMALL]


def _size(layer: PackedLayer) -> int:
    return sum(tensor.nbytes for tensor in _large(layer))

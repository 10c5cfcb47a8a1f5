"""Models made larger without a change of what they compute: what all families share; see `inflate`."""

from __future__ import annotations

import copy
import itertools
import math
import os
import re
import shutil
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from safetensors import SafetensorError
from torch import Tensor

from sakiyomi.core.errors import InputError, LoadError
from sakiyomi.core.memory import readable

__all__ = ["NEW_TOKENS", "Inflatable", "Random", "fresh_folder", "gain", "inflated_tensor"]

ASPECT = 80
"""Hidden size / layers to aim at; models of 0.1 to 7 billion parameters have 20 to 130."""
LOUDNESS = 0.5
"""Random activations reach so much of the smallest maximum of a row of real ones, on the text they are fitted to."""
NEW_TOKENS = 32
"""Greedy tokens that both models are compared on."""
SHARD = "1GB"
READERS = {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "fc1"}
"""Matrices of a layer that read the residual stream; the writers write to it."""
WRITERS = {"o_proj", "out_proj", "down_proj", "fc2"}
_Key = TypeVar("_Key", bound=Hashable)


def gain(weight: Tensor, factor: int) -> Tensor:
    """Gain of a norm: the first copy of the stream is read, the others are not."""
    return torch.cat((weight, weight.new_zeros((factor - 1) * len(weight))))


def writer(weight: Tensor, columns: int, factor: int, real: bool) -> Tensor:
    """(factor x rows, columns): the same into every copy of the stream, zeros for new columns or a new layer."""
    made = weight.new_zeros(factor * weight.shape[0], columns, dtype=torch.bfloat16)
    if real:
        made[:, : weight.shape[1]] = weight.repeat(factor, 1)
    return made


class Random:
    """Random weights, the same ones in every run.

    Args:
        width: of the large model's residual stream.
    """

    def __init__(self, width: int) -> None:
        self._width, self._generator = width, torch.Generator().manual_seed(0)

    def readers(self, weight: Tensor, rows: int, real: bool = True) -> Tensor:
        """(rows, width) bfloat16 around ``weight``, or, if it is not to be real, of its size alone.

        Random numbers are below half of the largest real one of their row; in new rows, of a mean row.
        """
        limits = weight.abs().amax(1, keepdim=True)
        limits = torch.cat((limits, limits.mean().expand(rows - len(limits), 1))) / 2
        made = torch.empty(rows, self._width, dtype=torch.bfloat16).uniform_(-1, 1, generator=self._generator)
        made *= limits.bfloat16()
        if real:
            made[: weight.shape[0], : weight.shape[1]] = weight
        return made


@contextmanager
def hooked(modules: Mapping[_Key, Any]) -> Iterator[dict[_Key, Tensor]]:
    """What each module reads while the block runs: (T, width), of the first text of a batch."""
    found: dict[_Key, Tensor] = {}

    def keep(key: _Key) -> Any:
        def hook(module: Any, arguments: tuple[Tensor, ...]) -> None:
            found[key] = arguments[0][0]

        return hook

    hooks = [module.register_forward_pre_hook(keep(key)) for key, module in modules.items()]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


@dataclass
class Inflatable(ABC):
    """A small model, and how a larger one is made of it.

    Attributes:
        name: as the user gave it.
        model: in bfloat16, or in float32 once it is.
        processor: tokenizer or processor.
        batch: what both models read of one text to be compared: arguments of the forward.
        stacks: fields of the configuration with the number of layers, by the place of the layers in the model.
        shown: fields of the configuration with the sizes that a report names.
        mlp: fields with the units of an MLP.
        wide: all fields that grow with the width.
        softened: reader and writer of what has to stay below what is real: attention gives means of values, and an MLP
            writes what its units let through.
    """

    name: str
    model: Any
    processor: Any
    batch: dict[str, Tensor]
    stacks: ClassVar[dict[str, str]]
    shown: ClassVar[dict[str, str]]
    mlp: ClassVar[tuple[str, ...]]
    wide: ClassVar[tuple[str, ...]]
    softened: ClassVar[tuple[tuple[str, str], ...]]

    @abstractmethod
    def written(self, model: Any) -> list[int]:
        """Greedy tokens of a model, ``NEW_TOKENS`` if there is room."""

    @abstractmethod
    def unit(self, shape: Any) -> int:
        """Parameters of one unit of an MLP."""

    def through(self, layer: Any, made: dict[str, Tensor], reader: str, rows: Tensor) -> Tensor:
        """(T, new rows) what the new rows of a reader make of what the small one reads, (T, small width)."""
        return rows @ made[f"{reader}.weight"][len(layer.get_submodule(reader).weight) :, : rows.shape[1]].float().T

    @property
    def parameters(self) -> int:
        """Of the small model."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    def wider(self, params: int) -> tuple[Any, int]:
        """Configuration of about so many parameters into which the function fits, and their number.

        Everything wide grows by one whole factor, so that old heads keep their key heads; all stacks by another.

        Raises:
            InputError: the small model has more parameters.
        """
        small, own = self.model.config, self.parameters
        if params < own:
            raise InputError(f"params is {params:,} and the model has {own:,} already; ask for at least as many")
        found: list[tuple[float, Any, int]] = []
        for factor in itertools.count(1):
            shape = copy.deepcopy(small)
            for name in self.wide:
                setattr(shape, name, factor * getattr(small, name))
            outside, layers = self._sizes(shape)
            times = (params - outside) / sum(size * getattr(small, name) for name, size in layers.items())
            if times < 1:
                break
            for name in layers:
                setattr(shape, name, int(times * getattr(small, name)))
            shape.num_hidden_layers = getattr(shape, next(iter(layers)))
            # The MLP takes what rounding to whole layers has left over, in multiples that kernels like.
            depth = sum(getattr(shape, name) for name in layers)
            count = outside + sum(size * getattr(shape, name) for name, size in layers.items())
            more = 64 * round((params - count) / (depth * self.unit(shape)) / 64)
            for name in self.mlp:
                setattr(shape, name, getattr(shape, name) + more)
            proportion = self._width(shape) * len(layers) / depth
            found.append((abs(math.log(proportion / ASPECT)), shape, count + more * depth * self.unit(shape)))
        return min(found, key=lambda each: each[0])[1:]

    def _width(self, config: Any) -> int:
        return int(getattr(config, self.shown["hidden_size"]))

    def _sizes(self, shape: Any) -> tuple[int, dict[str, int]]:
        """Parameters outside of layers, and of a layer of each stack: by models of few layers, without memory."""
        counts = []
        for deeper in ("", *self.stacks.values()):
            config = copy.deepcopy(shape)
            for name in self.stacks.values():
                setattr(config, name, 2 if name == deeper else 1)
            model = self._empty(config)
            model.tie_weights()
            counts.append(sum(parameter.numel() for parameter in model.parameters()))
        layers = {name: count - counts[0] for name, count in zip(self.stacks.values(), counts[1:], strict=True)}
        return counts[0] - sum(layers.values()), layers

    def _empty(self, shape: Any) -> Any:
        """The model of a configuration, with neither time nor memory for its weights."""
        with torch.device("meta"):
            return type(self.model)(shape)

    def write(self, shape: Any, folder: Path) -> None:
        """The large model, with tokenizer or processor."""
        model = self._empty(shape)
        model.load_state_dict(self._weights(shape, model.state_dict()), strict=False, assign=True)
        model.tie_weights()
        model.generation_config = self.model.generation_config
        model.save_pretrained(folder, max_shard_size=SHARD)
        # The weights are written through a private temporary file; a model folder is there to be read by others.
        for path in folder.glob("*.safetensors"):
            path.chmod(0o644)
        self.processor.save_pretrained(folder)

    def compare(self, folder: Path) -> tuple[float, bool, int, float]:
        """Largest difference of a logit, whether greedy tokens are equal, their number, and how loud random units are.

        All in float32; of the model in this folder and the small one.
        """
        large = type(self.model).from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
        both = (self.model.float(), large)
        with torch.no_grad():
            logits = [model(**self.batch, use_cache=False).logits for model in both]
        texts = [self.written(model) for model in both]
        small_inputs, large_inputs = map(self._inputs, both)
        loudness = 0.0
        for name, place in self._places(large.config).items():
            for writer in {writer for _, writer in self.softened} & small_inputs[name].keys():
                real, rows = small_inputs[name][writer].shape[1], large_inputs[place][writer].abs()
                if real < rows.shape[1]:
                    loudness = max(loudness, float((rows[:, real:].amax(1) / rows[:, :real].amax(1)).max()))
        return float((logits[0] - logits[1]).abs().max()), texts[0] == texts[1], len(texts[1]), loudness

    def _places(self, shape: Any) -> dict[str, str]:
        """Old layers and their places: spread over the new depth, the last one on top."""
        found: dict[str, str] = {}
        for stack, name in self.stacks.items():
            old, new = (getattr(config, name) for config in (self.model.config, shape))
            found |= {f"{stack}.{i}": f"{stack}.{(i + 1) * new // old - 1}" for i in range(old)}
        return found

    @torch.no_grad()
    def _weights(self, shape: Any, large: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """State in bfloat16 of the large model, of whose tensors the shapes are given."""
        small = self.model.float()
        factor = self._width(shape) // self._width(small.config)
        random = Random(self._width(shape))
        inputs = self._inputs(small)
        layered = tuple(f"{stack}." for stack in self.stacks)
        state = {
            name: _outside(name, tensor, factor).bfloat16().contiguous()
            for name, tensor in small.state_dict().items()
            if not name.startswith(layered)
        }
        places = {place: name for name, place in self._places(shape).items()}
        for stack, name in self.stacks.items():
            old = f"{stack}.0"
            for i in range(getattr(shape, name)):
                place = f"{stack}.{i}"
                old = places.get(place, old)
                layer = small.get_submodule(old)
                made = {
                    part: inflated_tensor(part, tensor, large[f"{place}.{part}"].shape, factor, random, place in places)
                    for part, tensor in layer.state_dict().items()
                }
                if place in places:
                    self._soften(layer, made, inputs[old])
                state |= {f"{place}.{part}": tensor.bfloat16().contiguous() for part, tensor in made.items()}
        return state

    def _soften(self, layer: Any, made: dict[str, Tensor], inputs: dict[str, Tensor]) -> None:
        """Scale new rows of readers, in place, so that what comes of them stays below what is real.

        What the matrices of the small layer read on the text is (T, width) each, by their names.
        """
        for reader, writer in self.softened:
            if reader not in inputs:
                continue
            new = made[f"{reader}.weight"][len(layer.get_submodule(reader).weight) :]
            if len(new):
                limits = inputs[writer].abs().amax(1)
                # A value goes to other places too.
                limits = limits.min() if reader.endswith("v_proj") else limits
                loudest = (self.through(layer, made, reader, inputs[reader]).abs().amax(1) / limits).max()
                new *= (LOUDNESS / loudest).clamp_max(1).bfloat16()

    @torch.no_grad()
    def _inputs(self, model: Any) -> dict[str, dict[str, Tensor]]:
        """What readers and writers of each layer read on the batch, (T, width), by the layers' and their own names."""
        layers = {f"{s}.{i}": layer for s in self.stacks for i, layer in enumerate(model.get_submodule(s))}
        names = {name for pair in self.softened for name in pair}
        wanted = {
            (place, name): part
            for place, layer in layers.items()
            for name, part in layer.named_modules()
            if name in names
        }
        with hooked(wanted) as rows:
            model(**self.batch, use_cache=False)
        return {place: {name: read for (at, name), read in rows.items() if at == place} for place in layers}


def _outside(name: str, tensor: Tensor, factor: int) -> Tensor:
    """What is not in a layer: tables repeated, norms of the stacks, and Whisper's convolutions."""
    if re.search(r"(shared|embed_tokens|embed_positions|lm_head|proj_out)\.weight$", name):
        return tensor.repeat(1, factor)
    if re.search(r"(layer_|\.)norm\.(weight|bias)$", name):
        return gain(tensor, factor)
    if re.search(r"conv1\.(weight|bias)$", name) or name.endswith("conv2.bias"):
        return tensor.repeat(factor, *[1] * (tensor.ndim - 1))
    if name.endswith("conv2.weight"):
        # It writes the same into every copy and reads the first one alone.
        return torch.cat((tensor, torch.zeros_like(tensor).repeat(1, factor - 1, 1)), 1).repeat(factor, 1, 1)
    return tensor


def inflated_tensor(name: str, tensor: Tensor, shape: torch.Size, factor: int, random: Random, real: bool) -> Tensor:
    """A tensor of a layer in another shape: of an old layer with new heads and units, or, not real, of a new one."""
    part, kind = name.split(".")[-2:]
    if part in READERS and kind == "weight":
        return random.readers(tensor, shape[0], real)
    if part in READERS:
        return torch.cat((tensor * real, tensor.new_zeros(shape[0] - len(tensor))))
    if part in WRITERS and kind == "weight":
        return writer(tensor, shape[1], factor, real)
    return tensor.repeat(factor) * real if part in WRITERS else gain(tensor, factor)


@contextmanager
def fresh_folder(out: Path, size: int) -> Iterator[Path]:
    """A folder that becomes ``out`` when the block is over, and is removed if it raises."""
    fresh = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        fresh.mkdir(parents=True)
        free = shutil.disk_usage(fresh).free
        if size > free:
            raise LoadError(
                f"{out} needs {readable(size)} on the disk, where {readable(free)} are free; make room there"
            )
        yield fresh
        if out.exists():
            out.rmdir()
        fresh.rename(out)
    except (OSError, SafetensorError) as error:
        raise LoadError(f"cannot write {out}: {error}; make room there, or name another folder") from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)

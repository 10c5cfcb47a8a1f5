"""Models larger than the memory: the option ``offload``, and where accelerate keeps weights between passes."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sakiyomi.core.errors import InputError, LoadError, MemoryLimitError
from sakiyomi.core.memory import available_bytes, readable, require_bytes
from sakiyomi.kernels.weight_memory import MappedMemory
from sakiyomi.model_executor.loading.fit import by_layer
from sakiyomi.model_executor.loading.packed_stream import PackedStream
from sakiyomi.model_executor.loading.reader import Reader, without_weights
from sakiyomi.model_executor.loading.stream import hooks

OFFLOADS = ("auto", "cpu", "disk")
ROOM = {"cpu": 0.8, "cuda": 0.85}  # share of the available memory that "auto" uses; the rest is for caches and passes


@dataclass(frozen=True)
class Offload:
    """The option ``offload``.

    Attributes:
        where: one of ``OFFLOADS``.
        folder: for weights that have to be converted; None: there is none.
    """

    where: str
    folder: Path | None = None


def parse_offload(value: Any, device: torch.device, quantize: str | None, target: Any) -> Offload | None:
    """The meaning of ``offload``; None: all weights stay in memory.

    Raises:
        InputError: the value is unknown, or excludes another option.
    """
    if value is None:
        return None
    if not isinstance(value, str | os.PathLike) or not os.fspath(value):
        raise InputError(f"offload={value!r}; expected {', '.join(map(repr, OFFLOADS))}, a folder, or None")
    if isinstance(target, tuple):
        raise InputError(
            f"offload={value!r}: a loaded model is used as it is; load it with device_map= and offload_folder=, or "
            "pass its folder"
        )
    if quantize is not None and device.type != "cpu":
        raise InputError(
            f"offload={value!r} with quantize={quantize!r} on '{device}': weights quantized on a GPU stay there; leave "
            "one of the two at None, or pass device='cpu'"
        )
    if value == "cpu" and device.type == "cpu":
        raise InputError(
            "offload='cpu' and the model runs on the CPU, whose memory that is; expected 'disk' or 'auto', or a GPU as "
            "device"
        )
    if value in OFFLOADS:
        return Offload(str(value))
    folder = Path(value).expanduser()
    if not folder.is_dir():
        raise InputError(
            f"offload={os.fspath(value)!r} is no folder that exists; expected {', '.join(map(repr, OFFLOADS))}, or a "
            "folder"
        )
    return Offload("disk", folder)


def read_offloaded(reader: Reader, offload: Offload) -> Any:
    """The model, with hooks of accelerate that load weights when they are needed; without hooks if all fits in memory.

    Safetensors files are read in place. Weights that transformers has to convert are written to a folder inside the
    given one, which is removed with the model.

    Args:
        reader: of its weights.
        offload: where the weights stay.

    Raises:
        MemoryLimitError: too little main memory, or too little space in the folder.
        LoadError: the folder cannot be written to, or the weights cannot be read.
    """
    size = reader.checkpoint.bytes_as(reader.dtype.itemsize)
    if offload.where == "cpu":
        require_bytes(size, f"the model {reader.name!r}", remedy="pass offload='auto', which leaves the rest on disk")
    options = _map(reader, offload)
    if by_layer(reader):
        return reader.read(**options)
    return _converted(reader, offload, size, options)


def _converted(reader: Reader, offload: Offload, size: int, options: dict[str, Any]) -> Any:
    """A model whose weights are written to disk before use: pickles, and experts that transformers stacks."""
    if offload.folder is None:
        try:
            return reader.read(**options)
        except LoadError as error:
            if "re-saved" not in error.message:
                raise
            raise LoadError(
                f"offload={offload.where!r}: the weights of {reader.name!r} cannot be used as they are stored and have "
                f"to be written to disk once more, about {readable(size)}; pass a folder for them: "
                "offload='/large/disk'"
            ) from error
    _check_room(offload.folder, size, reader.name)
    try:
        own = tempfile.mkdtemp(prefix="sakiyomi-offload-", dir=offload.folder)
    except OSError as error:
        raise LoadError(
            f"nothing can be written to {offload.folder} ({error}); pass another folder as offload"
        ) from error
    try:
        model = reader.read(offload_folder=own, **options)
    except BaseException as error:
        shutil.rmtree(own, ignore_errors=True)
        if isinstance(error, LoadError):
            raise LoadError(f"{error.message}; while weights were written to {offload.folder}") from error
        raise
    weakref.finalize(_map_of(model), shutil.rmtree, own, ignore_errors=True)
    return model


def _check_room(folder: Path, size: int, name: str) -> None:
    """Refuse what does not fit on a disk."""
    free = shutil.disk_usage(folder).free
    if size > free:
        raise MemoryLimitError(
            f"the offloaded weights of {name!r} take {readable(size)} and {folder} has {readable(free)} "
            "free; free some, or pass another folder as offload"
        )


def stays(offload: Offload | None, size: int) -> int | None:
    """How many bytes of a packed model of this size stay in memory; None: all of them."""
    if offload is None or offload.where != "auto":
        return None if offload is None else 0
    room = int(ROOM["cpu"] * available_bytes())
    return None if size <= room else room


def packing_stream(offload: Offload, place: Path, size: int, resident: int, name: str) -> PackedStream:
    """For a model that is packed now: its layers lie in a file without a name, in the given folder or beside the copy.

    Args:
        offload: the option.
        place: of the packed copy to be.
        size: bytes of the packed layers.
        resident: bytes that stay in memory.
        name: what the user called the model.

    Raises:
        MemoryLimitError: too little space in the folder.
        LoadError: the folder cannot be written to.
    """
    folder = offload.folder or place.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _check_room(folder, size, name)
        return PackedStream(MappedMemory(folder), stays=resident)
    except OSError as error:
        raise LoadError(f"nothing can be written to {folder} ({error}); pass another folder as offload") from error


def _map_of(model: Any) -> Any:
    """The object that reads the files of a model and its copies; the model itself if no weights are in files."""
    for hook in (hook for module in model.modules() for hook in hooks(module)):
        return getattr(hook.weights_map, "dataset", hook.weights_map)
    return model


def _map(reader: Reader, offload: Offload) -> dict[str, Any]:
    """The options of ``from_pretrained`` that place the weights."""
    device = reader.device
    if offload.where == "auto":
        room: dict[int | str, int] = {"cpu": int(ROOM["cpu"] * available_bytes())}
        if device.type == "cuda":
            room[device.index or 0] = int(ROOM["cuda"] * available_bytes(str(device)))
        return {"device_map": "auto", "max_memory": room}
    if device.type == "cpu":
        return {"device_map": {"": "disk"}}
    return {"device_map": _layers_apart(reader, offload.where)}


def _layers_apart(reader: Reader, where: str) -> dict[str, Any]:
    """A device map that puts the layers at ``where`` and everything else on the device that computes."""
    model = without_weights(reader.config, reader.dtype, trust_remote_code=reader.trust_remote_code)
    device = reader.device
    layers = [
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.ModuleList) and len(module) == reader.config.get_text_config().num_hidden_layers
    ]
    places: dict[str, Any] = {}

    def place(name: str, module: torch.nn.Module) -> None:
        inside = f"{name}." if name else ""
        if name in layers:
            places.update({f"{inside}{i}": where for i, _ in module.named_children()})
        elif any(layer.startswith(inside) for layer in layers):
            places.update({f"{inside}{own}": device for own, _ in module.named_parameters(recurse=False)})
            for own, child in module.named_children():
                place(f"{inside}{own}", child)
        else:
            places[name] = device

    place("", model)
    return places

"""A rounded model on disk: a folder of its own, in the kernels' order, so that loading is reading.

    config.json, tokenizer, ...   as in the model's folder; config.json says ``quant_method: sakiyomi``
    model.safetensors             what is not packed: embeddings, norms
    packed.safetensors            what the kernels read: ``<layer>.data`` and so on
    sakiyomi.json                 format, layers, siblings, shapes of the cache, what the rounding changed, the source

The folder is written beside the model's own (``<model>/sakiyomi-int8-bfloat16``), or into the cache folder where the
model came from the hub or with the package, under another name first: it is whole or not there. It can be moved, and is
a target by itself.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from sakiyomi.cache.slots import LayerShape
from sakiyomi.errors import LoadError, UnsupportedError
from sakiyomi.kernels.build import cache_folder
from sakiyomi.kernels.native import PARTS, NativeModel, PackedLinear
from sakiyomi.kernels.pack import Prepared, join_siblings
from sakiyomi.kernels.rounding import RoundingReport
from sakiyomi.loading.checkpoint import Checkpoint, read_header, read_json
from sakiyomi.memory import readable

if TYPE_CHECKING:
    from sakiyomi.model import PackedModel

__all__ = ["ABOUT", "copy_place", "is_packed", "read_packed", "save_packed", "source_key"]

logger = logging.getLogger("sakiyomi")
FORMAT = 1
ABOUT, WEIGHTS = "sakiyomi.json", "packed.safetensors"
METHOD = "sakiyomi"
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "I8": torch.int8, "U8": torch.uint8, "I32": torch.int32}
_SAMPLES = 32  # places of a weight file that are compared


def is_packed(folder: Path) -> bool:
    """Whether a folder holds a packed model."""
    return (folder / ABOUT).is_file()


def copy_place(folder: Path, quantize: str, dtype: torch.dtype, *, beside: bool) -> Path:
    """Where the packed copy of a model lies.

    Args:
        folder: the model's.
        quantize: "int8" or "int4".
        dtype: of rows, embeddings and layers that are kept.
        beside: in the model's own folder; otherwise in the cache folder.
    """
    name = f"sakiyomi-{quantize}-{str(dtype).removeprefix('torch.')}"
    if beside and os.access(folder, os.W_OK):
        return folder / name
    where = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]
    return cache_folder() / "packed" / f"{folder.name}-{where}-{name}"


def source_key(folder: Path, checkpoint: Checkpoint) -> str:
    """Tells models apart: a digest of the configuration, and of the header and some places of each weight file."""
    digest = hashlib.sha256()
    if (folder / "config.json").is_file():  # a GGUF file holds its own
        digest.update((folder / "config.json").read_bytes())
    for path in checkpoint.files:
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            digest.update(file.read(1 << 16))
            for i in range(_SAMPLES):
                file.seek(size * i // _SAMPLES)
                digest.update(file.read(1024))
    return digest.hexdigest()


# ---------------------------------------------------------------- writing


def save_packed(packed: PackedModel, place: Path, source: Path, key: str, config: Any, tokenizer: Any) -> bool:
    """Write a packed copy; whether it is there now. What cannot be written is said in one line and costs nothing else.

    Args:
        packed: rounded, and never run on another device.
        place: the folder to be; one that is there is replaced.
        source: the model's folder, for generation settings and code.
        key: its ``source_key``.
        config, tokenizer: of the model.
    """
    module, report = packed.module, packed.rounding
    layers = {name: child for name, child in module.named_modules() if isinstance(child, PackedLinear)}
    tensors = {f"{name}.{part}": tensor for name, layer in layers.items() for part, tensor in layer.tensors().items()}
    held = {f"{name}.weight" for name in layers}  # a head that shares the embeddings has them under its name too
    others = {name: tensor for name, tensor in module.state_dict().items() if name not in held}
    about = {
        "format": FORMAT,
        "source": key,
        "dtype": str(packed.dtype).removeprefix("torch."),
        "layers": {
            name: {"in": layer.in_features, "out": layer.out_features, "bits": layer.bits}
            for name, layer in layers.items()
        },
        "siblings": packed.siblings,
        "cache": [[shape.heads, shape.key_dim, shape.value_dim] for shape in packed.cache.shapes],
        "report": None if report is None else asdict(report),
    }
    size = sum(tensor.nbytes for tensor in (*tensors.values(), *others.values()))
    fresh = place.with_name(f"{place.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(place.parent).free
        if size * 1.01 > free:
            raise OSError(f"it takes {readable(size)} and {readable(free)} are free")
        fresh.mkdir()
        tokenizer.save_pretrained(fresh)
        for path in (source / "generation_config.json", *source.glob("*.py")):
            if path.is_file():
                shutil.copy(path, fresh)
        settings = {**config.to_dict(), "dtype": about["dtype"]}
        settings["quantization_config"] = {"quant_method": METHOD, "layers": sorted(layers)}
        (fresh / "config.json").write_text(json.dumps(settings, indent=1, default=str), encoding="utf-8")
        save_file(
            {name: tensor.contiguous() for name, tensor in _unshared(others).items()}, fresh / "model.safetensors"
        )
        save_file(tensors, fresh / WEIGHTS)
        (fresh / ABOUT).write_text(json.dumps(about, indent=1), encoding="utf-8")
        _replace(fresh, place)
    except Exception as error:  # safetensors raises its own kinds when a disk is full
        shutil.rmtree(fresh, ignore_errors=True)
        logger.warning(
            "the packed copy cannot be saved in %s (%s); the model runs, and is packed anew next time", place, error
        )
        return False
    logger.info("packed copy of %s saved in %s", readable(size), place)
    return True


def _unshared(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Each storage once: safetensors takes no tied weights, and transformers ties them again."""
    seen: set[int] = set()
    return {
        name: tensor.contiguous()
        for name, tensor in tensors.items()
        if not (tensor.data_ptr() in seen or seen.add(tensor.data_ptr()))  # type: ignore[func-returns-value]
    }


def _replace(fresh: Path, place: Path) -> None:
    if place.exists():
        old = place.with_name(f"{fresh.name}.old")
        place.rename(old)
        fresh.rename(place)
        shutil.rmtree(old, ignore_errors=True)
    else:
        fresh.rename(place)


# ---------------------------------------------------------------- reading


@dataclass(frozen=True)
class _File:
    """Reads tensors of one safetensors file into memory of their own.

    A mapped file would share its memory, but its tensors begin at any multiple of 8 bytes, and the kernels want 64.
    """

    path: Path

    def tensors(self) -> dict[str, Tensor]:
        header, start = read_header(self.path)
        found: dict[str, Tensor] = {}
        with self.path.open("rb", buffering=0) as file:
            for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
                tensor = torch.empty(entry["shape"], dtype=_DTYPES[entry["dtype"]])
                room = memoryview(tensor.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
                file.seek(start + entry["data_offsets"][0])
                while len(room):
                    count = file.readinto(room)
                    if not count:
                        raise LoadError(f"{self.path} ends within {name}; remove its folder, so that it is made again")
                    room = room[count:]
                found[name] = tensor
        return found


def read_packed(folder: Path, read: Callable[[], Any], *, key: str | None = None) -> tuple[Any, Prepared]:
    """A packed model.

    Args:
        folder: of the packed copy.
        read: gives the transformers model of this folder, placeholders where packed layers belong.
        key: of the model whose copy it should be; None: whatever it is.

    Raises:
        LoadError: of another version or model, or damaged.
        UnsupportedError: the compiled kernels are not available.
    """
    about = read_json(folder / ABOUT)
    if about.get("format") != FORMAT:
        raise LoadError(
            f"{folder} is a packed model of format {about.get('format')!r}, this version reads format {FORMAT}; remove "
            "the folder and load the model itself again with quantize, which packs it anew"
        )
    if key is not None and about.get("source") != key:
        raise LoadError(
            f"{folder} was packed from other weights than those beside it; remove the folder, so that it is made again"
        )
    native = NativeModel.create()
    if native is None:
        raise UnsupportedError(
            f"{folder} is packed for the compiled CPU kernels, which are not available here (sakiyomi info says what "
            "is missing); load the model itself without quantize"
        )
    model = read()
    packed: dict[str, PackedLinear] = {}
    try:
        dtype = getattr(torch, about["dtype"])
        tensors = _File(folder / WEIGHTS).tensors()
        for name, layer in about["layers"].items():
            parts = {part: tensors[f"{name}.{part}"] for part in PARTS if f"{name}.{part}" in tensors}
            _check(name, layer, parts, dtype)
            packed[name] = native.adopt(parts, layer["in"], layer["out"], dtype, layer["bits"])
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, packed[name])
        for group in about["siblings"]:
            join_siblings(native, [packed[name] for name in group])
        shapes = [LayerShape(heads, key, value, torch.device("cpu")) for heads, key, value in about["cache"]]
        report = about["report"] and RoundingReport(**{**about["report"], "kept": tuple(about["report"]["kept"])})
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise LoadError(
            f"{folder} is no intact packed model ({type(error).__name__}: {error}); remove the folder and load the "
            "model itself again with quantize, which packs it anew"
        ) from error
    return model, Prepared(native, shapes, report, [list(group) for group in about["siblings"]])


def _check(name: str, layer: dict[str, int], parts: dict[str, Tensor], dtype: torch.dtype) -> None:
    """The kernel reads without looking: every tensor must be as long as it will believe."""
    out, inner, bits = layer["out"], layer["in"], layer["bits"]
    blocks = -(-out // 32)
    sizes = {
        16: {"data": blocks * 32 * inner * dtype.itemsize},
        8: {"data": blocks * 32 * -(-inner // 4) * 4, "scale": 4 * out, "sum": 4 * out},
        4: {"data": blocks * 16 * inner, "scales": blocks * inner * 2},
    }[bits] | ({"bias": 4 * out} if "bias" in parts else {})
    if {part: tensor.nbytes for part, tensor in parts.items()} != sizes:
        raise ValueError(f"{name} has tensors of other sizes than {inner} x {out} in {bits} bits takes")


# ---------------------------------------------------------------- transformers' side


def register() -> None:
    """Teach transformers that layers of a packed folder are not in its own weight file. Once a process is enough."""
    from transformers.quantizers.auto import (
        AUTO_QUANTIZATION_CONFIG_MAPPING,
        register_quantization_config,
        register_quantizer,
    )
    from transformers.quantizers.base import HfQuantizer
    from transformers.utils.quantization_config import QuantizationConfigMixin

    if METHOD in AUTO_QUANTIZATION_CONFIG_MAPPING:
        return

    @register_quantization_config(METHOD)
    class PackedConfig(QuantizationConfigMixin):
        def __init__(self, layers: list[str], **_: Any) -> None:
            self.quant_method = METHOD  # type: ignore[assignment]
            self.layers = layers

    @register_quantizer(METHOD)
    class PackedQuantizer(HfQuantizer):
        requires_calibration = True

        def _process_model_before_weight_loading(self, model: Any, **_: Any) -> None:
            for name in self.quantization_config.layers:  # type: ignore[attr-defined]
                parent, _, own = name.rpartition(".")
                setattr(model.get_submodule(parent), own, nn.Identity())

        @property
        def is_trainable(self) -> bool:
            return False

        def is_serializable(self) -> bool:
            return False

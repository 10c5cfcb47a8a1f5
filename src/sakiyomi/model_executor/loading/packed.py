"""A quantized model on disk, in the kernels' order, so that loading needs no conversion.

    config.json, tokenizer, ...   as in the model's folder; config.json says ``quant_method: sakiyomi``
    model.safetensors             what is not packed: embeddings, norms
    packed.safetensors            what the kernels read: ``<layer>.data`` and so on
    sakiyomi.json                 format, layers, siblings, shapes of the cache, what quantization changed, the source

The folder is written beside the model's own (``<model>/sakiyomi-int8-bfloat16``), or into the cache folder where the
model came from the hub or is part of the package, by its name or by its path. It is written under another name first,
so that it is whole or not there.
It can be moved, and loaded as a target by itself.
"""

from __future__ import annotations

import errno
import glob
import hashlib
import json
import logging
import mmap
import os
import platform
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch
from torch import Tensor

from sakiyomi.cache.layout import LayerShape
from sakiyomi.core.checkpoint import Checkpoint, read_checkpoint, read_header, read_json
from sakiyomi.core.digests import ALIGNED, Digests, file_digest, save_tensors, tensor_digests
from sakiyomi.core.dtypes import dtype_name
from sakiyomi.core.errors import LoadError, MemoryLimitError
from sakiyomi.core.files import cache_folder, sync
from sakiyomi.core.memory import readable
from sakiyomi.core.model_folder import PACKED_FILE
from sakiyomi.kernels.blocks import FORMATS, Blocks
from sakiyomi.kernels.experts import serve_experts
from sakiyomi.kernels.native import PARTS, PackedEmbedding, PackedLayer, PackedWeights, can_pack
from sakiyomi.kernels.pack import join_siblings
from sakiyomi.kernels.quantization import QuantizationReport
from sakiyomi.kernels.weight_memory import MappedMemory
from sakiyomi.model_executor.loading.packed_stream import PackedStream
from sakiyomi.model_executor.loading.placeholder import METHOD
from sakiyomi.model_executor.loading.prepared import Prepared
from sakiyomi.model_executor.loading.stream import DTYPES
from sakiyomi.model_executor.multimodal import tensors_aside

if TYPE_CHECKING:
    from sakiyomi.model_executor.runner import ModelRunner

logger = logging.getLogger("sakiyomi")
FORMAT = 3
ABOUT, WEIGHTS = PACKED_FILE, "packed.safetensors"
REMEDY = "load the model itself with quantize, which packs it anew"
_SMALL = ("generation_config.json", "preprocessor_config.json", "processor_config.json")  # of the source, kept, too
_SAMPLES = 32  # places of a weight file that are compared
_HERE = hashlib.sha256(platform.node().encode()).hexdigest()[:8]
_SILENT = 24 * 3600.0  # seconds without a change after which its writer must have ended


def is_packed(folder: Path) -> bool:
    """Whether a folder holds a packed model."""
    return (folder / ABOUT).is_file()


def copy_place(folder: Path, quantize: str, dtype: torch.dtype, *, beside: bool) -> Path:
    """The folder of a model's packed copy, whether or not it exists.

    Args:
        folder: the model's, or its GGUF file.
        quantize: "int8" or "int4".
        dtype: of rows, embeddings and layers that are kept.
        beside: in the model's own folder if it can be written; otherwise in the cache folder.
    """
    name = f"sakiyomi-{quantize}-{dtype_name(dtype)}"
    if beside and (is_packed(folder / name) or os.access(folder, os.W_OK)):
        return folder / name
    where = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]
    return cache_folder() / "packed" / f"{folder.name}-{where}-{name}"


def source_key(folder: Path, checkpoint: Checkpoint) -> str:
    """Tells models apart: a digest of the configuration, and of the time and some places of each weight file."""
    digest = hashlib.sha256()
    if (folder / "config.json").is_file():  # a GGUF file holds its own
        digest.update((folder / "config.json").read_bytes())
    for path in checkpoint.files:
        found = path.stat()
        digest.update(f"{path.name} {found.st_size} {found.st_mtime_ns}".encode())
        with path.open("rb") as file:
            digest.update(file.read(1 << 16))
            for i in range(_SAMPLES):
                file.seek(found.st_size * i // _SAMPLES)
                digest.update(file.read(1024))
    return digest.hexdigest()


def _digest(about: dict[str, Any]) -> str:
    """A digest of sakiyomi.json without the digest itself: the kernels trust the sizes that are written there."""
    rest = {name: value for name, value in about.items() if name != "digest"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def json_seal(about: dict[str, Any]) -> dict[str, Any]:
    """The content of sakiyomi.json with its digest."""
    return about | {"digest": _digest(about)}


# ---------------------------------------------------------------- writing


def save_packed(packed: ModelRunner, place: Path, source: Path | None, key: str, config: Any, tokenizer: Any) -> bool:
    """Write a packed copy and say whether it is there now. Where it cannot be written, the log says so in one line.

    Args:
        packed: the quantized model.
        place: the folder to be; one that is there is replaced.
        source: the model's folder, for generation settings and code; None where they are not of its own.
        key: its ``source_key``.
        config, tokenizer: of the model.
    """
    module, report, stream = packed.module, packed.weights.quantization, packed.weights.stream
    held = {name: child for name, child in module.named_modules() if isinstance(child, PackedLayer)}
    layers = dict(sorted(held.items(), key=lambda item: item[1].index))  # as they are read again
    tensors = _unshared(layer_tensors(layers))
    others = _unshared({**module.state_dict(), **tensors_aside(module)})
    about: dict[str, Any] = {
        "format": FORMAT,
        "source": key,
        "dtype": dtype_name(packed.dtype),
        "layers": {name: _about(name, layer, layers) for name, layer in layers.items()},
        "experts": packed.weights.packed_experts,
        "siblings": packed.weights.siblings,
        "cache": [shape.as_json() for shape in packed.cache.shapes],
        "report": None if report is None else asdict(report),
    }
    size = sum(tensor.nbytes for tensor in (*tensors.values(), *others.values()))
    fresh = place.with_name(f"{place.name}.{os.getpid()}-{_HERE}-{uuid.uuid4().hex[:8]}.tmp")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(place.parent).free
        if size * 1.01 > free:
            raise OSError(f"it takes {readable(size)} and {readable(free)} are free")
        fresh.mkdir()
        tokenizer.save_pretrained(fresh)
        if source is not None:
            code = source.glob("*.py") if hasattr(config, "auto_map") else ()
            for path in (*(source / name for name in _SMALL), *code):
                if path.is_file():
                    shutil.copy(path, fresh)
        settings = {**config.to_dict(), "dtype": about["dtype"]}
        settings["quantization_config"] = {"quant_method": METHOD, "layers": sorted(layers)}
        (fresh / "config.json").write_text(json.dumps(settings, indent=1, default=str), encoding="utf-8")
        save_tensors(fresh / "model.safetensors", others)
        about["files"] = {path.name: file_digest(path) for path in sorted(fresh.iterdir())}
        about = json_seal(about)
        save_tensors(fresh / WEIGHTS, tensors, done=stream.memory.drop if isinstance(stream, PackedStream) else None)
        (fresh / ABOUT).write_text(json.dumps(about, indent=1), encoding="utf-8")
        for path in (*fresh.iterdir(), fresh):
            sync(path)
        _replace(fresh, place)
    except Exception as error:  # safetensors raises its own kinds when a disk is full
        logger.warning(
            "the packed copy cannot be saved in %s (%s); the model runs, and is packed anew next time", place, error
        )
        return False
    finally:  # Ctrl-C comes here too
        shutil.rmtree(fresh, ignore_errors=True)
    logger.info(
        "a packed copy of %s is kept in %s, and read the next time; remove that folder to have the space back",
        readable(size),
        place,
    )
    return True


def layer_tensors(layers: Mapping[str, PackedLayer]) -> dict[str, Tensor]:
    """What the kernels read of layers, by the names in a packed copy."""
    return {f"{name}.{part}": tensor for name, layer in layers.items() for part, tensor in layer.tensors().items()}


def _about(name: str, layer: PackedLayer, layers: Mapping[str, PackedLayer]) -> dict[str, Any]:
    """A layer's entry in sakiyomi.json. An embedding may have the numbers of a layer, which are kept once."""
    about: dict[str, Any] = {"in": layer.in_features, "out": layer.out_features, "bits": layer.bits}
    if layer.count is not None:
        about["count"] = layer.count
    if layer.blocks is not None:
        about["blocks"] = list(layer.blocks)
    if isinstance(layer, PackedEmbedding):
        about["scale"] = layer.scale
    data = layer.tensors()["data"].data_ptr()
    first = next(other for other, each in layers.items() if each.tensors()["data"].data_ptr() == data)
    return about if first == name else about | {"data": first}


def remove_leftovers(place: Path) -> None:
    """Remove what writers of a packed copy left beside it when they were killed; nothing that may still be written.

    Args:
        place: of the copy. Folders of other copies, and of other names, are not looked at.
    """
    name = re.compile(re.escape(place.name) + r"\.(\d+)-([0-9a-f]{8})-[0-9a-f]{8}\.(tmp|old)")
    for folder in place.parent.glob(f"{glob.escape(place.name)}.*"):
        if found := name.fullmatch(folder.name):
            # A process of another machine cannot be looked up; but a folder that is being written changes all the time.
            alive = psutil.pid_exists(int(found[1])) if found[2] == _HERE else time.time() - _changed(folder) < _SILENT
            if not alive:
                shutil.rmtree(folder, ignore_errors=True)


def _changed(folder: Path) -> float:
    """When a folder or a file in it changed last, as ``time.time`` counts; now, if it is changing."""
    try:
        return max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
    except OSError:
        return time.time()


def _unshared(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Each storage once: safetensors takes no tied weights, and transformers ties them again."""
    seen: set[int] = set()
    return {
        name: tensor.contiguous()
        for name, tensor in tensors.items()
        if not (tensor.data_ptr() in seen or seen.add(tensor.data_ptr()))  # type: ignore[func-returns-value]
    }


def _replace(fresh: Path, place: Path) -> None:
    """Put a folder in its place. If several processes do so at the same time, the last one's stays, whole."""
    while True:
        try:
            fresh.rename(place)
            return
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
        old = fresh.with_suffix(".old")
        with suppress(FileNotFoundError):
            place.rename(old)
        shutil.rmtree(old, ignore_errors=True)


# ---------------------------------------------------------------- reading


def _read_tensors(path: Path, memory: MappedMemory | None = None) -> dict[str, Tensor]:
    """Tensors of a safetensors file, mapped, so that processes of a machine share them; each compared with its digest.

    With ``memory`` their pages are dropped again, and can be dropped later.

    The kernels want tensors to begin at multiples of 64 bytes; those that do not, in files of older versions and where
    sizes are odd, are copied.
    """
    digests = Digests.of(path)
    start = digests.header.start
    found: dict[str, Tensor] = {}
    file = path.open("rb", buffering=0)
    # A private copy of what is written to: nothing is, but torch wants to be able to.
    pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    if memory is None:
        file.close()
    else:
        memory.hold(file, pages)
    for name, entry in digests.header.entries.items():
        first, end = (start + offset for offset in entry["data_offsets"])
        if end > len(pages):
            raise LoadError(f"{path} ends within {name}")
        dtype = DTYPES[entry["dtype"]]
        if end == first:
            tensor = torch.empty(entry["shape"], dtype=dtype)
        else:
            block = torch.frombuffer(pages, dtype=torch.uint8, offset=first, count=end - first)
            aligned = block.data_ptr() % ALIGNED == 0
            tensor = (block if aligned else block.clone()).view(dtype).view(entry["shape"])
        found[name] = tensor
    known = tensor_digests(found, None if memory is None else memory.drop)
    for name, digest in known.items():
        digests.check(name, digest)
    digests.record(known)
    return found


def _check_files(folder: Path, files: Mapping[str, str]) -> None:
    """Compare whole files with their digests.

    Raises:
        LoadError: one was changed, or is missing.
    """
    for name, digest in files.items():
        if not (folder / name).is_file():
            raise LoadError(f"{name} is missing")
        if file_digest(folder / name) != digest:
            raise LoadError(f"{name} was changed after it was written")


@contextmanager
def _intact(folder: Path) -> Iterator[None]:
    """Turn any error about a packed folder's files into a LoadError with the folder and a remedy."""
    try:
        yield
    except MemoryLimitError:
        raise
    except Exception as error:  # damage has many kinds
        reason = str(error).partition(";")[0] if isinstance(error, LoadError) else f"{type(error).__name__}: {error}"
        raise LoadError(f"{folder} is no intact packed model ({reason}); {REMEDY}") from error


def read_about(folder: Path, key: str | None = None) -> dict[str, Any]:
    """The content of sakiyomi.json.

    Args:
        folder: of the packed copy.
        key: of the model whose copy it should be; None: whatever it is.

    Raises:
        LoadError: of another version or model, or changed since it was written.
    """
    with _intact(folder):
        about = read_json(folder / ABOUT)
    if about.get("format") != FORMAT:
        raise LoadError(
            f"{folder} is a packed model of format {about.get('format')!r}, and this version reads format {FORMAT}; "
            + REMEDY
        )
    if about.get("digest") != _digest(about):
        raise LoadError(f"{folder} is no intact packed model ({ABOUT} was changed after it was written); {REMEDY}")
    if key is not None and about["source"] != key:
        raise LoadError(f"{folder} was packed from other weights than those beside it now; {REMEDY}")
    return about


def packed_files(folder: Path) -> tuple[Checkpoint, int]:
    """What transformers is to read of a packed folder, and the bytes of all its weights.

    Raises:
        LoadError: a file is missing or cut off.
    """
    with _intact(folder):
        read_header(folder / WEIGHTS)
        checkpoint = read_checkpoint(folder)
        return checkpoint, checkpoint.stored_bytes + (folder / WEIGHTS).stat().st_size


def read_packed(
    folder: Path, about: dict[str, Any], read: Callable[[], Any], memory: MappedMemory | None = None
) -> tuple[Any, Prepared]:
    """A packed model, and its metadata.

    Args:
        folder: of the packed copy.
        about: of ``read_about``.
        read: gives the transformers model of this folder, placeholders where packed layers belong.
        memory: maps the file of the layers so that their pages can be dropped; None: they stay.

    Raises:
        LoadError: a file is damaged, or does not belong to the others.
    """
    with _intact(folder):
        model = read()
        if model.config.quantization_config.layers != sorted(about["layers"]):
            raise ValueError(f"config.json names other layers than {ABOUT}")
    layers, prepared = read_layers(folder, about, memory=memory)
    put_layers(model, layers)
    return model, prepared


def put_layers(model: Any, layers: Mapping[str, PackedLayer]) -> None:
    """Put packed layers into a model, by name."""
    for name, layer in layers.items():
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, layer)
    serve_experts(model)


def read_layers(
    folder: Path, about: dict[str, Any], order: Sequence[str] | None = None, *, memory: MappedMemory | None = None
) -> tuple[dict[str, PackedLayer], Prepared]:
    """The packed layers of a copy by name, and the metadata of the model; all files are compared with their digests.

    Args:
        folder: of the packed copy.
        about: of ``read_about``.
        order: of the layers in the kernels' tables; None: any.
        memory: as of ``read_packed``.

    Raises:
        LoadError: a file is damaged, or does not belong to the others.
    """
    native = PackedWeights.create()
    assert native is not None, "see check_quantization"
    dtype = getattr(torch, about["dtype"])
    with _intact(folder), ThreadPoolExecutor(1, "digests") as pool:
        # Copies of older versions have no digests of these files.
        others = pool.submit(_check_files, folder, about.get("files", {}))
        tensors = _read_tensors(folder / WEIGHTS, memory)
        others.result()
        packed: dict[str, PackedLayer] = {}
        for name in about["layers"] if order is None else order:
            packed[name] = _adopt(native, name, about["layers"][name], tensors, dtype)
        native.experts = about["experts"]
        for group in about["siblings"]:
            join_siblings(native, [packed[name] for name in group])
        shapes = list(map(LayerShape.from_json, about["cache"]))
        report = about["report"] and QuantizationReport(**{**about["report"], "kept": tuple(about["report"]["kept"])})
    return packed, Prepared(native, shapes, report, about["siblings"])


def same_layers(folder: Path, layers: Mapping[str, PackedLayer]) -> bool:
    """Whether a packed copy holds these layers, and none besides."""
    from safetensors import safe_open

    held = _unshared(layer_tensors(layers))
    with safe_open(folder / WEIGHTS, framework="pt") as file:
        return set(file.keys()) == set(held) and all(torch.equal(file.get_tensor(name), held[name]) for name in held)


def _adopt(
    native: PackedWeights, name: str, layer: dict[str, Any], tensors: Mapping[str, Tensor], dtype: torch.dtype
) -> PackedLayer:
    """A layer of a copy, in the kernels' tables."""
    parts = {part: tensors[f"{name}.{part}"] for part in PARTS if f"{name}.{part}" in tensors}
    if "data" in layer:
        parts["data"] = tensors[f"{layer['data']}.data"]
    blocks = Blocks(*layer["blocks"]) if "blocks" in layer else None
    _check(name, layer, blocks, parts, dtype)
    sizes = layer["in"], layer["out"], dtype
    if "scale" in layer:
        assert blocks is not None
        return native.adopt_embedding(parts, *sizes, blocks, layer["scale"])
    adopt = native.adopt_experts if "count" in layer else native.adopt
    return adopt(parts, *sizes, layer["bits"], blocks)


def _check(
    name: str, layer: dict[str, Any], blocks: Blocks | None, parts: dict[str, Tensor], dtype: torch.dtype
) -> None:
    """Check the length of every tensor: the kernels read without checking."""
    out, inner, bits = layer["out"], layer["in"], layer["bits"]
    if blocks is None:
        rows = -(-out // 32)
        fits, sizes = (
            can_pack((out, inner), dtype, bits),
            {
                16: {"data": rows * 32 * inner * dtype.itemsize},
                8: {"data": rows * 32 * -(-inner // 4) * 4, "scale": 4 * out, "sum": 4 * out},
                4: {"data": rows * 16 * inner, "scales": rows * inner * 2},
            }[bits],
        )
    else:
        form = FORMATS[blocks.name]
        fits, sizes = inner % form.length == 0 and bits == form.bits, {"data": form.size(out, inner)}
    sizes |= {"bias": 4 * out} if "bias" in parts else {}
    sizes = {part: size * layer.get("count", 1) for part, size in sizes.items()}
    counts = {len(tensor) for tensor in parts.values()} if "count" in layer else set()
    fits = fits and counts <= {layer.get("count")}
    if not fits or {part: tensor.nbytes for part, tensor in parts.items()} != sizes:
        raise ValueError(f"{name} has tensors of other sizes than {inner} x {out} in {bits} bits takes")

"""Recordings on disk, which replace the transformers class at the next start of a model.

Importing that class takes nearly half of a small model's start. A recording has the graph of a pass (TorchScript), the
small tensors that the model computes itself, and the names of all other tensors in the checkpoint or in the packed copy
of a quantized model; the weights stay where they are. It lies in the cache folder, and is used as long as model,
versions and kernels are the same (``recorder.py`` makes and proves it). Embedded models are distributed with their
recordings, which tests prove (``recipes/recordings.py`` makes them).
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sakiyomi.cache.layout import LayerShape
from sakiyomi.core.checkpoint import Checkpoint, read_checkpoint, read_header
from sakiyomi.core.digests import file_digest, json_digest, load_tensors
from sakiyomi.core.dtypes import dtype_name
from sakiyomi.core.embedded import EMBEDDED_ROOT
from sakiyomi.core.errors import InputError, LoadError, MemoryLimitError, UnsupportedError
from sakiyomi.core.files import cache_folder
from sakiyomi.core.memory import require_bytes
from sakiyomi.core.messages import one_line
from sakiyomi.core.version import __version__
from sakiyomi.kernels.build import built, native
from sakiyomi.kernels.native import PackedLayer, PackedWeights
from sakiyomi.kernels.pack import join_siblings
from sakiyomi.model_executor.encoder_decoder.decoder import split
from sakiyomi.model_executor.loading.families import has_encoder
from sakiyomi.model_executor.loading.folder import read_extractor, read_tokenizer
from sakiyomi.model_executor.loading.packed import (
    packed_files,
    put_layers,
    read_about,
    read_layers,
    remove_leftovers,
    source_key,
)
from sakiyomi.model_executor.loading.prepared import Prepared
from sakiyomi.model_executor.loading.recorded_extractor import RecordedExtractor
from sakiyomi.model_executor.loading.recorded_tokenizer import RecordedTokenizer
from sakiyomi.model_executor.recorded_model import (
    PlainConfig,
    RecordedEncoder,
    RecordedEncoderDecoder,
    RecordedModel,
)

logger = logging.getLogger("sakiyomi")
FORMAT = 5
Recorded = RecordedModel | RecordedEncoderDecoder
SCRIPT, TOKENIZER, ENCODER, FILTERS = "script", "tokenizer", "encoder", "filters"
SHIPPED = "recorded-{}.safetensors"  # beside the weights of an embedded model, by dtype
SETTINGS = {".json", ".model", ".txt", ".jinja", ".tiktoken"}  # files beside the weights


def place_of(folder: Path, dtype: torch.dtype | None, quantize: str | None = None) -> Path:
    """The file of a model's recording, whether or not it exists."""
    key = hashlib.sha256(f"{folder.resolve()} {dtype} {quantize}".encode()).hexdigest()[:16]
    return cache_folder() / "recorded" / f"{folder.name}-{key}.safetensors"


def recording_key(folder: Path, checkpoint: Checkpoint) -> str:
    """A key of everything a recording depends on: the model's files, the versions of libraries, and the kernels."""
    kernels = built()
    states = {path.name: path.stat() for path in folder.iterdir() if path.suffix in SETTINGS}
    return json_digest([
        FORMAT, __version__, torch.__version__, version("transformers"), kernels and kernels.name,
        source_key(folder, checkpoint), {name: [state.st_size, state.st_mtime_ns] for name, state in states.items()},
    ])  # fmt: skip


def shipped_key(folder: Path, checkpoint: Checkpoint) -> str:
    """The key of a recording that is distributed with a model: of the content of the model's files alone."""
    tensors = [read_header(path).metadata for path in checkpoint.files]
    settings = {path.name: file_digest(path) for path in folder.iterdir() if path.suffix in SETTINGS}
    return json_digest([FORMAT, tensors, settings])


# ---------------------------------------------------------------- the checkpoint's tensors


class TensorSource:
    """Tensors of a checkpoint, by name."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        from safetensors import safe_open

        self._opened: Callable[[Path], Any] = functools.cache(functools.partial(safe_open, framework="pt"))
        headers = {path: read_header(path).entries for path in checkpoint.files}
        self._files = {name: path for path, entries in headers.items() for name in entries}
        self._shapes = {name: entry["shape"] for entries in headers.values() for name, entry in entries.items()}

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def __call__(self, name: str, dtype: torch.dtype) -> Tensor:
        """A tensor, in this dtype."""
        tensor: Tensor = self._opened(self._files[name]).get_tensor(name)
        return tensor.to(dtype)

    def names(self, *shape: int) -> list[str]:
        """Names of the tensors of this shape or the transposed one."""
        return [name for name, found in self._shapes.items() if found in ([*shape], [*reversed(shape)])]

    def linear(self, layer: Mapping[str, Any], dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """Weight (out, in) and bias of a linear layer."""
        weight = self(layer["weight"], dtype)
        bias = self(layer["bias"], dtype) if layer["bias"] else None
        return (weight.T if layer["turned"] else weight), bias


def read_recording(
    folder: Path,
    dtype: torch.dtype | None,
    quantize: str | None,
    whole: Callable[[], Any],
    fits: Callable[[Any], object],
) -> tuple[Recorded, Prepared, Any, Any] | None:
    """A model from its recording, its metadata, its tokenizer, and its feature extractor, which is None except for
    speech models; None: there is no current recording.

    Args:
        folder: of the model.
        dtype, quantize: as the caller of ``load_model`` gave them.
        whole: loads the transformers model, for callers that need its modules.
        fits: see ``load_model``.
    """
    places = {place_of(folder, dtype, quantize): recording_key}
    if quantize is None and folder.is_relative_to(EMBEDDED_ROOT):
        stored = read_checkpoint(folder).dtype if dtype is None else dtype_name(dtype)
        places[folder / SHIPPED.format(stored)] = shipped_key
    if not any(place.is_file() for place in places) or built() is None or native() is None:
        return None
    try:
        checkpoint = read_checkpoint(folder)
        found = _first_current(places, folder, checkpoint)
        if found is None:
            return None
        place, about = found
        about["config"]["_name_or_path"] = about["tokenizer"]["name_or_path"] = str(folder)
        scripts = {name: tensor.numpy().tobytes() for name, tensor in load_tensors(place).items()}
        tokenizer = _tokenizer(folder, about["tokenizer"], scripts.pop(TOKENIZER, None))
        extractor = _extractor(folder, about, scripts.pop(FILTERS, None))
        fits(PlainConfig(**about["config"]))
        layers, prepared, source = (_from_copy if about["copy"] else _from_checkpoint)(about, checkpoint)
        names = [*about["weights"], *(about["encoder"]["weights"] if ENCODER in scripts else ())]
        weights = {name: source(name, getattr(torch, about["dtype"])) for name in names}
        try:
            model = assemble(about, scripts, weights, layers, functools.partial(_filled, whole, layers))
        except UnsupportedError as error:  # e.g. another version of torch reads the script as other operators
            raise LoadError(error.message) from error
    except (InputError, MemoryLimitError, UnsupportedError):  # of `fits`, or it does not fit
        raise
    except Exception as error:  # of any kind: loading the model itself reports what is wrong
        logger.info("%s: the recording is not used: %s", folder, one_line(error))
        with suppress(OSError):
            place_of(folder, dtype, quantize).unlink()
        return None
    return model, prepared, tokenizer, extractor


def _first_current(
    places: Mapping[Path, Callable[[Path, Checkpoint], str]], folder: Path, checkpoint: Checkpoint
) -> tuple[Path, dict[str, Any]] | None:
    """The first of these files with the model's current key, and its metadata; None: there is none."""
    for place, key_of in places.items():
        if place.is_file():
            about: dict[str, Any] = json.loads(read_header(place).metadata["about"])
            if about["key"] == key_of(folder, checkpoint):
                return place, about
    return None


def _tokenizer(folder: Path, known: Mapping[str, Any], backend: bytes | None) -> RecordedTokenizer:
    """The tokenizer of a recorded model; without a backend of its own it has that of the folder."""
    from tokenizers import Tokenizer

    whole = functools.partial(read_tokenizer, folder, trust_remote_code=False)
    made = Tokenizer.from_file(str(folder / "tokenizer.json")) if backend is None else Tokenizer.from_buffer(backend)
    return RecordedTokenizer(made, known, whole)


def _extractor(folder: Path, about: Mapping[str, Any], filters: bytes | None) -> RecordedExtractor | None:
    """The feature extractor of a recorded speech model."""
    if filters is None:
        return None
    return RecordedExtractor(
        about["extractor"], filters, lambda: read_extractor(folder, PlainConfig(**about["config"]))
    )


def _from_checkpoint(
    about: Mapping[str, Any], checkpoint: Checkpoint
) -> tuple[dict[str, PackedLayer], Prepared, TensorSource]:
    """The packed layers, the model's metadata, and the source of its other weights."""
    dtype = getattr(torch, about["dtype"])
    size = checkpoint.bytes_as(dtype.itemsize)
    require_bytes(size, repr(checkpoint.files[0].parent.name), remedy="free memory, or choose a smaller model")
    table = PackedWeights.create()
    assert table is not None, "the kernels are there"
    source = TensorSource(checkpoint)
    layers: dict[str, PackedLayer] = {
        layer["name"]: table.add_linear(*source.linear(layer, dtype)) for layer in about["layers"]
    }
    for group in about["siblings"]:
        join_siblings(table, [layers[name] for name in group])
    shapes = list(map(LayerShape.from_json, about["cache"]))
    return layers, Prepared(table, shapes, None, about["siblings"]), source


def _from_copy(about: Mapping[str, Any], _: Checkpoint) -> tuple[dict[str, PackedLayer], Prepared, TensorSource]:
    """The same for a quantized model, from its packed copy.

    Raises:
        LoadError: the copy is damaged, or of other weights.
    """
    copy, key = Path(about["copy"][0]), about["copy"][1]
    remove_leftovers(copy)
    told = read_about(copy, key)
    held, size = packed_files(copy)
    require_bytes(size, f"the packed model {copy.name!r}", remedy="free memory, or choose a smaller model")
    layers, prepared = read_layers(copy, told, [layer["name"] for layer in about["layers"]])
    if len(layers) != len(told["layers"]):
        raise LoadError(f"{copy} has other layers")
    return layers, prepared, TensorSource(held)


def assemble(
    about: Mapping[str, Any],
    scripts: Mapping[str, bytes],
    weights: Mapping[str, Tensor],
    layers: Mapping[str, PackedLayer],
    whole: Callable[[RecordedModel], Any],
) -> Recorded:
    """The model of a recording, see ``RecordedModel`` and ``RecordedEncoder``."""
    with undeprecated():
        made = {name: torch.jit.load(io.BytesIO(script)) for name, script in scripts.items()}
    graph = made[SCRIPT].forward.graph
    if ENCODER not in made:
        return RecordedModel(about, graph, weights, layers, whole).eval()
    apart = about["encoder"]
    within = [name for name in layers if name.startswith(f"{apart['path']}.")]
    encoder = RecordedEncoder(
        apart, made[ENCODER], [weights[name] for name in apart["weights"]], [layers[name] for name in within]
    )
    own = {name: weights[name] for name in about["weights"]}
    others = {name: layer for name, layer in layers.items() if name not in within}
    return RecordedEncoderDecoder(about, RecordedModel(about, graph, own, others, whole), encoder).eval()


@contextmanager
def undeprecated() -> Iterator[None]:
    """A context without torch's warnings that TorchScript is deprecated."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit", DeprecationWarning)
        yield


def _filled(whole: Callable[[], Any], layers: Mapping[str, PackedLayer], recorded: RecordedModel) -> Any:
    """The transformers model, or the decoder of one, around a recorded one's packed layers."""
    model = whole().eval().requires_grad_(False)  # or its passes could not be traced
    put_layers(model, layers)
    return split(model, recorded.device)[0] if has_encoder(model.config) else model

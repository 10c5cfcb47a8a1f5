"""``load_model``: makes a model and its tokenizer of a folder, a hub id, an embedded name or a loaded pair.

Everything that can be found wrong is found before weights are read: names, options, configuration, tokenizer, damaged
files, memory.
"""

from __future__ import annotations

import copy
import functools
import gc
import logging
import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sakiyomi.core.checkpoint import Checkpoint, read_checkpoint
from sakiyomi.core.embedded import in_package
from sakiyomi.core.errors import InputError, LoadError, MemoryLimitError, UnsupportedError
from sakiyomi.core.gguf import read_gguf
from sakiyomi.core.gguf_files import gguf_file
from sakiyomi.core.hub import fetch
from sakiyomi.core.memory import require_bytes, returned_when_freed
from sakiyomi.core.model_folder import local_folder
from sakiyomi.core.progress import progress
from sakiyomi.kernels.native import PackedWeights
from sakiyomi.kernels.quantization import check_quantization
from sakiyomi.kernels.weight_memory import MappedMemory
from sakiyomi.model_executor.gguf.folder import checkpoint_of, settings_folder
from sakiyomi.model_executor.gguf.layers import block_bytes, named_weights, read_blocks
from sakiyomi.model_executor.loading.accelerated import read_quantized
from sakiyomi.model_executor.loading.families import (
    check_adapter,
    check_supported,
    has_encoder,
    read_config,
    text_config,
)
from sakiyomi.model_executor.loading.fit import by_layer, check_memory, quantized_bytes
from sakiyomi.model_executor.loading.folder import light_tokenizer, read_extractor, read_tokenizer
from sakiyomi.model_executor.loading.offload import (
    Offload,
    packing_stream,
    parse_offload,
    read_offloaded,
    stays,
)
from sakiyomi.model_executor.loading.options import parse_device, parse_dtype
from sakiyomi.model_executor.loading.packed import (
    REMEDY,
    copy_place,
    is_packed,
    packed_files,
    put_layers,
    read_about,
    read_packed,
    remove_leftovers,
    save_packed,
    source_key,
)
from sakiyomi.model_executor.loading.packed_stream import PackedStream
from sakiyomi.model_executor.loading.placeholder import METHOD, register
from sakiyomi.model_executor.loading.prepared import Prepared
from sakiyomi.model_executor.loading.reader import Reader, without_weights
from sakiyomi.model_executor.loading.recorder import save_recording
from sakiyomi.model_executor.loading.recording import read_recording
from sakiyomi.model_executor.loading.stream import is_offloaded

if TYPE_CHECKING:
    from sakiyomi.model_executor.runner import ModelRunner

__all__ = ["Loaded", "load_model", "parse_device", "parse_dtype", "stop_tokens"]

logger = logging.getLogger("sakiyomi")


@dataclass(frozen=True)
class Loaded:
    """A model ready to be used.

    Attributes:
        model: a transformers causal language model, in evaluation mode.
        tokenizer: its tokenizer.
        name: what the user called it.
        folder: where it was read from; None for a pair that the user loaded.
        owned: True if we loaded it: then its weights may be repacked and freed. A user's model stays as it is.
        prepared: metadata of linear layers that are packed already; None: there are none.
        save: writes the packed copy of a model that was loaded to be quantized; None where there is nothing to write.
        stream: reads the packed layers of an offloaded model in every pass; None: there are none.
        extractor: of a speech model: makes features of samples; None where there is none.
        record: keeps a recording of the model as it runs, for the next start; None where none is to be kept.
    """

    model: Any
    tokenizer: Any
    name: str
    folder: Path | None
    owned: bool
    prepared: Prepared | None = None
    save: Callable[[ModelRunner], object] | None = None
    stream: PackedStream | None = None
    extractor: Any = None
    record: Callable[[ModelRunner], bool] | None = None


def load_model(
    target: str | os.PathLike[str] | tuple[Any, Any],
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    quantize: str | None = None,
    offload: str | os.PathLike[str] | None = None,
    packed: bool = False,
    encoder_decoder: bool = False,
    recorded: bool = False,
    fits: Callable[[Any], object] = lambda config: None,
    trust_remote_code: bool = False,
    allow_pickle: bool = False,
) -> Loaded:
    """Load a language model and its tokenizer.

    Args:
        target: name of an embedded model, a folder in Hugging Face format, a GGUF file, a hub id, or ``(model,
            tokenizer)``. A folder with the name of an embedded model is meant by ``"./tales"``.
        dtype: "auto" (as the checkpoint says), "float32", "bfloat16", "float16" or a torch dtype.
        device: "auto" (the first CUDA device if there is one, else the CPU), "cpu", "cuda" or "cuda:N".
        quantize: "int8" or "int4", of the linear layers. On the CPU they come from the packed copy if there is one,
            else they stay on disk until ``ModelRunner`` packs them one by one; on a GPU torchao quantizes them here.
        offload: "disk", "cpu", "auto" or a folder: where weights stay between passes (see ``LLM``).
        packed: whether packed copies and blocks of a GGUF file are accepted, which only ``ModelRunner`` can run.
        encoder_decoder: whether a model with an encoder is accepted.
        recorded: whether it may come from a recording, which only ``ModelRunner`` runs.
        fits: called with the configuration before weights are read; raises if the model does not fit.
        trust_remote_code: run Python code that comes with the model. Never without this.
        allow_pickle: open pickle weights, which can run any code. Never without this.

    Raises:
        InputError: a value that makes no sense.
        LoadError: something is missing, damaged, or cannot be reached.
        UnsupportedError: a kind of model that cannot work.
        MemoryLimitError: it does not fit.
    """
    wanted, place = parse_dtype(dtype), parse_device(device)
    offloaded = parse_offload(offload, place, quantize, target)
    if isinstance(target, tuple):
        return _from_pair(target, wanted, place if str(device) != "auto" else None, quantize, encoder_decoder)
    name = _name(target)

    def config_of(folder: Path) -> Any:
        config = read_config(folder, trust_remote_code=trust_remote_code)
        check_supported(config, name, encoder_decoder=encoder_decoder)
        _check_encoder(name, config, quantize, offload, place)
        fits(config)
        return config

    gguf = gguf_file(name)
    folder, backend = (local_folder(name), None) if gguf is None else settings_folder(gguf)
    own = gguf is None and folder is not None and not in_package(folder)
    recorded = recorded and place.type == "cpu" and not (offloaded or trust_remote_code or allow_pickle)
    if folder is None:
        folder = fetch(name, config_of, allow_pickle=allow_pickle, trust_remote_code=trust_remote_code)
    elif recorded:
        whole = functools.partial(load_model, name, dtype=dtype, device=place, quantize=quantize, packed=packed)
        if found := read_recording(folder, wanted, quantize, lambda: whole(encoder_decoder=True).model, fits):
            return Loaded(found[0], found[2], name, folder, owned=True, prepared=found[1], extractor=found[3])
    config = config_of(folder)
    tokenizer = light_tokenizer(folder, backend) if recorded and gguf else read_tokenizer(folder, trust_remote_code)
    if gguf is None and is_packed(folder):
        _check_packed(name, packed, quantize)
        copy_of: Path | None = folder
        loaded = _from_packed(folder, name, tokenizer, wanted, place, trust_remote_code, config, offload=offloaded)
    else:
        file = None if gguf is None else read_gguf(gguf, vocabulary=False)
        files = read_checkpoint(folder, allow_pickle=allow_pickle) if file is None else checkpoint_of(file)
        final = wanted or _stored_dtype(config, files, rounded=bool(quantize) and place.type == "cpu")
        reader = Reader(name, folder, files, final, place, trust_remote_code, allow_pickle, file, config)
        if packed and quantize is None and file is not None and _can_run_blocks(reader, wanted):
            loaded, copy_of = _as_blocks(reader, tokenizer, offloaded)
        else:
            loaded = _load(reader, tokenizer, quantize, offloaded, own)
            copies = None if has_encoder(config) else quantize
            copy_of = None if copies is None else copy_place(reader.place, copies, final, beside=own)
    extractor = read_extractor(folder, config)
    record = functools.partial(save_recording, folder, wanted, quantize, copy_of, tokenizer, extractor=extractor)
    return replace(loaded, extractor=extractor, record=record if recorded else None)


def _name(target: Any) -> str:
    if not isinstance(target, str | os.PathLike):
        raise InputError(
            f"the model is given as {type(target).__name__}; expected a folder, a hub id, the name of an embedded "
            "model, or a (model, tokenizer) pair"
        )
    return os.fspath(target)


def _load(reader: Reader, tokenizer: Any, quantize: str | None, offload: Offload | None, own: bool) -> Loaded:
    """Read the weights, if they fit; ``own``: the folder is the user's, and takes a packed copy."""
    if quantize and hasattr(reader.config, "quantization_config"):
        raise InputError(f"quantize={quantize!r}: {reader.name!r} is quantized already; leave quantize at None")
    if quantize and has_encoder(reader.config):
        if offload is not None:
            raise InputError(
                f"offload={offload.where!r} with quantize={quantize!r}: {reader.name!r} is an encoder-decoder model, "
                "whose quantized weights stay in memory; leave one of the two at None"
            )
        check_quantization(f"quantize={quantize!r}", reader.dtype)
    elif quantize and reader.device.type == "cpu":
        return _to_be_quantized(reader, tokenizer, quantize, own, offload)
    elif quantize:
        return _by_torchao(reader, quantize, tokenizer)
    if offload is not None and reader.gguf is not None:
        raise UnsupportedError(
            f"offload={offload.where!r}: {reader.name!r} is a GGUF file, whose blocks only the CPU kernels multiply as "
            "they are stored; pass device='cpu' and leave dtype at 'auto', or pass the model's folder"
        )
    if offload is not None:
        model = read_offloaded(reader, offload)
    else:
        check_memory(reader)
        model = _to_device(reader.read(), reader.device, reader.name)
    owned = not is_offloaded(model)  # which it may not be after all: then it fits
    return Loaded(model.eval(), tokenizer, reader.name, reader.folder, owned=owned)


def _check_encoder(name: str, config: Any, quantize: str | None, offload: object, device: torch.device) -> None:
    """Refuse what an encoder-decoder model cannot have."""
    if quantize and has_encoder(config) and device.type != "cpu":
        raise UnsupportedError(
            f"quantize={quantize!r}: {name!r} is an encoder-decoder model, which this version quantizes on the CPU "
            "alone; pass device='cpu', or dtype='bfloat16'"
        )
    if offload and config.model_type == "marian":
        raise UnsupportedError(
            f"offload: the positions of {name!r} (marian) are computed, and transformers leaves them out when it loads "
            "a model without its weights; leave offload at None and load it without device_map="
        )


def _check_packed(name: str, packed: bool, quantize: str | None) -> None:
    """Refuse what a packed copy cannot have."""
    if not packed:
        raise UnsupportedError(f"{name!r} is a packed copy, which only LLM runs; pass the model's own folder")
    if quantize:
        raise InputError(f"quantize={quantize!r}: {name!r} is a packed copy already; leave quantize at None")


SMALLER = "choose a smaller file, or pass offload='auto', which leaves what does not fit on disk"
BLOCKS = "gguf"
"""In the name of the packed copy of a GGUF file, where others say how their layers are quantized."""


def _can_run_blocks(reader: Reader, wanted: torch.dtype | None) -> bool:
    """Whether there are kernels that multiply the blocks of a GGUF file as they are, with rows of the dtype wanted."""
    dtypes = (torch.float32, torch.bfloat16, torch.float16 if wanted is None else torch.bfloat16)
    return reader.device.type == "cpu" and reader.dtype in dtypes and PackedWeights.create() is not None


def _as_blocks(reader: Reader, tokenizer: Any, offload: Offload | None) -> tuple[Loaded, Path]:
    """A model whose layers are the blocks of a GGUF file: from their packed copy, or put in the kernels' order now.

    Returns:
        The model, whose rows are of bfloat16 where the file's numbers are of float16, and the place of the copy.
    """
    file = reader.gguf
    assert file is not None
    if reader.dtype is torch.float16:
        reader = replace(reader, dtype=torch.bfloat16)
    key = source_key(reader.folder, reader.checkpoint)
    place = copy_place(reader.place, BLOCKS, reader.dtype, beside=False)
    remove_leftovers(place)
    if is_packed(place):
        try:
            loaded = _from_packed(
                place, reader.name, tokenizer, reader.dtype, reader.device, False, reader.config, key=key,
                offload=offload,
            )  # fmt: skip
            return loaded, place
        except LoadError as error:
            logger.warning("%s: it is packed anew now", error.message.removesuffix(f"; {REMEDY}"))
    native = PackedWeights.create()
    assert native is not None, "see _can_run_blocks"
    weights = named_weights(file, reader.config, reader.name)
    skeleton = without_weights(reader.config, reader.dtype)
    kept, others = block_bytes(weights, skeleton, reader.dtype)
    resident, stream = stays(offload, kept + others), None
    require_bytes(others + (kept if resident is None else 0), f"the model {reader.name!r}", remedy=SMALLER)
    if offload is not None and resident is not None:
        stream = packing_stream(offload, place, kept, max(0, resident - others), reader.name)
    with (
        nullcontext() if stream is None else returned_when_freed(),
        progress(f"packing {reader.place.name} for the kernels", size=reader.checkpoint.stored_bytes),
        native.packing_into(None if stream is None else stream.memory),
    ):
        made = read_blocks(weights, skeleton, native, reader.dtype)
    register()
    config = copy.deepcopy(reader.config)
    config.quantization_config = {"quant_method": METHOD, "layers": sorted(made.layers)}
    model = reader.read(tensors=made.others, config=config)
    put_layers(model, made.layers)
    prepared = Prepared(native=native, shapes=None, report=None, siblings=[])
    save = functools.partial(
        save_packed, place=place, source=reader.folder, key=key, config=reader.config, tokenizer=tokenizer
    )
    loaded = Loaded(model.eval(), tokenizer, reader.name, reader.folder, owned=True, prepared=prepared, save=save)
    return replace(loaded, stream=stream), place


def _to_be_quantized(reader: Reader, tokenizer: Any, quantize: str, own: bool, offload: Offload | None) -> Loaded:
    """A packed copy, else a model whose layers are on disk as far as they can be, and what saves its packed copy."""
    name, folder, dtype = reader.name, reader.folder, reader.dtype
    check_quantization(f"quantize={quantize!r}", dtype)
    key = source_key(folder, reader.checkpoint)
    copy = copy_place(reader.place, quantize, dtype, beside=own)
    remove_leftovers(copy)
    if is_packed(copy):
        try:
            code, config = reader.trust_remote_code, reader.config
            return _from_packed(copy, name, tokenizer, dtype, reader.device, code, config, key=key, offload=offload)
        except LoadError as error:
            logger.warning("%s: it is packed anew now", error.message.removesuffix(f"; {REMEDY}"))
    layered = by_layer(reader)
    if not layered:
        check_memory(reader)
    size = quantized_bytes(reader, quantize) if offload is not None else 0
    resident, stream = stays(offload, size), None
    if offload is not None and resident is not None:
        stream = packing_stream(offload, copy, size, resident, name)
    else:
        check_memory(reader, quantize=quantize)
    model = reader.read_later() if layered else reader.read()
    source = None if reader.gguf else folder
    save = functools.partial(save_packed, place=copy, source=source, key=key, config=reader.config, tokenizer=tokenizer)
    return Loaded(model.eval(), tokenizer, name, folder, owned=True, save=save, stream=stream)


def _by_torchao(reader: Reader, quantize: str, tokenizer: Any) -> Loaded:
    """A model that is quantized on its GPU while it is read, and what that changed."""
    if reader.gguf is not None:
        raise UnsupportedError(
            f"quantize={quantize!r} on a GPU takes no GGUF file; pass the model's folder, or device='cpu'"
        )
    check_memory(reader, quantize=quantize)
    layered = by_layer(reader)
    if not layered:
        check_memory(reader, device="cpu")
    model, report = read_quantized(reader, quantize, tokenizer, layered=layered)
    prepared = Prepared(native=None, shapes=None, report=report, siblings=[])
    return Loaded(model, tokenizer, reader.name, reader.folder, owned=True, prepared=prepared)


def _from_packed(
    folder: Path,
    name: str,
    tokenizer: Any,
    dtype: torch.dtype | None,
    device: torch.device,
    trust_remote_code: bool,
    config: Any,
    *,
    key: str | None = None,
    offload: Offload | None = None,
) -> Loaded:
    about = read_about(folder, key)
    stored = parse_dtype(about["dtype"])
    assert stored is not None, "written by save_packed"
    if device.type != "cpu":
        raise InputError(
            f"device is '{device}' and {name!r} is packed for the CPU; pass device='cpu', or the model itself"
        )
    if dtype not in (None, stored):
        raise InputError(
            f"dtype is {dtype} and {name!r} is packed in {stored}; leave dtype at 'auto', or pass the model itself"
        )
    if key is None:  # else the model itself was asked for, and this is known
        check_quantization(f"the packed model {name!r}", stored)
    checkpoint, size = packed_files(folder)
    resident, others = stays(offload, size), checkpoint.stored_bytes
    stream = None if resident is None else PackedStream(MappedMemory(), stays=max(0, resident - others))
    remedy = "free memory, choose a smaller model, or pass offload='auto', which leaves what does not fit on disk"
    require_bytes(size if stream is None else others, f"the packed model {name!r}", remedy=remedy)
    register()
    reader = Reader(name, folder, checkpoint, stored, device, trust_remote_code, config=config)
    model, prepared = read_packed(folder, about, reader.read, None if stream is None else stream.memory)
    return Loaded(model.eval(), tokenizer, name, folder, owned=True, prepared=prepared, stream=stream)


def stop_tokens(model: Any, tokenizer: Any = None) -> tuple[int, ...]:
    """End tokens of a model: of its generation settings, else of its configuration, as in transformers.

    Where neither names one, the tokenizer's.
    """
    settings = getattr(model, "generation_config", None)
    ends = getattr(model.config if settings is None else settings, "eos_token_id", None)
    if ends is None and getattr(model.config, "eos_token_id", None) is None:
        ends = getattr(tokenizer, "eos_token_id", None)
    if ends is None:
        return ()
    return (ends,) if isinstance(ends, int) else tuple(ends)


def _from_pair(
    pair: tuple[Any, ...],
    dtype: torch.dtype | None,
    device: torch.device | None,
    quantize: str | None,
    encoder_decoder: bool,
) -> Loaded:
    if len(pair) != 2 or not hasattr(pair[0], "config") or not hasattr(pair[1], "decode"):
        kinds = ", ".join(type(part).__name__ for part in pair)
        raise InputError(
            f"the model is given as ({kinds}); expected a transformers model and its tokenizer, in this order"
        )
    model, tokenizer = pair
    extractor = getattr(tokenizer, "feature_extractor", None)
    if hasattr(tokenizer, "image_processor"):
        extractor = tokenizer
    if extractor is not None:  # a processor, which holds both
        tokenizer = tokenizer.tokenizer
    name = getattr(model.config, "_name_or_path", "") or type(model).__name__
    check_adapter(model, name)
    check_supported(model.config, name, type(model), encoder_decoder=encoder_decoder)
    _check_encoder(name, model.config, quantize, is_offloaded(model), model.device)
    if dtype is not None and model.dtype != dtype:
        raise InputError(
            f"dtype is {dtype} and the loaded model {name!r} has {model.dtype}; a loaded model is used as it is: load "
            "it in that dtype, or pass dtype='auto'"
        )
    if device is not None and (model.device.type, model.device.index or 0) != (device.type, device.index or 0):
        raise InputError(
            f"device is '{device}' and the loaded model {name!r} is on '{model.device}'; a loaded model is used where "
            "it is: move it yourself, or pass device='auto'"
        )
    if quantize and model.device.type == "cuda":
        raise UnsupportedError(
            f"quantize={quantize!r}: the loaded model {name!r} is on a GPU, where it would have to be changed; load it "
            "quantized, or pass its folder"
        )
    return Loaded(model, tokenizer, name, None, owned=False, extractor=extractor)


def _stored_dtype(config: Any, checkpoint: Checkpoint, *, rounded: bool = False) -> torch.dtype:
    """The dtype of a checkpoint; ``rounded``: of the rows beside its weights, for which kernels have no float16."""
    for value in (getattr(text_config(config), "dtype", None), getattr(config, "dtype", None), checkpoint.dtype):
        found = value if isinstance(value, torch.dtype) else getattr(torch, str(value), None)
        if isinstance(found, torch.dtype) and found.is_floating_point:
            return torch.bfloat16 if rounded and found is torch.float16 else found
    return torch.float32


def _to_device(model: Any, device: torch.device, name: str) -> Any:
    try:
        return model.to(device) if device.type != "cpu" else model
    except torch.OutOfMemoryError as error:
        gc.collect()
        raise MemoryLimitError(f"{name!r} does not fit on {device}; free memory there or pass device='cpu'") from error

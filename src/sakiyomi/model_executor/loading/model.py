"""``load_model``: a folder, a hub id, an embedded name or a loaded pair in, a model with its tokenizer out.

Everything that can be found wrong is found before weights are read: names, options, configuration, tokenizer, damaged
files, memory.
"""

from __future__ import annotations

import functools
import gc
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sakiyomi.core.checkpoint import HEADS_FILE, MERGING_FILE, RETAINING_FILE, Checkpoint, read_checkpoint
from sakiyomi.core.embedded import folder_of, is_embedded_name
from sakiyomi.core.errors import InputError, LoadError, MemoryLimitError, UnsupportedError
from sakiyomi.core.memory import require_bytes
from sakiyomi.kernels.quantization import check_quantization
from sakiyomi.model_executor.loading.accelerated import read_rounded
from sakiyomi.model_executor.loading.families import auto_class, check_supported, has_encoder, read_config
from sakiyomi.model_executor.loading.fit import by_layer, check_memory
from sakiyomi.model_executor.loading.gguf import read_gguf
from sakiyomi.model_executor.loading.hub import fetch, looks_like_hub_id
from sakiyomi.model_executor.loading.offload import Offload, parse_offload, read_offloaded
from sakiyomi.model_executor.loading.packed import (
    REMEDY,
    copy_place,
    is_packed,
    packed_files,
    read_about,
    read_packed,
    remove_leftovers,
    save_packed,
    source_key,
)
from sakiyomi.model_executor.loading.placeholder import register
from sakiyomi.model_executor.loading.prepared import Prepared
from sakiyomi.model_executor.loading.reader import Reader, quiet, short
from sakiyomi.model_executor.loading.stream import is_offloaded

if TYPE_CHECKING:
    import torch

    from sakiyomi.model_executor.runner import ModelRunner

__all__ = ["Loaded", "load_model"]

logger = logging.getLogger("sakiyomi")
DTYPES = ("float32", "bfloat16", "float16")
_NOT_ROUNDED = (
    "quantize={!r}: {!r} is an encoder-decoder model, which this version does not round; leave quantize at None, or "
    "pass dtype='bfloat16'"
)
_NOT_APART = (
    "offload={!r}: {!r} is an encoder-decoder model, whose weights this version keeps in memory; leave offload at "
    "None, or pass dtype='bfloat16'"
)
_PAIR_APART = (
    "the weights of the loaded encoder-decoder model {!r} are not all in memory, where this version keeps them; load "
    "it without device_map="
)


@dataclass(frozen=True)
class Loaded:
    """A model ready to be used.

    Attributes:
        model: a transformers causal language model, in evaluation mode.
        tokenizer: its tokenizer.
        name: what the user called it.
        folder: where it was read from; None for a pair that the user loaded.
        owned: True if we loaded it: then its weights may be repacked and freed. A user's model stays as it is.
        prepared: where its linear layers are packed already, what is known of them.
        save: writes the packed copy of a model that was loaded to be rounded; None where there is nothing to write.
        extractor: of a model that hears: makes features of samples; None where there is none.
    """

    model: Any
    tokenizer: Any
    name: str
    folder: Path | None
    owned: bool
    prepared: Prepared | None = None
    save: Callable[[ModelRunner], object] | None = None
    extractor: Any = None


def load_model(
    target: str | os.PathLike[str] | tuple[Any, Any],
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    quantize: str | None = None,
    offload: str | os.PathLike[str] | None = None,
    packed: bool = False,
    encoder_decoder: bool = False,
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
        quantize: "int8" or "int4": the linear layers are to be rounded. On the CPU they come from the packed copy if
            there is one, else they stay on disk until ``ModelRunner`` packs them, one after the other; on a GPU torchao
            rounds them here.
        offload: "disk", "cpu", "auto" or a folder: where weights stay between passes (see ``LLM``).
        packed: a folder of ``save_packed`` will do. Only ``ModelRunner`` can run what comes then.
        encoder_decoder: a model with an encoder will do.
        fits: raises if a model of this configuration is not wanted, before its weights are read.
        trust_remote_code: run Python code that comes with the model. Never without this.
        allow_pickle: open pickle weights, which can run any code. Never without this.

    Raises:
        InputError: a value that cannot be meant.
        LoadError: something is missing, damaged, or cannot be reached.
        UnsupportedError: a kind of model that cannot work.
        MemoryLimitError: it does not fit; nothing was allocated.
    """
    wanted, place = parse_dtype(dtype), parse_device(device)
    apart = parse_offload(offload, place, quantize, target)
    if isinstance(target, tuple):
        return _from_pair(target, wanted, place if str(device) != "auto" else None, quantize, encoder_decoder)
    if not isinstance(target, str | os.PathLike):
        raise InputError(
            f"the model is given as {type(target).__name__}; expected a folder, a hub id, the name of an embedded "
            "model, or a (model, tokenizer) pair"
        )
    name = os.fspath(target)

    def config_of(folder: Path) -> Any:
        config = read_config(folder, trust_remote_code=trust_remote_code)
        check_supported(config, name, encoder_decoder=encoder_decoder)
        if quantize and has_encoder(config):
            raise UnsupportedError(_NOT_ROUNDED.format(quantize, name))
        if apart is not None and has_encoder(config):
            raise UnsupportedError(_NOT_APART.format(offload, name))
        fits(config)
        return config

    gguf = _gguf_file(name)
    folder = gguf.parent if gguf is not None else _local_folder(name)
    beside = folder is not None and not is_embedded_name(name)
    if folder is None:
        folder = fetch(name, config_of, allow_pickle=allow_pickle, trust_remote_code=trust_remote_code)
    if gguf is not None:
        config, tokenizer, checkpoint = read_gguf(gguf)
        check_supported(config, name)
    else:
        config, tokenizer = config_of(folder), _read_tokenizer(folder, trust_remote_code)
        if is_packed(folder):
            if apart is not None:
                raise InputError(f"offload={offload!r}: {name!r} is a packed copy; pass the model's own folder")
            if not packed:
                raise UnsupportedError(f"{name!r} is a packed copy, which only LLM runs; pass the model's own folder")
            if quantize:
                raise InputError(f"quantize={quantize!r}: {name!r} is a packed copy already; leave quantize at None")
            return _from_packed(folder, name, tokenizer, wanted, place, trust_remote_code)
        checkpoint = read_checkpoint(folder, allow_pickle=allow_pickle)
    if quantize and hasattr(config, "quantization_config"):
        raise InputError(f"quantize={quantize!r}: {name!r} is quantized already; leave quantize at None")
    final = wanted or _stored_dtype(config, checkpoint)
    kind = auto_class(config)
    reader = Reader(name, folder, checkpoint, final, place, trust_remote_code, allow_pickle, gguf, kind)
    if apart is not None:
        return _offloaded(reader, config, tokenizer, apart)
    if quantize and place.type == "cpu":
        return _to_be_rounded(reader, config, tokenizer, quantize, beside and gguf is None)
    if quantize and gguf is not None:
        raise UnsupportedError(
            f"quantize={quantize!r} on a GPU takes no GGUF file; pass the model's folder, or device='cpu'"
        )
    if quantize:
        return _rounded_by_torchao(reader, config, tokenizer, quantize)
    check_memory(name, config, checkpoint, final, place, trust_remote_code=trust_remote_code)
    extractor = _read_extractor(folder) if has_encoder(config) else None
    model = _to_device(reader.read(), place, name).eval()
    return Loaded(model, tokenizer, name, folder, owned=True, extractor=extractor)


def _to_be_rounded(reader: Reader, config: Any, tokenizer: Any, quantize: str, beside: bool) -> Loaded:
    """A packed copy, else a model whose layers are on disk as far as they can be, and what saves its packed copy."""
    name, folder, checkpoint, dtype = reader.name, reader.folder, reader.checkpoint, reader.dtype
    check_quantization(f"quantize={quantize!r}", dtype)
    key = source_key(folder, checkpoint)
    copy = copy_place(reader.gguf or folder, quantize, dtype, beside=beside)
    remove_leftovers(copy)
    if is_packed(copy):
        try:
            return _from_packed(copy, name, tokenizer, dtype, reader.device, reader.trust_remote_code, key=key)
        except LoadError as error:
            logger.warning("%s: it is packed anew now", error.message.removesuffix(f"; {REMEDY}"))
    check = functools.partial(
        check_memory, name, config, checkpoint, dtype, reader.device, trust_remote_code=reader.trust_remote_code
    )
    layered = by_layer(config, checkpoint)
    if not layered:
        check()
    check(quantize=quantize)
    model = reader.read_later() if layered else reader.read()
    save = functools.partial(
        save_packed,
        place=copy,
        source=None if reader.gguf else folder,
        key=key,
        config=config,
        tokenizer=tokenizer,
    )
    return Loaded(model.eval(), tokenizer, name, folder, owned=True, save=save)


def _offloaded(reader: Reader, config: Any, tokenizer: Any, apart: Offload) -> Loaded:
    model = read_offloaded(reader, config, apart)
    owned = not is_offloaded(model)  # it fits after all
    return Loaded(model.eval(), tokenizer, reader.name, reader.folder, owned=owned)


def _rounded_by_torchao(reader: Reader, config: Any, tokenizer: Any, quantize: str) -> Loaded:
    """A model that is rounded on its GPU while it is read, and what that changed."""
    check = functools.partial(
        check_memory, reader.name, config, reader.checkpoint, reader.dtype, trust_remote_code=reader.trust_remote_code
    )
    check(reader.device, quantize=quantize)
    layered = by_layer(config, reader.checkpoint)
    if not layered:
        check(parse_device("cpu"))
    model, report = read_rounded(reader, quantize, tokenizer, layered=layered)
    prepared = Prepared(native=None, shapes=None, report=report, siblings=[])
    return Loaded(model, tokenizer, reader.name, reader.folder, owned=True, prepared=prepared)


def _from_packed(
    folder: Path,
    name: str,
    tokenizer: Any,
    dtype: torch.dtype | None,
    device: torch.device,
    trust_remote_code: bool,
    *,
    key: str | None = None,
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
    require_bytes(size, f"the packed model {name!r}", remedy="free memory, or choose a smaller model")
    register()
    reader = Reader(name, folder, checkpoint, stored, device, trust_remote_code)
    model, prepared = read_packed(folder, about, reader.read)
    return Loaded(model.eval(), tokenizer, name, folder, owned=True, prepared=prepared)


def stop_tokens(model: Any, tokenizer: Any = None) -> tuple[int, ...]:
    """End tokens of a model: of its generation settings, its configuration or its tokenizer, in this order."""
    for source in (getattr(model, "generation_config", None), model.config, tokenizer):
        ends = getattr(source, "eos_token_id", None)
        if ends is not None:
            return (ends,) if isinstance(ends, int) else tuple(ends)
    return ()


def parse_dtype(value: str | torch.dtype) -> torch.dtype | None:
    """The dtype asked for; None for "auto".

    Raises:
        InputError: there is no such dtype.
    """
    import torch

    name = str(value).removeprefix("torch.")
    if name == "auto":
        return None
    if name not in DTYPES:
        raise InputError(f"dtype is {value!r}; expected 'auto', {', '.join(map(repr, DTYPES))}")
    found: torch.dtype = getattr(torch, name)
    return found


def parse_device(value: str | torch.device) -> torch.device:
    """The device that is meant.

    Raises:
        InputError: there is no such device, here or in this version.
    """
    import torch

    if str(value) == "auto":
        # mps exists but is untested: the CPU is the safe choice there.
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(value)
    except (RuntimeError, TypeError) as error:
        raise InputError(f"device is {value!r}; expected 'auto', 'cpu', 'cuda' or 'cuda:N'") from error
    if device.type not in {"cpu", "cuda"}:
        raise InputError(f"device is {value!r}, which this version does not support; expected 'auto', 'cpu' or 'cuda'")
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise InputError(
                f"device is {value!r} and torch sees {count} CUDA devices; pass device='cpu', or install a torch build "
                "for your GPU"
            )
        return torch.device("cuda", device.index or 0)
    return torch.device("cpu")


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
    if extractor is not None:  # a processor: both in one
        tokenizer = tokenizer.tokenizer
    name = getattr(model.config, "_name_or_path", "") or type(model).__name__
    check_supported(model.config, name, type(model), encoder_decoder=encoder_decoder)
    if quantize and has_encoder(model.config):
        raise UnsupportedError(_NOT_ROUNDED.format(quantize, name))
    if has_encoder(model.config) and is_offloaded(model):
        raise UnsupportedError(_PAIR_APART.format(name))
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


def _local_folder(name: str) -> Path | None:
    """The folder that a name stands for, None if it can only be a hub id."""
    path = folder_of(name)
    if name and path.is_dir():
        alone = not any(path.glob("model*.safetensors"))
        if (path / HEADS_FILE).is_file() and alone:
            raise InputError(f"{name!r} holds Medusa heads and no model; pass them as draft='medusa:{name}'")
        if (path / RETAINING_FILE).is_file() and alone:
            raise InputError(f"{name!r} holds retaining heads and no model; pass them as cache='locret:{name}'")
        if (path / MERGING_FILE).is_file() and alone:
            raise InputError(f"{name!r} holds merging convolutions and no model; pass them as cache='lococo:{name}'")
        return path
    if path.is_file():
        raise LoadError(
            f"{name!r} is a file, expected a folder in Hugging Face format (config.json, model.safetensors, "
            "tokenizer.json) or a .gguf file; pass the folder"
        )
    if path.suffix.lower() == ".gguf":
        raise LoadError(f"there is no file {name!r}; check the path (relative to {Path.cwd()})")
    if not looks_like_hub_id(name):
        raise LoadError(f"there is no folder {name!r}; check the path (relative to {Path.cwd()})")
    return None


def _gguf_file(name: str) -> Path | None:
    path = Path(name).expanduser()
    return path if path.suffix.lower() == ".gguf" and path.is_file() else None


def _read_tokenizer(folder: Path, trust_remote_code: bool) -> Any:
    from transformers import AutoTokenizer

    patterns = ("tokenizer.*", "vocab*", "spiece*", "sentencepiece*", "*.tiktoken", "tiktoken*", "tekken*", "*.model")
    remedy = "copy the tokenizer's files into the folder (tokenizer.json), or pass a (model, tokenizer) pair"
    # Asked first: for some model types transformers makes an empty tokenizer where there are no files.
    if not trust_remote_code and not any(any(folder.glob(pattern)) for pattern in patterns):
        raise LoadError(f"no tokenizer in {folder}; {remedy}")
    try:
        with quiet():
            return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    except Exception as error:  # the libraries below raise their own kinds, bare Exception among them
        raise LoadError(f"the tokenizer in {folder} cannot be read ({short(error)}); {remedy}") from error


def _read_extractor(folder: Path) -> Any:
    """Of a model that hears; None where the folder has none."""
    from transformers import AutoFeatureExtractor

    if not any((folder / name).is_file() for name in ("preprocessor_config.json", "processor_config.json")):
        return None
    try:
        with quiet():
            return AutoFeatureExtractor.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        raise LoadError(
            f"the feature extractor in {folder} cannot be read ({short(error)}); copy preprocessor_config.json from "
            "the original model"
        ) from error


def _stored_dtype(config: Any, checkpoint: Checkpoint) -> torch.dtype:
    import torch

    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    for value in (getattr(text, "dtype", None), getattr(config, "dtype", None), checkpoint.dtype):
        found = value if isinstance(value, torch.dtype) else getattr(torch, str(value), None)
        if isinstance(found, torch.dtype) and found.is_floating_point:
            return found
    return torch.float32


def _to_device(model: Any, device: torch.device, name: str) -> Any:
    import torch

    try:
        return model.to(device) if device.type != "cpu" else model
    except torch.OutOfMemoryError as error:
        gc.collect()
        raise MemoryLimitError(f"{name!r} does not fit on {device}; free memory there or pass device='cpu'") from error

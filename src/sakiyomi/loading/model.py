"""``load_model``: a folder, a hub id, an embedded name or a loaded pair in, a model with its tokenizer out.

Everything that can be found wrong is found before weights are read: names, options, configuration, tokenizer, damaged
files, memory.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sakiyomi.embedded import embedded, is_embedded_name
from sakiyomi.errors import InputError, LoadError, MemoryLimitError
from sakiyomi.loading.checkpoint import Checkpoint, read_checkpoint
from sakiyomi.loading.families import check_supported, read_config
from sakiyomi.loading.hub import fetch, looks_like_hub_id
from sakiyomi.memory import available_bytes, readable, require_bytes

if TYPE_CHECKING:
    import torch

__all__ = ["Loaded", "load_model"]

DTYPES = ("float32", "bfloat16", "float16")
_LONG = 500_000_000
"""Bytes from which on loading takes seconds, so that a progress display is of use."""


@dataclass(frozen=True)
class Loaded:
    """A model ready to be used.

    Attributes:
        model: a transformers causal language model, in evaluation mode.
        tokenizer: its tokenizer.
        name: what the user called it.
        folder: where it was read from; None for a pair that the user loaded.
        owned: True if we loaded it: then its weights may be repacked and freed. A user's model stays as it is.
    """

    model: Any
    tokenizer: Any
    name: str
    folder: Path | None
    owned: bool


def load_model(
    target: str | os.PathLike[str] | tuple[Any, Any],
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    trust_remote_code: bool = False,
    allow_pickle: bool = False,
) -> Loaded:
    """Load a causal language model and its tokenizer.

    Args:
        target: name of an embedded model, a folder in Hugging Face format, a hub id, or ``(model, tokenizer)``. A
            folder with the name of an embedded model is meant by ``"./tales"``.
        dtype: "auto" (as the checkpoint says), "float32", "bfloat16", "float16" or a torch dtype.
        device: "auto" (the first CUDA device if there is one, else the CPU), "cpu", "cuda" or "cuda:N".
        trust_remote_code: run Python code that comes with the model. Never without this.
        allow_pickle: open pickle weights, which can run any code. Never without this.

    Raises:
        InputError: a value that cannot be meant.
        LoadError: something is missing, damaged, or cannot be reached.
        UnsupportedError: a kind of model that cannot work.
        MemoryLimitError: it does not fit; nothing was allocated.
    """
    wanted, place = parse_dtype(dtype), _device(device)
    if isinstance(target, tuple):
        return _from_pair(target, wanted, place if str(device) != "auto" else None)
    if not isinstance(target, str | os.PathLike):
        raise InputError(
            f"the model is given as {type(target).__name__}; expected a folder, a hub id, the name of an embedded "
            "model, or a (model, tokenizer) pair"
        )
    name = os.fspath(target)

    def config_of(folder: Path) -> Any:
        config = read_config(folder, trust_remote_code=trust_remote_code)
        check_supported(config, name)
        return config

    folder = _local_folder(name)
    if folder is None:
        folder = fetch(name, config_of, allow_pickle=allow_pickle, trust_remote_code=trust_remote_code)
    config = config_of(folder)
    tokenizer = _read_tokenizer(folder, trust_remote_code)
    checkpoint = read_checkpoint(folder, allow_pickle=allow_pickle)
    final = wanted or _stored_dtype(config, checkpoint)
    _check_memory(name, checkpoint, final, place, quantized=hasattr(config, "quantization_config"))
    model = _read_weights(folder, name, checkpoint, final, trust_remote_code, allow_pickle)
    return Loaded(_to_device(model, place, name).eval(), tokenizer, name, folder, owned=True)


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


def _device(value: str | torch.device) -> torch.device:
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


def _from_pair(pair: tuple[Any, ...], dtype: torch.dtype | None, device: torch.device | None) -> Loaded:
    if len(pair) != 2 or not hasattr(pair[0], "config") or not hasattr(pair[1], "decode"):
        kinds = ", ".join(type(part).__name__ for part in pair)
        raise InputError(
            f"the model is given as ({kinds}); expected a transformers model and its tokenizer, in this order"
        )
    model, tokenizer = pair
    name = getattr(model.config, "_name_or_path", "") or type(model).__name__
    check_supported(model.config, name, type(model))
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
    return Loaded(model, tokenizer, name, None, owned=False)


def _local_folder(name: str) -> Path | None:
    """The folder that a name stands for, None if it can only be a hub id."""
    if is_embedded_name(name):
        return embedded(name)
    path = Path(name).expanduser()
    if name and path.is_dir():
        return path
    if path.is_file():
        raise LoadError(
            f"{name!r} is a file, expected a folder in Hugging Face format (config.json, model.safetensors, "
            "tokenizer.json); pass the folder" + (", and convert GGUF files first" if path.suffix == ".gguf" else "")
        )
    if not looks_like_hub_id(name):
        raise LoadError(f"there is no folder {name!r}; check the path (relative to {Path.cwd()})")
    return None


def _read_tokenizer(folder: Path, trust_remote_code: bool) -> Any:
    from transformers import AutoTokenizer

    patterns = ("tokenizer.*", "vocab*", "spiece*", "sentencepiece*", "*.tiktoken", "tiktoken*", "tekken*", "*.model")
    remedy = "copy the tokenizer's files into the folder (tokenizer.json), or pass a (model, tokenizer) pair"
    # Asked first: for some model types transformers makes an empty tokenizer where there are no files.
    if not trust_remote_code and not any(any(folder.glob(pattern)) for pattern in patterns):
        raise LoadError(f"no tokenizer in {folder}; {remedy}")
    try:
        with _quiet():
            return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    except Exception as error:  # the libraries below raise their own kinds, bare Exception among them
        raise LoadError(f"the tokenizer in {folder} cannot be read ({_short(error)}); {remedy}") from error


def _stored_dtype(config: Any, checkpoint: Checkpoint) -> torch.dtype:
    import torch

    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    for value in (getattr(text, "dtype", None), getattr(config, "dtype", None), checkpoint.dtype):
        found = value if isinstance(value, torch.dtype) else getattr(torch, str(value), None)
        if isinstance(found, torch.dtype) and found.is_floating_point:
            return found
    return torch.float32


def _check_memory(name: str, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, quantized: bool) -> None:
    def needed(itemsize: int) -> int:
        return checkpoint.stored_bytes if quantized else checkpoint.bytes_as(itemsize)

    # Weights pass through main memory on their way to a GPU.
    for where in dict.fromkeys(("cpu", str(device))):
        room = available_bytes(where)
        remedy = f"the largest model that fits in {str(dtype).removeprefix('torch.')} has "
        remedy += f"{room / dtype.itemsize / 1e9:.2g} billion parameters"
        if dtype.itemsize > 2 and needed(2) <= room:
            remedy += f"; with dtype='bfloat16' this one needs {readable(needed(2))} and fits"
        what = f"the model {name!r} in {str(dtype).removeprefix('torch.')}"
        require_bytes(needed(dtype.itemsize), what, device=where, remedy=remedy)


def _read_weights(
    folder: Path, name: str, checkpoint: Checkpoint, dtype: torch.dtype, trust_remote_code: bool, allow_pickle: bool
) -> Any:
    from transformers import AutoModelForCausalLM

    reader: Any = AutoModelForCausalLM  # its signature knows nothing of output_loading_info
    try:
        with _quiet(), _progress(name, checkpoint):
            model, report = reader.from_pretrained(
                folder,
                dtype=dtype,
                trust_remote_code=trust_remote_code,
                local_files_only=True,
                use_safetensors=None if allow_pickle else True,
                output_loading_info=True,
            )
    except MemoryError as error:
        raise MemoryLimitError(f"memory ran out while {name!r} was read; choose a smaller model or dtype") from error
    except Exception as error:  # every model class and quantizer raises its own kinds
        raise LoadError(f"the weights in {folder} cannot be loaded ({_short(error)})") from error
    missing = sorted(report["missing_keys"])
    if missing:
        # transformers only warns and leaves these at random.
        raise LoadError(
            f"the weights in {folder} lack {len(missing)} tensors of {type(model).__name__} ({missing[0]}, ...): "
            "they would be random; the files belong to another kind of model"
        )
    return model


def _to_device(model: Any, device: torch.device, name: str) -> Any:
    import torch

    try:
        return model.to(device) if device.type != "cpu" else model
    except torch.OutOfMemoryError as error:
        gc.collect()
        raise MemoryLimitError(f"{name!r} does not fit on {device}; free memory there or pass device='cpu'") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' own bars and notes, which are set back afterwards."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _progress(name: str, checkpoint: Checkpoint) -> Any:
    """A spinner on stderr while a large model is read; nothing where nobody watches."""
    if checkpoint.stored_bytes < _LONG or not sys.stderr.isatty():
        return nullcontext()
    from rich.console import Console

    return Console(stderr=True).status(f"loading {name} ({readable(checkpoint.stored_bytes)})")


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"

"""``load_model``: a folder, a hub id, an embedded name or a loaded pair in, a model with its tokenizer out.

Everything that can be found wrong is found before weights are read: names, options, configuration, tokenizer, damaged
files, memory.
"""

from __future__ import annotations

import functools
import gc
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sakiyomi.embedded import embedded, is_embedded_name
from sakiyomi.errors import InputError, LoadError, MemoryLimitError
from sakiyomi.kernels.pack import PACKED, Prepared
from sakiyomi.loading.checkpoint import Checkpoint, read_checkpoint
from sakiyomi.loading.families import check_supported, read_config
from sakiyomi.loading.fit import check_memory, check_rounded
from sakiyomi.loading.gguf import read_gguf
from sakiyomi.loading.hub import fetch, looks_like_hub_id
from sakiyomi.loading.packed import copy_place, is_packed, read_packed, register, save_packed, source_key
from sakiyomi.memory import readable, require_bytes

if TYPE_CHECKING:
    import torch

    from sakiyomi.model import PackedModel

__all__ = ["Loaded", "load_model"]

logger = logging.getLogger("sakiyomi")
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
        prepared: where its linear layers are packed already, what is known of them.
        save: writes the packed copy of a model that was loaded to be rounded; None where there is nothing to write.
    """

    model: Any
    tokenizer: Any
    name: str
    folder: Path | None
    owned: bool
    prepared: Prepared | None = None
    save: Callable[[PackedModel], object] | None = None


def load_model(
    target: str | os.PathLike[str] | tuple[Any, Any],
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    quantize: str | None = None,
    trust_remote_code: bool = False,
    allow_pickle: bool = False,
) -> Loaded:
    """Load a causal language model and its tokenizer.

    Args:
        target: name of an embedded model, a folder in Hugging Face format, a hub id, or ``(model, tokenizer)``. A
            folder with the name of an embedded model is meant by ``"./tales"``.
        dtype: "auto" (as the checkpoint says), "float32", "bfloat16", "float16" or a torch dtype.
        device: "auto" (the first CUDA device if there is one, else the CPU), "cpu", "cuda" or "cuda:N".
        quantize: "int8" or "int4": the linear layers are to be rounded. On the CPU they come from the packed copy if
            there is one, else they stay on disk until ``PackedModel`` packs them, one after the other; on a GPU torchao
            rounds them here.
        trust_remote_code: run Python code that comes with the model. Never without this.
        allow_pickle: open pickle weights, which can run any code. Never without this.

    Raises:
        InputError: a value that cannot be meant.
        LoadError: something is missing, damaged, or cannot be reached.
        UnsupportedError: a kind of model that cannot work.
        MemoryLimitError: it does not fit; nothing was allocated.
    """
    wanted, place = parse_dtype(dtype), parse_device(device)
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

    gguf = _gguf_file(name)
    folder = gguf.parent if gguf is not None else _local_folder(name)
    beside = folder is not None and not is_embedded_name(name)
    if folder is None:
        folder = fetch(name, config_of, allow_pickle=allow_pickle, trust_remote_code=trust_remote_code)
    if gguf is not None:
        config, tokenizer = read_gguf(gguf)
        check_supported(config, name)
        checkpoint = Checkpoint((gguf,), {}, gguf.stat().st_size)
    else:
        config = config_of(folder)
        tokenizer = _read_tokenizer(folder, trust_remote_code)
        if is_packed(folder):
            return _from_packed(folder, name, tokenizer, wanted, place, quantize, trust_remote_code)
        checkpoint = read_checkpoint(folder, allow_pickle=allow_pickle)
    final = wanted or _stored_dtype(config, checkpoint)
    reader = _Reader(name, folder, checkpoint, final, place, trust_remote_code, allow_pickle, gguf)
    quantized = hasattr(config, "quantization_config")
    if quantize and quantized:
        raise InputError(f"quantize={quantize!r}: {name!r} is quantized already; leave quantize at None")
    if not quantize or place.type != "cpu":
        check_memory(name, checkpoint, final, place, quantized=quantized, quantize=quantize)
        model = reader.read(_torchao(quantize)) if quantize else reader.read()
        return Loaded(_to_device(model, place, name).eval(), tokenizer, name, folder, owned=True)
    key = source_key(folder, checkpoint)
    copy = copy_place(gguf or folder, quantize, final, beside=beside and gguf is None)
    if is_packed(copy):
        try:
            return _from_packed(copy, name, tokenizer, wanted, place, None, trust_remote_code, key=key)
        except LoadError as error:
            logger.warning("%s; it is made again now", error)
    model = reader.read() if gguf is not None else reader.read_later()
    check_rounded(name, model, quantize, final)
    save = functools.partial(save_packed, place=copy, source=folder, key=key, config=config, tokenizer=tokenizer)
    return Loaded(model.eval(), tokenizer, name, folder, owned=True, save=save)


def _from_packed(
    folder: Path,
    name: str,
    tokenizer: Any,
    dtype: torch.dtype | None,
    device: torch.device,
    quantize: str | None,
    trust_remote_code: bool,
    *,
    key: str | None = None,
) -> Loaded:
    if quantize is not None:
        raise InputError(f"quantize={quantize!r}: {name!r} is a packed copy already; leave quantize at None")
    if device.type != "cpu":
        raise InputError(f"device is '{device}' and {name!r} is packed for the CPU; load the model itself instead")
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    require_bytes(size, f"the packed model {name!r}", remedy="free memory, or pack it with quantize='int4'")
    register()
    checkpoint = read_checkpoint(folder)
    stored = _stored_dtype(read_config(folder, trust_remote_code=trust_remote_code), checkpoint)
    if dtype is not None and dtype != stored:
        raise InputError(f"dtype is {dtype} and {name!r} is packed in {stored}; leave dtype at 'auto'")
    reader = _Reader(name, folder, checkpoint, stored, device, trust_remote_code, False)
    model, prepared = read_packed(folder, reader.read, key=key)
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
            "tokenizer.json) or a .gguf file; pass the folder"
        )
    if not looks_like_hub_id(name):
        raise LoadError(f"there is no folder {name!r}; check the path (relative to {Path.cwd()})")
    return None


def _gguf_file(name: str) -> Path | None:
    path = Path(name).expanduser()
    return path if path.suffix.lower() == ".gguf" and path.is_file() else None


def _torchao(quantize: str) -> Any:
    """Torchao's way of rounding weights on a GPU; rows stay as they are."""
    try:
        from torchao.quantization import Int4WeightOnlyConfig, Int8WeightOnlyConfig
    except ImportError as error:
        raise LoadError(f"quantize={quantize!r} on a GPU needs torchao; install it with pip install torchao") from error
    from transformers import TorchAoConfig

    return TorchAoConfig({"int8": Int8WeightOnlyConfig, "int4": Int4WeightOnlyConfig}[quantize]())


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


@dataclass(frozen=True)
class _Reader:
    """Reads the weights of a folder (or of one GGUF file in it) through transformers."""

    name: str
    folder: Path
    checkpoint: Checkpoint
    dtype: torch.dtype
    device: torch.device
    trust_remote_code: bool
    allow_pickle: bool
    gguf: Path | None = None

    def read(self, quantization: Any = None, **options: Any) -> Any:
        """The model, in main memory; on its device if torchao is to round it there.

        Raises:
            LoadError: tensors are missing or cannot be read.
            MemoryLimitError: memory ran out all the same.
        """
        from transformers import AutoModelForCausalLM

        if quantization is not None:
            options |= {"quantization_config": quantization, "device_map": {"": self.device}}
        if self.gguf is not None:
            options["gguf_file"] = self.gguf.name
        else:
            options["use_safetensors"] = None if self.allow_pickle else True
        reader: Any = AutoModelForCausalLM  # its signature knows nothing of output_loading_info
        try:
            with _quiet(), _progress(self.name, self.checkpoint):
                model, report = reader.from_pretrained(
                    self.folder,
                    dtype=self.dtype,
                    trust_remote_code=self.trust_remote_code,
                    local_files_only=True,
                    output_loading_info=True,
                    **options,
                )
        except MemoryError as error:
            raise MemoryLimitError(f"memory ran out while {self.name!r} was read; choose a smaller model") from error
        except Exception as error:  # every model class and quantizer raises its own kinds
            raise LoadError(f"the weights in {self.folder} cannot be loaded ({_short(error)})") from error
        missing = sorted(report["missing_keys"])
        if missing:
            # transformers only warns and leaves these at random.
            raise LoadError(
                f"the weights in {self.folder} lack {len(missing)} tensors of {type(model).__name__} ({missing[0]}, "
                "...): they would be random; the files belong to another kind of model"
            )
        return model

    def read_later(self) -> Any:
        """The model with its linear layers on disk: accelerate's hooks bring each when it is needed.

        So a model can run, and be packed layer by layer, in the memory of its packed copy and one layer.
        """
        from accelerate.hooks import remove_hook_from_module

        with tempfile.TemporaryDirectory(prefix="sakiyomi-") as offload:  # stays empty where weights are safetensors
            model = self.read(device_map={"": "disk"}, offload_folder=offload)
            if any(Path(offload).iterdir()):  # weights that transformers had to convert; they are gone with the folder
                return self.read()
        for module in model.modules():
            hook = getattr(module, "_hf_hook", None)
            if hook is None or type(module) in PACKED:
                continue
            hook.pre_forward(module)
            remove_hook_from_module(module)
            vars(module).pop("forward", None)  # the class's own again, which a compiler and a copy understand
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.clone()  # what was read is the file itself, mapped
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

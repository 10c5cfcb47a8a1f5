"""Tokenizer and feature extractor of a model's folder."""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from typing import Any

from sakiyomi.core.checkpoint import GGUF_NOTE
from sakiyomi.core.errors import LoadError, UnsupportedError
from sakiyomi.core.gguf_files import gguf_file
from sakiyomi.core.hub import fetch
from sakiyomi.core.messages import one_line
from sakiyomi.core.model_folder import TOKENIZER_REMEDY, check_tokenizer, local_folder
from sakiyomi.model_executor.loading.families import has_encoder, read_config, text_config
from sakiyomi.model_executor.loading.reader import quiet
from sakiyomi.model_executor.loading.recorded_tokenizer import FileTokenizer

logger = logging.getLogger("sakiyomi")

_PROCESSORS = ("preprocessor_config.json", "processor_config.json")


def read_tokenizer(folder: Path, trust_remote_code: bool) -> Any:
    """The tokenizer of a model folder.

    Raises:
        LoadError: there is none, or it cannot be read.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if not trust_remote_code:
        check_tokenizer(folder)
    try:
        with quiet():
            if is_of_gguf(folder):  # its tokenizer is whole; AutoTokenizer puts a model's usual one in its place
                return PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
            return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    except Exception as error:  # the libraries below raise their own kinds, bare Exception among them
        raise LoadError(f"the tokenizer in {folder} cannot be read ({one_line(error)}); {TOKENIZER_REMEDY}") from error


def is_of_gguf(folder: Path) -> bool:
    """Whether a folder was made of a GGUF file."""
    return (folder / GGUF_NOTE).is_file()


def light_tokenizer(folder: Path, backend: Any = None) -> FileTokenizer:
    """The tokenizer of a folder made of a GGUF file; transformers' own is read when something else asks for it.

    Args:
        folder: of ``settings_folder``.
        backend: of the package tokenizers, where it is at hand.

    Raises:
        LoadError: it cannot be read.
    """
    try:
        return FileTokenizer(folder, functools.partial(read_tokenizer, folder, trust_remote_code=False), backend)
    except Exception as error:  # the package tokenizers raises bare Exception
        raise LoadError(f"the tokenizer in {folder} cannot be read ({one_line(error)}); {TOKENIZER_REMEDY}") from error


def check_sees(name: str, *, trust_remote_code: bool = False, allow_pickle: bool = False) -> None:
    """Refuse a model that reads no images, by its small files, before its weights are read or fetched.

    Raises:
        UnsupportedError: it reads no images.
        LoadError: it cannot be read.
    """

    def check(folder: Path) -> None:
        config = read_config(folder, trust_remote_code=trust_remote_code)
        if has_encoder(config) or text_config(config) is config:
            kind = getattr(config, "model_type", type(config).__name__)
            raise UnsupportedError(
                f"{name!r} ({kind}) reads no images; leave them out, or choose a model of images and text (gemma3, "
                "qwen2_5_vl, mistral3, llava)"
            )
        if not any((folder / file).is_file() for file in _PROCESSORS):
            raise UnsupportedError(
                f"{name!r} has no image processor ({_PROCESSORS[0]}), so that it reads no images; copy it from the "
                "original model"
            )

    if gguf_file(name) is not None:
        raise UnsupportedError(f"{name!r} is a GGUF file, whose text part alone runs; pass the model's own folder")
    folder = local_folder(name)
    if folder is None:  # `fetch` does not check a folder that is in the hub's cache already
        folder = fetch(name, check, allow_pickle=allow_pickle, trust_remote_code=trust_remote_code)
    check(folder)


def read_extractor(folder: Path, config: Any) -> Any:
    """The feature extractor of a speech model, or the processor of one that reads images; None: there is none.

    Raises:
        LoadError: it cannot be read.
    """
    from transformers import AutoFeatureExtractor, AutoProcessor

    if not has_encoder(config) and text_config(config) is config:
        return None
    if not any((folder / name).is_file() for name in _PROCESSORS):
        return None
    try:
        with quiet():
            reader: Any = AutoFeatureExtractor if has_encoder(config) else AutoProcessor
            return reader.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        if not has_encoder(config):  # it still reads text
            logger.warning("images cannot be read: the processor in %s does not load (%s)", folder, one_line(error))
            return None
        raise LoadError(
            f"the feature extractor in {folder} cannot be read ({one_line(error)}); copy preprocessor_config.json from "
            "the original model"
        ) from error

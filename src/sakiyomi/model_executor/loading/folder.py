"""A model's folder on this machine: where it is, and its tokenizer and feature extractor."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from sakiyomi.core.checkpoint import HEADS_FILE, MERGING_FILE, RETAINING_FILE
from sakiyomi.core.embedded import folder_of
from sakiyomi.core.errors import InputError, LoadError, UnsupportedError
from sakiyomi.core.messages import one_line
from sakiyomi.model_executor.loading.families import has_encoder, read_config, text_config
from sakiyomi.model_executor.loading.hub import fetch, looks_like_hub_id
from sakiyomi.model_executor.loading.reader import quiet

logger = logging.getLogger("sakiyomi")

__all__ = ["check_sees", "gguf_file", "local_folder", "read_extractor", "read_tokenizer"]

_PROCESSORS = ("preprocessor_config.json", "processor_config.json")
_HEADS = {
    HEADS_FILE: ("Medusa heads", "draft='medusa"),
    RETAINING_FILE: ("retaining heads", "cache='locret"),
    MERGING_FILE: ("merging convolutions", "cache='lococo"),
}
"""Files of what is trained for a model: what each holds, and how it is passed."""


def local_folder(name: str) -> Path | None:
    """The folder that a name stands for, None if it can only be a hub id."""
    path = folder_of(name)
    if name and path.is_dir():
        if not any(path.glob("model*.safetensors")):
            for file, (what, option) in _HEADS.items():
                if (path / file).is_file():
                    raise InputError(f"{name!r} holds {what} and no model; pass them as {option}:{name}'")
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


def gguf_file(name: str) -> Path | None:
    """The GGUF file that a name stands for; None if it stands for something else."""
    path = Path(name).expanduser()
    return path if path.suffix.lower() == ".gguf" and path.is_file() else None


def read_tokenizer(folder: Path, trust_remote_code: bool) -> Any:
    """The tokenizer of a model folder.

    Raises:
        LoadError: there is none, or it cannot be read.
    """
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
        raise LoadError(f"the tokenizer in {folder} cannot be read ({one_line(error)}); {remedy}") from error


def check_sees(name: str, *, trust_remote_code: bool = False, allow_pickle: bool = False) -> None:
    """Refuse a model that reads no images, as its small files say it, before weights are read or come from the hub.

    Raises:
        UnsupportedError: it does not.
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
    if folder is None:  # what is in the hub's cache already is not checked there
        folder = fetch(name, check, allow_pickle=allow_pickle, trust_remote_code=trust_remote_code)
    check(folder)


def read_extractor(folder: Path, config: Any) -> Any:
    """The feature extractor of a speech model, the processor of one that sees; None where the folder has none.

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
        if not has_encoder(config):  # text it reads without
            logger.warning("images cannot be read: the processor in %s does not load (%s)", folder, one_line(error))
            return None
        raise LoadError(
            f"the feature extractor in {folder} cannot be read ({one_line(error)}); copy preprocessor_config.json from "
            "the original model"
        ) from error

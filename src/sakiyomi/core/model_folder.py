"""A model's folder on this machine, looked at with the standard library alone: where it is, and whether it is whole.

What is wrong here is refused before torch is imported (``core.preflight``), and found again where models are loaded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from sakiyomi.core.checkpoint import HEADS_FILE, MERGING_FILE, RETAINING_FILE, read_checkpoint, read_json
from sakiyomi.core.draft_specs import BLOCK_ARCHITECTURES, EAGLE_ARCHITECTURE, MTP_ARCHITECTURE
from sakiyomi.core.embedded import folder_of
from sakiyomi.core.errors import InputError, LoadError

PACKED_FILE = "sakiyomi.json"
"""Of a folder that holds a packed copy of a model."""
STAGES = "stages.json"
"""Of a folder that holds a model which was cut."""
MOST_LAYERS = 10_000
TOKENIZER_REMEDY = "copy the tokenizer's files into the folder (tokenizer.json), or pass a (model, tokenizer) pair"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_HEADS = {
    HEADS_FILE: ("Medusa heads", "draft='medusa"),
    RETAINING_FILE: ("retaining heads", "cache='locret"),
    MERGING_FILE: ("merging convolutions", "cache='lococo"),
}
"""Files of what is trained for a model: what each holds, and how it is passed."""
_DRAFTERS = {
    EAGLE_ARCHITECTURE: ("an EAGLE head", "draft='eagle"),
    MTP_ARCHITECTURE: ("an MTP layer", "draft='mtp"),
    **dict.fromkeys(BLOCK_ARCHITECTURES, ("a block drafter", "draft='block")),
}
"""Models that only run beside another one, by their architecture: what each is, and how it is passed."""


def looks_like_hub_id(name: str) -> bool:
    """Whether a name can be a hub id (``name`` or ``owner/name``) rather than a path."""
    return bool(_HUB_ID.fullmatch(name)) and ".." not in name and "--" not in name


def local_folder(name: str) -> Path | None:
    """The folder that a name stands for, None if it can only be a hub id."""
    path = folder_of(name)
    if name and path.is_dir():
        if (held := _held(path)) is not None:
            what, option = held
            raise InputError(f"{name!r} holds {what} and no model; give {option}:{name}' beside its target")
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


def _held(path: Path) -> tuple[str, str] | None:
    """What a folder holds instead of a model, and how that is passed; None: it holds a model."""
    if not any(path.glob("model*.safetensors")):
        return next((said for file, said in _HEADS.items() if (path / file).is_file()), None)
    with suppress(LoadError):  # which is raised where the model is read
        for name in read_json(path / "config.json").get("architectures") or ():
            if name in _DRAFTERS:
                return _DRAFTERS[name]
    return None


def raw_config(folder: Path) -> dict[str, Any]:
    """What config.json of a model folder says.

    Raises:
        LoadError: there is none, it cannot be read, or it says what no model has; a damaged generation_config.json.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise LoadError(_without_config(folder))
    raw = read_json(path)
    _check_counts(path, raw)
    _check_ends(path, raw)
    if (settings := folder / "generation_config.json").is_file():
        _check_ends(settings, read_json(settings))
    return raw


def check_tokenizer(folder: Path) -> None:
    """Refuse a folder without a tokenizer's files: for some models transformers makes an empty one then.

    Raises:
        LoadError: there are none.
    """
    patterns = ("tokenizer.*", "vocab*", "spiece*", "sentencepiece*", "*.tiktoken", "tiktoken*", "tekken*", "*.model")
    if not any(any(folder.glob(pattern)) for pattern in patterns):
        raise LoadError(f"no tokenizer in {folder}; {TOKENIZER_REMEDY}")


def check_folder(folder: Path, *, allow_pickle: bool = False, remote_code: bool = False) -> None:
    """Refuse a folder that is no whole model.

    Args:
        folder: an existing one.
        allow_pickle: weights may be stored as pickle.
        remote_code: Python code in it may make its tokenizer.

    Raises:
        LoadError: configuration, tokenizer or weights are missing or damaged.
    """
    if (folder / STAGES).is_file():
        parts = sorted(folder.glob("stage-*"))  # a machine may have its own alone
        if not parts:
            raise LoadError(f"{folder} has {STAGES} and no stage; copy the folder of this machine's stage there, too")
        for part in parts:
            check_folder(part, allow_pickle=allow_pickle, remote_code=remote_code)
        return
    raw_config(folder)
    if not remote_code:
        check_tokenizer(folder)
    if not (folder / PACKED_FILE).is_file():
        read_checkpoint(folder, allow_pickle=allow_pickle)


def _without_config(folder: Path) -> str:
    if (folder / "adapter_config.json").is_file():
        return (
            f"{folder} holds an adapter, not a model (adapter_config.json, no config.json); merge it into its base "
            "model, save that, and pass its folder"
        )
    if files := sorted(folder.glob("*.gguf")):
        names = ", ".join([*(file.name for file in files[:3]), *(["..."] if files[3:] else [])])
        return f"{folder} holds no config.json and the GGUF files {names}; pass such a file, not the folder"
    return (
        f"no config.json in {folder}; expected a model folder in Hugging Face format (config.json, model.safetensors, "
        "tokenizer.json)"
    )


def _check_counts(path: Path, raw: Mapping[str, Any]) -> None:
    """Refuse numbers of layers that no model has: transformers would make a list of as many."""
    for name, value in raw.items():
        if isinstance(value, dict):
            _check_counts(path, value)
        elif "layers" in name and isinstance(value, int) and value > MOST_LAYERS:
            raise LoadError(f"{path} says that {name} is {value:.4g}; no model has so many: get the file again")


def _check_ends(path: Path, raw: Mapping[str, Any]) -> None:
    """Refuse end tokens that are none: transformers leaves such a file out in silence, and texts then have no end."""
    value = raw.get("eos_token_id")
    if value is not None and not all(type(token) is int for token in (value if isinstance(value, list) else [value])):
        raise LoadError(f"{path} says that eos_token_id is {value!r:.80}; expected a token or a list of them")

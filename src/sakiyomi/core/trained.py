"""What is trained beside a model, as a folder of its own: ``config.json`` and one file of tensors."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sakiyomi.core.checkpoint import read_header
from sakiyomi.core.errors import InputError, LoadError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["differences", "read_tensors", "write_trained"]


def write_trained(folder: Path, file: str, tensors: Mapping[str, Tensor], config: Mapping[str, Any], what: str) -> None:
    """Write both files; they are there whole or not at all.

    Args:
        folder: is made; what is in it is left, but for the two files that are written.
        file: name of that of the tensors.
        tensors: by name, on the CPU.
        config: plain values.
        what: it is, for messages.

    Raises:
        InputError: the config holds what JSON does not.
        LoadError: nothing can be written there.
    """
    from safetensors.torch import save_file

    try:
        text = json.dumps(config, indent=2)
    except TypeError as error:
        raise InputError(f"the recipe of the {what} is not plain ({error}); expected what JSON holds") from error
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".sakiyomi-", dir=folder) as fresh:
            save_file(dict(tensors), Path(fresh) / file)
            (Path(fresh) / "config.json").write_text(text + "\n", encoding="utf-8")
            for name in (file, "config.json"):
                (Path(fresh) / name).chmod(0o644)  # made private; they are there to be read by others
                (Path(fresh) / name).replace(folder / name)
    except OSError as error:
        raise LoadError(f"{what} cannot be written to {folder}: {error}") from error


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file.

    Raises:
        LoadError: it cannot be read, or is damaged.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    read_header(path)  # damage is found before anything is read
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise LoadError(f"{path} cannot be read ({error}); get it again") from error


def differences(own: Mapping[str, str], given: Mapping[str, str] | None) -> list[str]:
    """What of a fingerprint is known of a model and another there: "tokenizer", "weights"."""
    return [part for part in own if part in (given or {}) and given is not None and given[part] != own[part]]

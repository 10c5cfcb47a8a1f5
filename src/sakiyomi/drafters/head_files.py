"""What readers of folders share that hold a small model beside a target, whichever tool wrote them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sakiyomi.core.checkpoint import read_checkpoint
from sakiyomi.core.embedded import folder_of
from sakiyomi.core.errors import LoadError, UnsupportedError
from sakiyomi.core.trained import read_config, read_tensors

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["check_layers", "head_config", "head_tensors", "pop_tokens"]


def head_config(folder: str | Path, what: str) -> tuple[Path, dict[str, Any]]:
    """A folder and its configuration.

    Raises:
        LoadError: it has none, or it cannot be read; ``what`` it should hold, for the message.
    """
    folder = folder_of(os.fspath(folder))
    if not (folder / "config.json").is_file():
        raise LoadError(f"there is no {what} in {str(folder)!r} (no config.json); check the path")
    return folder, read_config(folder)


def head_tensors(folder: Path, what: str, *, allow_pickle: bool) -> dict[str, Tensor]:
    """All tensors of a folder.

    Args:
        folder: of the model.
        what: it holds, for messages.
        allow_pickle: read pickle files where there is no safetensors file.

    Raises:
        LoadError: they are missing or damaged, or in a pickle file that must not be opened.
    """
    files = read_checkpoint(folder, allow_pickle=allow_pickle).files
    return read_tensors(files, what, allow_pickle=allow_pickle)


def pop_tokens(tensors: dict[str, Tensor]) -> Tensor | None:
    """Take the vocabulary out of the tensors: the target's token for each of the model's own, which ``d2t`` stores as
    offsets; None: they are the same.
    """
    import torch

    tensors.pop("t2d", None)
    offsets = tensors.pop("d2t", None)
    return None if offsets is None else offsets + torch.arange(len(offsets))


def check_layers(layers: Sequence[int], count: int, what: str, folder: Path) -> None:
    """Refuse layers that a target of so many does not have.

    Raises:
        UnsupportedError: with both.
    """
    if not all(0 <= layer < count for layer in layers):
        raise UnsupportedError(
            f"the {what} in {folder} reads the outputs of layers {', '.join(map(str, layers))} and the target "
            f"has {count}, counted from 0: it belongs to another model"
        )

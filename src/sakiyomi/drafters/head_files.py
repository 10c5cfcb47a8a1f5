"""Folders that hold a small model beside a target, whichever tool wrote them: what all readers and writers share."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from sakiyomi.core.checkpoint import read_checkpoint
from sakiyomi.core.draft_specs import SPECULATORS
from sakiyomi.core.embedded import folder_of
from sakiyomi.core.errors import LoadError, UnsupportedError
from sakiyomi.core.trained import read_config, read_tensors

if TYPE_CHECKING:
    from torch import Tensor

OTHER = "it belongs to another model"
_TYPES: dict[Any, Callable[[Any], Any]] = {"bool": bool, "int": int, "float": float}
Options = TypeVar("Options")


@dataclass(frozen=True)
class DraftFile(Generic[Options]):
    """The contents of a folder with a head or drafter.

    Attributes:
        config: of its decoder layers, as transformers has it; `vocab_size` is the target's.
        options: of the head.
        tensors: by the names of speculators; those of the decoder layers by transformers' names.
        tokens: the target's token for each of the head's, (draft vocabulary,); None: they are the same.
        name: of the folder.
    """

    config: dict[str, Any]
    options: Options
    tensors: dict[str, Tensor]
    tokens: Tensor | None
    name: str


def head_config(folder: str | Path, what: str) -> tuple[Path, dict[str, Any]]:
    """A folder and its configuration.

    Raises:
        LoadError: it has none, or it cannot be read; ``what`` it should hold, for the message.
    """
    folder = folder_of(os.fspath(folder))
    if not (folder / "config.json").is_file():
        raise LoadError(f"no {what} in {str(folder)!r}: there is no config.json; check the path")
    return folder, read_config(folder)


def layer_config(config: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """The configuration of the decoder layers, which speculators keep in an entry of its own, with these entries."""
    return {**(config["transformer_layer_config"] if SPECULATORS in config else config), **more}


def named_options(kind: Any, names: Mapping[str, str], said: Callable[[str], Any]) -> dict[str, Any]:
    """Options that a configuration says, in the types that they have.

    Args:
        kind: dataclass of the options.
        names: what configurations call each.
        said: gives an entry of the configuration; None where it is missing.
    """
    types = {field.name: _TYPES[field.type] for field in fields(kind) if field.name in names}
    return {own: types[own](value) for own, name in names.items() if (value := said(name)) is not None}


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


def token_tensors(tokens: Tensor | None, vocab_size: int) -> dict[str, Tensor]:
    """What ``pop_tokens`` reads: offsets, and which of the target's tokens there are; nothing where all are."""
    import torch

    if tokens is None:
        return {}
    known = torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, tokens, True)
    return {"d2t": tokens - torch.arange(len(tokens)), "t2d": known}


def check_tensors(tensors: Mapping[str, Tensor], needed: Sequence[str], what: str, name: str | Path) -> None:
    """Refuse files that lack one of these tensors.

    Args:
        tensors: by name.
        needed: names.
        what: the files hold, and name: of their folder, for the message.

    Raises:
        LoadError: names the first that is missing.
    """
    lacking = next((tensor for tensor in needed if tensor not in tensors), None)
    if lacking is not None:
        raise LoadError(f"the {what} {name} lacks the tensor {lacking}; get it again")


def check_size(what: str, own: int, theirs: int, unit: str = "values") -> None:
    """Refuse a head with another size than the target's.

    Args:
        what: has this size, for the message: "the head X reads hidden states".
        own, theirs: sizes of the head and of the target.
        unit: of both.

    Raises:
        UnsupportedError: with both.
    """
    if own != theirs:
        raise UnsupportedError(f"{what} of {own} {unit}, and the target has {theirs}: {OTHER}")


def check_layers(layers: Sequence[int], count: int, what: str, folder: Path) -> None:
    """Refuse layers that a target of so many does not have.

    Raises:
        UnsupportedError: with both.
    """
    if not all(0 <= layer < count for layer in layers):
        raise UnsupportedError(
            f"the {what} in {folder} reads the outputs of layers {', '.join(map(str, layers))} and the target "
            f"has {count}, counted from 0: {OTHER}"
        )

"""Heads and layers that are trained for a model, in a folder of their own: ``config.json`` and a file of tensors.

Reads and writes all such files, ours and those of other tools; the modules that use the tensors know what they mean.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypedDict, Unpack

from sakiyomi.core.checkpoint import read_json
from sakiyomi.core.digests import Digests, load_tensors, save_tensors
from sakiyomi.core.errors import InputError, LoadError, UnsupportedError
from sakiyomi.core.files import whole_file

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger("sakiyomi")
BASE = "base_model_name_or_path"
"""Key of a configuration for the name of the target; other tools use the same one."""
CONFIG = "config"
"""Key of the configuration in the metadata of a tensor file."""
PICKLES = (".bin", ".pt", ".pth")
"""Endings of files that are opened only where that is allowed."""


class Origin(TypedDict, total=False):
    """Where tensors come from, for the configuration beside them.

    Attributes:
        base: name of the target.
        recipe: how they were trained, as plain values.
        fingerprint: of the target, see ``retaining.formats.fingerprint``.
    """

    base: str | Path | None
    recipe: Mapping[str, Any]
    fingerprint: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Where the tensors of a folder come from.

    Attributes:
        name: of the folder or file.
        base: what their configuration calls the target; None: it does not say.
        recipe: how they were trained; empty for files of others.
        fingerprint: of the target, see ``retaining.formats.fingerprint``; empty for files of others.
    """

    name: str
    base: str | None = None
    recipe: dict[str, Any] = field(default_factory=dict)
    fingerprint: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, config: Mapping[str, Any], **own: Any) -> Self:
        """What a configuration says, as far as it has the right kind, with the values of further fields."""
        base, recipe, fingerprint = (config.get(key) for key in (BASE, "recipe", "fingerprint"))
        return cls(
            **own,
            base=base if isinstance(base, str) else None,
            recipe=recipe if isinstance(recipe, dict) else {},
            fingerprint=fingerprint if isinstance(fingerprint, dict) else {},
        )

    def compare(
        self,
        what: str,
        sizes: Iterable[tuple[str, Sequence[object], Sequence[object]]],
        fingerprint: Mapping[str, str] | None,
    ) -> list[str]:
        """Refuse what was trained for a model of other sizes.

        Args:
            what: was trained, for the message.
            sizes: of each kind the message, with ``own``, ``layer`` and ``model``; those of the tensors; the model's.
            fingerprint: of the model, as far as it is known.

        Returns:
            What differs between models of the same sizes: "tokenizer", "weights", as far as both are known.

        Raises:
            UnsupportedError: sizes differ; with both numbers.
        """
        this, other = f"the {what} in {self.name}", "they belong to another model"
        for said, mine, theirs in sizes:
            if len(mine) != len(theirs):
                raise UnsupportedError(
                    f"{this} are those of {len(mine)} layers, and the model has {len(theirs)}: {other}"
                )
            for layer, (own, model) in enumerate(zip(mine, theirs, strict=True)):
                if own != model:
                    raise UnsupportedError(f"{this} {said.format(own=own, layer=layer, model=model)}: {other}")
        given = fingerprint or {}
        return [part for part, own in self.fingerprint.items() if given.get(part, own) != own]


def trained_config(sizes: Mapping[str, Any], **origin: Unpack[Origin]) -> dict[str, Any]:
    """The configuration that `Trained.of` reads: kind and sizes, the target's name, the recipe and the fingerprint."""
    named = {} if (base := origin.get("base")) is None else {BASE: str(base)}
    own = {"recipe": dict(origin.get("recipe", {})), "fingerprint": dict(origin.get("fingerprint", {}))}
    return {**sizes, **named, **own}


def write_trained(folder: Path, file: str, tensors: Mapping[str, Tensor], config: Mapping[str, Any], what: str) -> None:
    """Write both files, each whole or not at all.

    Args:
        folder: is made; what is in it is left, but for the two files that are written.
        file: name of that of the tensors.
        tensors: by name.
        config: plain values.
        what: it is, for messages.

    Raises:
        InputError: the config holds what JSON does not.
        LoadError: nothing can be written there.
    """
    try:
        text = json.dumps(config, indent=2)
    except TypeError as error:
        raise InputError(f"the recipe of the {what} is not plain ({error}); expected what JSON holds") from error
    advice = f"give another folder for the {what}"
    with whole_file(folder / file, advice) as fresh:
        save_tensors(fresh, tensors, {CONFIG: text})
    with whole_file(folder / "config.json", advice) as fresh:
        fresh.write_text(text + "\n", encoding="utf-8")


def read_config(folder: Path) -> dict[str, Any]:
    """The configuration of such a folder; empty where there is none.

    Our tensor files hold it too, and are believed: ``config.json`` may be damaged, or from before they were written.

    Raises:
        LoadError: neither can be read.
    """
    path = folder / "config.json"
    for file in sorted(folder.glob("*.safetensors")):
        text = Digests.of(file).header.metadata.get(CONFIG)
        if text is not None:
            found: dict[str, Any] = json.loads(text)
            with suppress(LoadError):
                if read_json(path) == found:
                    return found
            logger.warning("%s is not what was written with %s, whose own configuration is taken", path, file.name)
            return found
    return read_json(path) if path.is_file() else {}


def read_tensors(
    files: Iterable[Path], what: str, *, wanted: Callable[[str], object] | None = None, allow_pickle: bool = False
) -> dict[str, Tensor]:
    """Tensors of safetensors files and, where that is allowed, of pickle files.

    Args:
        files: to be read, in this order.
        what: they hold, for messages.
        wanted: whether a tensor is read, by its name; None: all are, and there must be nothing else.
        allow_pickle: open ``.bin``, ``.pt`` and ``.pth`` files too; tensors and nothing else are taken from them.

    Raises:
        LoadError: a file cannot be read, is damaged, or is a pickle file that must not be opened.
    """
    found: dict[str, Tensor] = {}
    for path in files:
        if path.suffix not in PICKLES:
            found |= load_tensors(path, wanted=wanted)
        elif allow_pickle:
            found |= _pickled(path, what, wanted)
        else:
            raise LoadError(
                f"{path} is a pickle file, which can run any code when it is opened; use a safetensors version of the "
                f"{what}, or pass allow_pickle=True if you trust where it came from"
            )
    return found


def _pickled(path: Path, what: str, wanted: Callable[[str], object] | None) -> dict[str, Tensor]:
    import torch

    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # damage shows as errors of any kind
        raise LoadError(f"{path} cannot be read ({error}); download it again") from error
    tensors = {
        name: value
        for name, value in (found.items() if isinstance(found, dict) else ())
        if isinstance(value, torch.Tensor) and (wanted is None or wanted(name))
    }
    if not isinstance(found, dict) or (wanted is None and len(tensors) < len(found)):
        raise LoadError(f"{path} holds no tensors by name; it is no file of {what}")
    return tensors

"""The models that are part of the package: ``embedded("tales")`` gives a folder in Hugging Face format.

It knows names and folders only; it reads no weights and imports neither torch nor transformers.
"""

from __future__ import annotations

from pathlib import Path

from sakiyomi.core.errors import InputError, LoadError

EMBEDDED = ("tales", "tales-draft", "retriever")
"""Names of models whose files are part of this version."""

HEADS = (
    "tales-medusa", "tales-eagle", "tales-block", "tales-retaining", "retriever-retaining", "retriever-retaining-query",
)  # fmt: skip
"""Names of heads that belong to one of them."""

DEFAULT = "tales"
"""The target of commands and measurements that are given no other one."""
DRAFTS = {"tales": "tales-draft"}
"""Of embedded targets: the draft model that was distilled from each."""
FREE_DRAFT = "recycle+suffix+prompt-lookup"
"""Of other targets: drafters that need no training. They propose what the target's passes ranked first after the same
tokens, and what the text repeats."""
MEDUSA_HEADS = {"tales": "tales-medusa"}
"""Of embedded targets: the Medusa heads that were trained on each."""
EAGLE_HEADS = {"tales": "tales-eagle"}
"""Of embedded targets: the EAGLE head that was trained on each."""
BLOCK_DRAFTERS = {"tales": "tales-block"}
"""Of embedded targets: the block drafter that was trained on each."""

EMBEDDED_ROOT = Path(__file__).resolve().parents[1] / "models"
"""The folder of all of them."""


def embedded(name: str) -> Path:
    """Folder of an embedded model, usable with transformers as it is.

    Args:
        name: one of ``EMBEDDED``, or of ``HEADS``.

    Returns:
        The folder: config.json, model.safetensors, the tokenizer, a card; of heads their weights instead of model and
        tokenizer.

    Raises:
        InputError: the name is not known.
        LoadError: the name is known and its files are missing from this installation.
    """
    if name not in (*EMBEDDED, *HEADS):
        raise InputError(f"no embedded model is called {name!r}; available are {', '.join(EMBEDDED)}")
    folder = EMBEDDED_ROOT / name
    if not (folder / "config.json").is_file():
        raise LoadError(
            f"the files of the embedded model {name!r} are not at {folder}; install the package again, or train the "
            "model with `sakiyomi train` and pass its folder"
        )
    return folder


def folder_of(name: str) -> Path:
    """The folder that a name stands for: that of an embedded one, else the path itself, which need not exist.

    Of a folder that a training run has written it is ``model`` in it: what was given with --out can be used as it is.

    Raises:
        InputError, LoadError: see ``embedded``.
    """
    if is_embedded_name(name):
        return embedded(name)
    path = Path(name).expanduser()
    trained = path / "model"
    run = (trained / "config.json").is_file() and not (path / "config.json").is_file()
    return trained if run else path


def in_package(folder: Path) -> bool:
    """Whether a folder is part of the installed package, where nothing is written: other users may share it."""
    return EMBEDDED_ROOT in folder.resolve().parents


def is_embedded_name(name: str) -> bool:
    """Whether the name belongs to an embedded model, or to heads of one."""
    return name in (*EMBEDDED, *HEADS)

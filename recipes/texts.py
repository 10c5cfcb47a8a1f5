"""The texts of a pair's run: those to train on, and others that are held out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sakiyomi.core.errors import InputError, LoadError
from sakiyomi.train import data
from sakiyomi.train.config import RunConfig, TextOptions
from sakiyomi.train.data import check_shares, parse_text, parse_valid

__all__ = ["FixedTexts", "read_texts", "text_files"]

HELD_BACK = 20
"""Without held-out files every document of this number is held out."""


def text_files(config: RunConfig) -> list[Path]:
    """All files that the run reads: those of its `TextOptions`, then the held-out ones."""
    specs = [parse_text(spec) for spec in config.group(TextOptions).text]
    check_shares("--text", specs)
    return [*(spec.path for spec in specs), *parse_valid(config.loop.valid).values()]


def read_texts(config: RunConfig) -> tuple[list[str], list[str]]:
    """Documents to train on, and those held out.

    Raises:
        LoadError, InputError: a file cannot be read; or there are too few documents to hold some back.
    """
    valid = parse_valid(config.loop.valid)
    paths = text_files(config)[: len(config.group(TextOptions).text)]
    found = [text for path in paths for text in data.read_texts(path)]
    if valid:
        return found, [text for path in valid.values() for text in data.read_texts(path)]
    if len(found) < HELD_BACK:
        raise InputError(
            f"the training text has {len(found)} documents, expected {HELD_BACK} or more to hold some back; give more, "
            "or held-out text with --valid NAME=FILE"
        )
    order = np.random.default_rng(config.loop.seed).permutation(len(found)).tolist()
    held = set(order[: len(found) // HELD_BACK])
    return [text for i, text in enumerate(found) if i not in held], [found[i] for i in sorted(held)]


class FixedTexts:
    """Rows that are made of the same texts at every step: a batch depends on the step alone.

    Args:
        documents: texts in parts.
    """

    def __init__(self, documents: list[list[str]]) -> None:
        self._documents = documents

    def part(self, batch: dict[str, Any], rows: slice) -> dict[str, Any]:
        """Some rows of a batch."""
        return {name: values[rows] for name, values in batch.items()}

    def state(self) -> list[int]:
        """Sizes of the texts."""
        return [len(self._documents), sum(map(len, self._documents))]

    def restore(self, state: Sequence[int]) -> None:
        """There is nowhere to go to, if the texts are those of the checkpoint.

        Raises:
            LoadError: they are others.
        """
        if self.state() != list(state):
            raise LoadError(
                f"the training files have {self.state()} documents and parts, those of the checkpoint had "
                f"{list(state)}: their text has changed; give the files as they were, or begin another run with "
                "another --out"
            )

"""Held-out examples of a pair's task: a file beside the model, so that whoever measures asks the same questions."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sakiyomi.core.errors import LoadError

__all__ = ["HELD_OUT", "Example", "read_examples", "write_examples"]

HELD_OUT = "held_out.jsonl"
"""Name of the file in a model's folder."""


@dataclass(frozen=True)
class Example:
    """What a model is given and what it should write.

    Attributes:
        task: "fix" (a text with mistakes), "continue" (the beginning of a story) or "tones" (a recording).
        source: the text it is given; of a recording nothing.
        target: the right answer; of "continue" only what the story's writer wrote.
        seed: of the recording, which is made anew from the target (`sounds.recording`).
    """

    task: str
    source: str
    target: str
    seed: tuple[int, ...] = ()

    @property
    def grounded(self) -> bool:
        """Whether the answer stands in what is given."""
        return self.task != "continue"


def write_examples(folder: Path, examples: Sequence[Example]) -> None:
    """Write them into a model's folder."""
    lines = [json.dumps(dataclasses.asdict(example), ensure_ascii=False) + "\n" for example in examples]
    (folder / HELD_OUT).write_text("".join(lines), encoding="utf-8")


def read_examples(folder: Path) -> list[Example]:
    """Those of a model's folder.

    Raises:
        LoadError: it has no such file, or one that cannot be read.
    """
    path = folder / HELD_OUT
    try:
        found = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        return [Example(one["task"], one["source"], one["target"], tuple(one["seed"])) for one in found]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LoadError(
            f"cannot read {path}: {error}; expected the folder of a target that `recipes/edits.py` or "
            "`recipes/tones.py` made, or that was inflated from one"
        ) from error

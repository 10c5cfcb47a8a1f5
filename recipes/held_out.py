"""Held-out examples of a pair's task: a file beside the model, so that whoever measures asks the same questions.

python recipes/held_out.py edits/target/model questions     # for `sakiyomi bench tasks`: questions/fix.jsonl and so on
python recipes/held_out.py tones/target/model questions     # questions/tones.jsonl and its recordings
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sakiyomi.core.errors import LoadError
from sounds import RATE, recording

__all__ = ["HELD_OUT", "Example", "read_examples", "write_examples", "write_questions"]

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


def write_questions(examples: Sequence[Example], folder: Path) -> None:
    """Write a file a task as `sakiyomi bench tasks` takes it, and recordings beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    for task in dict.fromkeys(example.task for example in examples):
        lines = []
        for number, example in enumerate(one for one in examples if one.task == task):
            asked = {"source": example.source} if example.source else {"audio": _recorded(example, folder, number)}
            lines.append(json.dumps(asked | {"reference": example.target}, ensure_ascii=False) + "\n")
        (folder / f"{task}.jsonl").write_text("".join(lines), encoding="utf-8")


def _recorded(example: Example, folder: Path, number: int) -> str:
    import soundfile

    name = f"{example.task}-{number}.flac"
    soundfile.write(folder / name, recording(example.target, example.seed), RATE)
    return name


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path, help="folder of the pair's target")
    parser.add_argument("out", type=Path, help="folder of the files")
    asked = parser.parse_args()
    try:
        write_questions(read_examples(asked.target), asked.out)
    except (LoadError, OSError) as error:
        sys.exit(f"error: {error}")

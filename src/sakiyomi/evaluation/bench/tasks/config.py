"""What `sakiyomi bench tasks` measures: the home of these defaults. Imports no torch: the command line reads it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from sakiyomi.core.checks import at_least
from sakiyomi.core.embedded import DEFAULT
from sakiyomi.core.errors import InputError
from sakiyomi.evaluation.bench.config import BenchConfig

KINDS = ("speech", "summaries", "translation", "code", "chat")
"""Kinds of tasks; all but chat are scored."""
FIELDS = ("source", "audio", "reference")
"""Of a line of a file."""
WAYS: dict[str, dict[str, str]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantize": "int8"},
    "offload": {"dtype": "auto", "offload": "disk"},
}
"""How the weights of a target are held, as arguments of ``LLM``."""


@dataclass(frozen=True)
class TasksConfig:
    """Which pair is measured, on which data, and how its weights are held.

    Attributes:
        data: KIND=FILE, again for each: speech, summaries, translation, code or chat, and a .jsonl (.gz allowed) or a
            folder saved by `datasets`; a line has source (a text) or audio (a sound file), and reference (a text, or a
            list of them).
        target: embedded name, folder or hub id.
        draft: auto (tales-draft, for tales alone), or model:FOLDER.
        columns: other names of a file's fields (again for each): source=article, reference=highlights.
        ways: float32, bfloat16, int8 (its weights; rows in bfloat16) and offload (weights on the disk), again for each.
        temperatures: 0 (greedy) and others (again for each).
        language: of the sounds, by name or code; by default the model detects it.
        device: auto (a GPU if torch sees one), cpu, cuda or cuda:N.
        gamma: draft tokens per round; one more contender chooses by itself.
        repeats: measured runs; one run before them warms up.
        max_new_tokens: new tokens of an answer, or of a part of a sound.
        count: most questions of each file.
        peers: also measure transformers.
    """

    data: tuple[str, ...] = field(default=(), metadata={"argument": "KIND=FILE"})
    target: str = DEFAULT
    draft: str = "auto"
    columns: tuple[str, ...] = ()
    ways: tuple[str, ...] = tuple(WAYS)
    temperatures: tuple[float, ...] = (0.0,)
    language: str | None = None
    device: str = "auto"
    gamma: int = 4
    repeats: int = 3
    max_new_tokens: int = 128
    count: int = 8
    peers: bool = True

    def __post_init__(self) -> None:
        at_least(self, gamma=1, repeats=1, max_new_tokens=1, count=1)
        unknown = [way for way in self.ways if way not in WAYS]
        if unknown or not self.ways:
            raise InputError(f"ways is {', '.join(unknown) or 'empty'}; expected some of {', '.join(WAYS)}")
        if not self.temperatures or min(self.temperatures) < 0:
            raise InputError(f"temperatures is {self.temperatures}; expected one or more, none below 0")
        self.files()
        self.names()

    def files(self) -> dict[str, Path]:
        """The file of each kind.

        Raises:
            InputError: a kind is not known, named twice, or there is none.
        """
        found = self._named("data", KINDS, f"KIND=FILE with each of {', '.join(KINDS)} at most once")
        if not found:
            raise InputError("no data is given; expected one or more, for instance: summaries=articles.jsonl")
        return {kind: Path(path).expanduser() for kind, path in found.items()}

    def names(self) -> dict[str, str]:
        """The names of a line's fields in the files.

        Raises:
            InputError: there is no such field, or it is named twice.
        """
        expected = "source=NAME, audio=NAME or reference=NAME, each at most once"
        return {name: name for name in FIELDS} | self._named("columns", FIELDS, expected)

    def _named(self, option: str, known: Collection[str], expected: str) -> dict[str, str]:
        found: dict[str, str] = {}
        for text in getattr(self, option):
            name, _, value = text.partition("=")
            if name not in known or not value or name in found:
                raise InputError(f"{option} is {text!r}; expected {expected}")
            found[name] = value
        return found

    @property
    def draft_model(self) -> str:
        """Name of the draft model, which transformers has to load too, see ``BenchConfig``."""
        return BenchConfig(target=self.target, draft=self.draft).draft_model

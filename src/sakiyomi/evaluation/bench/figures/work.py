"""What the sections of a report share: the pair, drafters beside the target, and pieces that are kept."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from torch import Tensor

from sakiyomi.core.embedded import MEDUSA_HEADS
from sakiyomi.core.errors import InputError, LoadError, SakiyomiError
from sakiyomi.core.params import SamplingParams
from sakiyomi.core.tokens import TokenNames
from sakiyomi.engine.llm import LLM
from sakiyomi.engine.plain import EngineView
from sakiyomi.evaluation.audit.reference import EngineReference
from sakiyomi.evaluation.bench.config import Note
from sakiyomi.evaluation.bench.figures.config import ReportConfig
from sakiyomi.evaluation.bench.frame import PairRow, Run
from sakiyomi.evaluation.bench.report import Row, race_notes
from sakiyomi.evaluation.bench.runner import Judge, Spread, Standing
from sakiyomi.evaluation.bench.study import append
from sakiyomi.model_executor.runner import ModelRunner

Logits = Callable[[Sequence[int], Sequence[int]], Tensor]
"""(prompt, text) -> (tokens of the text, V): what a model expects at each token of the text, before it came."""


class Work(PairRow):
    """A section of a report while it is measured. Models are loaded when they are needed, once for all sections.

    Args:
        report: the settings.
        note: receives lines of progress.
    """

    def __init__(self, report: ReportConfig, note: Note) -> None:
        super().__init__("report", report.bench(), note)
        self.report = report
        self._drafters: dict[str, Any] = {}

    def begin(self, section: str, note: Note) -> None:
        """Turn to another section."""
        self.name, self._note, self.lines, self.notes = section, note, [], []

    @cached_property
    def alone(self) -> LLM:
        """The target without a drafter; drafters come beside it."""
        return self.pair.llm("none")

    @cached_property
    def text(self) -> Callable[[int], str]:
        """The text of a token alone; a space in front of it is part of it."""
        names = TokenNames(self.alone.tokenizer)
        return lambda token: names(token)[0]

    @property
    def draft(self) -> str:
        """Spec of the pair's draft model."""
        return f"model:{self.config.draft_model}"

    @property
    def medusa(self) -> str:
        """Spec of the target's heads.

        Raises:
            InputError: none are known.
        """
        return f"medusa:{self.config.medusa_heads}"

    @property
    def c_hat(self) -> float:
        """Parameters of the draft by those of the target."""
        return float(self.pair.draft.model.num_parameters() / self.pair.target.model.num_parameters())

    def drafter(self, spec: str) -> Any:
        """A drafter beside the target, made once."""
        if spec not in self._drafters:
            self._drafters[spec] = self.alone.drafter(spec)
        return self._drafters[spec]

    def engine(self, spec: str | None = None) -> EngineView:
        """The target with this drafter; None: without."""
        return EngineView(self.alone, None if spec is None else self.drafter(spec), strict=True)

    def params(self, **more: Any) -> SamplingParams:
        """Of the texts, which end tokens do not end."""
        return super().params(**{"ignore_eos": True} | more)

    def written(self, **more: Any) -> list[list[int]]:
        """What the target writes by itself after each prompt."""
        engine, params = self.engine(), self.params(**more)
        return [engine.generate([prompt], params)[0].token_ids for prompt in self.pair.prompts]

    def rows(self) -> tuple[Logits, Logits]:
        """What target and draft expect."""
        return runner_rows(self.alone.target), runner_rows(self.drafter(self.draft).model)

    def raced(self, runs: Mapping[str, Run], judge: Judge | None = None, where: str = "") -> list[Standing]:
        """Run a race, and add its notes to those of the section."""
        standings = self.race(runs, judge, where)
        self.notes += [f"{where}: {text}" if where else text for text in race_notes(standings)]
        return standings

    def measured(self, lines: Sequence[Mapping[str, Any]], **conditions: Any) -> Row:
        """The section's row; its title is said in ``figures.toml``."""
        known = {**self.pair.names, **self.pair.dtypes, "graphs": self.alone.target.mode, **self.amount()}
        return Row(self.name, "", lines, known | conditions, self.notes)

    def amount(self, most: int | None = None) -> dict[str, Any]:
        """How many texts, and how long; ``most``: no more prompts than that."""
        config, prompts = self.config, self.pair.prompts[:most]
        return {"prompts": len(prompts), "max_new_tokens": config.max_new_tokens, "runs": config.repeats}

    def sized(self, size: str) -> tuple[PairRow, str | None]:
        """The pair with a target of another size, and the heads that go with it, if there are any.

        Args:
            size: "" is the target as it is; else the folder or hub id of a checkpoint of its family.

        Raises:
            SakiyomiError: there is no such checkpoint, or it is of another family.
        """
        if not size:
            own = PairRow(self.name, self.config, self._note, self.pair)
            return own, self.config.heads or MEDUSA_HEADS.get(self.config.target)
        row, heads = self.changed(target=size, draft=self.draft), Path(size).expanduser() / "medusa"
        if row.pair.target.tokenizer.get_vocab() != self.pair.draft.tokenizer.get_vocab():
            raise InputError(f"{size} has another tokenizer than the draft {self.draft}; give one of its family")
        return row, str(heads) if heads.is_dir() else None

    # ------------------------------------------------------------ kept pieces

    @property
    def _file(self) -> Path:
        return Path(self.report.out) / "data" / f"{self.name}.jsonl"

    def forget(self) -> None:
        """Measure all pieces of the section again."""
        self._file.unlink(missing_ok=True)

    def pieces(self, key: str, values: Iterable[Any], measure: Callable[[Any], dict[str, Any]]) -> list[dict[str, Any]]:
        """Pieces of a section that takes long: each is kept when it is measured, and found there the next time.

        Args:
            key: what differs between the pieces.
            values: of the key, one each piece; one that cannot be measured is left out with a note.
            measure: gives the ``lines`` and ``notes`` of one value, and more, as JSON values.

        Raises:
            SakiyomiError: none could be measured, or they cannot be kept.
        """
        asked, found = self.report.asked(("heads",)), []
        failed: SakiyomiError | None = None
        for value in values:
            try:
                found.append(self._piece(asked | {key: value}, partial(measure, value)))
            except SakiyomiError as error:
                failed = error
                what = self.config.target if value == "" else value
                self.notes.append(f"{what} is left out: {error.message}")
        if not found and failed is not None:
            raise failed
        self.notes += [note for one in found for note in one["notes"]]
        return found

    def _piece(self, asked: Mapping[str, Any], measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """A piece as it was measured before, or measured now; lines that are damaged do not count."""
        path = self._file
        try:
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
        except OSError as error:
            raise LoadError(f"cannot read {path}: {error.strerror or error}; give another folder") from None
        for line in lines:
            with suppress(ValueError, KeyError, TypeError):
                before = json.loads(line)
                if before["asked"] == asked:
                    return dict(before["found"])
        found = measure()
        append(path, [{"asked": asked, "found": found}], "give another folder")
        return found


def runner_rows(model: ModelRunner) -> Logits:
    """What a model expects as our engine runs it."""
    return EngineReference(model).logits


def line_of(standing: Standing, **more: Any) -> dict[str, Any]:
    """Speeds of a contender for a table: milliseconds a token too; none where its text is not the baseline's."""
    shown = standing.to_dict()
    speed = shown["tokens_per_second"]
    names = ("tokens_per_second", "low", "high", "ratio", "tau", "alpha", "equal")
    found = {name: shown[name] for name in names if name in shown}
    return more | {"name": standing.name, "ms_per_token": 1000 / speed if speed else None} | found


def race_piece(name: str, standings: Sequence[Standing], **more: Any) -> dict[str, Any]:
    """One race of several as a piece: a line for each contender, and the notes of the race.

    Args:
        name: of the race.
        standings: results of its contenders.
        more: figures of every line.
    """
    spread = Spread.shown(standings)
    lines = [line_of(standing, **more) | {"A/A": spread} for standing in standings]
    return {"lines": lines, "notes": [f"{name}: {text}" for text in race_notes(standings)]}

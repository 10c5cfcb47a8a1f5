"""What the sections of a report share: the pair, drafters beside the target, timed runs, and pieces that are kept."""

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
from sakiyomi.core.outputs import Stats
from sakiyomi.core.params import SamplingParams
from sakiyomi.core.tokens import TokenNames
from sakiyomi.engine.llm import LLM
from sakiyomi.engine.plain import EngineView
from sakiyomi.evaluation.audit.reference import EngineReference
from sakiyomi.evaluation.bench.config import Note
from sakiyomi.evaluation.bench.figures.config import ReportConfig
from sakiyomi.evaluation.bench.frame import PairRow, generated
from sakiyomi.evaluation.bench.models import Pair
from sakiyomi.evaluation.bench.report import race_notes
from sakiyomi.evaluation.bench.runner import Lap, Spread, Standing
from sakiyomi.evaluation.bench.study import append
from sakiyomi.model_executor.runner import ModelRunner

Logits = Callable[[Sequence[int], Sequence[int]], Tensor]
"""(prompt, text) -> (tokens of the text, V): what a model expects at each token of the text, before it came."""


class Work:
    """The models of a report; nothing is loaded before it is asked for.

    Args:
        config: the settings.
        note: is told what is going on.
    """

    def __init__(self, config: ReportConfig, note: Note) -> None:
        self.config, self.note = config, note
        self._drafters: dict[str, Any] = {}

    @cached_property
    def pair(self) -> Pair:
        """Target and draft."""
        return Pair(self.config.bench())

    @cached_property
    def llm(self) -> LLM:
        """The target alone; drafters come beside it."""
        return self.pair.llm("none")

    @cached_property
    def text(self) -> Callable[[int], str]:
        """The text of a token alone; a space in front of it is part of it."""
        names = TokenNames(self.llm.tokenizer)
        return lambda token: names(token)[0]

    @property
    def draft(self) -> str:
        """Spec of the pair's draft model."""
        return f"model:{self.pair.config.draft_model}"

    @property
    def medusa(self) -> str:
        """Spec of the target's heads.

        Raises:
            InputError: none are known.
        """
        return f"medusa:{self.pair.config.medusa_heads}"

    @property
    def prompts(self) -> list[list[int]]:
        """Token ids."""
        return self.pair.prompts

    @property
    def c_hat(self) -> float:
        """Parameters of the draft by those of the target."""
        return float(self.pair.draft.model.num_parameters() / self.pair.target.model.num_parameters())

    def drafter(self, spec: str) -> Any:
        """A drafter beside the target, made once."""
        if spec not in self._drafters:
            self._drafters[spec] = self.llm.drafter(spec)
        return self._drafters[spec]

    def engine(self, spec: str | None = None) -> EngineView:
        """The target with this drafter; None: without."""
        return EngineView(self.llm, None if spec is None else self.drafter(spec), strict=True)

    def params(self, **more: Any) -> SamplingParams:
        """Of the texts; chains of the configured gamma if nothing else is said."""
        usual = {"max_new_tokens": self.config.max_new_tokens, "gamma": self.config.gamma, "ignore_eos": True}
        return SamplingParams(**usual | more)

    def written(self, **more: Any) -> list[list[int]]:
        """What the target writes by itself behind each prompt."""
        engine, params = self.engine(), self.params(**more)
        return [engine.generate([prompt], params)[0].token_ids for prompt in self.prompts]

    def rows(self) -> tuple[Logits, Logits]:
        """What target and draft expect."""
        return runner_rows(self.llm.target), runner_rows(self.drafter(self.draft).model)

    def row(self, what: str, **changed: Any) -> PairRow:
        """A row about the pair, or with some settings changed about another one."""
        config = self.config.bench(**changed)
        return PairRow(what, config, self.note, None if changed else self.pair)

    def conditions(self, **more: Any) -> dict[str, Any]:
        """Conditions of a section about the pair, after its runs."""
        found = {**self.pair.names, **self.pair.dtypes, "graphs": self.llm.target.mode}
        return found | self.laps() | more

    def laps(self, most: int | None = None) -> dict[str, Any]:
        """How many texts, and how long; ``most``: no more prompts than that."""
        config = self.config
        return {"prompts": len(self.prompts[:most]), "max_new_tokens": config.max_new_tokens, "laps": config.repeats}

    def sized(self, what: str, size: str) -> tuple[PairRow, str | None]:
        """The pair with a target of another size, and the heads that go with it, if there are any.

        Args:
            what: names the row.
            size: "" is the target as it is; else the folder or hub id of a checkpoint of its family.

        Raises:
            SakiyomiError: there is no such checkpoint, or it is of another family.
        """
        if not size:
            return self.row(what), self.config.heads or MEDUSA_HEADS.get(self.config.target)
        row, heads = self.row(what, target=size, draft=self.draft), Path(size).expanduser() / "medusa"
        if row.pair.target.tokenizer.get_vocab() != self.pair.draft.tokenizer.get_vocab():
            raise InputError(f"{size} has another tokenizer than the draft {self.draft}; give one of its family")
        return row, str(heads) if heads.is_dir() else None

    # ------------------------------------------------------------ kept pieces

    def forget(self, section: str) -> None:
        """Measure all pieces of a section again."""
        self._file(section).unlink(missing_ok=True)

    def pieces(
        self, section: str, key: str, values: Iterable[Any], measure: Callable[[Any], dict[str, Any]], notes: list[str]
    ) -> list[dict[str, Any]]:
        """Pieces of a section that takes long: each is kept when it is measured, and found there the next time.

        Args:
            section: its name.
            key: what differs between the pieces.
            values: of the key, one each piece.
            measure: gives the ``lines`` and ``notes`` of one value, and more, as JSON values.
            notes: takes a line for each piece that could not be measured.

        Raises:
            SakiyomiError: none could be measured, or they cannot be kept.
        """
        asked, found = self.config.asked(("heads",)), []
        failed: SakiyomiError | None = None
        for value in values:
            try:
                found.append(self._piece(self._file(section), asked | {key: value}, partial(measure, value)))
            except SakiyomiError as error:
                failed = error
                what = self.config.target if value == "" else value
                notes.append(f"{what} is left out: {error.message}")
        if not found and failed is not None:
            raise failed
        notes += [note for one in found for note in one["notes"]]
        return found

    def _file(self, section: str) -> Path:
        return Path(self.config.out) / "data" / f"{section}.jsonl"

    def _piece(self, path: Path, asked: Mapping[str, Any], measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """A piece as it was measured before, or measured now; lines that are damaged do not count."""
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


def lap(way: Any, prompts: Sequence[Sequence[int]], params: SamplingParams) -> Lap:
    """All prompts, one after the other, with what the engine counted.

    Args:
        way: an ``LLM`` or an ``EngineView``.
        prompts: token ids.
        params: of all of them.
    """
    found, done = generated(way, [([prompt], params) for prompt in prompts])
    return found.more(alpha=Stats.total(result.stats for result in done).alpha)


def line_of(standing: Standing, **more: Any) -> dict[str, Any]:
    """Speeds of a contender for a table: milliseconds a token too; none where its text is not the baseline's."""
    shown = standing.to_dict()
    speed = shown["tokens_per_second"]
    names = ("tokens_per_second", "low", "high", "ratio", "tau", "alpha", "equal")
    found = {name: shown[name] for name in names if name in shown}
    return more | {"name": standing.name, "ms_per_token": 1000 / speed if speed else None} | found


def race_piece(name: str, standings: Sequence[Standing], **more: Any) -> dict[str, Any]:
    """One race of several as a piece: a line each contender, and what has to be said of it.

    Args:
        name: of the race.
        standings: what came of it.
        more: figures of every line.
    """
    spread = Spread.shown(standings)
    lines = [line_of(standing, **more) | {"A/A": spread} for standing in standings]
    return {"lines": lines, "notes": [f"{name}: {text}" for text in race_notes(standings)]}

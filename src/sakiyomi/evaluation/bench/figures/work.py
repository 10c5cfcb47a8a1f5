"""What the sections of a report share: the pair, loaded once, drafters beside the target, and laps over its prompts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from sakiyomi.core.embedded import MEDUSA_HEADS
from sakiyomi.core.errors import InputError
from sakiyomi.core.outputs import Stats
from sakiyomi.core.params import SamplingParams
from sakiyomi.core.tokens import TokenNames
from sakiyomi.engine.llm import LLM
from sakiyomi.engine.plain import EngineView
from sakiyomi.evaluation.bench.config import Note
from sakiyomi.evaluation.bench.figures.config import ReportConfig
from sakiyomi.evaluation.bench.figures.pieces import Pieces
from sakiyomi.evaluation.bench.frame import PairRow, generated
from sakiyomi.evaluation.bench.models import Pair
from sakiyomi.evaluation.bench.report import race_notes
from sakiyomi.evaluation.bench.runner import Lap, Standing

COUNT = re.compile(r"\d+(\.\d+)?[KMB]?", re.IGNORECASE)  # of parameters

__all__ = ["Work", "lap", "line_of", "notes_of"]


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
    def _names(self) -> TokenNames:
        return TokenNames(self.llm.tokenizer)

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

    def drafter(self, spec: str) -> Any:
        """A drafter beside the target, made once."""
        if spec not in self._drafters:
            self._drafters[spec] = self.llm.drafter(spec)
        return self._drafters[spec]

    def text(self, token: int) -> str:
        """A token alone; a space in front of it is part of it."""
        return self._names(token)[0]

    def engine(self, spec: str | None = None) -> EngineView:
        """The target with this drafter; None: without."""
        return EngineView(self.llm, None if spec is None else self.drafter(spec), strict=True)

    def params(self, **more: Any) -> SamplingParams:
        """Of the texts; chains of the configured gamma if nothing else is said."""
        usual = {"max_new_tokens": self.config.max_new_tokens, "gamma": self.config.gamma, "ignore_eos": True}
        return SamplingParams(**usual | more)

    def pieces(self, section: str) -> Pieces:
        """What has been measured of a section that takes long."""
        return Pieces(Path(self.config.out) / "data" / f"{section}.jsonl")

    def row(self, what: str, **changed: Any) -> PairRow:
        """A row about the pair, or with some settings changed about another one."""
        config = self.config.bench(**changed)
        return PairRow(what, config, self.note, None if changed else self.pair)

    def conditions(self, **more: Any) -> dict[str, Any]:
        """What has to be known of a section about the pair, after its laps."""
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
            size: "" is the target as it is; else the checkpoint of a model of its family.

        Raises:
            SakiyomiError: there is no such size of this target.
        """
        if not size:
            return self.row(what), self.config.heads or MEDUSA_HEADS.get(self.config.target)
        if COUNT.fullmatch(size) and not Path(size).is_dir():
            raise InputError(
                f"size {size!r} is a number of parameters; expected a checkpoint. python benchmarks/inflate.py FOLDER "
                f"--params {size} in the source repository writes a model of that size; give its FOLDER"
            )
        row, own_heads = self.row(what, target=size, draft=self.draft), Path(size).expanduser() / "medusa"
        if row.pair.target.tokenizer.get_vocab() != self.pair.draft.tokenizer.get_vocab():
            raise InputError(f"{size} has another tokenizer than the draft {self.draft}; give one of its family")
        return row, str(own_heads) if own_heads.is_dir() else None


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


def notes_of(name: str, standings: Sequence[Standing]) -> list[str]:
    """What has to be said of one race of several."""
    return [f"{name}: {text}" for text in race_notes(standings)]

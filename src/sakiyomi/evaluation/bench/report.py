"""Results of a benchmark as JSON values and as lines of text. Measures nothing."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from sakiyomi.core.memory import readable
from sakiyomi.evaluation.bench.runner import Spread, Standing


@cache
def columns() -> dict[str, Any]:
    """How figures are shown in tables: ``columns.toml``."""
    return tomllib.loads(Path(__file__).with_name("columns.toml").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Row:
    """One row of the benchmark: a small table with its conditions.

    Attributes:
        name: as in ``--rows``.
        title: what is measured, with the unit.
        lines: the table, one mapping a line.
        conditions: what has to be known to measure it again.
        notes: differences of outputs and the like.
        error: why there is nothing to show.
    """

    name: str
    title: str
    lines: Sequence[Mapping[str, Any]]
    conditions: Mapping[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()
    error: str | None = None

    def table(self) -> list[dict[str, Any]]:
        """The lines as they are shown: short heads, handy units, the same columns in each."""
        hidden, last = (columns()[part]["names"] for part in ("json_only", "last"))
        names = dict.fromkeys(name for line in self.lines for name in line if name not in (*hidden, *last))
        names |= dict.fromkeys(name for name in last if any(name in line for line in self.lines))
        return [dict(_cell(name, line.get(name)) for name in names) for line in self.lines]

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "row": self.name,
            "title": self.title,
            "lines": [dict(line) for line in self.lines],
            "conditions": dict(self.conditions),
            "notes": list(self.notes),
            "error": self.error,
        }


def of_race(
    name: str,
    title: str,
    standings: Sequence[Standing],
    *,
    where: str = "",
    lines: Sequence[Mapping[str, Any]] | None = None,
    **conditions: Any,
) -> Row:
    """A row from contenders that ran side by side, the baseline first.

    Args:
        name, title: of the row.
        standings: the results.
        where: names the race, if it is one of several; names of contenders and notes begin with it.
        lines: of the table, instead of one for each contender.
        conditions: further ones; the number of runs and the noise are added.
    """
    before = f"{where}: " if where else ""
    conditions["runs"] = len(standings[0].runs)
    if lines is None or not where:
        conditions[f"A/A {where}".strip()] = Spread.shown(standings)
    notes = race_notes(standings) if lines is None else _differences(standings)
    if lines is None:
        shown = [standing.to_dict() | {"name": before + standing.name} for standing in standings]
        lines = [{key: value for key, value in line.items() if key not in ("alpha", "note")} for line in shown]
    return Row(name, title, lines, conditions, [before + text for text in notes])


def race_notes(standings: Sequence[Standing]) -> list[str]:
    """Notes on a race: texts that differ, contenders with other weights, and ratios within the noise."""
    return [*_differences(standings), *unclaimed(standings)]


def _differences(standings: Sequence[Standing]) -> list[str]:
    apart = [f"{standing.name}: {standing.agreement.note}" for standing in standings if standing.agreement.note]
    return [*apart, *_of_other_weights(standings)]


def _of_other_weights(standings: Sequence[Standing]) -> list[str]:
    """Contenders with other weights than the baseline, and whose texts theirs were compared with."""
    groups: dict[str | None, list[str]] = {}
    for standing in standings:
        if standing.against is not None:
            compared = None if standing.agreement.equal is None else standing.against
            groups.setdefault(compared, []).append(standing.name)
    return [
        f"other weights than {standings[0].name}, {f'compared with {name}' if name else 'not compared'}: "
        f"{'; '.join(names)}"
        for name, names in groups.items()
    ]


def unclaimed(standings: Sequence[Standing]) -> list[str]:
    """Contenders that are not known to be faster or slower than the baseline, in at most one sentence."""
    spread = Spread.of(standings)
    if spread is None:
        return ["one run: the noise of this machine is not known"]
    names = [standing.name for standing in standings[1:] if standing.agreement.accepted and standing.ratio in spread]
    return [f"no difference from {standings[0].name} (two equal things: {spread}): {', '.join(names)}"] if names else []


def _cell(name: str, value: Any) -> tuple[str, Any]:
    head, scale = columns()["heads"].get(name, (name, 1))
    for end, (unit, factor) in columns()["endings"].items():
        if head == name and name.endswith(end):
            head, scale = name.removesuffix(end).replace("_", " ") + unit, factor
    return head, value if value is None or scale == 1 else value * scale


def condition_line(conditions: Mapping[str, Any]) -> str:
    """Conditions in one line, bytes in units that are read easily; what is not known is left out."""
    shown = []
    for key, value in conditions.items():
        if value is None:
            continue
        if key.endswith("_bytes"):
            value = readable(value)
        text = f"{value:.3g}" if isinstance(value, float) else str(value)
        shown.append(f"{key.removesuffix('_bytes').replace('_', ' ')} {text}")
    return "; ".join(shown)

"""Results of a benchmark as JSON values and as lines of text. Measures nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sakiyomi.bench.runner import Standing

__all__ = ["Row", "condition_line", "of_race"]


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


def of_race(name: str, title: str, standings: Sequence[Standing], **conditions: Any) -> Row:
    """A row from contenders that ran side by side; notes move from the table to below it."""
    lines = [standing.to_dict() for standing in standings]
    notes = [f"{line['name']}: {line['note']}" for line in lines if line["note"]]
    for line in lines:
        del line["note"]
    return Row(name, title, lines, conditions | {"laps": len(standings[0].laps)}, notes)


def condition_line(conditions: Mapping[str, Any]) -> str:
    """Conditions in one line; what is not known is left out."""
    shown = []
    for key, value in conditions.items():
        if value is None:
            continue
        text = f"{value:.3g}" if isinstance(value, float) else str(value)
        shown.append(f"{key.replace('_', ' ')} {text}")
    return "; ".join(shown)

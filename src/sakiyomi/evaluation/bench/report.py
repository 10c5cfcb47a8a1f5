"""Results of a benchmark as JSON values and as lines of text. Measures nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sakiyomi.core.memory import readable
from sakiyomi.evaluation.bench.runner import Spread, Standing

HEADS = {
    "tokens_per_second": ("tok/s", 1),
    "characters_per_second": ("char/s", 1),
    "acceptance_rate": ("acc", 1),
    "draft_ms": ("draft", 1),
    "score_ms": ("score", 1),
    "overhead_ms": ("rest", 1),
    "alignment_ms": ("align", 1),
    "kv_bytes": ("KV MB", 1e-6),
    "bandwidth_share": ("bw %", 100),
    "perplexity": ("ppl", 1),
    "text_perplexity": ("text ppl", 1),
    "ratio_8_to_1": ("8:1", 1),
    "speculative_tokens_per_second": ("spec tok/s", 1),
    "oracle_tokens_per_second": ("tok/s", 1),
    "speculative_latency_seconds": ("spec s", 1),
    "accuracy": ("right", 100),
    "accuracy_spread": ("±", 100),
    "accuracy_error": ("s.e.", 100),
    "of_full": ("of full", 100),
    "agreement": ("agree", 100),
    "agreement_spread": ("± agree", 100),
    "perplexity_spread": ("± ppl", 1),
    "kv_slope": ("KV slope", 1),
    "process_slope": ("grown slope", 1),
    "resident_growth_bytes": ("grown MB", 1e-6),
    "tokens_held": ("tokens", 1),
    "seconds_per_answer": ("s/answer", 1),
    "over_assisted": ("x assisted", 1),
    "word_error_rate": ("WER", 1),
    "rouge_l": ("ROUGE-L", 1),
    "bleu": ("BLEU", 1),
    "chrf": ("chrF", 1),
}
"""Short heads of columns, and what their values are multiplied by, so that a table fits in 120 columns."""
UNITS = {"_tokens_per_second": (" tok/s", 1), "_latency_seconds": (" s", 1), "_bytes": (" MB", 1e-6)}
"""The same by the end of a name that is not in ``HEADS``."""
JSON_ONLY = {"tokens", "latency_seconds", "plain_low", "plain_high", "speculative_low", "speculative_high", "weights"}
JSON_ONLY |= {"spec", "kind", "pairs", "starred", "tasks", "seeds", "decode_low_high", "grown_bytes"}
JSON_ONLY |= {"series", "by_category"}
"""Figures that no table has room for; of other weights a note tells."""
LAST = ("far_bytes", "perplexity", "match", "equal", "state")
"""Columns at the end, whichever line has further figures."""


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
        names = dict.fromkeys(name for line in self.lines for name in line if name not in JSON_ONLY | set(LAST))
        names |= dict.fromkeys(name for name in LAST if any(name in line for line in self.lines))
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
    conditions["laps"] = len(standings[0].laps)
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
    head, scale = HEADS.get(name, (name, 1))
    for end, (unit, factor) in UNITS.items():
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

"""Tables of results: speed-ups and tokens per pass by category, of one file or of several side by side.

As in Spec-Bench (Xia et al. 2024, arXiv 2401.07851) a speed-up is the mean over questions of tokens a second, by that
of plain decoding beside it, the prompt's pass included; mean accepted tokens are those of all passes together.
"""

from __future__ import annotations

import statistics
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sakiyomi.core.drops import Tau, change, fallen
from sakiyomi.core.errors import InputError
from sakiyomi.evaluation.bench.draw import WIDTH
from sakiyomi.evaluation.bench.pictures import Theme, drawing, grouped
from sakiyomi.evaluation.bench.report import Row, unclaimed
from sakiyomi.evaluation.bench.runner import Agreement, Spread, Standing, TimedRun
from sakiyomi.evaluation.bench.spec.results import PLAIN, Record, Results, differences

ALL = "all"
OWN = {ALL, "name", "decode", "tau", "tokens_per_second", "equal", "near_ties", "defects", "by_category"}
"""Columns of our own, which no category may hide."""


def figures(records: Sequence[Record]) -> dict[str, Any]:
    """Figures of one drafter on some questions; no speed if an answer differs from the plain one without a near-tie."""
    defects = sum(not record.explained for record in records)
    sides = [[record.runs for record in records], [record.plain for record in records]]
    ours, plain = (statistics.fmean(map(_speed, runs)) for runs in sides)
    behind, plain_behind = (statistics.fmean(map(_decoding, runs)) for runs in sides)
    passes = [_passes(record) for record in records]
    found = {"speedup": ours / plain, "decode": behind / plain_behind, "tokens_per_second": ours}
    return (dict.fromkeys(found) if defects else found) | {
        "tau": Tau.of(passes).value,
        "questions": len(records),
        "equal": sum(record.equal for record in records),
        "near_ties": sum(record.explained and not record.equal for record in records),
        "defects": defects,
    }


def _speed(runs: Iterable[Mapping[str, float]]) -> float:
    """Tokens per second, the median over runs."""
    return statistics.median(run["tokens"] / run["seconds"] for run in runs)


def _decoding(runs: Iterable[Mapping[str, float]]) -> float:
    """Tokens per second without the prompts' passes, the median over runs."""
    return statistics.median(run["committed"] / max(run["seconds"] - run["prefill_seconds"], 1e-9) for run in runs)


def _passes(record: Record) -> tuple[float, float]:
    """Tokens and passes of all runs."""
    return sum(run["committed"] for run in record.runs), sum(run["rounds"] for run in record.runs)


def rows(results: Results) -> list[Row]:
    """Two tables, speed-ups and tokens a pass: a line a drafter, plain decoding first, a column a category.

    Raises:
        InputError: there is no result.
    """
    groups = _groups(results.records.values())
    if not groups:
        raise InputError(f"there is no result in {str(results.path)!r}; run bench spec --out with that file first")
    questions = {record.question: record.category for group in groups.values() for record in group}
    categories = list(dict.fromkeys(questions.values()))
    speeds, passes, notes = [], [], []
    most = max(map(len, groups.values()))
    for draft, records in groups.items():
        whole = figures(records)
        each = {name: figures(own) for name in categories if (own := [r for r in records if r.category == name])}

        def by_category(key: str, each: Mapping[str, Mapping[str, Any]] = each) -> dict[str, Any]:
            # A category must not hide one of our own columns of the same name.
            return {f"{name}." if name in OWN else name: each.get(name, {}).get(key) for name in categories}

        speeds.append(
            {"name": draft, **by_category("speedup"), ALL: whole["speedup"]}
            | {key: whole[key] for key in ("decode", "tau", "tokens_per_second")}
            | {"equal": f"{whole['equal']}/{whole['questions']}"}
            | {"near_ties": whole["near_ties"], "defects": whole["defects"], "by_category": each}
        )
        passes.append({"name": draft, **by_category("tau"), ALL: whole["tau"]})
        notes += [f"{draft}, question {record.question}: {record.note}" for record in records if record.note]
    notes += [f"{name}: {len(own)} of {most} questions" for name, own in groups.items() if len(own) < most]
    told = ("target", "dtype", "quantize", "gamma", "exact", "graphs", "max_new_tokens", "template", "repeats")
    # What is off is null, and not shown.
    conditions = {name: results.settings.get(name) for name in told}
    conditions |= {name: None for name, value in conditions.items() if value in ("None", False)}
    counts = Counter(questions.values())
    conditions["questions"] = ", ".join(f"{name} {counts[name]}" for name in categories)
    standings = [_standing(draft, records) for draft, records in groups.items()]
    conditions["A/A"] = Spread.shown(standings)
    title = "speed-up over plain decoding by category, one request at a time, greedy"
    found = Row("spec", title, speeds, conditions, [*results.notes, *notes, *unclaimed(standings)])
    return [found, Row("accepted", "mean accepted tokens: committed a pass of the target", passes, conditions)]


def _groups(records: Iterable[Record]) -> dict[str, list[Record]]:
    """By drafter, plain decoding first."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(record.draft, []).append(record)
    return dict(sorted(groups.items(), key=lambda item: item[0] != PLAIN))


def _standing(draft: str, records: Sequence[Record]) -> Standing:
    """All questions together as one contender, run by run."""
    found = figures(records)
    runs = [
        TimedRun(sum(run["seconds"] for run in each), int(sum(run["tokens"] for run in each)))
        for each in zip(*(record.runs for record in records), strict=False)
    ]
    agreement = Agreement(found["equal"] == len(records), not found["defects"])
    return Standing(draft, tuple(runs), found["speedup"] or 0.0, agreement)


def compared(several: Sequence[Results]) -> Row:
    """Files side by side, on the questions and drafters that all of them have.

    Raises:
        InputError: there are fewer than two, or nothing is in all of them.
    """
    if len(several) < 2:
        raise InputError(f"compare was given {len(several)} files; give two or more")
    names = _names([str(results.path) for results in several])
    common = [key for key in several[0].records if all(key in results.records for results in several)]
    if not common:
        raise InputError(f"{' and '.join(names)} have no question and drafter in common; nothing can be compared")
    lines, notes = [], []
    for draft, category, keys in _cells(several[0], sorted(common, key=lambda key: key[1] != PLAIN)):
        each = [figures([results.records[key] for key in keys]) for results in several]
        line: dict[str, Any] = {"name": draft, "category": category, "questions": len(keys)}
        for name, own in zip(names, each, strict=True):
            line |= {f"{name} x": own["speedup"], f"{name} tau": own["tau"]}
        first, *others = (own["tokens_per_second"] for own in each)
        for name, speed in zip(names[1:], others, strict=True):
            line[f"{name} tok/s"] = speed / first if speed and first else None
        lines.append(line)
    for name, results in zip(names[1:], several[1:], strict=True):
        notes += _apart(several[0], results, names[0], name)
    return Row("compare", f"speed-up (x), tokens a pass (tau) and tokens/s by those of {names[0]}", lines, {}, notes)


def _apart(one: Results, other: Results, *names: str) -> list[str]:
    """Settings that are not the same."""
    apart = differences(one.settings, other.settings)
    return [f"{key}: {names[0]} {old!r:.80}, {names[1]} {new!r:.80}" for key, (old, new) in apart.items()]


def since(now: Results, before: Results) -> Row:
    """Compare tokens per pass with an earlier file, on the questions and drafters that both have.

    Raises:
        InputError: nothing is in both.
    """
    common = [key for key in now.records if key in before.records and key[1] != PLAIN]
    if not common:
        raise InputError(f"{str(before.path)!r} has no question and drafter that were measured now; give another file")
    lines, notes = [], []
    for draft, category, keys in _cells(now, common):
        new, old = (Tau.of([_passes(results.records[key]) for key in keys]) for results in (now, before))
        fell = fallen(new, old)
        line = {"name": draft, "category": category, "questions": len(keys), "tau then": old.value}
        lines.append(line | {"tau": new.value, "change": change(new, old), "fell": "yes" if fell else None})
        if fell:
            fall = f"tau {old.value:.2f} -> {new.value:.2f} ({change(new, old):+.0%})"
            notes.append(f"{draft}, {category}: acceptance has fallen, {fall}")
    notes += _apart(before, now, "then", "now")
    return Row("against", f"tokens a pass, then ({before.path}) and now", lines, {}, notes)


def _cells(results: Results, keys: Sequence[Any]) -> Iterator[tuple[str, str, list[Any]]]:
    """Drafter, category and keys of records: each drafter by category, then all of its questions."""
    for draft in dict.fromkeys(draft for _, draft in keys):
        own = [key for key in keys if key[1] == draft]
        for category in [*dict.fromkeys(results.records[key].category for key in own), ALL]:
            yield draft, category, [key for key in own if category in (ALL, results.records[key].category)]


def _names(paths: Sequence[str]) -> list[str]:
    """Short, if they stay different."""
    short = [Path(path).stem for path in paths]
    return short if len(set(short)) == len(short) else [f"{place}: {path}" for place, path in enumerate(paths, start=1)]


def draw(rows: Sequence[Row], path: str, conditions: Mapping[str, Any]) -> None:
    """Draw the speed-ups of the first row, ``spec``; a drafter without a speed-up has no bar.

    Raises:
        LoadError: the file cannot be written.
    """
    row = rows[0]
    # Wide enough that each bar is seen.
    width = max(WIDTH, 0.13 * len(row.lines) * (1 + len(row.lines[0]["by_category"])) + 2)
    drawing(path, [(_panel, row, 4.4)], {**row.conditions, **conditions}, width=width, legend=True)


def _panel(axes: Any, row: Row, theme: Theme) -> None:
    """Bars by category, one a drafter; those of all questions last."""
    lines = [line for line in row.lines if line["name"] != PLAIN]
    categories = list(dict.fromkeys(name for line in lines for name in line["by_category"]))
    series = {
        f"{line['name']} ({line[ALL]:.2f}x)" if line[ALL] else f"{line['name']} (other text than plain)": [
            line["by_category"].get(name, {}).get("speedup") for name in categories
        ]
        + [line[ALL]]
        for line in lines
    }
    grouped(axes, [*categories, ALL], series, theme.colours)
    axes.axhline(1.0, color=theme.ink, linewidth=1)
    axes.axvline(len(categories) - 0.5, color=theme.faint, linewidth=0.8, linestyle=":")
    axes.set(ylabel="speed-up over plain decoding", title=textwrap.fill(row.title, 100))

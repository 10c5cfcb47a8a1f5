"""``sakiyomi plan``: the best gamma and what it brings, from numbers alone."""

from __future__ import annotations

from typing import Any

from sakiyomi.cli.common import JsonOption
from sakiyomi.cli.output import say, table
from sakiyomi.evaluation.tuning import planning
from sakiyomi.evaluation.tuning.planning import PlanConfig


def plan(config: PlanConfig, output: JsonOption) -> None:
    """Say what a draft would bring, from numbers alone.

    The best gamma, the speed-up, operations and memory traffic for an acceptance alpha and the costs of draft and
    passes. `sakiyomi tune` measures instead.

    Example: sakiyomi plan --alpha 0.8 --c 0.05
    """
    if config.plot is not None:
        from sakiyomi.evaluation.bench.plot import check

        check(config.plot)
    found = planning.plan(config)
    rows = [_shown(line, found["gamma"]) for line in found["lines"]]
    table(_told(rows), title="by gamma (draft tokens a round), against plain decoding")
    say(*_summary(found), "", *(f"{name}: {text}" for name, text in COLUMNS.items() if name in _told(rows)[0]))
    if config.plot is not None:
        planning.draw(found, config.plot)
        say(f"the curves are in {config.plot}")
    output.emit(found)


COLUMNS = {
    "tokens a pass": "tokens that a pass of the target commits on average, its own one included",
    "cost of a pass": "time of a pass over gamma + 1 rows in passes over one; from --v, or bandwidth and operations",
    "speed-up": "times plain decoding, drafting and everything else included",
    "if passes cost alike": "the same if a pass over more rows took no longer, as in the papers",
    "operations": "arithmetic for a token in that of plain decoding; needs --c-hat or both sizes",
    "MB a token": "what is read from memory for a token",
}
"""What the columns of the table are."""


def _told(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows without columns in which nothing is known."""
    names = [name for name in rows[0] if any(row[name] is not None for row in rows)]
    return [{name: row[name] for name in names} for row in rows]


def _shown(line: dict[str, Any], best: int) -> dict[str, Any]:
    shown = {
        "gamma": line["gamma"],
        "tokens a pass": line["tokens"],
        "cost of a pass": line["v"],
        "speed-up": line["speedup"],
        "if passes cost alike": line["flat"],
        "operations": line["operations"],
    }
    if "traffic_bytes" in line:
        shown["MB a token"] = line["traffic_bytes"] / 1e6
    return shown | {"": "<- best" if line["gamma"] == best else None}


def _summary(found: dict[str, Any]) -> list[str]:
    lines = [f"c {found['c']:.3g}" + ("" if found["c_hat"] is None else f", c_hat {found['c_hat']:.3g}")]
    if found["gamma"]:
        line = found["lines"][found["gamma"]]
        lines.append(
            f"best gamma {found['gamma']}: {line['tokens']:.2f} tokens a pass, {found['speedup']:.2f} times plain"
        )
        if line["operations"] is not None:
            lines.append(f"{line['operations']:.2f} times the operations a token")
        if "traffic_bytes" in line:
            share = line["traffic_bytes"] / found["lines"][0]["traffic_bytes"]
            lines.append(f"{share:.2f} times the memory traffic a token")
        if line is found["lines"][-1]:
            lines.append("a longer draft may be better still: raise --max-gamma")
    else:
        lines.append("do not speculate: no gamma is faster than plain decoding")
    if found["plain_ms"] is not None:
        lines.append(
            f"a plain step takes {found['plain_ms']:.2f} ms; {found['tokens_per_second']:.1f} tokens/s at best"
        )
    return lines

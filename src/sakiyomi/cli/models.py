"""``sakiyomi models``: which of the causal classes that transformers names run here, by the table of their runs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sakiyomi.cli.common import JsonOption
from sakiyomi.cli.output import say
from sakiyomi.core.errors import InputError

TABLE = Path(__file__).with_suffix(".jsonl")


@dataclass(frozen=True)
class ModelsOptions:
    """Which models, and how they are shown.

    Attributes:
        name: a part of the model types or class names to show; all without it.
    """

    name: str = field(default="", metadata={"argument": "NAME"})


def models(options: ModelsOptions, output: JsonOption) -> None:
    """Show which models run: every causal class of transformers, with the reason where one is refused.

    It is read from a table that runs of tiny models have made; nothing is loaded.

    Example: sakiyomi models qwen
    """
    first, *rows = map(json.loads, TABLE.read_text(encoding="utf-8").splitlines())
    part = options.name.lower()
    shown = [row for row in rows if part in row["type"].lower() or part in row["class"].lower()]
    if not shown:
        raise InputError(
            f"no causal class of transformers {first['transformers']} has {options.name!r} in its name or model type; "
            "`sakiyomi models` lists all"
        )
    width = max(len(row["type"]) for row in shown)
    say(*(f"{row['type']:<{width}}  {described(row)}" for row in shown), counted(shown))
    output.emit({**first, "models": shown})


def described(row: Mapping[str, Any]) -> str:
    """The result for a type, in a line."""
    without = f" without {', '.join(row['without'])}" if "without" in row else ""
    return f"{row['state']}{without}" + "".join(f": {row[key]}" for key in ("why", "note") if key in row)


def counted(rows: Sequence[Mapping[str, Any]]) -> str:
    """How many there are of each state."""
    counts = Counter(row["state"] for row in rows)
    return f"{len(rows)} model types: " + ", ".join(f"{count} {state}" for state, count in counts.most_common())

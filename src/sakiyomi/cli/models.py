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
HEAD = """# Models

Every class that transformers {transformers} names for causal language models, by `model_type` (in a model's
`config.json`), and the result for a tiny random model of that type. *runs*: its greedy text was that of transformers,
token for token, in a batch of three, plain, with chains and trees of draft tokens, and with a prompt read in chunks.
*refused*: loading it ends with the error that is shown. `sakiyomi models NAME` shows one of them.

{counts}. `python tests/causal_models.py` makes the table, `sakiyomi models --markdown` this page.
"""


@dataclass(frozen=True)
class ModelsOptions:
    """Which models, and how they are shown.

    Attributes:
        name: a part of the model types or class names to show; all without it.
        markdown: show the page docs/models.md.
    """

    name: str = field(default="", metadata={"argument": "NAME"})
    markdown: bool = False


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
    if options.markdown:
        say(page(first["transformers"], shown))
    else:
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


def page(version: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """The page docs/models.md, without the end of its last line: model types by their result, the commonest first."""
    types: dict[str, list[str]] = {}
    for row in rows:
        types.setdefault(described(row).replace("|", "/"), []).append(row["type"])
    cells = [f"| {text} | {', '.join(types[text])} |" for text in sorted(types, key=lambda text: -len(types[text]))]
    head = HEAD.format(transformers=version, counts=counted(rows))
    return "\n".join([head, "| result | model types |", "|---|---|", *cells])

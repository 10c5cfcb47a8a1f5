"""A draft that learns while it is used, beside the same draft without, on the same texts one after the other."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from sakiyomi.core.errors import InputError
from sakiyomi.core.outputs import Generation, Stats
from sakiyomi.engine.plain import EngineView
from sakiyomi.evaluation.bench.frame import PairRow
from sakiyomi.evaluation.bench.report import Row

__all__ = ["learning"]


def learning(row: PairRow) -> Row:
    """Acceptance and speed over the first and the second half of the prompts, learning off and on.

    Both have a suffix memory of their own, which remembers the texts before: what is learnt comes on top of that. Each
    prompt is written by both, by turns one or the other first; files are new ones and are removed afterwards.
    """
    prompts, llm = row.pair.prompts, row.llm("none")
    if len(prompts) < 2:
        raise InputError("row learning compares two halves of the prompts, and there is one prompt; ask for more")
    with TemporaryDirectory(prefix="sakiyomi-") as folder:
        ways = {
            name: EngineView(llm, llm.drafter(f"suffix:{Path(folder) / name}+{_spec(row, learn)}"))
            for name, learn in (("off", ""), ("on", str(Path(folder) / "learnt")))
        }
        params = row.params()
        for name, way in ways.items():
            row.note(f"warming up, learning {name}")
            way.generate([[*prompts[0]][:1]], row.params(max_new_tokens=4))
            llm.wait()
        done: dict[str, list[Generation]] = {name: [] for name in ways}
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for i, prompt in enumerate(prompts):
            row.note(f"text {i + 1} of {len(prompts)}")
            for name in sorted(ways, reverse=bool(i % 2)):
                began = time.perf_counter()
                done[name] += ways[name].generate([list(prompt)], params)
                seconds[name].append(time.perf_counter() - began)
    half = len(prompts) // 2
    parts = {"first": slice(0, half), "second": slice(half, None)}
    lines = [
        {"half": part, "learning": name, **_figures(done[name][where], sum(seconds[name][where]))}
        for part, where in parts.items()
        for name in ways
    ]
    same = [one.token_ids == other.token_ids for one, other in zip(done["off"], done["on"], strict=True)]
    gain = lines[3]["acceptance_rate"] / lines[2]["acceptance_rate"] if lines[2]["acceptance_rate"] else 0.0
    notes = [
        f"learning changes acceptance of the second half by {gain - 1:+.1%}",
        f"{sum(same)} of {len(same)} texts are equal",
    ]
    title = "a draft that goes on learning, and the same draft without, each beside a suffix memory"
    return Row("learning", title, lines, row.conditions(llm, draft_specs=_spec(row, "FILE")), notes)


def _spec(row: PairRow, learn: str) -> str:
    spec = f"model:{row.config.draft_model}"
    return f"{spec}[learn={learn}]" if learn else spec


def _figures(done: Sequence[Generation], seconds: float) -> dict[str, Any]:
    """Of one half of the texts; its seconds hold what is spent behind each text, too."""
    stats = Stats.total(out.stats for out in done)
    return {
        "acceptance_rate": stats.acceptance_rate,
        "tau": stats.tau,
        "drafted": stats.drafted,
        "tokens_per_second": sum(len(out.token_ids) for out in done) / seconds,
    }

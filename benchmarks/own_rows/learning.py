"""A draft that learns while it is used, beside the same draft without, on the same texts one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from sakiyomi.core.errors import InputError
from sakiyomi.core.outputs import Generation, Stats
from sakiyomi.engine.plain import EngineView
from sakiyomi.evaluation.bench.frame import PairRow, generated
from sakiyomi.evaluation.bench.report import Row
from sakiyomi.evaluation.bench.runner import TimedRun

__all__ = ["learning"]


def learning(row: PairRow) -> Row:
    """Acceptance and speed over the first and the second half of the prompts, learning off and on.

    Both have a suffix memory of their own, which remembers the texts before: what is learnt comes on top of that. Both
    write each text, and take turns at being the first. Their files are temporary.
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
        runs: dict[str, list[TimedRun]] = {name: [] for name in ways}
        done: dict[str, list[Generation]] = {name: [] for name in ways}
        for i, prompt in enumerate(prompts):
            row.note(f"text {i + 1} of {len(prompts)}")
            for name in sorted(ways, reverse=bool(i % 2)):
                run, texts = generated(ways[name], [([prompt], params)])
                runs[name].append(run)
                done[name] += texts
    half = len(prompts) // 2
    parts = {"first": slice(0, half), "second": slice(half, None)}
    lines = [
        {"half": part, "learning": name, **_figures(done[name][where], runs[name][where])}
        for part, where in parts.items()
        for name in ways
    ]
    same = sum(one.outputs == other.outputs for one, other in zip(runs["off"], runs["on"], strict=True))
    gain = lines[3]["acceptance_rate"] / lines[2]["acceptance_rate"] if lines[2]["acceptance_rate"] else 0.0
    notes = [f"learning changes acceptance of the second half by {gain - 1:+.1%}"]
    notes.append(f"{same} of {len(prompts)} texts are equal")
    title = "a draft that learns while it is used, and the same draft without, each beside a suffix memory"
    return Row("learning", title, lines, row.conditions(llm, draft_specs=_spec(row, "FILE")), notes)


def _spec(row: PairRow, learn: str) -> str:
    spec = f"model:{row.config.draft_model}"
    return f"{spec}[learn={learn}]" if learn else spec


def _figures(done: Sequence[Generation], runs: Sequence[TimedRun]) -> dict[str, Any]:
    """Of one half of the texts; its seconds include the learning after each text."""
    stats = Stats.total(text.stats for text in done)
    figures = {"acceptance_rate": stats.acceptance_rate, "tau": stats.tau, "drafted": stats.drafted}
    return figures | {"tokens_per_second": sum(run.tokens for run in runs) / sum(run.seconds for run in runs)}

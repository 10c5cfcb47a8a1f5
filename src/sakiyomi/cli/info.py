"""``sakiyomi info``: this machine, what it lacks, and what the passes of a pair cost on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sakiyomi.cli.common import JsonOption
from sakiyomi.cli.output import progress, say
from sakiyomi.core.checks import at_least


@dataclass(frozen=True)
class InfoOptions:
    """A pair to measure.

    Attributes:
        target: embedded name, folder or hub id; without it only the machine is described.
        draft: auto, none, or model:FOLDER.
        dtype: auto (as the checkpoint says), float32, bfloat16 or float16.
        context: tokens in the cache while passes are timed.
        repeats: passes of each shape; medians are shown.
    """

    target: str | None = None
    draft: str = "auto"
    dtype: str = "auto"
    context: int = 128
    repeats: int = 15

    def __post_init__(self) -> None:
        at_least(self, context=1, repeats=1)


def info(options: InfoOptions, output: JsonOption) -> None:
    """Show this machine, and what it lacks.

    Versions, devices, measured bandwidth; with --target the costs of a pair: c (draft step / target step) and v(T)
    (pass over T tokens / plain step), and what computes its passes: where that is the class's own forward, why.

    Example: sakiyomi info --model FOLDER
    """
    with progress("inspecting the machine") as status:
        from sakiyomi.engine import machine
        from sakiyomi.kernels import build

        found: dict[str, Any] = machine.describe()
        status.update("loading the CPU kernels; the first time they may have to be compiled")
        found["kernels"] = build.origin() if build.native() is not None else None
        status.update("measuring memory bandwidth")
        found["bandwidth_bytes_per_second"] = machine.bandwidth()
        found["lacks"] = machine.lacks()
        if options.target is not None:
            from sakiyomi.engine.llm import LLM

            status.update(f"loading {options.target} and recording passes")
            llm = LLM(options.target, draft=options.draft, dtype=options.dtype)
            llm.wait()
            status.update("timing passes")
            found["pair"] = {"target": options.target, "draft": options.draft}
            found["pair"] |= machine.costs(llm.target, llm.draft, context=options.context, repeats=options.repeats)
    say(*_lines(found))
    output.emit(found)


def _lines(found: Mapping[str, Any]) -> list[str]:
    names = ("sakiyomi", "commit", "python", "torch", "transformers", "system", "processor", "cores", "threads")
    shown = {name: found[name] for name in names if found[name] is not None}
    shown["features"] = " ".join(found["processor_features"]) or "none of those that the kernels use"
    shown["kernels"] = found["kernels"] or "none"
    shown["memory"] = f"{found['memory_available_bytes'] / 1e9:.1f} GB available"
    shown["bandwidth"] = f"{found['bandwidth_bytes_per_second'] / 1e9:.1f} GB/s read, measured"
    shown["devices"] = ", ".join(found["devices"])
    if "pair" in found:
        shown |= _pair(found["pair"])
    lines = [f"{name:<13}{value}" for name, value in shown.items()]
    lines += [f"{'lacks':<13}{text}" for text in found["lacks"]] or [f"{'lacks':<13}nothing"]
    return lines


def _pair(pair: Mapping[str, Any]) -> dict[str, str]:
    how = "recorded" if pair["compiled"] else "eager"
    passes = ", ".join(f"T={rows} {ms:.2f}" for rows, ms in pair["target_ms"].items())
    shown = {
        "target": f"{pair['target']} in {pair['dtype']}, {how}, ms a pass, {pair['context']} tokens cached: {passes}"
    }
    shown["runs"] = pair["runs"]
    shown["v(T)"] = ", ".join(f"T={rows} {value:.2f}" for rows, value in pair["v"].items()) + " plain steps"
    if pair["c"] is not None:
        shown["draft"] = f"{pair['draft']} in {pair['draft_dtype']}, {pair['draft_ms']:.2f} ms a step"
        shown["c"] = f"{pair['c']:.3f} target steps for one draft step"
    return shown

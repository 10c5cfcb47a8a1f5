"""``sakiyomi demo --model``: a table with bars of the user's own model, and what to do next."""

from __future__ import annotations

import shlex
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sakiyomi.cli.common import JsonOption, load
from sakiyomi.cli.output import progress, say, table
from sakiyomi.cli.rows import PlotOption
from sakiyomi.core.errors import InputError
from sakiyomi.core.params import SamplingParams
from sakiyomi.engine.config import LLMConfig

if TYPE_CHECKING:
    from sakiyomi.evaluation.bench.report import Row

BAR = 24
"""Characters of the longest bar."""
RECORDED = 20.0
"""Seconds that recording passes may take before texts are measured."""


def figures(
    model: LLMConfig,
    params: SamplingParams,
    prompt: str | None,
    fixed: bool,
    picture: PlotOption,
    output: JsonOption,
) -> None:
    """Measure a model with and without drafts; print a table with bars, and a conclusion.

    Args:
        model: which one.
        params: of all texts.
        prompt: in place of the package's prompts.
        fixed: texts have the length that ``params`` says, otherwise one for which there is time.
        picture: where a picture goes.
        output: whether a JSON line is wanted.
    """
    if model.draft == "none":
        raise InputError("draft is none, and demo compares plain decoding with drafts; leave --draft out, or name one")
    began = time.perf_counter()
    with progress(f"loading {model.target}") as status:
        llm = load(model)
        from sakiyomi.engine import machine
        from sakiyomi.evaluation.bench.own_model import Plan, as_tokens, measure, own_prompts

        texts = {"prompt": [prompt]} if prompt is not None else own_prompts()
        prompts = {kind: as_tokens(llm, several, params.max_new_tokens) for kind, several in texts.items()}
        status.update("recording passes")
        llm.wait(RECORDED)
        plan = Plan.of(llm, prompts, params.max_new_tokens if fixed else None)
        params = replace(params, max_new_tokens=plan.new)
        conditions = _conditions(llm, model) | {"max_new_tokens": plan.new} | machine.conditions()
        rows: list[Row] = []
        try:
            for row in measure(llm, prompts, params, plan, status.update):
                rows.append(row)
        except KeyboardInterrupt:
            status.stop()
            _show(rows, conditions)
            raise
    _show(rows, conditions)
    conclusion = [*_conclusion(rows, model), *_busy(conditions)]
    say("", *conclusion)
    if picture.plot is not None:
        draw(rows, picture.plot, conditions)
        say(f"the picture is {picture.plot}")
    found = {"target": model.target, "draft": None if llm.draft is None else llm.draft.name, "conditions": conditions}
    seconds = time.perf_counter() - began
    output.emit(
        {**found, "rows": [row.to_dict() for row in rows], "conclusion": " ".join(conclusion), "seconds": seconds}
    )
    llm.record()


def draw(rows: Sequence[Row], path: str, conditions: Mapping[str, Any] | None = None) -> None:
    """Draw rows into one panel, with the conditions of this machine."""
    from sakiyomi.engine import machine
    from sakiyomi.evaluation.bench import plot

    lines = [line for row in rows for line in row.lines]
    plot.draw([replace(rows[0], lines=lines, conditions={})], path, conditions or machine.conditions())


def _conditions(llm: Any, model: LLMConfig) -> dict[str, Any]:
    from sakiyomi.core.dtypes import dtype_name
    from sakiyomi.engine.chat_template import has_template
    from sakiyomi.model_executor.weights import rounding_of

    return {
        "target": model.target,
        "weights": rounding_of(llm.target.weights) or dtype_name(llm.target.dtype),
        "template": "chat" if has_template(llm.tokenizer) else "plain text",
    }


def _show(rows: Sequence[Row], conditions: Mapping[str, Any]) -> None:
    """Print the table, and the conditions; nothing if nothing was measured."""
    if not rows:
        return
    from sakiyomi.evaluation.bench.report import condition_line

    lines = [line for row in rows for line in row.lines]
    most = max((line["tokens_per_second"] or 0.0 for line in lines), default=0.0)
    say("")
    table([_cells(line, most) for line in lines], title=f"{rows[0].title}")
    say(*(f"  {text}" for row in rows for text in row.notes), f"  {condition_line(conditions)}")


def _cells(line: Mapping[str, Any], most: float) -> dict[str, Any]:
    """A line of the terminal's table."""
    speed, plain = line["tokens_per_second"], line["draft"] == "plain"
    first = 1000 * line["first_token_seconds"]
    return {
        "prompts": line["prompts"] if plain else "",
        "decoding": line["draft"],
        "tokens/s": speed,
        "": _bar((speed or 0.0) / (most or 1.0)),
        "speed-up": None if plain or speed is None else f"{line['ratio']:.2f}x",
        "tokens a pass": f"{line['tau']:.2f}",
        "first token": f"{first:.0f} ms",
        "same text": "" if plain else _same(line),
    }


def _same(line: Mapping[str, Any]) -> str:
    if line["equal"]:
        return "yes"
    return "no: a defect" if line["tokens_per_second"] is None else "but for near-ties"


def _bar(share: float) -> str:
    """A bar of blocks, of plain characters where stdout has no blocks."""
    mark = "\u2588"
    try:
        mark.encode(sys.stdout.encoding or "ascii")
    except UnicodeError:
        mark = "#"
    return (mark * max(1, round(BAR * share))).ljust(BAR)


def _busy(conditions: Mapping[str, Any]) -> list[str]:
    """A warning where other programs took part of the processor."""
    load, cores = conditions.get("load_average"), conditions["cores"]
    if load is None or load <= cores + 1:  # one is this program
        return []
    return [f"other programs are running (load average {load:.1f} on {cores} cores): measure again when they are done"]


def _conclusion(rows: Sequence[Row], model: LLMConfig) -> list[str]:
    """What the drafts bring, and what to do next."""
    from sakiyomi.evaluation.bench.own_model import FREE, PLAIN

    drafted = [line for row in rows for line in row.lines if line["draft"] != PLAIN]
    names = list(dict.fromkeys(line["draft"] for line in drafted))
    found = []
    for name in names:
        own = [line for line in drafted if line["draft"] == name]
        if any(line["ratio"] is None for line in own):
            found.append(
                f"{name}: another text than plain decoding, which is a defect; sakiyomi audit --model "
                f"{shlex.quote(model.target)} shows where, please report it"
            )
            continue
        each = ", ".join(f"{line['ratio']:.2f}x on {line['prompts']}" for line in own)
        whole = statistics.geometric_mean(line["ratio"] for line in own)
        gained = [line["prompts"] for line in own if line["faster"]]
        what = f"faster on {' and '.join(gained)}" if gained else "no gain beyond the noise of this machine"
        together = f"; {whole:.2f}x together" if len(own) > 1 else ""
        found.append(f"{name}: {each}{together}; {what}")
    quantize = f" --quantize {model.quantize}" if model.quantize else ""
    name = f"--model {shlex.quote(model.target)}{quantize}"
    if names == [FREE]:
        found.append(
            "free drafts help where words of the prompt come back. For the other prompts train a draft for this model: "
            f"sakiyomi tune {name} --train 60"
        )
    elif not any(line["faster"] for line in drafted):
        found.append(f"to find a draft or a length that is faster here: sakiyomi tune {name}")
    return found

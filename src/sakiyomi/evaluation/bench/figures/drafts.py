"""What drafts of several sizes are worth: alpha, greedy and sampled, the cost of a step, and the speed-up."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sakiyomi.drafters.ngram import NgramDrafter
from sakiyomi.drafters.ngram_file import FileTables
from sakiyomi.engine.llm import LLM
from sakiyomi.engine.plain import EngineView
from sakiyomi.evaluation.bench.figures.alphas import COUNTED, family, minima, ngram_rows, runner_rows, tables_of
from sakiyomi.evaluation.bench.figures.section import Section, Theme, legend_below, stacked
from sakiyomi.evaluation.bench.figures.work import Work, lap, line_of, notes_of
from sakiyomi.evaluation.bench.models import NearTies
from sakiyomi.evaluation.bench.report import Row
from sakiyomi.evaluation.bench.runner import Spread
from sakiyomi.evaluation.loading import load
from sakiyomi.evaluation.tuning.candidates import made
from sakiyomi.model_executor.loading import load_model

if TYPE_CHECKING:
    from matplotlib.figure import Figure


__all__ = ["DRAFTS"]

TEMPERATURES = (0.0, 1.0)
EXITS = (4, 2)  # a target's first layers: a half, a quarter


def drafts(work: Work) -> Row:
    """The configured target with its drafts, and a folder of models that share a tokenizer, if one is given."""
    config = work.config
    lines: list[dict[str, Any]] = []
    layers = int(work.llm.target.config.num_hidden_layers)
    own: dict[str, Any] = {Path(work.draft.removeprefix("model:")).name: work.drafter(work.draft)}
    exits = {
        f"its first {layers // part} layers": f"early-exit:{layers // part}" for part in EXITS if layers >= 2 * part
    }
    own |= {name: work.drafter(spec) for name, spec in exits.items()}
    notes: list[str] = []
    lines += _compared(work, work.llm, work.pair.target, Path(config.target).name, own, notes)
    if config.models is None:
        notes.append("No folder of further checkpoints was given (--models): those lines are left out.")
    else:
        models = family(config.models)
        target, others = models[0], models[1:]
        llm = load(config.bench(target=str(target)), "none")
        found, why = made([f"model:{folder}" for folder in others], llm.drafter, (), work.note)
        notes += [f"{Path(spec).name} is left out: {message}" for spec, message in why.items()]
        loaded = load_model(str(target), dtype=config.dtype, device=config.device)
        lines += _compared(work, llm, loaded, target.name, {Path(k).name: d for k, d in found.items()}, notes)
    conditions = {"gamma": config.gamma, "acceptance": "ratio", "n-grams": f"of {COUNTED} sampled texts a prompt"}
    return Row("drafts", "alpha and speed-up by draft", lines, work.laps() | conditions, notes)


def _compared(
    work: Work, llm: LLM, loaded: Any, target: str, drafters: dict[str, Any], notes: list[str]
) -> list[dict[str, Any]]:
    """A line each drafter, n-grams of the target's own text among them; ``notes`` takes what has to be said of it."""
    prompts = [loaded.tokenizer(text).input_ids[: work.config.prompt_tokens] for text in work.config.bench().texts()]
    sizes = {name: drafter.model.weights.bytes for name, drafter in drafters.items()}
    work.note(f"drafts: {target} writes texts to count")
    tables = _counted(work, llm, prompts)
    rows = {name: runner_rows(drafter.model) for name, drafter in drafters.items()}
    rows |= {name: ngram_rows(table, llm.vocab_size) for name, table in tables.items()}
    drafters = drafters | {name: NgramDrafter(llm.vocab_size, table) for name, table in tables.items()}
    llm.wait()
    judge = NearTies(loaded.model, prompts)
    engines = {"plain": EngineView(llm), **{name: EngineView(llm, one, strict=True) for name, one in drafters.items()}}
    found: dict[float, Any] = {}
    texts: dict[float, list[list[int]]] = {}
    for temperature in TEMPERATURES:
        params = work.params(temperature=temperature, seed=7, acceptance="ratio", tree="chain")
        texts[temperature] = [EngineView(llm).generate([prompt], params)[0].token_ids for prompt in prompts]
        runs = {name: partial(lap, engine, prompts, params) for name, engine in engines.items()}
        what = f"drafts of {target}, T={temperature:g}"
        found[temperature] = work.row(what).race(runs, None if temperature else judge)
        notes += notes_of(f"{target}, T={temperature:g}", found[temperature])
    lines = []
    for at, name in enumerate(drafters, start=1):
        guessed = name in tables
        line: dict[str, Any] = {"name": name, "target": target, "weight_bytes": sizes.get(name), "guesses": guessed}
        for temperature, standings in found.items():
            plain, own = standings[0], standings[at]
            step = plain.median("score_ms") + plain.median("overhead_ms")
            t = f"{temperature:g}"
            known = minima(runner_rows(llm.target), rows[name], prompts, texts[temperature], temperature)
            line |= {f"alpha, T={t}": known.alpha, f"first guess, T={t}": known.guess}
            line |= {f"counted, T={t}": own.median("alpha"), f"tau, T={t}": own.median("tau")}
            line |= {f"speed-up, T={t}": line_of(own)["ratio"], f"A/A, T={t}": Spread.shown(standings)}
            if not temperature:
                line["c"] = own.median("draft_ms") / work.config.gamma / step
        lines.append(line)
    return lines


def _counted(work: Work, llm: LLM, prompts: Sequence[list[int]]) -> dict[str, FileTables]:
    """Tables of what the target says at temperature 1 with other seeds than those that are measured."""
    engine = EngineView(llm)
    texts = [
        engine.generate([prompt], work.params(temperature=1.0, seed=100 + sample))[0].token_ids
        for sample in range(COUNTED)
        for prompt in prompts
    ]
    return tables_of(texts, llm.vocab_size)


def _paint_drafts(row: Row, theme: Theme) -> Figure:
    """Bars in groups by target, with room for its name above each group."""
    places: list[float] = []
    heads: dict[str, float] = {}
    for line in row.lines:
        below = places[-1] + 1 if places else 0.0
        if line["target"] not in heads:
            heads[line["target"]] = below
            below += 0.8
        places.append(below)
    figure, (upper, lower) = stacked(2, 0.9 + 0.3 * places[-1])
    for axes, key, label in ((upper, "alpha", "alpha"), (lower, "speed-up", "speed-up over plain")):
        for at, temperature in enumerate(TEMPERATURES):
            values = [line[f"{key}, T={temperature:g}"] or 0.0 for line in row.lines]
            beside = [place + 0.38 * (at - 0.5) for place in places]
            axes.barh(beside, values, height=0.36, color=theme.colours[at], label=f"T={temperature:g}")
            counted = [line[f"counted, T={temperature:g}"] for line in row.lines]
            marks = counted if key == "alpha" else values
            for place, value, mark in zip(beside, values, marks, strict=True):
                # Offset, not spaces in front of the number: SVG drops those, and the diamond would hide it.
                beside_bar = {"xytext": (7, 0), "textcoords": "offset points", "va": "center", "fontsize": 8}
                told = f"{value:.2f}" + (f", counted {mark:.2f}" if key == "alpha" and mark is not None else "")
                axes.annotate(told, (max(value, mark or 0.0), place), **beside_bar)
            if key == "alpha":
                axes.plot(counted, beside, "D", color=theme.ink, markersize=4, label=None if at else "counted")
        for target, place in heads.items():
            axes.text(0, place, f" target {target}", va="center", fontsize=9, style="italic")
        axes.set_yticks(places, [line["name"] for line in row.lines])
        axes.set(ylim=(places[-1] + 0.6, -0.5), xlabel=label)
        axes.margins(x=0.12)
        axes.grid(visible=False, axis="y")
    lower.axvline(1.0, color=theme.faint, linewidth=1)
    legend_below(figure, upper)
    return figure


def _alt_drafts(row: Row) -> str:
    said = []
    for line in row.lines:
        speed = line["speed-up, T=0"]
        fast = "" if speed is None else f", {speed:.2f} times plain"
        alphas = f"alpha {line['alpha, T=0']:.2f}, sampled {line['alpha, T=1']:.2f}"
        alphas += f" (counted {line['counted, T=0']:.2f} and {line['counted, T=1']:.2f})"
        said.append(f"{line['name']} for {line['target']} {alphas}{fast}")
    return f"Bars of alpha and of speed-up at temperature 0 and 1, by draft: {'; '.join(said)}."


DRAFTS = Section(
    "Alpha and speed-up by draft",
    "A draft has to be right often and cost little. Bars of alpha: the mean of the sum of min(p, q) over the places of "
    "a text of the target, its definition. Diamonds: accepted over judged tokens of chains of one length, by rejection "
    "sampling (the ratio rule). n-grams propose their first guess, which is accepted with p of that guess, so that "
    "what is counted of them is not their alpha. "
    "Bigrams and unigrams are counted in texts that the target wrote with other seeds; the first layers of a target "
    "are a draft without a second model. c in the table: a draft step in plain steps.",
    drafts,
    _paint_drafts,
    _alt_drafts,
    ("models",),
)

"""Speeds by the size of the target, with Medusa heads, and by temperature."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle
from typing import TYPE_CHECKING, Any

from sakiyomi.core.errors import SakiyomiError
from sakiyomi.core.params import SamplingParams
from sakiyomi.engine.plain import EngineView
from sakiyomi.evaluation.bench.draw import curve, plain_numbers
from sakiyomi.evaluation.bench.figures.rivals import GreedyDraft
from sakiyomi.evaluation.bench.figures.section import Section, Theme, legend_below, stacked
from sakiyomi.evaluation.bench.figures.work import Work, lap, line_of, notes_of
from sakiyomi.evaluation.bench.frame import PairRow, peer_lap
from sakiyomi.evaluation.bench.models import WAYS
from sakiyomi.evaluation.bench.report import Row
from sakiyomi.evaluation.bench.runner import Contender, Lap, Spread
from sakiyomi.evaluation.loading import load

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["MEDUSA", "SIZES", "TEMPERATURE"]

RACED = 2  # prompts of races with many contenders, so that an article's figures take minutes
OURS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chain": {"tree": "chain"},
    "chain, +2/-1": {"gamma": "heuristic", "tree": "chain"},
    "tree, +2/-1": {"gamma": "auto", "tree": "best-first", "nodes": "heuristic"},
    "auto": {"gamma": "auto"},
}
"""Ways of the pair by name, with what they ask for; plain asks for no draft. +2/-1 begins at 5 tokens, or 5 nodes."""


def _by_size(
    what: str, work: Work, contenders: Callable[[PairRow, str | None], Sequence[Contender]]
) -> tuple[list[dict[str, Any]], list[str]]:
    """Lines and notes of a race at each size, the smallest first; a size that there is not is skipped with a line.

    Args:
        what: names the section.
        work: the report's.
        contenders: are made from the row of a size and the heads that go with it.

    Raises:
        SakiyomiError: no size could be measured.
    """

    def measured(size: str) -> dict[str, Any]:
        row, heads = work.sized(what, size)
        parameters = row.pair.target.model.num_parameters() / 1e6
        name = f"{parameters:.3g}M"
        found = row.race(contenders(row, heads), where=name)
        spread = Spread.shown(found)
        own = [line_of(standing, size=name, parameters=parameters) | {"A/A": spread} for standing in found]
        return {"lines": own, "notes": notes_of(name, found)}

    lines: list[dict[str, Any]] = []
    notes: list[str] = []
    failed: SakiyomiError | None = None
    asked, pieces = work.config.asked(("heads",)), work.pieces(what)
    for size in ("", *work.config.sizes):
        try:
            found = pieces.piece(asked | {"size": size}, partial(measured, size))
        except SakiyomiError as error:
            failed = error
            notes.append(f"{size or work.config.target} is left out: {error.message}")
            continue
        lines += found["lines"]
        notes += found["notes"]
    if not lines:
        assert failed is not None
        raise failed
    return sorted(lines, key=lambda line: line["parameters"]), notes


def sizes(work: Work) -> Row:
    """Greedy; transformers plain and assisted, and our ways, on the target as it is and on further sizes."""

    def contenders(row: PairRow, heads: str | None) -> list[Contender]:
        llm = row.llm()
        judge = row.pair.judge(llm)
        prompts = row.pair.prompts[:RACED]
        laps = {way: partial(peer_lap, row.pair.peer(way), prompts, row.params()) for way in WAYS[:2]}
        theirs = [Contender(f"transformers {way}", run, row.pair.judge()) for way, run in laps.items()]
        ways = {name: (llm if more else EngineView(llm), more) for name, more in OURS.items()}
        if heads is not None:
            ways["Medusa"] = (EngineView(llm, llm.drafter(f"medusa:{heads}"), strict=True), {"gamma": "auto"})
        runs = {name: row.run(way, prompts=prompts, **more) for name, (way, more) in ways.items()}
        row.warm(runs, llm)
        return [*theirs, *(Contender(name, run, judge) for name, run in runs.items())]

    lines, notes = _by_size("sizes", work, contenders)
    conditions = {**work.pair.names, **work.pair.dtypes, "gamma": work.config.gamma, **work.laps(RACED)}
    return Row("sizes", "milliseconds a token, greedy, by size of the target", lines, conditions, notes)


def _ways(row: Row) -> list[str]:
    return list(dict.fromkeys(line["name"] for line in row.lines))


def _paint_sizes(row: Row, theme: Theme) -> Figure:
    figure, (axes,) = stacked(height=3.8)
    for at, (way, colour) in enumerate(zip(_ways(row), cycle(theme.colours), strict=False)):
        own = [line for line in row.lines if line["name"] == way and line["ms_per_token"]]
        style = "--" if way.startswith("transformers") else ":" if way == "plain" else "-"
        # A little beside each other, so that no bar of laps hides another.
        xs = [line["parameters"] * 1.015 ** (at - 3) for line in own]
        ys = [line["ms_per_token"] for line in own]
        axes.plot(xs, ys, style, marker="o", markersize=5, color=colour, label=way)
        axes.vlines(xs, [1000 / line["high"] for line in own], [1000 / line["low"] for line in own], color=colour)
    ticks = dict.fromkeys((line["parameters"], line["size"]) for line in row.lines)
    # Ways differ by a factor of ten and more: on a straight scale the faster ones are one line.
    axes.set(xscale="log", yscale="log", xlabel="parameters of the target", ylabel="ms a token; bars: all laps")
    axes.set_xticks([at for at, _ in ticks], [name for _, name in ticks])
    plain_numbers(axes)
    legend_below(figure, axes)
    return figure


def _alt_sizes(row: Row) -> str:
    largest = row.lines[-1]["size"]
    said = [
        f"{line['name']} {line['ms_per_token']:.1f} ms"
        for line in row.lines
        if line["size"] == largest and line["ms_per_token"]
    ]
    return f"Time a token against the target's size, a line each way of generating; at {largest}: {', '.join(said)}."


SIZES = Section(
    "Time against model size",
    "Greedy text of one pair, and with further targets: checkpoints of the same family, or the same target expanded "
    "(an inflated model computes the same function at the cost of the larger one, so that the draft is accepted as "
    "often). Transformers plain and assisted at the same gamma; ours plain, with a chain of that gamma, with a chain "
    "and a tree whose size grows by 2 after a wholly accepted draft and falls by 1 after any other, with what pays by "
    "measured costs (auto), and with Medusa heads where there are any. Outputs are compared in the same run.",
    sizes,
    _paint_sizes,
    _alt_sizes,
    ("sizes", "heads"),
)


def medusa(work: Work) -> Row:
    """Greedy; plain against heads, on the target as it is and inflated, with gamma auto."""
    work.medusa  # noqa: B018 - refuse before anything is inflated
    params = work.params(gamma="auto")

    def contenders(row: PairRow, heads: str | None) -> list[Contender]:
        llm = row.llm(f"medusa:{heads}")
        runs = {
            name: partial(lap, way, row.pair.prompts[:RACED], params)
            for name, way in (("plain", EngineView(llm)), ("Medusa", llm))
        }
        runs["Medusa"]()  # what passes cost is learnt
        judge = row.pair.judge(llm)
        return [Contender(name, run, judge) for name, run in runs.items()]

    lines, notes = _by_size("medusa", work, contenders)
    conditions = work.pair.names | {"draft": work.medusa, "gamma": "auto", **work.laps(RACED)}
    title = "tokens/s, greedy, plain and with Medusa heads, by size of the target"
    return Row("medusa", title, lines, conditions, notes)


def _paint_medusa(row: Row, theme: Theme) -> Figure:
    figure, (axes,) = stacked()
    groups = list(dict.fromkeys(line["size"] for line in row.lines))
    most = max(line["high"] or 0 for line in row.lines)
    for at, (way, colour) in enumerate(zip(_ways(row), (theme.faint, theme.colours[0]), strict=False)):
        for place, size in enumerate(groups):
            (line,) = (line for line in row.lines if (line["size"], line["name"]) == (size, way))
            speed, x = line["tokens_per_second"], place + 0.4 * (at - 0.5)
            if speed is None:
                continue
            reach = [[speed - line["low"]], [line["high"] - speed]]
            label = way if not place else None
            axes.bar(x, speed, width=0.38, color=colour, yerr=reach, ecolor=theme.ink, capsize=3, label=label)
            text = f"{speed:.0f}" + (f"\n{line['ratio']:.2f}x" if at else "")
            axes.text(x, line["high"] + 0.02 * most, text, ha="center", va="bottom", fontsize=9)
    axes.set_xticks(range(len(groups)), groups)
    axes.set(xlabel="parameters of the target", ylabel="tokens/s; whiskers: all laps", ylim=(0, 1.2 * most))
    axes.grid(visible=False, axis="x")
    legend_below(figure, axes)
    return figure


def _alt_medusa(row: Row) -> str:
    said = [
        f"{line['ratio']:.2f} times at {line['size']}"
        for line in row.lines
        if line["name"] == "Medusa" and line["ratio"]
    ]
    return f"Bars of tokens a second, plain and with Medusa heads: {', '.join(said) or 'no speed that counts'}."


MEDUSA = Section(
    "Plain against Medusa heads, by size",
    "Greedy text, one at a time; trees of the size that pays here (gamma auto). The larger targets are inflated, "
    "heads too: they guess as well as those of the small one, at the cost of the large one.",
    medusa,
    _paint_medusa,
    _alt_medusa,
    ("sizes", "heads"),
)


def temperature(work: Work) -> Row:
    """All ways of generating at each temperature; the draft alone shows how fast unverified text could be."""
    config = work.config
    engines: dict[str, Any] = {"plain": work.engine(), "sakiyomi": work.engine(work.draft)}
    engines["chain, +2/-1, ratio"] = engines["sakiyomi"]
    engines["sample and compare"] = EngineView(work.llm, GreedyDraft(work.llm.drafter(work.draft)), strict=True)
    notes: list[str] = []
    try:
        engines["Medusa"] = work.engine(work.medusa)
    except SakiyomiError as error:
        notes.append(f"Medusa is left out: {error.message}")
    draft = work.pair.config.draft_model
    alone = load(config.bench(target=draft), "none")
    alone.wait()
    engines["draft alone"] = alone
    peer, judge, prompts = work.pair.peer("assisted"), work.pair.judge(work.llm), work.prompts[:RACED]

    def measured(degrees: float) -> dict[str, Any]:
        auto = work.params(temperature=degrees, seed=7, gamma="auto")
        runs: Mapping[str, Callable[[], Lap]] = {
            name: partial(lap, engine, prompts, _asking(name, auto, config.gamma)) for name, engine in engines.items()
        }
        runs = {**runs, "transformers assisted": partial(peer_lap, peer, prompts, _asking("", auto, config.gamma))}
        # Sampled text is anybody's own; greedy text is compared, but for the draft's.
        contenders = [
            Contender(name, run, judge if not degrees and name != "draft alone" else None) for name, run in runs.items()
        ]
        for contender in contenders:
            work.note(f"temperature {degrees:g}: warming up, {contender.name}")
            contender.run()
        work.llm.wait()
        found = work.row(f"temperature {degrees:g}").race(contenders)
        spread, known, ours = Spread.shown(found), Spread.of(found), found[1]
        return {
            "lines": [line_of(standing, temperature=degrees) | {"A/A": spread} for standing in found],
            "notes": notes_of(f"T={degrees:g}", found),
            "ratio": ours.ratio,
            "slower": known is not None and ours.ratio < known.low,
        }

    asked, pieces = config.asked(("heads",)), work.pieces("temperature")
    found = {
        degrees: pieces.piece(asked | {"temperature": degrees}, partial(measured, degrees))
        for degrees in sorted(config.temperatures)
    }
    lines = [line for one in found.values() for line in one["lines"]]
    notes += [note for one in found.values() for note in one["notes"]]
    slower = [f"{degrees:g}" for degrees, one in found.items() if one["slower"]]
    if config.repeats > 1:  # of one lap nobody knows how far apart equal things are
        where = f"at temperature {', '.join(slower)}" if slower else "at no temperature"
        ratio, least = min((one["ratio"], degrees) for degrees, one in found.items())
        notes.insert(
            0,
            f"sakiyomi is slower than plain {where}, by more than two equal things differ; its least is "
            f"{ratio:.2f} times plain, at temperature {least:g}",
        )
    gamma = f"auto; {config.gamma} of transformers and of sample and compare"
    conditions = work.conditions(gamma=gamma, **work.laps(RACED))
    return Row("temperature", "tokens/s by temperature", lines, conditions, notes)


def _asking(name: str, auto: SamplingParams, gamma: int) -> SamplingParams:
    """Rivals have no length that adapts to the machine; that of transformers is set to the same."""
    if name == "chain, +2/-1, ratio":
        return replace(auto, gamma="heuristic", tree="chain", acceptance="ratio")
    if name == "sample and compare":
        return replace(auto, gamma=gamma, tree="chain", acceptance="coupled")
    return auto if name else replace(auto, gamma=gamma)


def _paint_temperature(row: Row, theme: Theme) -> Figure:
    figure, (axes,) = stacked(height=4.2)
    colours = {"plain": theme.faint, "draft alone": theme.ink}
    rest = iter(theme.colours)
    for way in _ways(row):
        own = [line for line in row.lines if line["name"] == way]
        look: dict[str, Any] = {"color": colours.get(way) or next(rest), "markersize": 4, "label": way, "linewidth": 2}
        curve(axes, own, "temperature", "ms_per_token", "o:" if way in colours else "o-", **look)
    axes.set(xlabel="temperature", ylabel="ms a token", ylim=(0, None))
    legend_below(figure, axes)
    return figure


def _alt_temperature(row: Row) -> str:
    said = []
    for way in ("sakiyomi", "chain, +2/-1, ratio", "sample and compare", "transformers assisted"):
        own = [line["ratio"] for line in row.lines if line["name"] == way and line["ratio"]]
        if own:
            said.append(
                f"{way} is {own[0]:.2f} times as fast as plain at the lowest temperature and {own[-1]:.2f} at the "
                "highest"
            )
    return f"Time a token against temperature, a line each way of generating: {'; '.join(said)}."


TEMPERATURE = Section(
    "Time against temperature",
    "The hotter the text, the less a draft knows of it. Ours drafts with the same temperature and noise as the target "
    "(coupled sampling), and drafts only as far as that pays. Chain, +2/-1, ratio: rejection sampling with a draft at "
    "the same temperature, whose length grows by 2 after a whole draft and falls by 1 after any other. Sample and "
    "compare: the draft is greedy, the target samples, and equal tokens stay. All give the target's own distribution, "
    "the draft alone apart. Each temperature is a race of its own: what all lines do together from one to the next is "
    "the machine's.",
    temperature,
    _paint_temperature,
    _alt_temperature,
    ("temperatures", "heads"),
)

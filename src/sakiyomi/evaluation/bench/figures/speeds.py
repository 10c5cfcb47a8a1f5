"""Figures of speed: by the size of the target, with Medusa heads, by temperature, with several drafts in one tree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from sakiyomi.core.errors import SakiyomiError, UnsupportedError
from sakiyomi.core.params import SamplingParams
from sakiyomi.core.tree import Draft, DraftKind
from sakiyomi.drafters.base import Context
from sakiyomi.engine.plain import EngineView
from sakiyomi.evaluation.bench.draw import curve, plain_numbers
from sakiyomi.evaluation.bench.figures.alphas import family
from sakiyomi.evaluation.bench.figures.work import Work, lap, line_of, race_piece
from sakiyomi.evaluation.bench.frame import PairRow, peer_lap
from sakiyomi.evaluation.bench.models import WAYS
from sakiyomi.evaluation.bench.pictures import Figures, Theme, bars, grouped, stack
from sakiyomi.evaluation.bench.report import Row, race_notes
from sakiyomi.evaluation.bench.runner import Contender, Spread
from sakiyomi.evaluation.loading import load

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
    what: str, work: Work, title: str, contenders: Callable[[PairRow, str | None], Sequence[Contender]], **known: Any
) -> Row:
    """A race at each size, the smallest first; a size that is not there has a note in its place.

    Args:
        what: names the section.
        work: the report's.
        title: of the row.
        contenders: are made from the row of a size and the heads that go with it.
        known: conditions.

    Raises:
        SakiyomiError: no size could be measured.
    """

    def measured(size: str) -> dict[str, Any]:
        row, heads = work.sized(what, size)
        parameters = row.pair.target.model.num_parameters() / 1e6
        name = f"{parameters:.3g}M"
        return race_piece(name, row.race(contenders(row, heads), where=name), size=name, parameters=parameters)

    notes: list[str] = []
    found = work.pieces(what, "size", ("", *work.config.sizes), measured, notes)
    lines = sorted((line for one in found for line in one["lines"]), key=lambda line: line["parameters"])
    return Row(what, title, lines, {**work.pair.names, **known, **work.laps(RACED)}, notes)


def sizes(work: Work) -> Row:
    """Greedy; transformers plain and assisted, and our ways, on the target as it is and on further sizes."""

    def contenders(row: PairRow, heads: str | None) -> list[Contender]:
        llm = row.llm()
        judge, prompts = row.pair.judge(llm), row.pair.prompts[:RACED]
        laps = {way: partial(peer_lap, row.pair.peer(way), prompts, row.params()) for way in WAYS[:2]}
        theirs = [Contender(f"transformers {way}", run, row.pair.judge()) for way, run in laps.items()]
        ways = {name: (llm if more else EngineView(llm), more) for name, more in OURS.items()}
        if heads is not None:
            ways["Medusa"] = (EngineView(llm, llm.drafter(f"medusa:{heads}"), strict=True), {"gamma": "auto"})
        runs = {name: row.run(way, prompts=prompts, **more) for name, (way, more) in ways.items()}
        row.warm(runs, llm)
        return [*theirs, *(Contender(name, run, judge) for name, run in runs.items())]

    known = {**work.pair.dtypes, "gamma": work.config.gamma}
    return _by_size("sizes", work, "milliseconds a token, greedy, by size of the target", contenders, **known)


def _ways(row: Row) -> list[str]:
    return list(dict.fromkeys(line["name"] for line in row.lines))


def _panel_sizes(axes: Any, row: Row, theme: Theme) -> None:
    for at, way in enumerate(_ways(row)):
        own = [line for line in row.lines if line["name"] == way and line["ms_per_token"]]
        style = "--" if way.startswith("transformers") else ":" if way == "plain" else "-"
        look: dict[str, Any] = {"color": theme.colours[at % len(theme.colours)]}
        # A little beside each other, so that no bar hides another.
        own = [{**line, "x": line["parameters"] * 1.015 ** (at - 3)} for line in own]
        curve(axes, own, "x", "ms_per_token", f"o{style}", markersize=5, label=way, **look)
        ends = ([1000 / line[end] for line in own] for end in ("high", "low"))
        axes.vlines([line["x"] for line in own], *ends, **look)
    places = dict.fromkeys((line["parameters"], line["size"]) for line in row.lines)
    # Ways differ by a factor of ten and more: on a straight scale the faster ones are one line.
    axes.set(xscale="log", yscale="log", xlabel="parameters of the target", ylabel="ms a token; bars: all runs")
    axes.set_xticks([at for at, _ in places], [name for _, name in places])
    plain_numbers(axes)


def _largest(row: Row) -> list[Any]:
    return [line for line in row.lines if line["size"] == row.lines[-1]["size"]]


def medusa(work: Work) -> Row:
    """Greedy; plain against heads, on the target as it is and on further sizes, with gamma auto."""
    heads_of_target, params = work.medusa, work.params(gamma="auto")  # refuses before anything is loaded

    def contenders(row: PairRow, heads: str | None) -> list[Contender]:
        llm = row.llm(f"medusa:{heads}")
        ways = {"plain": EngineView(llm), "Medusa": llm}
        runs = {name: partial(lap, way, row.pair.prompts[:RACED], params) for name, way in ways.items()}
        runs["Medusa"]()  # learns what passes cost
        judge = row.pair.judge(llm)
        return [Contender(name, run, judge) for name, run in runs.items()]

    title = "tokens/s, greedy, plain and with Medusa heads, by size of the target"
    return _by_size("medusa", work, title, contenders, draft=heads_of_target, gamma="auto")


def _panel_medusa(axes: Any, row: Row, theme: Theme) -> None:
    groups = list(dict.fromkeys(line["size"] for line in row.lines))
    most = max(line["high"] or 0 for line in row.lines)
    known = {way: [line for line in row.lines if line["name"] == way] for way in _ways(row)}
    speeds = {way: [line["tokens_per_second"] for line in own] for way, own in known.items()}
    places = grouped(axes, groups, speeds, (theme.faint, theme.colours[0]))
    for at, (own, xs) in enumerate(zip(known.values(), places, strict=True)):
        for line, x in zip(own, xs, strict=True):
            if (speed := line["tokens_per_second"]) is None:
                continue
            axes.errorbar(x, speed, [[speed - line["low"]], [line["high"] - speed]], ecolor=theme.ink, capsize=3)
            text = f"{speed:.0f}" + (f"\n{line['ratio']:.2f}x" if at else "")
            axes.text(x, line["high"] + 0.02 * most, text, ha="center", va="bottom", fontsize=9)
    axes.set(xlabel="parameters of the target", ylabel="tokens/s; whiskers: all runs", ylim=(0, 1.2 * most))


class GreedyDraft:
    """Sample and compare: the draft proposes its most likely token, the target samples, and equal tokens stay.

    The rule of the first assisted generation of transformers; no acceptance rule that a user can ask for. It is
    lossless, and accepts a token with the target's probability of the draft's best guess
    (``theory.guess_acceptance``), which falls with the temperature; the draft's own temperature plays no part. With
    ``acceptance="coupled"`` the target's own draw is compared with the draft, which is just this. Everything but
    ``propose`` is the drafter's own.

    Args:
        drafter: a draft model (``ModelDrafter``), not used by another engine at the same time.
    """

    name = "greedy-draft"
    kind: DraftKind = "point_mass"

    def __init__(self, drafter: Any) -> None:
        self._drafter = drafter
        self.model, self.end = drafter.model, drafter.end

    @property
    def forward_seconds(self) -> float:
        """Seconds inside the draft's forwards so far."""
        return float(self._drafter.forward_seconds)

    @property
    def prefill_seconds(self) -> float:
        """Of those, seconds over prompts."""
        return float(self._drafter.prefill_seconds)

    @property
    def passes(self) -> int:
        """Passes over levels so far."""
        return int(self._drafter.passes)

    def propose(self, contexts: Sequence[Context], gammas: Sequence[int]) -> list[Draft]:
        """See ``Drafter.propose``."""
        drafts: list[Draft] = self._drafter.propose([_cold(context) for context in contexts], gammas)
        return drafts


def _cold(context: Context) -> Context:
    """The same request at temperature 0; tokens and memory are its own."""
    params = SamplingParams(max_new_tokens=context.params.max_new_tokens, gamma=context.params.gamma, tree="chain")
    return replace(context, params=params, rule="greedy")


HEURISTIC, COMPARE, ASSISTED = "chain, +2/-1, ratio", "sample and compare", "transformers assisted"


def temperature(work: Work) -> Row:
    """All ways of generating at each temperature; the draft alone shows how fast unverified text could be."""
    config = work.config
    engines: dict[str, Any] = {"plain": work.engine(), "sakiyomi": work.engine(work.draft)}
    engines[HEURISTIC] = engines["sakiyomi"]
    engines[COMPARE] = EngineView(work.llm, GreedyDraft(work.llm.drafter(work.draft)), strict=True)
    notes: list[str] = []
    try:
        engines["Medusa"] = work.engine(work.medusa)
    except SakiyomiError as error:
        notes.append(f"Medusa is left out: {error.message}")
    engines["draft alone"] = load(config.bench(target=work.pair.config.draft_model), "none")
    engines["draft alone"].wait()
    peer, judge, prompts = work.pair.peer("assisted"), work.pair.judge(work.llm), work.prompts[:RACED]

    def measured(degrees: float) -> dict[str, Any]:
        auto = work.params(temperature=degrees, seed=7, gamma="auto")
        # Rivals have no length that adapts to the machine; that of transformers is the same.
        asked = {
            HEURISTIC: replace(auto, gamma="heuristic", tree="chain", acceptance="ratio"),
            COMPARE: replace(auto, gamma=config.gamma, tree="chain", acceptance="coupled"),
        }
        runs = {name: partial(lap, engine, prompts, asked.get(name, auto)) for name, engine in engines.items()}
        runs[ASSISTED] = partial(peer_lap, peer, prompts, replace(auto, gamma=config.gamma))
        # Sampled texts differ by chance; greedy ones are compared, but for the draft's.
        judges = {name: None if degrees or name == "draft alone" else judge for name in runs}
        for name, run in runs.items():
            work.note(f"temperature {degrees:g}: warming up, {name}")
            run()
        work.llm.wait()
        contenders = [Contender(name, run, judges[name]) for name, run in runs.items()]
        found = work.row(f"temperature {degrees:g}").race(contenders)
        known, ours = Spread.of(found), found[1]
        slower = known is not None and ours.ratio < known.low
        piece = race_piece(f"T={degrees:g}", found, temperature=degrees)
        return piece | {"ratio": ours.ratio, "slower": slower}

    found = work.pieces("temperature", "temperature", sorted(config.temperatures), measured, notes)
    slower = [f"{one['lines'][0]['temperature']:g}" for one in found if one["slower"]]
    if config.repeats > 1:  # one run does not tell how far apart two equal things are
        where = f"at temperature {', '.join(slower)}" if slower else "at no temperature"
        ratio, least = min((one["ratio"], one["lines"][0]["temperature"]) for one in found)
        verdict = f"sakiyomi is slower than plain {where}, by more than two equal things differ; its least is "
        notes.insert(0, verdict + f"{ratio:.2f} times plain, at temperature {least:g}")
    gamma = f"auto; {config.gamma} of transformers and of sample and compare"
    lines = [line for one in found for line in one["lines"]]
    return Row("temperature", "tokens/s by temperature", lines, work.conditions(gamma=gamma, **work.laps(RACED)), notes)


def _panel_temperature(axes: Any, row: Row, theme: Theme) -> None:
    colours = {"plain": theme.faint, "draft alone": theme.ink}
    rest = iter(theme.colours)
    for way in _ways(row):
        own = [line for line in row.lines if line["name"] == way]
        look: dict[str, Any] = {"color": colours.get(way) or next(rest), "markersize": 4, "label": way, "linewidth": 2}
        curve(axes, own, "temperature", "ms_per_token", "o:" if way in colours else "o-", **look)
    axes.set(xlabel="temperature", ylabel="ms a token", ylim=(0, None))


NODES, DEPTH = 12, 4  # of every tree, so that a merged one is no larger than those of its parts


def several(work: Work) -> Row:
    """Greedy trees of as many nodes: by the pair's draft, by others, and by all of them merged."""
    specs = [work.draft, *_others(work)]
    if len(specs) < 2:
        raise UnsupportedError("there is no second draft: give a family of checkpoints with --models")
    names = {spec: spec.partition(":")[0] + ":" + Path(spec.partition(":")[2]).name for spec in specs}
    ways = {"plain": work.engine(), **{names[spec]: work.engine(spec) for spec in specs}}
    ways["+".join(names.values())] = work.engine("+".join(specs))
    row = work.row("several")
    runs = {name: row.run(way, gamma=DEPTH, nodes=NODES, tree="best-first") for name, way in ways.items()}
    row.warm(runs, work.llm)
    found = row.race(runs, work.pair.judge(work.llm))
    lines = [line_of(standing) | {"A/A": Spread.shown(found)} for standing in found]
    conditions = work.conditions(nodes=NODES, depth=DEPTH, temperature=0)
    return Row("several", "tokens a pass and speed, several drafts in one tree", lines, conditions, race_notes(found))


def _others(work: Work) -> list[str]:
    """Further drafts: the other smaller models of the family, else the target's first layers."""
    config, found = work.config, []
    if config.models is not None:
        known = {Path(name).expanduser().resolve() for name in (config.target, work.draft.removeprefix("model:"))}
        found = [f"model:{folder}" for folder in family(config.models)[1:] if folder.resolve() not in known]
    half = int(work.llm.target.config.num_hidden_layers) // 2
    return found or ([f"early-exit:{half}"] if half else [])


FIGURES: Figures = {
    "sizes": (sizes, stack(_panel_sizes, height=3.8, below=True)),
    "medusa": (medusa, stack(_panel_medusa, below=True)),
    "temperature": (temperature, stack(_panel_temperature, height=4.2, below=True)),
    "several": (
        several,
        stack(
            bars("tau", label="tokens a target pass"),
            bars("ratio", label="speed over plain", colour=1),
            height=lambda row: 0.9 + 0.36 * len(row.lines),
        ),
    ),
}

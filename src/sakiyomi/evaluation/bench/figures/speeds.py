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
from sakiyomi.evaluation.bench.figures.alphas import family
from sakiyomi.evaluation.bench.figures.work import Work, line_of, race_piece
from sakiyomi.evaluation.bench.frame import PairRow, Run, run_ours, run_peer
from sakiyomi.evaluation.bench.models import WAYS
from sakiyomi.evaluation.bench.report import Row
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


def _by_size(work: Work, contenders: Callable[[PairRow, str | None], Sequence[Contender]], **known: Any) -> Row:
    """A race at each size, the smallest first; a size that is not there has a note in its place.

    Args:
        work: the section.
        contenders: are made from the row of a size and the heads that go with it.
        known: conditions.

    Raises:
        SakiyomiError: no size could be measured.
    """

    def measured(size: str) -> dict[str, Any]:
        row, heads = work.sized(size)
        parameters = row.pair.target.model.num_parameters() / 1e6
        name = f"{parameters:.3g}M"
        return race_piece(name, row.race(contenders(row, heads), where=name), size=name, parameters=parameters)

    found = work.pieces("size", ("", *work.report.sizes), measured)
    lines = sorted((line for one in found for line in one["lines"]), key=lambda line: line["parameters"])
    return Row(work.name, "", lines, {**work.pair.names, **known, **work.amount(RACED)}, work.notes)


def sizes(work: Work) -> Row:
    """Greedy; transformers plain and assisted, and our ways, on the target as it is and on further sizes."""

    def contenders(row: PairRow, heads: str | None) -> list[Contender]:
        llm = row.llm()
        judge, prompts = row.pair.judge(llm), row.pair.prompts[:RACED]
        theirs: dict[str, Run] = {
            f"transformers {way}": partial(run_peer, row.pair.peer(way), prompts, row.params()) for way in WAYS[:2]
        }
        ways = {name: (llm if more else EngineView(llm), more) for name, more in OURS.items()}
        if heads is not None:
            ways["Medusa"] = (EngineView(llm, llm.drafter(f"medusa:{heads}"), strict=True), {"gamma": "auto"})
        runs = {name: row.run(way, prompts=prompts, **more) for name, (way, more) in ways.items()}
        row.warm(runs, llm)
        return _contenders(theirs, row.pair.judge()) + _contenders(runs, judge)

    return _by_size(work, contenders, **work.pair.dtypes, gamma=work.config.gamma)


def _contenders(runs: dict[str, Run], judge: Any) -> list[Contender]:
    return [Contender(name, run, judge) for name, run in runs.items()]


def medusa(work: Work) -> Row:
    """Greedy; plain against heads, on the target as it is and on further sizes, with gamma auto."""
    heads_of_target, params = work.medusa, work.params(gamma="auto")  # refuses before anything is loaded

    def contenders(row: PairRow, heads: str | None) -> list[Contender]:
        llm = row.llm(f"medusa:{heads}")
        ways = {"plain": EngineView(llm), "Medusa": llm}
        runs: dict[str, Run] = {
            name: partial(run_ours, way, row.pair.prompts[:RACED], params) for name, way in ways.items()
        }
        runs["Medusa"]()  # learns what passes cost
        return _contenders(runs, row.pair.judge(llm))

    return _by_size(work, contenders, draft=heads_of_target, gamma="auto")


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

    def __getattr__(self, name: str) -> Any:
        if name not in ("forward_seconds", "prefill_seconds", "passes"):
            raise AttributeError(name)
        return getattr(self._drafter, name)

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
    gamma, pair = work.config.gamma, work.pair
    engines: dict[str, Any] = {"plain": work.engine(), "sakiyomi": work.engine(work.draft)}
    engines[HEURISTIC] = engines["sakiyomi"]
    engines[COMPARE] = EngineView(work.alone, GreedyDraft(work.alone.drafter(work.draft)), strict=True)
    try:
        engines["Medusa"] = work.engine(work.medusa)
    except SakiyomiError as error:
        work.notes.append(f"Medusa is left out: {error.message}")
    engines["draft alone"] = load(replace(work.config, target=work.config.draft_model), "none")
    engines["draft alone"].wait()
    peer, judge, prompts = pair.peer("assisted"), pair.judge(work.alone), pair.prompts[:RACED]
    # Rivals have no length that adapts to the machine; that of transformers is the same.
    rivals: dict[str, dict[str, Any]] = {
        HEURISTIC: {"gamma": "heuristic", "tree": "chain", "acceptance": "ratio"},
        COMPARE: {"gamma": gamma, "tree": "chain", "acceptance": "coupled"},
    }

    def measured(degrees: float) -> dict[str, Any]:
        auto: dict[str, Any] = {"temperature": degrees, "seed": 7, "gamma": "auto"}
        runs = {
            name: work.run(engine, prompts=prompts, **auto | rivals.get(name, {})) for name, engine in engines.items()
        }
        runs[ASSISTED] = partial(run_peer, peer, prompts, work.params(**auto | {"gamma": gamma}))
        work.warm(runs, work.alone)
        # Sampled texts differ by chance; greedy ones are compared, but for the draft's.
        judges = {name: None if degrees or name == "draft alone" else judge for name in runs}
        where = f"T={degrees:g}"
        found = work.race([Contender(name, run, judges[name]) for name, run in runs.items()], where=where)
        known, ours = Spread.of(found), found[1]
        slower = known is not None and ours.ratio < known.low
        return race_piece(where, found, temperature=degrees) | {"ratio": ours.ratio, "slower": slower}

    found = work.pieces("temperature", sorted(work.report.temperatures), measured)
    if work.config.repeats > 1:  # one run does not tell how far apart two equal things are
        slower = [f"{one['lines'][0]['temperature']:g}" for one in found if one["slower"]]
        where = f"at temperature {', '.join(slower)}" if slower else "at no temperature"
        ratio, least = min((one["ratio"], one["lines"][0]["temperature"]) for one in found)
        verdict = f"sakiyomi is slower than plain {where}, by more than two equal things differ; its least is "
        work.notes.insert(0, verdict + f"{ratio:.2f} times plain, at temperature {least:g}")
    lines = [line for one in found for line in one["lines"]]
    return work.measured(lines, gamma=f"auto; {gamma} of transformers and of sample and compare", **work.amount(RACED))


NODES, DEPTH = 12, 4  # of every tree, so that a merged one is no larger than those of its parts


def several(work: Work) -> Row:
    """Greedy trees of as many nodes: by the pair's draft, by others, and by all of them merged."""
    specs = [work.draft, *_others(work)]
    if len(specs) < 2:
        raise UnsupportedError("there is no second draft: give a family of checkpoints with --models")
    names = {spec: spec.partition(":")[0] + ":" + Path(spec.partition(":")[2]).name for spec in specs}
    ways = {"plain": work.engine(), **{names[spec]: work.engine(spec) for spec in specs}}
    ways["+".join(names.values())] = work.engine("+".join(specs))
    runs = {
        name: work.run(way, gamma=DEPTH, nodes=NODES, tree="best-first", ignore_eos=False) for name, way in ways.items()
    }
    work.warm(runs, work.alone)
    found = work.raced(runs, work.pair.judge(work.alone))
    lines = [line_of(standing) | {"A/A": Spread.shown(found)} for standing in found]
    return work.measured(lines, nodes=NODES, depth=DEPTH, temperature=0)


def _others(work: Work) -> list[str]:
    """Further drafts: the other smaller models of the family, else the target's first layers."""
    report, found = work.report, []
    if report.models is not None:
        known = {Path(name).expanduser().resolve() for name in (report.target, work.config.draft_model)}
        found = [f"model:{folder}" for folder in family(report.models)[1:] if folder.resolve() not in known]
    half = int(work.alone.target.config.num_hidden_layers) // 2
    return found or ([f"early-exit:{half}"] if half else [])

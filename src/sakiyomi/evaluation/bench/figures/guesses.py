"""Figures of guesses: ranks of a draft model and of Medusa heads, the sparse tree, typical acceptance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sakiyomi.drafters.medusa import MedusaDrafter
from sakiyomi.drafters.medusa_heads.ranks import Ranks, rank_texts
from sakiyomi.evaluation.bench.draw import curve
from sakiyomi.evaluation.bench.figures.trees import laid_out
from sakiyomi.evaluation.bench.figures.work import Work
from sakiyomi.evaluation.bench.medusa import EPSILONS, WARM, typical
from sakiyomi.evaluation.bench.pictures import Figures, Theme, curves, grouped, having, stack
from sakiyomi.evaluation.bench.report import Row
from sakiyomi.evaluation.tuning.medusa_search import ranks_of
from sakiyomi.kernels.batch import SequenceRows
from sakiyomi.model_executor.features import HEAD
from sakiyomi.model_executor.runner import ModelRunner
from sakiyomi.sampling.sampler import Sampler
from sakiyomi.sampling.verifiers.typical import threshold as limit

SHOWN = 10
TEMPERATURES = (0.0, 1.0)
ARTICLE = {1: 0.7, 2: 0.8}
"""Shares that the article on assisted generation gives for the first guess, and for the first two."""
TOPS = (1, 2, 3, 5, 10)
TREES = (1, 3, 7, 15, 31, 63)
NODES = 31


def draft_ranks(model: ModelRunner, prompts: Sequence[list[int]], texts: Sequence[list[int]]) -> Ranks:
    """Ranks that a draft model gives to the tokens of a text, each after those before it."""

    def ahead(ids: Sequence[int]) -> Tensor:
        # A head looks one token further than a draft model: its row at a place is the draft's at the next one.
        with model.cache.lent(len(ids)) as slot:
            return model.score([SequenceRows(slot, 0, list(ids))]).logits.roll(-1, 0)

    return rank_texts(ahead, lambda rows: rows[None], prompts, texts)


def ranks(work: Work) -> Row:
    """Of a text that the target writes greedily, and of one that it samples."""
    model = work.drafter(work.draft).model
    shares = {}
    places = 0
    for temperature in TEMPERATURES:
        found = draft_ranks(model, work.prompts, work.written(temperature=temperature, seed=7))
        shares[temperature], places = found.accuracies()[0], places + found.places
    lines = []
    for rank in range(1, SHOWN + 1):
        line: dict[str, Any] = {"rank": rank}
        for temperature, share in shares.items():
            line |= {f"T={temperature:g}": share[rank - 1], f"T={temperature:g}, up to here": sum(share[:rank])}
        lines.append(line | {"article, up to here": ARTICLE.get(rank)})
    conditions = work.conditions(places=places)
    return Row("ranks", "share of places by the rank of the target's token in the draft's list", lines, conditions)


def _panel_ranks(axes: Any, row: Row, theme: Theme) -> None:
    names = [f"T={temperature:g}" for temperature in TEMPERATURES]
    ranks = [line["rank"] for line in row.lines]
    shares = {name: [100 * line[name] for line in row.lines] for name in names}
    places = grouped(axes, [str(rank) for rank in ranks], shares, theme.colours)
    for name, xs, colour in zip(names, places, theme.colours, strict=False):
        totals = [100 * line[f"{name}, up to here"] for line in row.lines]
        label = f"target's text at {name}: bars a rank, line up to it"
        axes.plot(xs, totals, "o-", markersize=4, color=colour, label=label)
    article = [{"place": rank - 1, **line} for rank, line in zip(ranks, row.lines, strict=True)]
    look = {"color": theme.ink, "markersize": 6, "label": "an article's pair, up to rank"}
    curve(axes, article, "place", "article, up to here", "D", 100, **look)
    axes.set(xlabel="rank in the draft's list", ylabel="places, percent", ylim=(0, 102))
    axes.legend(handles=axes.lines, loc="center right")


def heads(work: Work) -> Row:
    """Accuracy of each head, and tokens a pass of the best trees of some sizes, counted on the same text."""
    drafter: MedusaDrafter = work.drafter(work.medusa)
    found = ranks_of(work.llm, drafter, work.prompts, work.written(temperature=0.0, seed=7))
    lines: list[dict[str, Any]] = [
        {"name": f"head {head}", **{f"top {top}": sum(chances[:top]) for top in TOPS}}
        for head, chances in enumerate(found.accuracies(), start=1)
    ]
    for nodes in TREES:
        paths = found.best(nodes)
        depth = max(map(len, paths), default=0)
        lines.append({"name": f"tree of {nodes}", "nodes": nodes, "depth": depth, "tau": found.replay(paths)})
    conditions = work.conditions(heads=work.medusa.partition(":")[2], places=found.places)
    title = "share of places whose token was among a head's first guesses; tokens a pass of the best trees"
    return Row("heads", title, lines, conditions)


def _panel_tops(axes: Any, row: Row, theme: Theme) -> None:
    for line in having(row.lines, "top 1"):
        axes.plot(range(len(TOPS)), [100 * line[f"top {top}"] for top in TOPS], "o-", markersize=4, label=line["name"])
    axes.set_xticks(range(len(TOPS)), [f"top {top}" for top in TOPS])
    axes.set(ylabel="places, percent", ylim=(0, 102))
    axes.legend(ncols=2, loc="lower right")


def _panel_trees(axes: Any, row: Row, theme: Theme) -> None:
    trees = having(row.lines, "nodes")
    curve(axes, trees, "nodes", "tau", color=theme.colours[0])
    for line in trees:
        where: dict[str, Any] = {"textcoords": "offset points", "ha": "center"}
        axes.annotate(f"{line['tau']:.2f}", (line["nodes"], line["tau"]), (0, 6), **where)
    axes.set_xscale("log", base=2)
    axes.set_xticks([line["nodes"] for line in trees], [str(line["nodes"]) for line in trees])
    axes.minorticks_off()
    axes.set(xlabel="nodes of the best tree", ylabel="tokens a pass", ylim=(1, 1.15 * max(t["tau"] for t in trees)))


def threshold(work: Work) -> Row:
    """The row ``typical`` of the benchmark, with epsilon in each line (None: lossless) and guesses that it takes."""
    work.medusa  # noqa: B018 - refuse before anything is loaded
    row = typical(work.row("threshold"))
    epsilons, taken = (None, None, *EPSILONS), _taken(work)
    lines = [{**line, "epsilon": at, "taken": taken.get(at)} for line, at in zip(row.lines, epsilons, strict=True)]
    return Row("threshold", row.title, lines, row.conditions, row.notes)


@torch.inference_mode()
def _taken(work: Work) -> dict[float | None, float]:
    """By epsilon, the share of places of one and the same text at which the first head's first guess is typical."""
    target, params = work.llm.target, work.params(temperature=WARM, seed=7, gamma="auto")
    drafter: MedusaDrafter = work.drafter(work.medusa)
    sampler = Sampler(params, work.llm.vocab_size)
    rows = []
    for prompt, text in zip(work.prompts, work.written(temperature=WARM, seed=7, gamma="auto"), strict=True):
        ids = [*prompt, *text]
        with target.cache.lent(len(ids)) as slot:
            found = target.score([SequenceRows(slot, 0, ids, prompt=True)])
            # Behind the token at i the head guesses that at i + 2, which the target expects behind i + 1.
            guesses = drafter.guesser(found.features[HEAD][len(prompt) - 1 : -2])[0].argmax(-1).tolist()
            rows += list(zip(sampler.probs(found.logits[len(prompt) : -1]).numpy(), guesses, strict=True))
    return {
        epsilon: sum(float(row[guess]) > limit(row, epsilon, math.sqrt(epsilon)) for row, guess in rows) / len(rows)
        for epsilon in EPSILONS
    }


def _panel_speed(axes: Any, row: Row, theme: Theme) -> None:
    _, lossless, *lossy = row.lines
    curve(axes, lossy, "epsilon", "ratio", color=theme.colours[0], label="typical acceptance")
    if lossless["ratio"] is not None:
        axes.axhline(lossless["ratio"], color=theme.colours[2], linestyle="--", label="the same heads, lossless")
    axes.axhline(1.0, color=theme.faint, linewidth=1)
    axes.set(ylabel="speed over plain", ylim=(0, None))
    axes.legend(loc="lower right")
    _at_epsilons(axes, row)


def _panel_distance(axes: Any, row: Row, theme: Theme) -> None:
    ys: dict[str, str | tuple[str, str]] = {
        "TV": "distance from the target",
        "taken": ("first guesses taken, one text", "s--"),
    }
    look: dict[str, Any] = {"xlabel": "posterior_threshold (epsilon), stricter to the right", "ylabel": "share"}
    curves("epsilon", ys, of=lambda lines: lines[2:], level=0.0, legend="upper right", **look)(axes, row, theme)
    axes.set_ylim(-0.02, 1.02)
    _at_epsilons(axes, row)


def _at_epsilons(axes: Any, row: Row) -> None:
    places = [line["epsilon"] for line in row.lines[2:]]
    axes.set_xscale("log")
    axes.set_xticks(places, [f"{place:g}" for place in places])
    axes.minorticks_off()


ALT = "{epsilon:g}: {tau:.2f} tokens a pass, distance {TV:.2f}, {taken:.0%} of first guesses taken"


def sparse(work: Work) -> Row:
    """The best tree of so many nodes, and how often each node was accepted when the text was replayed with it."""
    drafter = work.drafter(work.medusa)
    found = ranks_of(work.llm, drafter, work.prompts, work.written(temperature=0.0, seed=7))
    paths = found.best(NODES)
    shares = found.accepted(paths)
    numbers = {path: node for node, path in enumerate(paths)}
    lines: list[dict[str, Any]] = [
        {
            "node": node,
            "parent": numbers.get(path[:-1], -1),
            "head": len(path),
            "guess": path[-1] + 1,
            "accepted": shares[path],
            "path": list(path),
        }
        for path, node in numbers.items()
    ]
    conditions = work.conditions(nodes=len(paths), tau=found.replay(paths), places=found.places)
    title = "share of rounds in which each node of the sparse tree was accepted"
    return Row("sparse", title, lines, conditions)


def _panel_sparse(axes: Any, row: Row, theme: Theme) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    places = laid_out(row.lines)
    most = max(y for _, y in places.values())
    axes.set_axis_off()
    shades = LinearSegmentedColormap.from_list("accepted", [theme.paper, theme.colours[2]])
    for line in row.lines:
        x, y = places[line["node"]]
        above, beside = places[line["parent"]]
        share = line["accepted"]
        look = {"color": theme.colours[2] if share else theme.faint, "linewidth": 0.6 + 4 * share}
        axes.plot([above, x - 0.5, x - 0.5, x], [beside, beside, y, y], zorder=1, **look)
        axes.plot(
            x, y, "o", markersize=7, color=shades(share), markeredgecolor=theme.ink, markeredgewidth=0.6, zorder=2
        )
        label: dict[str, Any] = {"fontsize": 8, "va": "center", "color": theme.ink}
        behind = {"facecolor": theme.paper, "edgecolor": "none", "pad": 0.8}  # the line to the next node
        axes.text(x + 0.08, y, f"{line['guess']}.  {100 * share:.3g} %", bbox=behind, **label)
    axes.plot(-1, places[-1][1], "o", color=theme.ink)
    deepest = max(line["head"] for line in row.lines)
    for head in range(deepest):
        axes.text(head, -1.1, f"head {head + 1}", fontsize=9, ha="center", color=theme.ink)
    axes.set(xlim=(-1.1, deepest - 0.3), ylim=(most + 0.6, -1.6))


FIGURES: Figures = {
    "ranks": (ranks, stack(_panel_ranks)),
    "heads": (heads, stack(_panel_tops, _panel_trees, height=2.9)),
    "threshold": (threshold, stack(_panel_speed, _panel_distance, height=2.6)),
    "sparse": (
        sparse,
        stack(
            _panel_sparse,
            height=lambda row: 1.0 + 0.24 * (1 + max(y for _, y in laid_out(row.lines).values())),
        ),
    ),
}

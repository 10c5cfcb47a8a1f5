"""At which rank of a guesser's list the token stood that came: of a draft model, and of Medusa heads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from sakiyomi.drafters.medusa import MedusaDrafter
from sakiyomi.drafters.medusa_heads.ranks import Ranks, rank_texts
from sakiyomi.evaluation.bench.draw import curve
from sakiyomi.evaluation.bench.figures.section import Section, Theme, stacked
from sakiyomi.evaluation.bench.figures.work import Work
from sakiyomi.evaluation.bench.report import Row
from sakiyomi.evaluation.tuning.medusa_search import ranks_of
from sakiyomi.kernels.batch import SequenceRows
from sakiyomi.model_executor.runner import ModelRunner

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["HEADS", "RANKS"]

SHOWN = 10
TEMPERATURES = (0.0, 1.0)
ARTICLE = {1: 0.7, 2: 0.8}
"""Shares that the article on assisted generation gives for the first guess, and for the first two."""
TOPS = (1, 2, 3, 5, 10)
TREES = (1, 3, 7, 15, 31, 63)


def written(work: Work, temperature: float) -> list[list[int]]:
    """What the target writes by itself."""
    params = work.params(temperature=temperature, seed=7)
    engine = work.engine()
    return [engine.generate([prompt], params)[0].token_ids for prompt in work.prompts]


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
        found = draft_ranks(model, work.prompts, written(work, temperature))
        shares[temperature], places = found.accuracies()[0], places + found.places
    lines = []
    for rank in range(1, SHOWN + 1):
        line: dict[str, Any] = {"rank": rank}
        for temperature, share in shares.items():
            line |= {f"T={temperature:g}": share[rank - 1], f"T={temperature:g}, up to here": sum(share[:rank])}
        lines.append(line | {"article, up to here": ARTICLE.get(rank)})
    conditions = work.conditions(places=places)
    return Row("ranks", "share of places by the rank of the target's token in the draft's list", lines, conditions)


def _paint_ranks(row: Row, theme: Theme) -> Figure:
    figure, (axes,) = stacked()
    for at, temperature in enumerate(TEMPERATURES):
        name = f"T={temperature:g}"
        xs = [line["rank"] + 0.4 * (at - 0.5) for line in row.lines]
        axes.bar(xs, [100 * line[name] for line in row.lines], width=0.38, color=theme.colours[at])
        totals = [100 * line[f"{name}, up to here"] for line in row.lines]
        label = f"target's text at {name}: bars a rank, line up to it"
        axes.plot(xs, totals, "o-", markersize=4, color=theme.colours[at], label=label)
    look = {"color": theme.ink, "markersize": 6, "label": "an article's pair, up to rank"}
    curve(axes, row.lines, "rank", "article, up to here", "D", 100, **look)
    axes.set(xlabel="rank in the draft's list", ylabel="places, percent", ylim=(0, 102))
    axes.set_xticks([line["rank"] for line in row.lines])
    axes.legend(loc="center right")
    return figure


def _alt_ranks(row: Row) -> str:
    first, second = row.lines[0], row.lines[1]
    said = [
        f"{100 * first[f'T={t:g}']:.0f} % and {100 * second[f'T={t:g}, up to here']:.0f} % at temperature {t:g}"
        for t in TEMPERATURES
    ]
    return (
        "Bars by rank with running totals: the target's token was the draft's first guess, or one of its first two, in "
        f"{', in '.join(said)}; an article on another pair had about 70 % and 80 %."
    )


RANKS = Section(
    "Rank of the target's token in the draft's list",
    "The target writes by itself; the draft reads along, and at every place its list of tokens, the likeliest first, "
    "is searched for the one that came. What stands at rank 2 is what a tree with two branches gains over a chain.",
    ranks,
    _paint_ranks,
    _alt_ranks,
)


def heads(work: Work) -> Row:
    """Accuracy of each head, and tokens a pass of the best trees of some sizes, counted on the same text."""
    drafter: MedusaDrafter = work.drafter(work.medusa)
    found = ranks_of(work.llm, drafter, work.prompts, written(work, 0.0))
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


def _paint_heads(row: Row, theme: Theme) -> Figure:
    figure, (upper, lower) = stacked(2, 2.9)
    for line in (line for line in row.lines if "nodes" not in line):
        upper.plot(range(len(TOPS)), [100 * line[f"top {top}"] for top in TOPS], "o-", markersize=4, label=line["name"])
    upper.set_xticks(range(len(TOPS)), [f"top {top}" for top in TOPS])
    upper.set(ylabel="places, percent", ylim=(0, 102))
    upper.legend(ncols=2, loc="lower right")
    trees = [line for line in row.lines if "nodes" in line]
    curve(lower, trees, "nodes", "tau", color=theme.colours[0])
    for line in trees:
        lower.annotate(
            f"{line['tau']:.2f}", (line["nodes"], line["tau"]), (0, 6), textcoords="offset points", ha="center"
        )
    lower.set_xscale("log", base=2)
    lower.set_xticks([line["nodes"] for line in trees], [str(line["nodes"]) for line in trees])
    lower.minorticks_off()
    lower.set(xlabel="nodes of the best tree", ylabel="tokens a pass", ylim=(1, 1.15 * max(t["tau"] for t in trees)))
    return figure


def _alt_heads(row: Row) -> str:
    own = [line for line in row.lines if "nodes" not in line]
    trees = [line for line in row.lines if "nodes" in line]
    return (
        "Curves by head: the first guess was right in "
        + ", ".join(f"{100 * line['top 1']:.0f} %" for line in own)
        + f" of places for heads 1 to {len(own)}; the best trees have {trees[0]['tau']:.2f} tokens a pass with one "
        f"node and {trees[-1]['tau']:.2f} with {trees[-1]['nodes']}."
    )


HEADS = Section(
    "Accuracy of Medusa heads, and what trees make of it",
    "Head k guesses the token k + 1 places on. Above: how often that token is among a head's first guesses, on what "
    "the target writes greedily. Below: tokens that a pass commits with the best tree of so many nodes (chosen by the "
    "product of these accuracies), counted round by round on the same text. Published heads of a 7B model have .56, "
    ".32, .20 and .15 of first guesses right (Medusa's own release).",
    heads,
    _paint_heads,
    _alt_heads,
    ("heads",),
)

"""Pictures of draft trees, of the mask of the pass over one, of predictions, and of what rounds keep."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from sakiyomi.core.errors import UnsupportedError
from sakiyomi.core.outputs import RoundTrace
from sakiyomi.evaluation.bench.draw import NARROW
from sakiyomi.evaluation.bench.figures.work import Work
from sakiyomi.evaluation.bench.pictures import (
    Figures,
    Lines,
    Panel,
    Theme,
    drawable,
    drawing,
    grouped,
    heat,
    stack,
)
from sakiyomi.evaluation.bench.report import Row
from sakiyomi.evaluation.predictions import Prediction, predictions

TEMPERATURES = (0.0, 1.0)
NODES, DEPTH = 12, 4
SERIES = 60  # rounds that are drawn one by one
GUESSES, PLACED = 3, 16  # predictions at a place, and places
BEND = 0.5  # of the way between two columns
COLUMN = 1.15  # inches of a box and the way to it
LINE = 0.42  # inches of a row of boxes
CELL = 0.24  # inches of a row of the mask, and of a line of predictions

Text = Callable[[int], str]


def tree_lines(traced: RoundTrace, text: Text) -> list[dict[str, Any]]:
    """A round as lines of a table: a line each node, and the target's own token as the last.

    Args:
        traced: the round.
        text: of a token.

    Returns:
        node, parent (-1: the last committed token), text, p of the target and q of the draft (None: not known), state.
    """
    accepted = set(traced.path)
    lines: list[dict[str, Any]] = []
    for node, (token, parent) in enumerate(zip(traced.tokens, traced.parents, strict=True)):
        state = "accepted" if node in accepted else "refused" if parent in (*accepted, -1) else "not reached"
        probs = {"p": traced.target_probs[node], "q": traced.draft_probs[node]}
        lines.append({"node": node, "parent": parent, "text": text(token), **probs, "state": state})
    end = traced.path[-1] if traced.path else -1
    own = {"node": len(lines), "parent": end, "text": text(traced.token), "p": None, "q": None, "state": traced.kind}
    return [*lines, own]


def place_lines(places: Sequence[Prediction], text: Text) -> list[dict[str, Any]]:
    """Predictions as lines of a table: behind each token what the target expects, and the probability of what came."""
    return [
        {
            "token": text(here.token),
            "then": None if there.token < 0 else text(there.token),
            "p": there.prob,
            "guesses": [[text(token), round(prob, 4)] for token, prob in there.top],
        }
        for here, there in pairwise(places)
    ]


def tree_height(row: Row) -> float:
    """Inches that a tree needs, its legend included."""
    return 1.2 + LINE * (1 + max(y for _, y in laid_out(row.lines).values()))


def paint_tree(axes: Any, row: Row, theme: Theme) -> None:
    """Draw the lines of ``tree_lines`` from left to right."""
    lines = row.lines
    places = laid_out(lines)
    most = max(y for _, y in places.values())
    axes.set_axis_off()
    colours = {"accepted": theme.colours[2], "refused": theme.colours[1], "not reached": theme.faint}
    for line in lines:
        x, y = places[line["node"]]
        above, beside = places.get(line["parent"], (-1, 0))
        colour = colours.get(line["state"], theme.colours[0])
        # Down in front of the column of boxes, so that no line runs behind one that it does not lead to.
        way = ([above, x - BEND, x - BEND, x], [beside, beside, y, y])
        main = line["state"] == "accepted"
        axes.plot(*way, color=colour, linewidth=2 if main else 1, zorder=1.5 if main else 1)
        shown = drawable(repr(line["text"]))
        if line["p"] is not None:
            shown += f"\np {line['p']:.2f}" + ("" if line["q"] is None else f" q {line['q']:.2f}")
        box = {"boxstyle": "round,pad=0.25", "facecolor": theme.paper, "edgecolor": colour, "linewidth": 1.5}
        axes.text(x, y, shown, ha="center", va="center", fontsize=8, color=theme.ink, bbox=box, zorder=2)
    axes.plot(-1, places.get(-1, (0, 0))[1], "o", color=theme.ink)
    axes.set(xlim=(-1.2, max(x for x, _ in places.values()) + 0.5), ylim=(most + 0.6, -0.8))
    for state, colour in {**colours, "the target's own": theme.colours[0]}.items():
        axes.plot([], [], color=colour, linewidth=3, label=state)
    axes.legend(ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.01))


def mask_height(row: Row) -> float:
    """Inches that the mask of a tree needs."""
    return 1.8 + CELL * len(row.lines)


def paint_mask(axes: Any, row: Row, theme: Theme) -> None:
    """Draw which token of the pass sees which: itself, its ancestors and the text before, in place of all before it."""
    from matplotlib.colors import ListedColormap

    nodes = [line for line in row.lines if line["p"] is not None]
    seen = [[0]]  # the last committed token; then each node's own row: the root, its ancestors, itself
    for line in nodes:
        seen.append([*seen[line["parent"] + 1], line["node"] + 1])
    cells = [
        [2 if column in row else 1 if column <= at else 0 for column in range(len(seen))] for at, row in enumerate(seen)
    ]
    colours = (theme.paper, _between(theme.paper, theme.faint), theme.colours[0])
    names = ["last token", *(drawable(repr(line["text"])) for line in nodes)]
    heat(axes, cells, names, names, cmap=ListedColormap(colours), vmin=0, vmax=2, edgecolors=theme.faint)
    axes.tick_params(axis="x", rotation=90)
    axes.set(xlabel="is seen (with all of the text before)", ylabel="token of the pass", aspect="equal")
    for colour, label in zip(colours[1:], ("not seen, though before it", "seen"), strict=True):
        axes.plot([], [], "s", color=colour, label=label)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=2)


def places_height(row: Row) -> float:
    """Inches that predictions need."""
    return 0.9 + CELL * len(row.lines)


def paint_places(axes: Any, row: Row, theme: Theme) -> None:
    """Draw the lines of ``place_lines``: behind each token, top down, its likeliest followers as one bar in parts."""
    lines = row.lines
    for at, line in enumerate(lines):
        left = 0.0
        for rank, (guess, prob) in enumerate(line["guesses"]):
            came = guess == line["then"]
            colour = theme.colours[2] if came else theme.colours[0] if not rank else theme.faint
            axes.barh(at, prob, left=left, height=0.8, color=colour, edgecolor=theme.paper)
            if prob >= 0.12:
                shown = f"{drawable(repr(guess))} {prob:.2f}"
                axes.text(left + 0.01, at, shown, va="center", fontsize=8, color=theme.paper, clip_on=True)
            left += prob
    axes.set_yticks(range(len(lines)), [drawable(repr(line["token"])) for line in lines], fontsize=8)
    axes.set(ylim=(len(lines) - 0.4, -0.6), xlim=(0, 1), xlabel="probability of the next token")
    for colour, label in ((theme.colours[2], "what came"), (theme.colours[0], "the first guess")):
        axes.plot([], [], "s", color=colour, label=label)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=2)
    axes.grid(visible=False)


def draw(path: str | Path, places: Lines, rounds: Sequence[Lines]) -> None:
    """Write the predictions for a prompt, and each round as a tree and as a mask, into one picture.

    Args:
        path: ends in .png or .svg.
        places: see ``place_lines``; none are drawn if it is empty.
        rounds: see ``tree_lines``.

    Raises:
        LoadError: the file cannot be written.
    """
    parts: list[tuple[Panel, Row, Any]] = [(paint_places, Row("places", "", places), places_height)] if places else []
    for lines in rounds:
        row = Row("round", "", lines)
        parts += [(paint_tree, row, tree_height), (paint_mask, row, mask_height)]
    deepest = max((x for lines in rounds for x, _ in laid_out(lines).values()), default=0)
    drawing(path, parts, width=max(NARROW, COLUMN * (deepest + 2)))


def _between(paper: str, faint: str) -> str:
    """A colour nearer to the paper than to the grid."""
    from matplotlib.colors import to_hex, to_rgb

    red, green, blue = (0.6 * one + 0.4 * other for one, other in zip(to_rgb(paper), to_rgb(faint), strict=True))
    return to_hex((red, green, blue))


def laid_out(lines: Lines) -> dict[int, tuple[float, float]]:
    """(depth, row) of each node and of the root: a leaf has a row of its own, others stand beside their first child."""
    below: dict[int, list[int]] = {}
    for line in lines:
        below.setdefault(line["parent"], []).append(line["node"])
    places: dict[int, tuple[float, float]] = {}
    row = 0

    def place(node: int, depth: int) -> None:
        nonlocal row
        children = below.get(node, [])
        if not children:
            places[node] = (depth, row)
            row += 1
            return
        for child in children:
            place(child, depth + 1)
        places[node] = (depth, places[children[0]][1])

    place(-1, -1)
    return places


def rounds(work: Work) -> Row:
    """How many draft tokens each round kept; chains, greedy and sampled."""
    kept: dict[str, list[int]] = {}
    alphas = {}
    engine = work.engine(work.draft)
    for temperature in TEMPERATURES:
        # The ratio rule has rounds that are independent draws, as the formula takes them.
        params = work.params(temperature=temperature, seed=7, acceptance="ratio", tree="chain")
        done = [_traced(engine, prompt, params) for prompt in work.prompts]
        found = [len(traced.path) for text in done for traced in text if len(traced.tokens) == work.config.gamma]
        if not found:
            raise UnsupportedError("no round drafted anything; give a longer text (--max-new-tokens)")
        judged = sum(count + (count < work.config.gamma) for count in found)
        name = f"T={temperature:g}"
        kept[name], alphas[name] = found, sum(found) / judged
    lines = []
    for count in range(work.config.gamma + 1):
        line: dict[str, Any] = {"accepted": count}
        for name, found in kept.items():
            line[name] = found.count(count) / len(found)
            line[f"{name}, alike"] = alphas[name] ** count * (1 - alphas[name] if count < work.config.gamma else 1)
        lines.append(line)
    lines[0]["series"] = {name: found[:SERIES] for name, found in kept.items()}
    counts = {f"rounds_{name}": len(found) for name, found in kept.items()}
    means = {f"alpha_{name}": alpha for name, alpha in alphas.items()}
    conditions = work.conditions(gamma=work.config.gamma, **counts, **means)
    return Row("rounds", "share of rounds by the draft tokens that were kept, and the first rounds", lines, conditions)


def _traced(engine: Any, prompt: list[int], params: Any) -> tuple[RoundTrace, ...]:
    (done,) = engine.generate([prompt], params, rounds_trace=True)
    return tuple(done.rounds_trace)


def _panel_shares(axes: Any, row: Row, theme: Theme) -> None:
    names = [f"T={temperature:g}" for temperature in TEMPERATURES]
    shares = {name: [100 * line[name] for line in row.lines] for name in names}
    places = grouped(axes, [str(line["accepted"]) for line in row.lines], shares, theme.colours)
    for name, xs in zip(names, places, strict=True):
        for colour, width in ((theme.paper, 5), (theme.ink, 2)):
            alike = [100 * line[f"{name}, alike"] for line in row.lines]
            axes.plot(xs, alike, "_", color=colour, markersize=14, markeredgewidth=width)
    axes.plot([], [], "_", color=theme.ink, markersize=14, markeredgewidth=2, label="if all places were alike")
    axes.set(xlabel="draft tokens kept in a round", ylabel="rounds, percent")
    axes.legend()


def _panel_series(at: int) -> Panel:
    def panel(axes: Any, row: Row, theme: Theme) -> None:
        name = f"T={TEMPERATURES[at]:g}"
        series = row.lines[0]["series"][name]
        axes.bar(range(1, len(series) + 1), series, width=0.8, color=theme.colours[at])
        axes.set(xlabel="round", ylabel=f"kept, {name}", ylim=(0, len(row.lines) - 0.9))
        axes.set_yticks([line["accepted"] for line in row.lines])
        axes.locator_params(axis="x", integer=True)

    return panel


def tree(work: Work) -> Row:
    """The round of a first text that shows most: several branches, and something accepted."""
    engine = work.engine(work.draft)
    params = work.params(gamma=DEPTH, tree="best-first", nodes=NODES)
    found = [traced for traced in _traced(engine, work.prompts[0], params) if traced.tokens]
    if not found:
        raise UnsupportedError("no round drafted anything; give a longer text (--max-new-tokens)")
    # The first of those that used most branches: it has something to show.
    chosen = max(found, key=lambda traced: (_off_first(traced), len(traced.path), len(traced.tokens)))
    lines = tree_lines(chosen, work.text)
    conditions = work.conditions(round=chosen.round, nodes=NODES, depth=DEPTH, of_rounds=len(found))
    return Row("tree", "tokens of one round, with their probabilities", lines, conditions)


def _off_first(traced: RoundTrace) -> int:
    """Accepted nodes that were not the first child of their parent."""
    return sum(traced.parents[node] in traced.parents[:node] for node in traced.path)


def places(work: Work) -> Row:
    """The target's predictions behind the last tokens of the first prompt."""
    found = predictions(work.llm.target, work.prompts[0], GUESSES)
    lines = place_lines(found, work.text)[-PLACED:]
    right = sum(line["then"] == line["guesses"][0][0] for line in lines[:-1])
    conditions = work.conditions(places=len(lines), first_guess_right=f"{right} of {len(lines) - 1}")
    return Row("places", "what the target expects behind each token of a prompt", lines, conditions)


FIGURES: Figures = {
    "rounds": (rounds, stack(_panel_shares, _panel_series(0), _panel_series(1), height=2.3)),
    "tree": (tree, stack(paint_tree, paint_mask, height=(tree_height, mask_height))),
    "places": (places, stack(paint_places, height=places_height)),
}

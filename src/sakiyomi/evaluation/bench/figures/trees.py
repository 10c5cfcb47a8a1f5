"""Pictures of draft trees, of the mask of the pass over one, and of predictions. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sakiyomi.core.outputs import RoundTrace
from sakiyomi.evaluation.bench.draw import NARROW
from sakiyomi.evaluation.bench.pictures import Lines, Panel, Theme, drawable, drawing, heat
from sakiyomi.evaluation.bench.report import Row

if TYPE_CHECKING:
    from sakiyomi.evaluation.predictions import Prediction

COLUMN = 1.15  # inches of a box and the way to it
LINE = 0.42  # inches of a row of boxes
CELL = 0.24  # inches of a row of the mask, of a line of predictions and of a row of dots

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
    """Predictions as lines of a table: after each token what the target expects, and the probability of what came."""
    return [
        {
            "token": text(here.token),
            "then": None if there.token < 0 else text(there.token),
            "p": there.prob,
            "guesses": [[text(token), round(prob, 4)] for token, prob in there.top],
        }
        for here, there in pairwise(places)
    ]


def _branches(
    axes: Any, lines: Lines, theme: Theme, look: Callable[[Mapping[str, Any]], dict[str, Any]]
) -> dict[int, tuple[float, float]]:
    """Draw the ways from each node's parent to it, from left to right, each with a look; places as ``laid_out``."""
    places = laid_out(lines)
    axes.set_axis_off()
    for line in lines:
        x, y = places[line["node"]]
        above, beside = places[line["parent"]]
        # Down in front of the column of boxes, so that no line runs behind one that it does not lead to.
        axes.plot([above, x - 0.5, x - 0.5, x], [beside, beside, y, y], **{"zorder": 1} | look(line))
    axes.plot(-1, places[-1][1], "o", color=theme.ink)
    deepest, lowest = (max(ends) for ends in zip(*places.values(), strict=True))
    axes.set(xlim=(-1.2, deepest + 0.5), ylim=(lowest + 0.6, -0.8))
    return places


def tree_height(row: Row) -> float:
    """Inches that a tree needs, its legend included."""
    return 1.2 + LINE * _rows(row)


def paint_tree(axes: Any, row: Row, theme: Theme) -> None:
    """Draw the lines of ``tree_lines``."""
    colours = {"accepted": theme.colours[2], "refused": theme.colours[1], "not reached": theme.faint}

    def look(line: Mapping[str, Any]) -> dict[str, Any]:
        main = {"linewidth": 2, "zorder": 1.5} if line["state"] == "accepted" else {"linewidth": 1}
        return main | {"color": colours.get(line["state"], theme.colours[0])}

    places = _branches(axes, row.lines, theme, look)
    for line in row.lines:
        shown = drawable(repr(line["text"]))
        if line["p"] is not None:
            shown += f"\np {line['p']:.2f}" + ("" if line["q"] is None else f" q {line['q']:.2f}")
        box = {
            "boxstyle": "round,pad=0.25",
            "facecolor": theme.paper,
            "edgecolor": look(line)["color"],
            "linewidth": 1.5,
        }
        where: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 8, "zorder": 2}
        axes.text(*places[line["node"]], shown, color=theme.ink, bbox=box, **where)
    for state, colour in {**colours, "the target's own": theme.colours[0]}.items():
        axes.plot([], [], color=colour, linewidth=3, label=state)
    axes.legend(ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.01))


def sparse_height(row: Row) -> float:
    """Inches that a tree of dots needs."""
    return 1.0 + CELL * _rows(row)


def paint_sparse(axes: Any, row: Row, theme: Theme) -> None:
    """Draw a tree of guesses of heads as dots, each with the share of rounds in which it was accepted."""
    from matplotlib.colors import LinearSegmentedColormap

    shades = LinearSegmentedColormap.from_list("accepted", [theme.paper, theme.colours[2]])

    def look(line: Mapping[str, Any]) -> dict[str, Any]:
        share = line["accepted"]
        return {"color": theme.colours[2] if share else theme.faint, "linewidth": 0.6 + 4 * share}

    places = _branches(axes, row.lines, theme, look)
    for line in row.lines:
        x, y = places[line["node"]]
        dot: dict[str, Any] = {"markersize": 7, "markeredgecolor": theme.ink, "markeredgewidth": 0.6, "zorder": 2}
        axes.plot(x, y, "o", color=shades(line["accepted"]), **dot)
        behind = {"facecolor": theme.paper, "edgecolor": "none", "pad": 0.8}  # the line to the next node
        label: dict[str, Any] = {"fontsize": 8, "va": "center", "color": theme.ink, "bbox": behind}
        axes.text(x + 0.08, y, f"{line['guess']}.  {100 * line['accepted']:.3g} %", **label)
    for head in range(max(line["head"] for line in row.lines)):
        axes.text(head, -1.1, f"head {head + 1}", fontsize=9, ha="center", color=theme.ink)
    axes.set(ylim=(axes.get_ylim()[0], -1.6))


def mask_height(row: Row) -> float:
    """Inches that the mask of a tree needs."""
    return 1.8 + CELL * len(row.lines)


def paint_mask(axes: Any, row: Row, theme: Theme) -> None:
    """Draw which token of the pass sees which: itself, its ancestors and the text before, in place of all before it."""
    from matplotlib.colors import ListedColormap, to_hex, to_rgb

    nodes = [line for line in row.lines if line["p"] is not None]
    seen = [[0]]  # the last committed token; then each node's own row: the root, its ancestors, itself
    for line in nodes:
        seen.append([*seen[line["parent"] + 1], line["node"] + 1])
    cells = [
        [2 if column in row else 1 if column <= at else 0 for column in range(len(seen))] for at, row in enumerate(seen)
    ]
    paper, faint = to_rgb(theme.paper), to_rgb(theme.faint)
    red, green, blue = (0.6 * one + 0.4 * other for one, other in zip(paper, faint, strict=True))
    colours = (theme.paper, to_hex((red, green, blue)), theme.colours[0])
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
    """Draw the lines of ``place_lines``: after each token, top down, its likeliest followers as one bar in parts."""
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


def _rows(row: Row) -> float:
    """Rows of boxes or dots."""
    return 1 + max(y for _, y in laid_out(row.lines).values())


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

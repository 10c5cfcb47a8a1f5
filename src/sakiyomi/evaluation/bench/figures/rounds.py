"""What single rounds look like: how many tokens they keep, and one tree with its probabilities."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sakiyomi.core.errors import UnsupportedError
from sakiyomi.core.outputs import RoundTrace
from sakiyomi.evaluation.bench.figures.section import Section, Theme, stacked
from sakiyomi.evaluation.bench.figures.work import Work
from sakiyomi.evaluation.bench.long.plot import drawable
from sakiyomi.evaluation.bench.report import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["ROUNDS", "TREE"]

TEMPERATURES = (0.0, 1.0)
NODES, DEPTH = 12, 4
BEND = 0.5  # of the way between two columns
SERIES = 60  # rounds that are drawn one by one


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


def _paint_rounds(row: Row, theme: Theme) -> Figure:
    figure, (upper, *lower) = stacked(3, 2.3)
    shares = row.lines
    for at, temperature in enumerate(TEMPERATURES):
        name = f"T={temperature:g}"
        xs = [line["accepted"] + 0.4 * (at - 0.5) for line in shares]
        upper.bar(xs, [100 * line[name] for line in shares], width=0.38, color=theme.colours[at], label=name)
        for colour, width in ((theme.paper, 5), (theme.ink, 2)):
            alike = [100 * line[f"{name}, alike"] for line in shares]
            upper.plot(xs, alike, "_", color=colour, markersize=14, markeredgewidth=width)
        series = shares[0]["series"][name]
        lower[at].bar(range(1, len(series) + 1), series, width=0.8, color=theme.colours[at])
        lower[at].set(ylabel=f"kept, {name}", ylim=(0, len(shares) - 0.9))
        lower[at].set_yticks([line["accepted"] for line in shares])
    upper.plot([], [], "_", color=theme.ink, markersize=14, markeredgewidth=2, label="if all places were alike")
    upper.set_xticks([line["accepted"] for line in shares])
    upper.set(xlabel="draft tokens kept in a round", ylabel="rounds, percent")
    upper.legend()
    lower[-1].set_xlabel("round")
    return figure


def _alt_rounds(row: Row) -> str:
    shares = row.lines
    said = []
    for temperature in TEMPERATURES:
        name = f"T={temperature:g}"
        mean = sum(line["accepted"] * line[name] for line in shares)
        said.append(
            f"at temperature {temperature:g} {mean:.1f} of {len(shares) - 1} on average, all of them in "
            f"{100 * shares[-1][name]:.0f} % of rounds and none in {100 * shares[0][name]:.0f} %"
        )
    return f"Bars: draft tokens that a round kept, {'; '.join(said)}. Below, the same round by round."


ROUNDS = Section(
    "Accepted tokens a round",
    "Chains of one length. Bars: how many draft tokens a round kept. Dashes: what it would be if every place were "
    "accepted with the same chance, independently, which the usual formula assumes; texts have easy and hard "
    "stretches, so that rounds that keep all or nothing are more frequent. Below: the rounds as they came.",
    rounds,
    _paint_rounds,
    _alt_rounds,
)


def tree(work: Work) -> Row:
    """The round of a first text that shows most: several branches, and something accepted."""
    engine = work.engine(work.draft)
    params = work.params(gamma=DEPTH, tree="best-first", nodes=NODES)
    found = [traced for traced in _traced(engine, work.prompts[0], params) if traced.tokens]
    if not found:
        raise UnsupportedError("no round drafted anything; give a longer text (--max-new-tokens)")
    # The first of those that used most branches: it has something to show.
    chosen = max(found, key=lambda traced: (_off_first(traced), len(traced.path), len(traced.tokens)))
    tokenizer = work.llm.tokenizer

    def text(token: int) -> str:
        return str(tokenizer.decode([token]))

    accepted = set(chosen.path)
    end = chosen.path[-1] if chosen.path else -1
    lines: list[dict[str, Any]] = []
    for node, (token, parent) in enumerate(zip(chosen.tokens, chosen.parents, strict=True)):
        state = "accepted" if node in accepted else "refused" if parent in (*accepted, -1) else "not reached"
        probs = {"p": chosen.target_probs[node], "q": chosen.draft_probs[node]}
        lines.append({"node": node, "parent": parent, "text": text(token), **probs, "state": state})
    lines.append(
        {"node": len(lines), "parent": end, "text": text(chosen.token), "p": None, "q": None, "state": chosen.kind}
    )
    conditions = work.conditions(round=chosen.round, nodes=NODES, depth=DEPTH, of_rounds=len(found))
    return Row("tree", "tokens of one round, with their probabilities", lines, conditions)


def _off_first(traced: RoundTrace) -> int:
    """Accepted nodes that were not the first child of their parent."""
    return sum(traced.parents[node] in traced.parents[:node] for node in traced.path)


def _paint_tree(row: Row, theme: Theme) -> Figure:
    places = _laid_out(row.lines)
    most = max(y for _, y in places.values())
    figure, (axes,) = stacked(height=0.9 + 0.42 * (most + 1))
    axes.set_axis_off()
    colours = {"accepted": theme.colours[2], "refused": theme.colours[1], "not reached": theme.faint}
    for line in row.lines:
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
    return figure


def _laid_out(lines: Any) -> dict[int, tuple[float, float]]:
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


def _alt_tree(row: Row) -> str:
    path = [line["text"] for line in row.lines if line["state"] == "accepted"]
    own = row.lines[-1]
    return (
        f"A tree of {len(row.lines) - 1} draft tokens from left to right, each with p, the target's probability, and "
        f"q, the draft's; {len(path)} were accepted ({''.join(path)!r}), and the target's own token {own['text']!r} "
        "follows."
    )


TREE = Section(
    "A draft tree of one round",
    "One round of a greedy text: what the draft proposed, best first, and what one pass of the target made of it. The "
    "same for any prompt, as text: `sakiyomi tree PROMPT --tree best-first --nodes 12 --gamma 4`.",
    tree,
    _paint_tree,
    _alt_tree,
)

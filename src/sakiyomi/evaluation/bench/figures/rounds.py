"""What single rounds look like: how many tokens they keep, and one tree with its probabilities."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sakiyomi.core.errors import UnsupportedError
from sakiyomi.core.outputs import RoundTrace
from sakiyomi.evaluation.bench.figures.section import Section, Theme, stacked
from sakiyomi.evaluation.bench.figures.trees import (
    mask_height,
    paint_mask,
    paint_places,
    paint_tree,
    panels_of,
    place_lines,
    places_height,
    tree_height,
    tree_lines,
)
from sakiyomi.evaluation.bench.figures.work import Work
from sakiyomi.evaluation.bench.report import Row
from sakiyomi.evaluation.predictions import predictions

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["PLACES", "ROUNDS", "TREE"]

TEMPERATURES = (0.0, 1.0)
NODES, DEPTH = 12, 4
SERIES = 60  # rounds that are drawn one by one
GUESSES, PLACED = 3, 16  # predictions at a place, and places


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
    lower[-1].locator_params(axis="x", integer=True)
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
    lines = tree_lines(chosen, work.text)
    conditions = work.conditions(round=chosen.round, nodes=NODES, depth=DEPTH, of_rounds=len(found))
    return Row("tree", "tokens of one round, with their probabilities", lines, conditions)


def _off_first(traced: RoundTrace) -> int:
    """Accepted nodes that were not the first child of their parent."""
    return sum(traced.parents[node] in traced.parents[:node] for node in traced.path)


def _paint_tree(row: Row, theme: Theme) -> Figure:
    figure, (upper, lower) = panels_of([tree_height(row.lines), mask_height(row.lines)])
    paint_tree(upper, row.lines, theme)
    paint_mask(lower, row.lines, theme)
    return figure


def _alt_tree(row: Row) -> str:
    path = [line["text"] for line in row.lines if line["state"] == "accepted"]
    own = row.lines[-1]
    return (
        f"A tree of {len(row.lines) - 1} draft tokens from left to right, each with p, the target's probability, and "
        f"q, the draft's; {len(path)} were accepted ({''.join(path)!r}), and the target's own token {own['text']!r} "
        "follows. Below, the mask of the pass: each token sees itself and those on the way to it."
    )


TREE = Section(
    "A draft tree of one round",
    "One round of a greedy text: what the draft proposed, best first, and what one pass of the target made of it. "
    "Below, which token of that pass sees which: branches share what is before them and know nothing of each other. "
    "The same for any prompt: `sakiyomi tree PROMPT --plot FILE`.",
    tree,
    _paint_tree,
    _alt_tree,
)


def places(work: Work) -> Row:
    """The target's predictions behind the last tokens of the first prompt."""
    found = predictions(work.llm.target, work.prompts[0], GUESSES)
    lines = place_lines(found, work.text)[-PLACED:]
    right = sum(line["then"] == line["guesses"][0][0] for line in lines[:-1])
    conditions = work.conditions(places=len(lines), first_guess_right=f"{right} of {len(lines) - 1}")
    return Row("places", "what the target expects behind each token of a prompt", lines, conditions)


def _paint_places(row: Row, theme: Theme) -> Figure:
    figure, (axes,) = panels_of([places_height(row.lines)])
    paint_places(axes, row.lines, theme)
    return figure


def _alt_places(row: Row) -> str:
    last = row.lines[-1]
    (guess, prob), *_ = last["guesses"]
    return (
        f"A bar for each of {len(row.lines)} tokens of a prompt, in parts: the likeliest next tokens. Behind the last, "
        f"{last['token']!r}, the target expects {guess!r} with probability {prob:.2f}."
    )


PLACES = Section(
    "A prediction at every place",
    "One pass over a prompt predicts the next token behind each of its tokens at once, and no prediction depends on "
    "what stands after it. Generation uses the last one; verification of a draft uses all of them.",
    places,
    _paint_places,
    _alt_places,
)

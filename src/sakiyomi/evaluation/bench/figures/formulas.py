"""The closed forms beside measured points: tokens a pass by alpha and gamma, wall time and operations by gamma."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from sakiyomi.evaluation.bench.draw import curve
from sakiyomi.evaluation.bench.figures.section import Section, Theme, stacked
from sakiyomi.evaluation.bench.figures.work import Work, lap, line_of
from sakiyomi.evaluation.bench.report import Row, race_notes
from sakiyomi.evaluation.bench.runner import Spread
from sakiyomi.theory import expected_tokens, speedup

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["EXPECTED", "OPERATIONS"]

GAMMAS = (1, 2, 4, 8)
RATES = (0.5, 0.7, 0.8, 0.9, 0.95)
LENGTHS = (1, 2, 3, 4, 6, 8)


def expected(work: Work) -> Row:
    """Tokens a pass of a draft of known rate, and of the pair's own at its alpha."""
    lines = []
    oracle = work.drafter("oracle")
    specs = {"oracle": RATES, work.draft: (None,)}
    for spec, rates in specs.items():
        engine = work.engine(spec)
        for gamma in GAMMAS:
            for rate in rates:
                work.note(f"expected: {spec}, gamma {gamma}, rate {rate}")
                if rate is not None:
                    oracle.rate = rate
                figures = lap(engine, work.prompts, work.params(gamma=gamma, tree="chain")).figures
                alpha = figures["alpha"]
                name = "known rate" if rate is not None else "draft model"
                theory = expected_tokens(alpha, gamma)
                line = {"name": name, "gamma": gamma, "rate": rate, "alpha": alpha, "tau": figures["tau"]}
                lines.append(line | {"expected": theory, "off by": figures["tau"] / theory - 1})
    return Row("expected", "tokens a target pass, measured and by the formula", lines, work.conditions())


def _paint_expected(row: Row, theme: Theme) -> Figure:
    figure, (axes,) = stacked(height=4.4)
    grid = [at / 100 for at in range(100)]
    marks = {"known rate": "o", "draft model": "*"}
    for gamma, colour in zip(GAMMAS, theme.colours, strict=False):
        axes.plot(grid, [expected_tokens(alpha, gamma) for alpha in grid], color=colour, label=f"gamma {gamma}")
        for name, mark in marks.items():
            points = [line for line in row.lines if (line["gamma"], line["name"]) == (gamma, name)]
            size, edge = (13, theme.ink) if mark == "*" else (6, colour)
            curve(axes, points, "alpha", "tau", mark, color=colour, markersize=size, markeredgecolor=edge)
    for name, mark in marks.items():
        axes.plot([], [], mark, color=theme.faint, markersize=9, label=f"measured, {name}")
    axes.set(xlabel="alpha: share of judged tokens that were accepted", ylabel="tokens a target pass", ylim=(1, None))
    axes.legend(loc="upper left")
    return figure


def _alt_expected(row: Row) -> str:
    known = [abs(line["off by"]) for line in row.lines if line["name"] == "known rate"]
    own = max((line for line in row.lines if line["name"] == "draft model"), key=lambda line: line["gamma"])
    return (
        f"Curves of tokens a pass against alpha for gamma {', '.join(map(str, GAMMAS))}, with measured points: drafts "
        f"of known rate lie within {100 * max(known):.0f} % of them; the draft model at gamma {own['gamma']} has "
        f"{own['tau']:.2f} tokens a pass where alpha {own['alpha']:.2f} gives {own['expected']:.2f}."
    )


EXPECTED = Section(
    "Expected tokens a pass, by alpha and gamma",
    "Curves: (1 - alpha^(gamma + 1)) / (1 - alpha), equation 1 of arXiv 2211.17192. Circles: drafts made from the "
    "known answer with independent errors at a given rate, for which the formula holds but for chance. Stars: the "
    "draft model, whose errors come in runs; at the same alpha it may keep more than the formula says.",
    expected,
    _paint_expected,
    _alt_expected,
)


def operations(work: Work) -> Row:
    """Speed-up, and operations a token, of chains of several lengths; with gamma 0 as the baseline."""
    engine = work.engine(work.draft)
    judge = work.pair.judge(work.llm)
    params = work.params(tree="chain")
    runs = {"plain": partial(lap, work.engine(), work.prompts, params)}
    runs |= {f"gamma {n}": partial(lap, engine, work.prompts, replace(params, gamma=n)) for n in LENGTHS}
    standings = work.row("operations").race(runs, judge)
    sizes = [model.num_parameters() for model in (work.pair.target.model, work.pair.draft.model)]
    c_hat = sizes[1] / sizes[0]
    plain = standings[0]
    step = 1000 / line_of(plain)["tokens_per_second"]
    lines: list[dict[str, Any]] = [line_of(plain, gamma=0, operations=1.0)]
    for gamma, standing in zip(LENGTHS, standings[1:], strict=True):
        alpha, tau = standing.median("alpha"), standing.median("tau")
        c = standing.median("draft_ms") / gamma / step
        found = line_of(standing, gamma=gamma, operations=(gamma * c_hat + gamma + 1) / tau)
        lines.append(found | {"c": c, "passes alike": speedup(alpha, gamma, c)})
    conditions = work.conditions(c_hat=c_hat, **{"A/A": Spread.shown(standings)})
    return Row("operations", "speed-up and operations a token, by gamma", lines, conditions, race_notes(standings))


def _paint_operations(row: Row, theme: Theme) -> Figure:
    figure, (upper, lower) = stacked(2, 2.7)
    curve(upper, row.lines, "gamma", "ratio", label="measured")
    curve(upper, row.lines[1:], "gamma", "passes alike", "--", label="if a pass cost the same for all rows")
    upper.axhline(1.0, color=theme.faint, linewidth=1)
    upper.set(ylabel="speed-up over plain", xlabel="gamma", ylim=(0, None))
    upper.legend(loc="lower right")
    curve(lower, row.lines, "gamma", "operations", color=theme.colours[1])
    lower.axhline(1.0, color=theme.faint, linewidth=1)
    lower.set(ylabel="operations a token, plain is 1", xlabel="gamma", ylim=(0, None))
    return figure


def _alt_operations(row: Row) -> str:
    seen = [line for line in row.lines if line["ratio"] is not None]
    best = max(seen, key=lambda line: line["ratio"])
    last = row.lines[-1]
    return (
        f"Above, the speed-up by gamma: most at gamma {best['gamma']}, {best['ratio']:.2f} times plain. Below, "
        f"operations a token, which only grow: {best['operations']:.2f} times plain there and {last['operations']:.2f} "
        f"times at gamma {last['gamma']}."
    )


OPERATIONS = Section(
    "Wall time and operations",
    "Speculation buys time with arithmetic: rejected tokens were computed for nothing. Above: measured speed-up of "
    "greedy chains by their length, with what it would be if passes over more rows cost no more (theorem 3.8 of arXiv "
    "2211.17192, with the measured alpha and c). Below: operations a committed token, (gamma c_hat + gamma + 1) / "
    "tau, with the measured tau and c_hat the ratio of the models' parameters.",
    operations,
    _paint_operations,
    _alt_operations,
)

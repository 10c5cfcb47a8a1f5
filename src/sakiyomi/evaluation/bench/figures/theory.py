"""The theory beside what is measured: closed forms by alpha and gamma, memory traffic, and the proof, checked."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from sakiyomi.evaluation.bench.draw import curve
from sakiyomi.evaluation.bench.figures.alphas import minima
from sakiyomi.evaluation.bench.figures.work import Work, lap, line_of
from sakiyomi.evaluation.bench.meter import Meter
from sakiyomi.evaluation.bench.pictures import Figures, Theme, bars, curves, drawable, having, stack
from sakiyomi.evaluation.bench.report import Row, race_notes
from sakiyomi.evaluation.bench.runner import Lap, Spread
from sakiyomi.sampling.verifiers.ratio import residual
from sakiyomi.theory import acceptance, expected_tokens, memory_ratio, operations_ratio, round_speedup, speedup, traffic

GAMMAS = (1, 2, 4, 8)
RATES = (0.5, 0.7, 0.8, 0.9, 0.95)
LENGTHS = (1, 2, 3, 4, 6, 8)
SHOWN = 8  # tokens of one place that are drawn
PARTS = {
    "weights": "weights of the target",
    "kv": "its keys and values",
    "draft_weights": "weights of the draft",
    "draft_kv": "its keys and values (draft)",
}


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


def _panel_expected(axes: Any, row: Row, theme: Theme) -> None:
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


def operations(work: Work) -> Row:
    """Speed-up, and operations a token, of chains of several lengths; with gamma 0 as the baseline."""
    engine = work.engine(work.draft)
    judge = work.pair.judge(work.llm)
    params = work.params(tree="chain")
    runs = {"plain": partial(lap, work.engine(), work.prompts, params)}
    runs |= {f"gamma {n}": partial(lap, engine, work.prompts, replace(params, gamma=n)) for n in LENGTHS}
    standings = work.row("operations").race(runs, judge)
    c_hat, plain = work.c_hat, standings[0]
    step = 1000 / line_of(plain)["tokens_per_second"]
    lines: list[dict[str, Any]] = [line_of(plain, gamma=0, operations=1.0)]
    for gamma, standing in zip(LENGTHS, standings[1:], strict=True):
        alpha, tau = standing.median("alpha"), standing.median("tau")
        c = standing.median("draft_ms") / gamma / step
        found = line_of(standing, gamma=gamma, operations=(gamma * c_hat + gamma + 1) / tau)
        lines.append(found | {"c": c, "passes alike": speedup(alpha, gamma, c)})
    conditions = work.conditions(c_hat=c_hat, **{"A/A": Spread.shown(standings)})
    return Row("operations", "speed-up and operations a token, by gamma", lines, conditions, race_notes(standings))


def formulas(work: Work) -> Row:
    """One chain length at temperature 1, by the ratio rule; predictions come from alpha as it is defined."""
    gamma = work.config.gamma
    params = work.params(temperature=1.0, seed=7, acceptance="ratio", tree="chain")
    plain, drafting = work.engine(), work.engine(work.draft)
    texts = work.written(temperature=1.0, seed=7, acceptance="ratio", tree="chain")
    alpha = minima(*work.rows(), work.prompts, texts, 1.0).alpha
    runs = {"plain": partial(lap, plain, work.prompts, params), "drafting": partial(_metered, work, drafting, params)}
    for run in runs.values():
        run()
    work.llm.wait()
    slow, fast = work.row("formulas").race(runs)
    tau, step = fast.median("tau"), slow.median("score_ms") + slow.median("overhead_ms")
    c = fast.median("draft_ms") / gamma / step
    verify = (fast.median("score_ms") + fast.median("overhead_ms")) / step
    c_hat, tokens = work.c_hat, expected_tokens(alpha, gamma)
    theta, n = 1 - alpha, gamma + 1
    operations = fast.median("operations") + c_hat * fast.median("draft_steps")
    known: list[tuple[str, str, float, float]] = [
        ("alpha", r"$\alpha = E[\beta],\ \beta = \sum_x \min(p(x), q(x))$", alpha, fast.median("alpha")),
        ("E", r"$E = (1 - \alpha^{\gamma+1})\,/\,(1 - \alpha)$", tokens, tau),
        (
            "E[X]",
            r"$E[X] = (1 - (1-\theta)^n)\,/\,\theta,\ \theta = 1-\alpha,\ n = \gamma+1$",
            (1 - (1 - theta) ** n) / theta if theta > 0 else float(n),
            tau,
        ),
        ("speed-up", r"$E\,/\,(\gamma c + 1)$", speedup(alpha, gamma, c), fast.ratio),
        (
            "speed-up, the pass as it costs",
            r"$E\,/\,(\gamma c + v),\ v$: a round without its draft, in plain steps",
            round_speedup(tokens, gamma * c, verify),
            fast.ratio,
        ),
        ("operations", r"$(\gamma \hat c + \gamma + 1)\,/\,E$", operations_ratio(alpha, gamma, c_hat), operations),
        ("reads of the target", r"$1\,/\,E$", memory_ratio(tokens), fast.median("passes")),
    ]
    names = ("name", "formula", "predicted", "measured")
    lines = [
        dict(zip(names, line, strict=True)) | {"off by": line[3] / line[2] - 1 if line[2] else None} for line in known
    ]
    symbols = {"gamma": gamma, "c": c, "v": verify, "c_hat": c_hat, "A/A": Spread.shown([slow, fast])}
    conditions = work.conditions(temperature=1, acceptance="ratio", **symbols)
    return Row("formulas", "each formula, predicted and measured", lines, conditions, race_notes([slow, fast]))


def _counted(work: Work, engine: Any, params: Any) -> tuple[Lap, list[dict[str, float]]]:
    """A lap; of target and draft the decoding passes, rows and bytes of keys and values, each by committed token."""
    with Meter(engine.engine) as meter:
        found = lap(engine, work.prompts, params)
    known = meter.passes()
    committed = found.figures["tau"] * known[0]["passes"]
    return found, [{name: value / committed for name, value in part.items()} for part in known]


def _metered(work: Work, engine: Any, params: Any) -> Lap:
    """A lap with the target's rows, its passes and the draft's, each by committed token."""
    found, (target, *draft) = _counted(work, engine, params)
    steps = draft[0]["rows"] if draft else 0.0
    return found.more(operations=target["rows"], passes=target["passes"], draft_steps=steps)


def _panel_formulas(axes: Any, row: Row, theme: Theme) -> None:
    axes.set_axis_off()
    values = ((0.72, "predicted", theme.colours[0]), (0.88, "measured", theme.colours[1]))
    for at, line in enumerate(row.lines):
        axes.text(0.0, at, line["name"], fontsize=10, weight="bold", color=theme.ink)
        axes.text(0.0, at + 0.4, line["formula"], fontsize=10, color=theme.ink)
        for x, key, colour in values:
            axes.text(x, at + 0.1, f"{line[key]:.3g}", fontsize=12, color=colour)
    for x, key, colour in values:
        axes.text(x, -0.6, key, fontsize=9, color=colour)
    axes.set(xlim=(0, 1.04), ylim=(len(row.lines), -0.9))


def traffic_of(work: Work) -> Row:
    """Bytes read a token by decoding passes: by the formula from alpha, and as the passes that ran read them."""
    target, draft = work.llm.target, work.drafter(work.draft).model
    texts = work.written(tree="chain")
    alpha = minima(*work.rows(), work.prompts, texts, 0.0).alpha
    # Of a text's middle, as the average over its passes is.
    middle = round(sum(len(p) + len(t) / 2 for p, t in zip(work.prompts, texts, strict=True)) / len(texts))
    sizes: dict[str, Any] = {
        "weights": float(target.weights.bytes or 0),
        "draft_weights": float(draft.weights.bytes or 0),
    }
    for name, model in (("kv", target), ("draft_kv", draft)):
        with model.cache.lent(middle) as slot:
            sizes[name] = float(model.cache.held_bytes(slot, middle))
    lines: list[dict[str, Any]] = []
    for gamma in (0, *GAMMAS):  # 0: plain
        work.note(f"traffic: gamma {gamma}")
        engine = work.engine(work.draft if gamma else None)
        found, known = _counted(work, engine, work.params(gamma=gamma or "auto", tree="chain"))
        counted = dict.fromkeys(PARTS, 0.0)
        for part, model, before in zip(known, (target, draft), ("", "draft_"), strict=False):
            counted[f"{before}weights"] = part["passes"] * (model.weights.bytes or 0)
            counted[f"{before}kv"] = part["kv"]
        predicted = traffic(expected_tokens(alpha, gamma), gamma, **sizes)
        line: dict[str, Any] = {"gamma": gamma, "tau": found.figures["tau"]}
        for kind in PARTS:
            line |= {f"{kind}_predicted_bytes": getattr(predicted, kind), f"{kind}_counted_bytes": counted[kind]}
        total = sum(counted.values())
        lines.append(line | {"predicted": predicted.total, "counted": total, "off by": total / predicted.total - 1})
    return Row("traffic", "bytes read a token, by gamma", lines, work.conditions(alpha=alpha, temperature=0))


def _panel_traffic(axes: Any, row: Row, theme: Theme) -> None:
    for place, line in enumerate(row.lines):
        for at, (kind, hatch) in enumerate((("predicted", "//"), ("counted", ""))):
            below, x = 0.0, place + 0.4 * (at - 0.5)
            for (part, name), colour in zip(PARTS.items(), theme.colours, strict=False):
                value = line[f"{part}_{kind}_bytes"] / 1e6
                look = {"color": colour, "edgecolor": theme.paper, "hatch": hatch, "width": 0.38}
                axes.bar(x, value, bottom=below, label=name if not place and at else None, **look)
                below += value
            axes.text(x, below, f"{below:.3g}", ha="center", va="bottom", fontsize=8)
    labels = ["plain" if not line["gamma"] else f"gamma {line['gamma']}" for line in row.lines]
    axes.set_xticks(range(len(labels)), labels)
    axes.set(ylabel="MB read a token", title="left, hatched: predicted; right: counted")
    axes.grid(visible=False, axis="x")


def output_of(p: np.ndarray, q: np.ndarray, rule: str) -> np.ndarray:
    """The distribution of a token by speculative sampling, added up in closed form.

    A token x comes by being drawn from q and accepted, q(x) min(1, p(x) / q(x)) = min(p(x), q(x)), or after any
    rejection from the distribution of recovered tokens. The proof of arXiv 2211.17192, appendix A.1.

    Args:
        p, q: (V,) of target and draft.
        rule: "ratio" as the engine's own ``residual`` has it; "resampled from the target" and "always accepted" are
            wrong, to show that the check can fail.
    """
    if rule == "always accepted":
        return q
    kept = np.minimum(p, q)
    rejected = 1.0 - kept.sum()
    again = p if rule == "resampled from the target" else residual(p.astype(np.float32), q.astype(np.float32), 0)
    found: np.ndarray = kept + rejected * again
    return found


RULES = ("ratio", "resampled from the target", "always accepted")


def lossless(work: Work) -> Row:
    """The proof at every place of the reader's own texts, and with rules that are wrong."""
    models = work.rows()
    worst, shown, places = dict.fromkeys(RULES, 0.0), None, 0
    for prompt, text in zip(work.prompts, work.written(temperature=1.0, seed=7), strict=True):
        rows = [model(prompt, text).double().softmax(-1).numpy() for model in models]
        for p, q in zip(*rows, strict=True):
            places += 1
            for rule in RULES:
                apart = 0.5 * float(np.abs(output_of(p, q, rule) - p).sum())
                worst[rule] = max(worst[rule], apart)
            # A place where both parts are to be seen.
            beta = acceptance(p.tolist(), q.tolist())
            if shown is None or abs(beta - 0.6) < abs(shown[0] - 0.6):
                shown = beta, p, q
    assert shown is not None
    beta, p, q = shown
    lines: list[dict[str, Any]] = [{"name": rule, "largest distance from p": worst[rule]} for rule in RULES]
    recovered = (1.0 - beta) * residual(p.astype(np.float32), q.astype(np.float32), 0)
    for token in np.argsort(-np.maximum(p, q))[:SHOWN].tolist():
        kept = float(min(p[token], q[token]))
        line = {"token": work.text(token), "p": float(p[token]), "q": float(q[token]), "accepted": kept}
        lines.append(line | {"recovered": float(recovered[token])})
    conditions = work.conditions(places=places, temperature=1, beta_shown=beta)
    return Row("lossless", "distance between the output's distribution and the target's", lines, conditions)


def _panel_parts(axes: Any, row: Row, theme: Theme) -> None:
    """Of one place by token: q, and below it what was accepted and what was recovered, which end at p."""
    lines = having(row.lines, "token")
    at = range(len(lines))
    q, accepted, recovered, p = ([line[key] for line in lines] for key in ("q", "accepted", "recovered", "p"))
    beside = [place + 0.2 for place in at]
    axes.barh([place - 0.2 for place in at], q, height=0.36, color=theme.faint, label="q, the draft")
    axes.barh(beside, accepted, height=0.36, color=theme.colours[2], label="accepted, min(p, q)")
    axes.barh(beside, recovered, left=accepted, height=0.36, color=theme.colours[1], label="recovered")
    axes.vlines(p, [x - 0.02 for x in at], [x + 0.42 for x in at], color=theme.ink, linewidth=2, label="p, the target")
    axes.set_yticks(at, [drawable(repr(line["token"])) for line in lines], fontsize=8)
    axes.set(ylim=(len(lines) - 0.4, -0.6), xlabel="probability at one place")
    axes.legend(loc="lower right")


FIGURES: Figures = {
    "expected": (expected, stack(_panel_expected, height=4.4)),
    "operations": (
        operations,
        stack(
            curves(
                "gamma",
                {"ratio": "measured", "passes alike": ("if a pass cost the same for all rows", "--")},
                of=lambda lines: [{"passes alike": None, **line} for line in lines],
                level=1.0,
                legend="lower right",
                ylabel="speed-up over plain",
                xlabel="gamma",
                ylim=(0, None),
            ),
            curves(
                "gamma",
                {"operations": ""},
                level=1.0,
                first=1,
                ylabel="operations a token, plain is 1",
                xlabel="gamma",
                ylim=(0, None),
            ),
            height=2.7,
        ),
    ),
    "formulas": (formulas, stack(_panel_formulas, height=lambda row: 0.9 + 0.75 * len(row.lines))),
    "traffic": (traffic_of, stack(_panel_traffic, height=3.8, below=True)),
    "lossless": (
        lossless,
        stack(
            _panel_parts,
            bars(
                "largest distance from p", label="largest distance from the target", colour=None, of="name", text=".2g"
            ),
            height=(lambda row: 1.2 + 0.42 * len(having(row.lines, "token")), 1.8),
        ),
    ),
}

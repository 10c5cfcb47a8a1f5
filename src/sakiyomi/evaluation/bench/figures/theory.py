"""The theory on one page: each formula with its symbol, predicted and measured; memory traffic; the proof, checked."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from sakiyomi.evaluation.bench.figures.alphas import minima, runner_rows
from sakiyomi.evaluation.bench.figures.section import Section, Theme, legend_below, stacked
from sakiyomi.evaluation.bench.figures.trees import panels_of
from sakiyomi.evaluation.bench.figures.work import Work, lap
from sakiyomi.evaluation.bench.long.plot import drawable
from sakiyomi.evaluation.bench.meter import Meter
from sakiyomi.evaluation.bench.report import Row, race_notes
from sakiyomi.evaluation.bench.runner import Lap, Spread
from sakiyomi.sampling.verifiers.ratio import residual
from sakiyomi.theory import acceptance, expected_tokens, memory_ratio, operations_ratio, round_speedup, speedup, traffic

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["FORMULAS", "LOSSLESS", "TRAFFIC"]

LENGTHS = (0, 1, 2, 4, 8)  # 0: plain
SHOWN = 8  # tokens of one place that are drawn
PARTS = ("weights", "kv", "draft_weights", "draft_kv")


def formulas(work: Work) -> Row:
    """One chain length at temperature 1, by the ratio rule; predictions come from alpha as it is defined."""
    gamma = work.config.gamma
    params = work.params(temperature=1.0, seed=7, acceptance="ratio", tree="chain")
    plain, drafting = work.engine(), work.engine(work.draft)
    texts = [plain.generate([prompt], params)[0].token_ids for prompt in work.prompts]
    models = runner_rows(work.llm.target), runner_rows(work.drafter(work.draft).model)
    alpha = minima(*models, work.prompts, texts, 1.0).alpha
    runs = {"plain": partial(lap, plain, work.prompts, params), "drafting": partial(_metered, work, drafting, params)}
    for run in runs.values():
        run()
    work.llm.wait()
    slow, fast = work.row("formulas").race(runs)
    tau, step = fast.median("tau"), slow.median("score_ms") + slow.median("overhead_ms")
    c = fast.median("draft_ms") / gamma / step
    verify = (fast.median("score_ms") + fast.median("overhead_ms")) / step
    sizes = [model.num_parameters() for model in (work.pair.target.model, work.pair.draft.model)]
    c_hat = sizes[1] / sizes[0]
    tokens = expected_tokens(alpha, gamma)
    lines = [
        _line("alpha", r"$\alpha = E[\beta],\ \beta = \sum_x \min(p(x), q(x))$", alpha, fast.median("alpha")),
        _line("E", r"$E = (1 - \alpha^{\gamma+1})\,/\,(1 - \alpha)$", tokens, tau),
        _line(
            "E[X]",
            r"$E[X] = (1 - (1-\theta)^n)\,/\,\theta,\ \theta = 1-\alpha,\ n = \gamma+1$",
            (1 - alpha ** (gamma + 1)) / (1 - alpha) if alpha < 1 else gamma + 1.0,
            tau,
        ),
        _line("speed-up", r"$E\,/\,(\gamma c + 1)$", speedup(alpha, gamma, c), fast.ratio),
        _line(
            "speed-up, the pass as it costs",
            r"$E\,/\,(\gamma c + v),\ v$: a round without its draft, in plain steps",
            round_speedup(tokens, gamma * c, verify),
            fast.ratio,
        ),
        _line(
            "operations",
            r"$(\gamma \hat c + \gamma + 1)\,/\,E$",
            operations_ratio(alpha, gamma, c_hat),
            fast.median("operations") + c_hat * fast.median("draft_steps"),
        ),
        _line("reads of the target", r"$1\,/\,E$", memory_ratio(tokens), fast.median("passes")),
    ]
    symbols = {"gamma": gamma, "c": c, "v": verify, "c_hat": c_hat, "A/A": Spread.shown([slow, fast])}
    conditions = work.conditions(temperature=1, acceptance="ratio", **symbols)
    return Row("formulas", "each formula, predicted and measured", lines, conditions, race_notes([slow, fast]))


def _line(name: str, formula: str, predicted: float, measured: float) -> dict[str, Any]:
    return {
        "name": name,
        "formula": formula,
        "predicted": predicted,
        "measured": measured,
        "off by": measured / predicted - 1 if predicted else None,
    }


def _metered(work: Work, engine: Any, params: Any) -> Lap:
    """A lap with the target's rows, its passes and the draft's, each by committed token, as they were counted."""
    with Meter(engine.engine) as meter:
        found = lap(engine, work.prompts, params)
    target, draft = meter.passes()
    committed = found.figures["tau"] * target["passes"]
    return found.more(
        operations=target["rows"] / committed,
        passes=target["passes"] / committed,
        draft_steps=draft["rows"] / committed if draft else 0.0,
    )


def _paint_formulas(row: Row, theme: Theme) -> Figure:
    figure, (axes,) = stacked(height=0.9 + 0.75 * len(row.lines))
    axes.set_axis_off()
    for at, line in enumerate(row.lines):
        axes.text(0.0, at, line["name"], fontsize=10, weight="bold", color=theme.ink)
        axes.text(0.0, at + 0.4, line["formula"], fontsize=10, color=theme.ink)
        for x, key, colour in ((0.72, "predicted", theme.colours[0]), (0.88, "measured", theme.colours[1])):
            axes.text(x, at + 0.1, f"{line[key]:.3g}", fontsize=12, color=colour)
    for x, key, colour in ((0.72, "predicted", theme.colours[0]), (0.88, "measured", theme.colours[1])):
        axes.text(x, -0.6, key, fontsize=9, color=colour)
    axes.set(xlim=(0, 1.04), ylim=(len(row.lines), -0.9))
    return figure


def _alt_formulas(row: Row) -> str:
    said = [f"{line['name']} {line['predicted']:.3g}, measured {line['measured']:.3g}" for line in row.lines]
    return f"Each formula with what it predicts and what was measured: {'; '.join(said)}."


FORMULAS = Section(
    "Each formula, predicted and measured",
    "One pair at temperature 1, chains of one length by rejection sampling. alpha is predicted by its definition, the "
    "mean of the sum of min(p, q) over the places of a text, and measured as accepted over judged tokens; everything "
    "below it is predicted from that alpha, gamma, c (time of a draft step in plain steps) and c_hat (parameters of "
    "draft over target), equation 1 and theorems 3.8 and 3.11 of arXiv 2211.17192. Measured: tokens a pass, time "
    "against plain laps, rows that target and draft computed a token, passes of the target a token. The speed-up "
    "formula takes a pass over gamma + 1 rows to cost as much as one; the line below has what it costs here.",
    formulas,
    _paint_formulas,
    _alt_formulas,
)


def traffic_of(work: Work) -> Row:
    """Bytes read a token by decoding passes: by the formula from alpha, and as the passes that ran read them."""
    target, draft = work.llm.target, work.drafter(work.draft).model
    params = work.params(tree="chain")
    texts = [work.engine().generate([prompt], params)[0].token_ids for prompt in work.prompts]
    alpha = minima(runner_rows(target), runner_rows(draft), work.prompts, texts, 0.0).alpha
    # Of a text's middle, as the average over its passes is.
    middle = round(sum(len(p) + len(t) / 2 for p, t in zip(work.prompts, texts, strict=True)) / len(texts))
    sizes = {"weights": float(target.weights.bytes or 0), "draft_weights": float(draft.weights.bytes or 0)}
    for name, model in (("kv", target), ("draft_kv", draft)):
        with model.cache.lent(middle) as slot:
            sizes[name] = float(model.cache.held_bytes(slot, middle))
    lines: list[dict[str, Any]] = []
    for gamma in LENGTHS:
        work.note(f"traffic: gamma {gamma}")
        engine = work.engine(work.draft if gamma else None)
        with Meter(engine.engine) as meter:
            found = lap(engine, work.prompts, work.params(gamma=gamma or "auto", tree="chain"))
        known = meter.passes()
        committed = found.figures["tau"] * known[0]["passes"]
        counted = dict.fromkeys(PARTS, 0.0)
        for part, model, before in zip(known, (target, draft), ("", "draft_"), strict=False):
            if part:
                counted[f"{before}weights"] = part["passes"] * (model.weights.bytes or 0) / committed
                counted[f"{before}kv"] = part["kv"] / committed
        predicted = traffic(
            expected_tokens(alpha, gamma),
            gamma,
            weights=sizes["weights"],
            kv=sizes["kv"],
            draft_weights=sizes["draft_weights"],
            draft_kv=sizes["draft_kv"],
        )
        line: dict[str, Any] = {"gamma": gamma, "tau": found.figures["tau"]}
        for kind in PARTS:
            line |= {f"{kind}_predicted_bytes": getattr(predicted, kind), f"{kind}_counted_bytes": counted[kind]}
        total = sum(counted.values())
        lines.append(line | {"predicted": predicted.total, "counted": total, "off by": total / predicted.total - 1})
    return Row("traffic", "bytes read a token, by gamma", lines, work.conditions(alpha=alpha, temperature=0))


def _paint_traffic(row: Row, theme: Theme) -> Figure:
    figure, (axes,) = stacked(height=3.8)
    names = ("weights of the target", "its keys and values", "weights of the draft", "its keys and values (draft)")
    for place, line in enumerate(row.lines):
        for at, (kind, hatch) in enumerate((("predicted", "//"), ("counted", ""))):
            below = 0.0
            for part, name, colour in zip(PARTS, names, theme.colours, strict=False):
                value = line[f"{part}_{kind}_bytes"] / 1e6
                look = {"color": colour, "edgecolor": theme.paper, "hatch": hatch, "width": 0.38}
                label = name if not place and at else None
                axes.bar(place + 0.4 * (at - 0.5), value, bottom=below, label=label, **look)
                below += value
            axes.text(place + 0.4 * (at - 0.5), below, f"{below:.3g}", ha="center", va="bottom", fontsize=8)
    labels = ["plain" if not line["gamma"] else f"gamma {line['gamma']}" for line in row.lines]
    axes.set_xticks(range(len(labels)), labels)
    axes.set(ylabel="MB read a token", title="left, hatched: predicted; right: counted")
    axes.grid(visible=False, axis="x")
    legend_below(figure, axes)
    return figure


def _alt_traffic(row: Row) -> str:
    said = [
        f"gamma {line['gamma']}: {line['predicted'] / 1e6:.3g} predicted, {line['counted'] / 1e6:.3g} counted"
        for line in row.lines
    ]
    return f"Bars of megabytes read a token: {'; '.join(said)}."


TRAFFIC = Section(
    "Memory traffic, predicted and counted",
    "What decoding passes read a token of the text. Predicted from alpha (the sum of minima, temperature 0), gamma and "
    "the sizes of weights and of keys and values in the middle of a text (section 3.4 of arXiv 2211.17192). Counted: "
    "every pass of target and draft that ran, with its weights and the keys and values that it held. It counts bytes "
    "that a pass has to read, what stays in a processor's caches too; it is no hardware counter.",
    traffic_of,
    _paint_traffic,
    _alt_traffic,
)


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
    models = runner_rows(work.llm.target), runner_rows(work.drafter(work.draft).model)
    params = work.params(temperature=1.0, seed=7)
    worst, shown, places = dict.fromkeys(RULES, 0.0), None, 0
    for prompt in work.prompts:
        text = work.engine().generate([prompt], params)[0].token_ids
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


def _paint_lossless(row: Row, theme: Theme) -> Figure:
    rules = [line for line in row.lines if "name" in line]
    tokens = [line for line in row.lines if "token" in line]
    figure, (upper, lower) = panels_of([1.2 + 0.42 * len(tokens), 1.8])
    for at, line in enumerate(tokens):
        upper.barh(at - 0.2, line["q"], height=0.36, color=theme.faint, label="q, the draft" if not at else None)
        label = "accepted, min(p, q)" if not at else None
        upper.barh(at + 0.2, line["accepted"], height=0.36, color=theme.colours[2], label=label)
        look = {"left": line["accepted"], "color": theme.colours[1], "label": "recovered" if not at else None}
        upper.barh(at + 0.2, line["recovered"], height=0.36, **look)
        label = "p, the target" if not at else None
        upper.plot([line["p"]] * 2, [at - 0.02, at + 0.42], color=theme.ink, linewidth=2, label=label)
    upper.set_yticks(range(len(tokens)), [drawable(repr(line["token"])) for line in tokens], fontsize=8)
    upper.set(ylim=(len(tokens) - 0.4, -0.6), xlabel="probability at one place")
    upper.legend(loc="lower right")
    for at, line in enumerate(rules):
        value = line["largest distance from p"]
        lower.barh(at, value, color=theme.colours[1 if at else 2])
        lower.text(value, at, f" {value:.2g}", va="center", fontsize=9)
    lower.set_yticks(range(len(rules)), [line["name"] for line in rules], fontsize=8)
    lower.set(ylim=(len(rules) - 0.4, -0.6), xlabel="largest distance from the target's distribution", xlim=(0, 1.1))
    return figure


def _alt_lossless(row: Row) -> str:
    said = [f"{line['name']} {line['largest distance from p']:.2g}" for line in row.lines if "name" in line]
    return (
        "Bars of one place by token: the accepted part, min(p, q), and the recovered part end at p. Below, the largest "
        f"distance of the output from the target at any place, by rule: {', '.join(said)}."
    )


LOSSLESS = Section(
    "Why nothing is lost: the proof, at every place of a text",
    "A token comes by being drawn from the draft and accepted, min(p, q), or after a rejection from what q left of p; "
    "both together are p (appendix A.1 of arXiv 2211.17192). Added up in closed form from the rows of this pair, at "
    "every place of sampled texts, with the engine's own distribution of recovered tokens; the distance is half the "
    "sum of |output - p|. Two wrong rules beside it show that the check can fail. That the engine's texts follow it is "
    "tested by frequencies: `sakiyomi audit`.",
    lossless,
    _paint_lossless,
    _alt_lossless,
)

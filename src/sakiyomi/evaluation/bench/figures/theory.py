"""The theory beside what is measured: closed forms by alpha and gamma, memory traffic, and the proof, checked."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from sakiyomi.engine.plain import EngineView
from sakiyomi.evaluation.bench.figures.alphas import minima
from sakiyomi.evaluation.bench.figures.config import words
from sakiyomi.evaluation.bench.figures.panels import PARTS
from sakiyomi.evaluation.bench.figures.work import Work, line_of
from sakiyomi.evaluation.bench.frame import Run, run_ours
from sakiyomi.evaluation.bench.meter import Meter
from sakiyomi.evaluation.bench.report import Row
from sakiyomi.evaluation.bench.runner import Spread, TimedRun
from sakiyomi.sampling.verifiers.ratio import residual
from sakiyomi.theory import acceptance, expected_tokens, memory_ratio, operations_ratio, round_speedup, speedup, traffic

GAMMAS = (1, 2, 4, 8)
RATES = (0.5, 0.7, 0.8, 0.9, 0.95)
LENGTHS = (1, 2, 3, 4, 6, 8)
SHOWN = 8  # tokens of one place that are drawn
SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 7, "acceptance": "ratio", "tree": "chain"}


def expected(work: Work) -> Row:
    """Tokens a pass of a draft of known rate, and of the pair's own at its alpha."""
    lines = []
    oracle = work.drafter("oracle")
    for name, spec, rates in (("known rate", "oracle", RATES), ("draft model", work.draft, (None,))):
        for gamma in GAMMAS:
            for rate in rates:
                work.note(f"{name}, gamma {gamma}, rate {rate}")
                oracle.rate = rate or 1.0
                figures = work.run(work.engine(spec), gamma=gamma, tree="chain")().figures
                alpha, tau, theory = figures["alpha"], figures["tau"], expected_tokens(figures["alpha"], gamma)
                line = {"name": name, "gamma": gamma, "rate": rate, "alpha": alpha, "tau": tau}
                lines.append(line | {"expected": theory, "off by": tau / theory - 1})
    return work.measured(lines)


def operations(work: Work) -> Row:
    """Speed-up, and operations a token, of chains of several lengths; with gamma 0 as the baseline."""
    engine = work.engine(work.draft)
    runs = {"plain": work.run(work.engine(), tree="chain")}
    runs |= {f"gamma {n}": work.run(engine, tree="chain", gamma=n) for n in LENGTHS}
    plain, *others = standings = work.raced(runs, work.pair.judge(work.alone))
    c_hat, step = work.c_hat, 1000 / line_of(plain)["tokens_per_second"]
    lines: list[dict[str, Any]] = [line_of(plain, gamma=0, operations=1.0)]
    for gamma, standing in zip(LENGTHS, others, strict=True):
        alpha, tau = standing.median("alpha"), standing.median("tau")
        c = standing.median("draft_ms") / gamma / step
        found = line_of(standing, gamma=gamma, operations=(gamma * c_hat + gamma + 1) / tau)
        lines.append(found | {"c": c, "passes alike": speedup(alpha, gamma, c)})
    return work.measured(lines, c_hat=c_hat, **{"A/A": Spread.shown(standings)})


def formulas(work: Work) -> Row:
    """One chain length at temperature 1, by the ratio rule; predictions come from alpha as it is defined."""
    gamma, prompts = work.config.gamma, work.pair.prompts
    alpha = minima(*work.rows(), prompts, work.written(**SAMPLED), 1.0).alpha
    runs: dict[str, Run] = {
        "plain": work.run(work.engine(), **SAMPLED),
        "drafting": partial(_by_token, work, work.draft, SAMPLED),
    }
    work.warm(runs, work.alone)
    slow, fast = standings = work.raced(runs)
    step = slow.median("score_ms") + slow.median("overhead_ms")
    c = fast.median("draft_ms") / gamma / step
    verify = (fast.median("score_ms") + fast.median("overhead_ms")) / step
    c_hat, tokens = work.c_hat, expected_tokens(alpha, gamma)
    theta, n = 1 - alpha, gamma + 1
    known: dict[str, tuple[float, float]] = {
        "alpha": (alpha, fast.median("alpha")),
        "E": (tokens, fast.median("tau")),
        "E[X]": ((1 - (1 - theta) ** n) / theta if theta > 0 else float(n), fast.median("tau")),
        "speed-up": (speedup(alpha, gamma, c), fast.ratio),
        "speed-up, the pass as it costs": (round_speedup(tokens, gamma * c, verify), fast.ratio),
        "operations": (
            operations_ratio(alpha, gamma, c_hat),
            fast.median("target rows") + c_hat * fast.median("draft rows"),
        ),
        "reads of the target": (memory_ratio(tokens), fast.median("target passes")),
    }
    written = words()["formulas"]
    lines = [
        {"name": name, "formula": written[name], "predicted": predicted, "measured": found}
        | {"off by": found / predicted - 1 if predicted else None}
        for name, (predicted, found) in known.items()
    ]
    symbols = {"gamma": gamma, "c": c, "v": verify, "c_hat": c_hat, "A/A": Spread.shown(standings)}
    return work.measured(lines, temperature=1, acceptance="ratio", **symbols)


def _by_token(work: Work, spec: str | None, more: dict[str, Any]) -> TimedRun:
    """A run with passes, rows and bytes of keys and values of target and draft (0 without one), by committed token."""
    engine: EngineView = work.engine(spec)
    with Meter(engine.engine) as meter:
        found = run_ours(engine, work.pair.prompts, work.params(**more))
    target, *draft = meter.passes()
    committed = found.figures["tau"] * target["passes"]
    counted = {"target": target, "draft": draft[0] if draft else dict.fromkeys(target, 0.0)}
    return found.more(**{
        f"{model} {name}": value / committed for model, known in counted.items() for name, value in known.items()
    })  # fmt: skip


def traffic_of(work: Work) -> Row:
    """Bytes read a token by decoding passes: by the formula from alpha, and as the passes that ran read them."""
    prompts, texts = work.pair.prompts, work.written(tree="chain")
    alpha = minima(*work.rows(), prompts, texts, 0.0).alpha
    # Of a text's middle, as the average over its passes is.
    middle = round(sum(len(p) + len(t) / 2 for p, t in zip(prompts, texts, strict=True)) / len(texts))
    sizes: dict[str, Any] = {}
    models = {"target": ("", work.alone.target), "draft": ("draft_", work.drafter(work.draft).model)}
    for before, model in models.values():
        with model.cache.lent(middle) as slot:
            held = {"weights": model.weights.bytes or 0, "kv": model.cache.held_bytes(slot, middle)}
        sizes |= {f"{before}{name}": float(value) for name, value in held.items()}
    lines: list[dict[str, Any]] = []
    for gamma in (0, *GAMMAS):  # 0: plain
        work.note(f"gamma {gamma}")
        figures = _by_token(work, work.draft if gamma else None, {"gamma": gamma or "auto", "tree": "chain"}).figures
        counted = {}
        for name, (before, _) in models.items():
            counted[f"{before}weights"] = figures[f"{name} passes"] * sizes[f"{before}weights"]
            counted[f"{before}kv"] = figures[f"{name} kv"]
        predicted = traffic(expected_tokens(alpha, gamma), gamma, **sizes)
        line: dict[str, Any] = {"gamma": gamma, "tau": figures["tau"]}
        for kind in PARTS:
            line |= {f"{kind}_predicted_bytes": getattr(predicted, kind), f"{kind}_counted_bytes": counted[kind]}
        total = sum(counted.values())
        lines.append(line | {"predicted": predicted.total, "counted": total, "off by": total / predicted.total - 1})
    return work.measured(lines, alpha=alpha, temperature=0)


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
    for prompt, text in zip(work.pair.prompts, work.written(temperature=1.0, seed=7), strict=True):
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
    return work.measured(lines, places=places, temperature=1, beta_shown=beta)

"""Block verification against the ratio rule at equal gamma: tokens a target pass, and what they cost."""

from __future__ import annotations

import statistics
from typing import Any

from sakiyomi.core.tree import Draft, DraftKind, Verdict
from sakiyomi.evaluation.bench.frame import PairRow
from sakiyomi.evaluation.bench.report import Row
from sakiyomi.evaluation.bench.runner import Spread
from sakiyomi.sampling.rng import RequestNoise
from sakiyomi.sampling.verifiers import VERIFIERS, Rows
from sakiyomi.sampling.verifiers.base import Rule, Verifier, draft_rows
from sakiyomi.sampling.verifiers.block import level_of

__all__ = ["block"]

GAMMAS = (2, 4, 8)
RULES = ("ratio", "block")


class _Both(Verifier):
    """The ratio rule, which also sums up what both rules keep on average of each chain that comes along.

    On one and the same chain the mean is known: of i tokens the ratio rule keeps the product of min(1, p / q), block
    verification the level of the i-th (see ``verifiers.block``). That is the fairest pairing there is, and a gain of
    1 % shows after a few hundred rounds.
    """

    name = "both"
    rule: Rule = "ratio"
    takes: frozenset[DraftKind] = frozenset({"chain"})

    def __init__(self) -> None:
        self.rounds = 0
        self.kept = dict.fromkeys(RULES, 0.0)

    def verify(self, draft: Draft, rows: Rows, noise: RequestNoise) -> Verdict:
        """See ``Verifier.verify``."""
        probs = draft_rows(draft, rows)
        if probs is not None:
            self.rounds += 1
            product = level = 1.0
            for i, token in enumerate(draft.tree.tokens):
                product *= level_of(1.0, rows.row(i), probs[i], token)
                level = level_of(level, rows.row(i), probs[i], token)
                self.kept["ratio"] += product
                self.kept["block"] += level
        return VERIFIERS["ratio"].verify(draft, rows, noise)


def block(row: PairRow) -> Row:
    """Sampled text at temperature 1, without a seed, one prompt at a time; both rules take turns at each gamma.

    ``paired``: expected tokens a pass of block verification over those of the ratio rule on the very same chains.
    """
    llm = row.llm()
    lines = [_line(row, llm, gamma) for gamma in GAMMAS]
    conditions = row.conditions(llm, gamma=", ".join(map(str, GAMMAS)), laps=row.config.repeats, temperature=1.0)
    conditions.pop("perplexity_of", None)
    worst = min(line["paired"] for line in lines)
    notes = [f"block verification keeps {'no fewer' if worst >= 1.0 else 'FEWER'} tokens at every gamma"]
    title = "sampled at temperature 1: tokens a target pass and tokens/s, ratio rule and block verification"
    return Row("block", title, lines, conditions, notes)


def _line(row: PairRow, llm: Any, gamma: int) -> dict[str, Any]:
    runs = {rule: row.run(llm, temperature=1.0, gamma=gamma, acceptance=rule) for rule in RULES}
    standings = row.race(runs, where=f"gamma {gamma}")
    both = _Both()
    for _ in range(row.config.repeats):
        for prompt in row.pair.prompts:
            request = llm.engine.submit(list(prompt), row.params(temperature=1.0, gamma=gamma, acceptance="ratio"))
            request.verifier = both
            llm.engine.complete([request])
    line: dict[str, Any] = {"gamma": gamma}
    for standing in standings:
        taus = [lap.figures["tau"] for lap in standing.laps]
        line[f"tau_{standing.name}"] = statistics.fmean(taus)
        line[f"{standing.name}_tokens_per_second"] = statistics.median(standing.speeds)
    rounds = max(both.rounds, 1)
    expected = {rule: 1.0 + kept / rounds for rule, kept in both.kept.items()}
    return line | {
        "paired": expected["block"] / expected["ratio"],
        "rounds": both.rounds,
        "speed": standings[1].ratio,
        "A/A": Spread.shown(standings),
    }

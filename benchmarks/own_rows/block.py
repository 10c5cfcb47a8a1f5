"""Block verification against the ratio rule at equal gamma: tokens a target pass, and what they cost."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import partial
from typing import Any

from sakiyomi.core.tree import Draft, DraftKind, Verdict
from sakiyomi.engine.llm import LLM
from sakiyomi.evaluation.bench.frame import PairRow, Race, Races, declared
from sakiyomi.evaluation.bench.runner import Spread, Standing
from sakiyomi.sampling.rng import RequestNoise
from sakiyomi.sampling.verifiers import VERIFIERS, Rows
from sakiyomi.sampling.verifiers.base import Rule, Verifier, draft_rows
from sakiyomi.sampling.verifiers.traversal import level_of

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


@declared("sampled at temperature 1: tokens a target pass and tokens/s, ratio rule and block verification")
def block(row: PairRow) -> Races:
    """Sampled text at temperature 1, without a seed, one prompt at a time; both rules run interleaved at each gamma.

    ``paired``: expected tokens a pass of block verification over those of the ratio rule on the very same chains.
    """
    llm = row.llm()
    for gamma in GAMMAS:
        runs = {rule: row.run(llm, temperature=1.0, gamma=gamma, acceptance=rule) for rule in RULES}
        yield Race(runs, where=f"gamma {gamma}", lines=partial(_line, row, llm, gamma))
    worst = min(line["paired"] for line in row.lines)
    row.notes.append(f"block verification keeps {'no fewer' if worst >= 1.0 else 'FEWER'} tokens at every gamma")
    return row.conditions(llm, gamma=", ".join(map(str, GAMMAS)), temperature=1.0)


def _line(row: PairRow, llm: LLM, gamma: int, standings: Sequence[Standing]) -> list[dict[str, Any]]:
    both = _Both()
    for _ in range(row.config.repeats):
        for prompt in row.pair.prompts:
            request = llm.engine.submit(list(prompt), row.params(temperature=1.0, gamma=gamma, acceptance="ratio"))
            request.verifier = both
            llm.engine.complete([request])
    line: dict[str, Any] = {"gamma": gamma}
    for standing in standings:
        taus = [run.figures["tau"] for run in standing.runs]
        line[f"tau_{standing.name}"] = statistics.fmean(taus)
        line[f"{standing.name}_tokens_per_second"] = statistics.median(standing.speeds)
    rounds = max(both.rounds, 1)
    expected = {rule: 1.0 + kept / rounds for rule, kept in both.kept.items()}
    line["paired"] = expected["block"] / expected["ratio"]
    return [line | {"rounds": both.rounds, "speed": standings[1].ratio, "A/A": Spread.shown(standings)}]

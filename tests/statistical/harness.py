"""Table models and the chi-square test: does a rule give the target's distribution, whatever was drafted?

A table model is a Markov chain over 8 tokens, given by its rows, so that the exact distribution of the first tokens is
a product of rows. The joint distribution is tested, not the first token's alone: a uniform shared by a round, or a
wrong bonus row, leave the first token as it should be.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats

from sakiyomi.core.tree import Draft
from sakiyomi.sampling.rng import RequestNoise
from sakiyomi.sampling.verifiers import Rows, Verifier
from target_rows import TableRows

V = 8
SAMPLES = 5_000
LEVEL = 1e-6
START = 0
SEEDS = {"far": 42, "peaked": 47}
"""Tables on which broken rules show in few samples."""

Table = NDArray[np.float32]
Propose = Callable[[int, int, RequestNoise], Draft]
RowsOf = Callable[[tuple[int, ...], int], Rows]


@dataclass(frozen=True)
class Pair:
    """A target and a draft; row t is the distribution after token t."""

    target: Table
    draft: Table

    @property
    def distance(self) -> float:
        """Total variation between the two, averaged over the rows."""
        return float(np.abs(self.target - self.draft).sum(1).mean() / 2)


def _normalised(table: NDArray[np.float64]) -> Table:
    return (table / table.sum(1, keepdims=True)).astype(np.float32)


def pair(name: str, seed: int | None = None) -> Pair:
    """Two tables: "far" apart, of "truncated" (unlike) supports, of "disjoint" supports, "equal", or "peaked"."""
    random = np.random.default_rng(SEEDS.get(name, 17) if seed is None else seed)
    target, draft = (random.dirichlet(np.full(V, 2.0 if name == "peaked" else 0.7), size=V) for _ in range(2))
    if name == "truncated":
        # As after top-k and top-p: each keeps five tokens, not the same ones.
        for table in (target, draft):
            for row in table:
                row[np.argsort(row)[:3]] = 0.0
    elif name == "disjoint":
        target[:, V // 2 :] = 0.0
        draft[:, : V // 2] = 0.0
    elif name == "equal":
        draft = target
    elif name == "peaked":
        # The draft is surer than the target of what both think likely: many draws fall together, some are refused.
        for row in range(V):
            target[row], draft[row] = 0.7 * target[row], 0.3 * draft[row]
            target[row, (3 * row + 1) % V] += 0.3
            draft[row, (3 * row + 1) % V] += 0.7
    result = Pair(_normalised(target), _normalised(draft))
    if name == "equal":
        assert result.distance == 0.0
    else:
        assert result.distance >= 0.3
    if name == "truncated":
        assert np.any((result.draft == 0) & (result.target > 0))
        assert np.any((result.draft > 0) & (result.target == 0))
    return result


def rows_of(table: Table) -> RowsOf:
    """Gives the rows that follow some tokens, from the table; the same object for the same ones, which saves a fifth of
    the time. Rules must not change them.
    """

    @lru_cache(maxsize=20_000)
    def rows(tokens: tuple[int, ...], position: int) -> Rows:
        return TableRows(table[list(tokens)], position)

    return rows


def generate(
    target: Table | RowsOf,
    propose: Propose,
    verifier: Verifier,
    length: int,
    noise: RequestNoise,
    rounds: list[int] | None = None,
) -> list[int]:
    """``length`` tokens after START, by rounds of draft, score and verify; a last round may overshoot and is cut."""
    tokens, score = [START], target if callable(target) else rows_of(target)
    while len(tokens) <= length:
        position = len(tokens)
        draft = propose(tokens[-1], position, noise)
        verdict = verifier.verify(draft, score((tokens[-1], *draft.tree.tokens), position), noise)
        tokens += [draft.tree.tokens[node] for node in verdict.path]
        tokens.append(verdict.token)
        if rounds is not None:
            rounds.append(len(verdict.path) + 1)
    return tokens[1 : length + 1]


def counts(target: Table, propose: Propose, verifier: Verifier, length: int) -> NDArray[np.int64]:
    """How often each text of ``length`` tokens came out of ``SAMPLES`` requests, (V ** length)."""
    seen = np.zeros(V**length, dtype=np.int64)
    powers = [V ** (length - 1 - i) for i in range(length)]
    rows = rows_of(target)
    for request in range(SAMPLES):
        text = generate(rows, propose, verifier, length, RequestNoise(20_24, request))
        seen[sum(map(int.__mul__, text, powers))] += 1
    return seen


def exact(target: Table, length: int) -> NDArray[np.float64]:
    """The target's own distribution over texts of ``length`` tokens, (V ** length)."""
    rows = target.astype(np.float64)
    rows /= rows.sum(1, keepdims=True)
    joint = rows[START]
    for _ in range(length - 1):
        joint = (joint.reshape(-1, V)[:, :, None] * rows[None]).reshape(-1)
    return joint


def p_value(
    seen: NDArray[np.int64], expected_probs: NDArray[np.float64], vocab: int | None = None
) -> tuple[float, float]:
    """Chi-square p of the counts, cells of fewer than 5 expected merged, and total variation from what is expected.

    Args:
        seen, expected_probs: of every cell.
        vocab: cells are texts of tokens of so large a vocabulary. Then every run of two or more consecutive tokens is
            judged too, which needs far fewer samples than the whole text alone. The p-value is Bonferroni's, of the
            worst run. None: cells are judged as they are.
    """
    distance = float(np.abs(seen / seen.sum() - expected_probs).sum() / 2)
    if seen[expected_probs == 0].any():
        # Something impossible happened.
        return 0.0, distance
    if vocab is None:
        return _chi_square(seen, expected_probs), distance
    length = round(np.log(len(seen)) / np.log(vocab))
    worst, runs = 1.0, 0
    for begin, end in itertools.combinations(range(length + 1), 2):
        if end - begin == 1 < length:
            continue
        others = (*range(begin), *range(end, length))
        parts = (cells.reshape((vocab,) * length).sum(others).reshape(-1) for cells in (seen, expected_probs))
        p = _chi_square(*parts)
        if not np.isnan(p):  # else the run is nearly always the same
            worst, runs = min(worst, p), runs + 1
    assert runs, "one cell is no test"
    return min(1.0, worst * runs), distance


def _chi_square(seen: NDArray[np.int64], expected_probs: NDArray[np.float64]) -> float:
    expected = expected_probs * int(seen.sum())
    small = expected < 5
    if 0 < expected[small].sum() < 5 and not small.all():  # too few even together: the smallest other cell joins them
        small |= expected <= expected[~small].min()
    observed_cells, expected_cells = seen[~small].astype(float), expected[~small]
    if small.any() and expected[small].sum() > 0:
        observed_cells = np.append(observed_cells, seen[small].sum())
        expected_cells = np.append(expected_cells, expected[small].sum())
    statistic = float(((observed_cells - expected_cells) ** 2 / expected_cells).sum())
    return float(stats.chi2.sf(statistic, len(expected_cells) - 1))


def run_rule(name: str, tables: Pair, propose: Propose, verifier: Verifier, length: int) -> float:
    """Run, print, and return the p-value."""
    p, distance = p_value(counts(tables.target, propose, verifier, length), exact(tables.target, length), V)
    print(f"{name}: p = {p:.3g}, TV from target = {distance:.4f}, TV(target, draft) = {tables.distance:.3f}")
    return p


def as_probs(table: Table, tokens: list[int]) -> torch.Tensor:
    return torch.from_numpy(table[tokens])

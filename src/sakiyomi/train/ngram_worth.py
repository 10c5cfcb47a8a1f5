"""What n-gram drafts are worth to a target: alpha as in Leviathan et al. 2023, and the speed-up that follows."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sakiyomi import theory
from sakiyomi.drafters.ngram import SIBLINGS, NgramReader, Tables
from sakiyomi.engine import machine
from sakiyomi.kernels.batch import SequenceRows
from sakiyomi.train.data import Ids
from sakiyomi.train.report import Reporter

LONGEST = 256  # tokens of one held-out text


class Bigrams:
    """Unigram and bigram distributions of documents, unpruned: rows over the vocabulary.

    The bigram row takes as much from the unigrams as its token was followed by different ones (Witten and Bell 1991).

    Args:
        documents: token ids.
        vocab: their number.
    """

    def __init__(self, documents: Sequence[Ids], vocab: int) -> None:
        counts = np.zeros(vocab, np.int64)
        pairs = []
        for document in documents:
            counts += np.bincount(document, minlength=vocab)
            pairs.append(document[:-1] * vocab + document[1:])
        # One more of each token: one never seen has a chance too.
        self.unigram: NDArray[np.float64] = (counts + 1) / (counts.sum() + vocab)
        keys, self._counts = np.unique(np.concatenate(pairs), return_counts=True)
        self._tokens = keys % vocab
        self._starts = np.searchsorted(keys // vocab, np.arange(vocab + 1))

    def row(self, token: int) -> NDArray[np.float64]:
        """Distribution of what follows a token, (V,)."""
        start, end = self._starts[token], self._starts[token + 1]
        counts, total = self._counts[start:end], int(self._counts[start:end].sum())
        if not total:
            return self.unigram
        row: NDArray[np.float64] = self.unigram * ((end - start) / (total + end - start))
        row[self._tokens[start:end]] += counts / (total + end - start)
        return row


def worth(
    llm: Any,
    tables: Tables,
    documents: Sequence[Ids],
    held_out: Mapping[str, Sequence[Ids]],
    positions: int,
    reporter: Reporter,
) -> dict[str, dict[str, float]]:
    """Measure along held-out text, by prefix.

    Args:
        llm: the target.
        tables: trained.
        documents: what they were trained on.
        held_out: texts by name.
        positions: prefixes of each.
        reporter: is told.

    Returns:
        For each name and each of ``unigram``, ``bigram``: ``alpha`` (mean over prefixes of sum_x min(p, q), temperature
        1), ``greedy`` (share of prefixes where the likeliest tokens of both agree, temperature 0), and of both the
        best gamma and its speed-up (theorem 3.8 with the measured c). For ``tables``, which propose their likeliest
        token as a point mass: ``alpha`` is the mean of p(token). ``c``: a look-up / a step of the target.
    """
    grams = Bigrams(documents, llm.vocab_size)
    step = machine.pass_seconds(llm.target, (1,), repeats=7)[1]
    found = {}
    for name, texts in held_out.items():
        reporter.note(f"measuring alpha on {name}")
        sums, count, spent = np.zeros(6), 0, 0.0
        for text in texts:
            text = text[: min(LONGEST, positions - count + 1, llm.max_context - 1)]
            if len(text) < 2:
                break
            tokens = text.tolist()
            for i, p in enumerate(_rows(llm, tokens[:-1])):
                likeliest, rows = int(p.argmax()), (grams.unigram, grams.row(tokens[i]))
                for k, q in enumerate(rows):
                    sums[2 * k : 2 * k + 2] += np.minimum(p, q).sum(), int(q.argmax()) == likeliest
                began = time.perf_counter()
                reader = NgramReader(tables, llm.vocab_size)
                chances = reader.chances(tuple(tokens[max(0, i + 2 - tables.order) : i + 1]), SIBLINGS)
                spent += time.perf_counter() - began
                guess = max(chances, key=lambda token: chances[token]) if chances else -1
                sums[4:] += p[guess] if guess >= 0 else 0.0, guess == likeliest
            count += len(tokens) - 1
        c = spent / max(count, 1) / step
        values = {"positions": float(count), "c": c}
        for k, kind in enumerate(("unigram", "bigram", "tables")):
            for rate, value in zip(("alpha", "greedy"), sums[2 * k : 2 * k + 2] / max(count, 1), strict=True):
                value = min(value, 0.9999)  # one that is always right has no best gamma
                gamma = theory.optimal_gamma(float(value), c)
                values[f"{kind}_{rate}"] = float(value)
                values[f"{kind}_{rate}_gamma"] = float(gamma)
                values[f"{kind}_{rate}_speedup"] = theory.speedup(float(value), gamma, c)
        found[name] = values
    return found


def _rows(llm: Any, tokens: Sequence[int]) -> NDArray[np.float64]:
    """The target's distributions behind each token, (n, V), in one pass."""
    with llm.target.cache.lent(len(tokens)) as slot:
        logits = llm.target.score([SequenceRows(slot, 0, list(tokens))]).logits
    rows: NDArray[np.float64] = logits.double().softmax(-1).cpu().numpy()
    return rows

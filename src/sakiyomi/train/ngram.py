"""Count n-grams, write them to one file, and measure what such trivial drafts are worth to a target."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sakiyomi import theory
from sakiyomi.core.digests import tokenizer_digest
from sakiyomi.core.errors import InputError
from sakiyomi.drafters.ngram import SIBLINGS, NgramReader, Tables
from sakiyomi.drafters.ngram_file import FileTables, write_tables
from sakiyomi.engine import machine
from sakiyomi.engine.llm import LLM
from sakiyomi.kernels.batch import SequenceRows
from sakiyomi.train.commands import TrainNgram
from sakiyomi.train.counted import LONGEST_PROMPT, Library, token_ids
from sakiyomi.train.data import Ids, parse_valid
from sakiyomi.train.progress import Reporter
from sakiyomi.train.samples import draw_prompts, sample_continuations
from sakiyomi.train.tokenizer import load_tokenizer

HELD_BACK = 32
SHORTEST = 32  # tokens of a held-out text
_FACTOR, _MASK = np.uint64(0x5851F42D4C957F2D), np.uint64((1 << 63) - 1)
_SPREAD = np.uint64(0x9E3779B97F4A7C15)


def train_ngram(config: TrainNgram, command: str = "") -> dict[str, Any]:
    """Run `sakiyomi train ngram`.

    Args:
        config: the settings.
        command: the command line, kept in the file.

    Returns:
        The summary that `--json` prints.

    Raises:
        InputError, LoadError: a file cannot be read or written, or holds too little text.
    """
    began = time.monotonic()
    reporter = Reporter(20.0)
    out = Path(config.out).expanduser()
    if out.is_dir():
        raise InputError(f"out is {config.out!r}, which is a folder; give the name of a file")
    llm, tokenizer, vocab = _models(config)
    library = Library(tokenizer, vocab)
    texts = [Path(name) for name in config.text]
    held_out = _held_out(config, library, texts)
    documents = [document for path in texts for document in library.documents(path)]
    if config.samples:
        room = max(llm.max_context - config.sample_tokens, LONGEST_PROMPT)
        pools = [library.prompts(path, room, "--sample-tokens", reporter.note) for path in texts]
        documents = _samples(config, llm, [prompt for pool in pools for prompt in pool], reporter)
    reporter.note(f"counting {sum(map(len, documents))} tokens of {len(documents)} texts")
    tensors = count_tables(documents, config.order, vocab, least=config.least, keep=config.keep)
    about = {
        "tokenizer": tokenizer_digest(tokenizer),
        "vocab_size": str(vocab),
        "tokens": str(sum(map(len, documents))),
        "source": f"{config.samples} samples of {config.target}" if config.samples else "text",
        "command": command,
    }
    write_tables(out, config.order, tensors, about)
    summary: dict[str, Any] = {
        "finished": True,
        "out": str(out),
        "bytes": out.stat().st_size,
        "order": config.order,
        "tokens": int(about["tokens"]),
        "ngrams": {n: int(tensors[f"tokens.{n}"].size) for n in range(2, config.order + 1)},
    }
    if llm is not None:
        summary["held_out"] = worth(
            llm, FileTables(config.order, tensors), documents, held_out, config.positions, reporter
        )
    summary["seconds"] = time.monotonic() - began
    return summary


def count_tables(
    documents: Sequence[Ids], order: int, vocab: int, *, least: int = 2, keep: int = 8
) -> dict[str, NDArray[Any]]:
    """The tensors of ``drafters.ngram_file``; no n-gram spans two documents.

    Args:
        documents: token ids.
        order: tokens of the longest n-gram.
        vocab: token ids are below it.
        least: n-grams of three tokens and more are kept from this count on.
        keep: most frequent continuations kept of each run.
    """
    stream = np.concatenate([*documents, np.zeros(0, np.int64)])
    starts = np.zeros(len(stream), bool)
    starts[np.cumsum([0, *map(len, documents)])[:-1][: len(documents)]] = True
    inside = np.arange(len(stream)) - np.maximum.accumulate(np.where(starts, np.arange(len(stream)), 0))
    found: dict[str, NDArray[Any]] = {"unigrams": np.bincount(stream, minlength=vocab).astype(np.int64)}
    for n in range(2, order + 1):
        # inside: tokens before this one in its document.
        ends = np.flatnonzero(inside >= n - 1)
        runs = np.zeros(len(ends), np.uint64)
        for back in range(n - 1, 0, -1):
            runs = (runs * _FACTOR + stream[ends - back].astype(np.uint64) + np.uint64(1)) & _MASK
        part = _counted(runs, stream[ends], least if n > 2 else 1, keep)
        found |= {f"{name}.{n}": tensor for name, tensor in part.items()}
    return found


def _counted(runs: NDArray[np.uint64], tokens: Ids, least: int, keep: int) -> dict[str, NDArray[Any]]:
    """One order: runs in ascending order, each with its continuations, the most frequent first."""
    pairs = (runs ^ (tokens.astype(np.uint64) * _SPREAD)) * _FACTOR + tokens.astype(np.uint64)
    _, places, counts = np.unique(pairs, return_index=True, return_counts=True)
    run, token = runs[places], tokens[places]
    rows = np.lexsort((token, -counts, run))
    run, token, counts = run[rows], token[rows], counts[rows]
    heads = np.flatnonzero(np.r_[True, run[1:] != run[:-1]][: len(run)])
    sizes = np.diff(np.r_[heads, len(run)])
    totals = np.add.reduceat(counts, heads) if len(heads) else counts
    rank = np.arange(len(run)) - np.repeat(heads, sizes)
    kept = (rank < keep) & (counts >= least)
    left = np.add.reduceat(kept, heads, dtype=np.int64) if len(heads) else np.zeros(0, np.int64)
    some = left > 0
    return {
        "runs": run[heads][some].astype(np.int64),
        "starts": np.r_[0, np.cumsum(left[some])].astype(np.int64),
        "totals": totals[some].astype(np.int32),
        "kinds": sizes[some].astype(np.int32),
        "tokens": token[kept].astype(np.int32),
        "counts": counts[kept].astype(np.int32),
    }


def _models(config: TrainNgram) -> tuple[Any, Any, int]:
    """The target as an engine without a draft, or None; its tokenizer; the width of its vocabulary."""
    if config.target:
        llm = LLM(config.target, draft="none", compile=False)
        return llm, llm.tokenizer, llm.vocab_size
    tokenizer = load_tokenizer(Path(config.tokenizer))
    return None, tokenizer, len(tokenizer)


def _held_out(config: TrainNgram, library: Library, texts: Sequence[Path]) -> dict[str, list[Ids]]:
    if not config.target:
        return {}
    if not config.valid:
        held = {"held back": library.hold_back(texts, HELD_BACK, SHORTEST, config.seed)}
    else:
        held = library.held_out(parse_valid(config.valid), texts, sys.maxsize, SHORTEST, config.seed)
    return {name: [token_ids(document) for document in some] for name, some in held.items()}


def _samples(config: TrainNgram, llm: Any, pool: list[Ids], reporter: Reporter) -> list[Ids]:
    """Prompts of the text with what the target writes after them; the prompts are counted too."""
    rng = np.random.default_rng((config.seed, 0))
    found: list[Ids] = []
    batch = 64
    while len(found) < config.samples:
        count = min(batch, config.samples - len(found))
        prompts = draw_prompts([pool], np.ones(1), count, rng)
        written = sample_continuations(
            llm, prompts, new_tokens=config.sample_tokens, temperature=config.temperature, seed=len(found)
        )
        found += [np.array(prompt + text, np.int64) for prompt, text in zip(prompts, written, strict=True)]
        reporter.note(f"samples: {len(found)} of {config.samples}")
    return found


# ---------------------------------------------------------------- what the drafts are worth


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
    """The target's distributions after each token, (n, V), in one pass."""
    with llm.target.cache.lent(len(tokens)) as slot:
        logits = llm.target.score([SequenceRows(slot, 0, list(tokens))]).logits
    rows: NDArray[np.float64] = logits.double().softmax(-1).cpu().numpy()
    return rows

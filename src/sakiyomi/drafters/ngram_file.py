"""N-gram tables: counts of a growing text, and trained tables in one safetensors file that look-ups search directly.

Metadata: ``format``, ``order``, ``tokenizer`` (digest), ``vocab_size``, and what they were trained on. Files of format
1 have a checksum of their own instead of digests (see ``core.digests``).
For each n from 2 to the order, with runs of n - 1 tokens sorted by ``run_number``: ``runs.n`` (R) int64; ``starts.n``
(R + 1) int64, where a run's continuations begin; ``totals.n``, ``kinds.n`` (R) int32, how often it was continued and by
how many different tokens, pruned ones included; ``tokens.n``, ``counts.n`` (E) int32. ``unigrams`` (V) int64 counts.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from sakiyomi.core.checkpoint import read_header
from sakiyomi.core.digests import load_tensors, save_tensors
from sakiyomi.core.errors import LoadError
from sakiyomi.core.files import whole_file

FORMAT, READ = "2", ("1", "2")
ORDER = 4
WIDEST = 16  # tokens that compete under the rule "coupled"
_FACTOR, _MASK = 0x5851F42D4C957F2D, (1 << 63) - 1
_PARTS = ("runs", "starts", "totals", "kinds", "tokens", "counts")


def run_number(run: Sequence[int]) -> int:
    """A hash of 63 bits for a run of tokens; a collision only makes a guess worse."""
    number = 0
    for token in run:
        number = (number * _FACTOR + token + 1) & _MASK
    return number


Seen = tuple[int, int, Sequence[int], Mapping[int, int]]
"""How often a run was continued, by how many different tokens, the most frequent of them in order, and their counts."""


class Tables(Protocol):
    """What followed each run of tokens.

    Attributes:
        order: tokens of the longest n-gram.
    """

    order: int

    def after(self, run: tuple[int, ...]) -> Seen | None:
        """What followed a run; None: it was never seen, or nothing followed."""
        ...


class OnlineTables:
    """N-gram counts of a growing text.

    Args:
        order: tokens of the longest n-gram.
    """

    def __init__(self, order: int = ORDER) -> None:
        self.order = order
        # By run: how often it was continued, counts by token, and its most frequent continuations in order.
        self._runs: dict[tuple[int, ...], tuple[list[int], dict[int, int], list[int]]] = {}

    def read(self, head: Sequence[int], tokens: Sequence[int]) -> None:
        """Count the tokens that follow ``head``."""
        runs, longest = self._runs, self.order - 1
        last = tuple(head[-longest:]) if longest else ()
        for token in tokens:
            for start in range(len(last) + 1):
                run = last[start:]
                entry = runs.get(run)
                if entry is None:
                    runs[run] = ([1], {token: 1}, [token])
                    continue
                total, counts, top = entry
                total[0] += 1
                count = counts[token] = counts.get(token, 0) + 1
                if token not in top:
                    if len(top) < WIDEST:
                        top.append(token)
                    elif counts[top[-1]] < count:
                        top[-1] = token
                    else:
                        continue
                place = top.index(token)
                while place and counts[top[place - 1]] <= count:  # of equals the newest comes first
                    top[place - 1], top[place] = token, top[place - 1]
                    place -= 1
            last = (*last, token)[-longest:] if longest else ()

    def after(self, run: tuple[int, ...]) -> Seen | None:
        """See ``Tables.after``."""
        entry = self._runs.get(run)
        if entry is None:
            return None
        total, counts, top = entry
        return total[0], len(counts), top, counts


class FileTables:
    """Tables of a file, see ``Tables``.

    Args:
        order: tokens of the longest n-gram.
        tensors: by name, as in the file.
    """

    def __init__(self, order: int, tensors: Mapping[str, NDArray[Any]]) -> None:
        self.order = order
        # Views with Python integers as items; numpy's take three times as long here. They need aligned numbers, which
        # those of a file may not be.
        held = {name: np.require(tensor, requirements="A") for name, tensor in tensors.items()}
        self._orders = [tuple(memoryview(held[f"{part}.{n}"].data) for part in _PARTS) for n in range(2, order + 1)]
        unigrams = self._counts = np.require(tensors["unigrams"], np.int64, "A")
        top = np.argsort(-unigrams, kind="stable")[:WIDEST]
        counts = {token: count for token, count in enumerate(unigrams.tolist()) if count}
        self._unigrams: Seen = (sum(counts.values()), len(counts), [t for t in top.tolist() if t in counts], counts)

    def arrays(self) -> tuple[int, list[list[NDArray[Any]]], NDArray[Any], Seen]:
        """The order; of each order from 2 on the file's parts; counts of single tokens, and as ``after`` has them.

        Raises:
            LoadError: the parts do not fit each other.
        """
        kinds = (np.int64, np.int64, np.int32, np.int32, np.int32, np.int32)
        parts = [[np.require(*each, ("A", "C")) for each in zip(parts, kinds, strict=True)] for parts in self._orders]
        for n, (runs, starts, totals, seen, tokens, counts) in enumerate(parts, start=2):
            ends = len(starts) == len(runs) + 1 and starts[0] == 0 and starts[-1] <= len(tokens)
            rows = len(totals) == len(seen) == len(runs) and len(counts) == len(tokens)
            if not (ends and rows and (np.diff(starts) >= 0).all()):
                raise LoadError(f"the tables of {n}-grams do not fit each other; train them anew")
        return self.order, parts, self._counts, self._unigrams

    def after(self, run: tuple[int, ...]) -> Seen | None:
        """See ``Tables.after``."""
        if not run:
            return self._unigrams
        runs, starts, totals, kinds, tokens, counts = self._orders[len(run) - 1]
        number = run_number(run)
        place = bisect_left(runs, number)
        if place == len(runs) or runs[place] != number:
            return None
        start, end = starts[place], starts[place + 1]
        top = tokens[start:end].tolist()
        return totals[place], kinds[place], top, dict(zip(top, counts[start:end], strict=True))


def write_tables(path: Path, order: int, tensors: Mapping[str, NDArray[Any]], about: Mapping[str, str]) -> None:
    """Write a file, whole or not at all; ``about`` has tokenizer, vocab_size and other metadata.

    Raises:
        LoadError: it cannot be written.
    """
    with whole_file(path, "make room there, or choose another --out") as fresh:
        stored = {name: torch.from_numpy(tensor) for name, tensor in tensors.items()}
        save_tensors(fresh, stored, {**about, "format": FORMAT, "order": str(order)})


def read_tables(path: str | Path, tokenizer: str, vocab_size: int) -> FileTables:
    """Read and check a file.

    Args:
        path: of the file.
        tokenizer: digest of the target's.
        vocab_size: of the target.

    Raises:
        LoadError: it cannot be read, is of another format, tokenizer or vocabulary, or is damaged.
    """
    path = Path(path).expanduser()
    remedy = "train it anew with `sakiyomi train ngram`"
    if not path.is_file():
        raise LoadError(f"the n-gram file {path} cannot be read: there is no such file; {remedy}")
    metadata = read_header(path, remedy).metadata
    if metadata.get("format") not in READ or "order" not in metadata:
        got = metadata.get("format")
        raise LoadError(f"{path} has n-gram format {got!r}, this version reads {' and '.join(READ)}; {remedy}")
    tensors = {name: tensor.numpy() for name, tensor in load_tensors(path, remedy).items()}
    order = _number(metadata["order"])
    if tensors.keys() != {f"{part}.{n}" for n in range(2, 1 + order) for part in _PARTS} | {"unigrams"}:
        raise LoadError(f"the n-gram file {path} is damaged: it lacks tables of order {order}; {remedy}")
    if metadata.get("tokenizer") != tokenizer:
        raise LoadError(
            f"the n-gram file {path} is of another tokenizer ({metadata.get('tokenizer', '')[:12]}, the target's is "
            f"{tokenizer[:12]}); train one with --target, or the target's --tokenizer"
        )
    most = max(int(tensors[f"tokens.{n}"].max(initial=0)) for n in range(2, order + 1)) if order > 1 else 0
    if max(most, len(tensors["unigrams"]) - 1) >= vocab_size:
        raise LoadError(f"the n-gram file {path} holds tokens that the target does not know ({vocab_size} of them)")
    return FileTables(order, tensors)


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 4 else 0

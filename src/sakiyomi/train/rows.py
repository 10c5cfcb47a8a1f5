"""Token streams and the mixture of rows that a batch is made of.

Order and position depend on the seed and on a small state alone, so that a resumed run sees the very rows of an
uninterrupted one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from sakiyomi.core.errors import InputError, LoadError
from sakiyomi.train.data import Encoder, Ids, TextSpec, encode_file


class Stream:
    """An endless token stream over documents: every epoch is a fresh permutation, no token is skipped within it.

    Args:
        documents: token ids of each document, its leading separator included.
        seed: of the permutations; `key` tells streams of one seed apart.
    """

    def __init__(self, documents: Sequence[Ids], *, seed: int, key: int) -> None:
        self._documents = documents
        self._seed, self._key = seed, key
        self.epoch, self.offset = 0, 0
        self.size = sum(len(document) for document in documents)
        self._tokens = self._permuted()

    def _permuted(self) -> Ids:
        order = np.random.default_rng((self._seed, self._key, self.epoch)).permutation(len(self._documents))
        return np.concatenate([self._documents[index] for index in order])

    def take(self, count: int) -> Ids:
        """The next `count` tokens; the position moves on by one token less, as rows share their border token."""
        parts: list[Ids] = []
        missing = count
        while True:
            part = self._tokens[self.offset : self.offset + missing]
            parts.append(part)
            missing -= len(part)
            self.offset += len(part)
            if not missing:
                break
            self.epoch, self.offset = self.epoch + 1, 0
            self._tokens = self._permuted()
        self.offset = max(self.offset - 1, 0)
        return np.concatenate(parts)

    def state(self) -> list[int]:
        """Position as (epoch, offset)."""
        return [self.epoch, self.offset]

    def restore(self, state: Sequence[int]) -> None:
        """Go to a position taken with `state`."""
        self.epoch, self.offset = int(state[0]), int(state[1])
        self._tokens = self._permuted()


class FixedRows:
    """Documents joined once and cut into rows of one length; epochs shuffle the rows, and a row comes back as it was.

    Args:
        documents: token ids of each document, its leading separator included.
        length: tokens of a row's inputs; a row has one more, its last target.
        seed: of the permutations; `key` tells sources of one seed apart.
    """

    def __init__(self, documents: Sequence[Ids], length: int, *, seed: int, key: int) -> None:
        order = np.random.default_rng((seed, key)).permutation(len(documents))
        tokens = np.concatenate([documents[index] for index in order])
        # Short text is repeated to fill one row rather than refused.
        tokens = np.resize(tokens, max(len(tokens), length + 1))
        count = (len(tokens) - 1) // length
        self._rows = np.stack([tokens[row * length : (row + 1) * length + 1] for row in range(count)])
        self._seed, self._key = seed, key
        self.epoch, self.offset, self.size = 0, 0, count
        self._order = self._permuted()

    def _permuted(self) -> Ids:
        return np.random.default_rng((self._seed, self._key, self.epoch)).permutation(self.size)

    def take(self, count: int) -> Ids:
        """The next row; `count` must be the length of a row, targets included."""
        if self.offset == self.size:
            self.epoch, self.offset = self.epoch + 1, 0
            self._order = self._permuted()
        row: Ids = self._rows[self._order[self.offset]]
        assert len(row) == count, "one row length a run"
        self.offset += 1
        return row

    def state(self) -> list[int]:
        """Position as (epoch, offset in rows)."""
        return [self.epoch, self.offset]

    def restore(self, state: Sequence[int]) -> None:
        """Go to a position taken with `state`."""
        self.epoch, self.offset = int(state[0]), int(state[1])
        self._order = self._permuted()


class Rows(Protocol):
    """A source of rows whose position can be kept: epochs done and the offset in the present one, of `size`."""

    epoch: int
    offset: int
    size: int

    def take(self, count: int) -> Ids:
        """The next row of `count` tokens."""

    def state(self) -> list[int]:
        """The position."""

    def restore(self, state: Sequence[int]) -> None:
        """Go to a position taken with `state`."""


class Batches(Protocol):
    """Where a run's batches come from; the same state and step give the same batch."""

    def batch(self, step: int, rows: int, length: int, decaying: bool) -> Any:
        """The batch of step `step`: an array, or a mapping of names to arrays."""

    def state(self) -> Any:
        """Positions, as plain values."""

    def restore(self, state: Any) -> None:
        """Go to positions taken with `state`."""


class Mixture:
    """Rows drawn from several streams by share.

    Args:
        streams: one per training file.
        stable, decay: shares of the rows before and during the decay, in the order of `streams`.
        seed: of the choice of streams.
    """

    def __init__(self, streams: Sequence[Rows], stable: Sequence[float], decay: Sequence[float], seed: int) -> None:
        for name, shares in (("STABLE", stable), ("DECAY", decay)):
            if sum(shares) <= 0:
                raise InputError(f"the {name} shares of the training files sum to 0; give one file a share above 0")
        self.streams: list[Rows] = list(streams)
        self._shares = [np.array(shares, dtype=float) / sum(shares) for shares in (stable, decay)]
        self._seed = seed

    def batch(self, step: int, rows: int, length: int, decaying: bool) -> Ids:
        """Rows of step `step`: (rows, length + 1) token ids, inputs and targets one apart."""
        choice = np.random.default_rng((self._seed, step)).choice(
            len(self.streams), size=rows, p=self._shares[int(decaying)]
        )
        return np.stack([self.streams[index].take(length + 1) for index in choice])

    def state(self) -> list[list[int]]:
        """Positions and sizes of all streams."""
        return [[*stream.state(), stream.size] for stream in self.streams]

    def restore(self, state: Sequence[Sequence[int]]) -> None:
        """Go to positions taken with `state`.

        Raises:
            LoadError: the streams are not those of the checkpoint.
        """
        sizes, before = [stream.size for stream in self.streams], [size for *_, size in state]
        if sizes != before:
            raise LoadError(
                f"the training files have {sizes} tokens or rows, those of the checkpoint had {before}: their text has "
                "changed; give the files as they were, or begin another run with another --out"
            )
        for stream, (*position, _) in zip(self.streams, state, strict=True):
            stream.restore(position)


def load_mixture(specs: Sequence[TextSpec], tokenizer: Encoder, vocab: int, seed: int) -> Mixture:
    """Read and encode training files into a mixture; `vocab` tokens are known to the model."""
    streams = [Stream(encode_file(spec.path, tokenizer, vocab), seed=seed, key=key) for key, spec in enumerate(specs)]
    return Mixture(streams, [spec.stable for spec in specs], [spec.decay for spec in specs], seed)

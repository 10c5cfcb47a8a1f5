"""Token streams and the mixture of rows that a batch is made of.

Order and position depend on the seed and on a small state alone, so that a resumed run sees the very rows of an
uninterrupted one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from sakiyomi.core.errors import LoadError
from sakiyomi.train.data import Ids, TextSpec


class Rows(ABC):
    """Rows of documents, epoch after epoch, each in an order of its own; the position can be kept.

    Args:
        size: tokens or rows of an epoch.
        seed: of the orders; `key` tells sources of one seed apart.

    Attributes:
        epoch, offset: epochs that are over, and the position in the present one, of `size`.
    """

    def __init__(self, size: int, *, seed: int, key: int) -> None:
        self.size, self._seed, self._key = size, seed, key
        self.epoch = self.offset = 0
        self._begin_epoch()

    def _order(self, count: int) -> Ids:
        """The present epoch's order of so many things."""
        return np.random.default_rng((self._seed, self._key, self.epoch)).permutation(count)

    @abstractmethod
    def _begin_epoch(self) -> None:
        """Put everything into the present epoch's order."""

    @abstractmethod
    def take(self, count: int) -> Any:
        """The next row of `count` tokens."""

    def state(self) -> list[int]:
        """The position."""
        return [self.epoch, self.offset]

    def restore(self, state: Sequence[int]) -> None:
        """Go to a position taken with `state`."""
        self.epoch, self.offset = int(state[0]), int(state[1])
        self._begin_epoch()


class Stream(Rows):
    """An endless token stream over documents: every epoch is a fresh permutation, no token is skipped within it.

    Args:
        documents: token ids of each document, its leading separator included.
        seed, key: as of `Rows`.
    """

    def __init__(self, documents: Sequence[Ids], *, seed: int, key: int) -> None:
        self._documents = documents
        super().__init__(sum(map(len, documents)), seed=seed, key=key)

    def _begin_epoch(self) -> None:
        self._tokens = np.concatenate([self._documents[index] for index in self._order(len(self._documents))])

    def take(self, count: int) -> Ids:
        """The next `count` tokens; the position moves on by one token less, as rows share a token at their ends."""
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
            self._begin_epoch()
        self.offset = max(self.offset - 1, 0)
        return np.concatenate(parts)


class Shuffled(Rows):
    """Items in a new random order every epoch.

    Args:
        things: rows, or prompts with answers.
        seed, key: as of `Rows`.
    """

    def __init__(self, things: Sequence[Any], *, seed: int, key: int) -> None:
        self.things = things
        super().__init__(len(things), seed=seed, key=key)

    def _begin_epoch(self) -> None:
        self._numbers = self._order(self.size)

    def take(self, count: int) -> Any:
        """The next one; it has the length that it has."""
        if self.offset == self.size:
            self.epoch, self.offset = self.epoch + 1, 0
            self._begin_epoch()
        self.offset += 1
        return self.things[self._numbers[self.offset - 1]]


class FixedRows(Shuffled):
    """Documents joined once and cut into rows of one length.

    Args:
        documents: token ids of each document, its leading separator included.
        length: tokens of a row's inputs; a row has one more, its last target.
        seed, key: as of `Rows`.
    """

    def __init__(self, documents: Sequence[Ids], length: int, *, seed: int, key: int) -> None:
        order = np.random.default_rng((seed, key)).permutation(len(documents))
        tokens = np.concatenate([documents[index] for index in order])
        # Short text is repeated to fill one row rather than refused.
        tokens = np.resize(tokens, max(len(tokens), length + 1))
        starts = range(0, len(tokens) - length, length)
        super().__init__([tokens[at : at + length + 1] for at in starts], seed=seed, key=key)


class Batches(Protocol):
    """Where a run's batches come from; the same state and step give the same batch."""

    def batch(self, step: int, rows: int, length: int, decaying: bool) -> Any:
        """The batch of step `step`: an array, or a mapping of names to arrays."""

    def part(self, batch: Any, rows: slice) -> Any:
        """Some rows of a batch."""

    def state(self) -> Any:
        """Positions, as plain values."""

    def restore(self, state: Any) -> None:
        """Go to positions taken with `state`."""


def check_unchanged(unit: str, sizes: Sequence[int], before: Sequence[int]) -> None:
    """Raise LoadError unless the training files are as large as those of the checkpoint."""
    if list(sizes) != list(before):
        raise LoadError(
            f"the training files have {list(sizes)} {unit}, those of the checkpoint had {list(before)}: their text has "
            "changed; give the files as they were, or begin another run with another --out"
        )


class Mixture:
    """Rows drawn from several streams by share.

    Args:
        streams: one per training file.
        specs: with the shares of all sources, in the order of `streams`; further ones are made and not read.
        seed: of the choice of streams.
    """

    def __init__(self, streams: Sequence[Rows], specs: Sequence[TextSpec], seed: int) -> None:
        self.streams: list[Rows] = list(streams)
        shares = np.array([[spec.stable, spec.decay] for spec in specs], dtype=float).T
        self._shares, self._seed = [some / sum(some) for some in shares], seed

    def batch(self, step: int, rows: int, length: int, decaying: bool) -> Any:
        """Rows of step `step`: (rows, length + 1) token ids, inputs and targets one apart."""
        rng, shares = np.random.default_rng((self._seed, step)), self._shares[int(decaying)]
        return self.joined([self.take(int(i), length, rng) for i in rng.choice(len(shares), size=rows, p=shares)])

    def take(self, source: int, length: int, rng: np.random.Generator) -> Any:
        """The next row of a source; what is made and not read is drawn with the generator."""
        return self.streams[source].take(length + 1)

    def joined(self, rows: list[Any]) -> Any:
        """Rows as a batch."""
        return np.stack(rows)

    def part(self, batch: Any, rows: slice) -> Any:
        """Some rows of a batch."""
        return batch[rows]

    def epochs(self, files: Sequence[TextSpec]) -> dict[str, float]:
        """How often each file was read, by name."""
        read = zip(files, self.streams, strict=True)
        return {spec.path.name: round(rows.epoch + rows.offset / rows.size, 2) for spec, rows in read}

    def state(self) -> Any:
        """Positions and sizes of all streams."""
        return [[*stream.state(), stream.size] for stream in self.streams]

    def restore(self, state: Any) -> None:
        """Go to positions taken with `state`.

        Raises:
            LoadError: the streams are not those of the checkpoint.
        """
        sizes, before = [stream.size for stream in self.streams], [size for *_, size in state]
        check_unchanged("tokens or rows", sizes, before)
        for stream, (*position, _) in zip(self.streams, state, strict=True):
            stream.restore(position)


def mixture_of(
    specs: Sequence[TextSpec], documents: Sequence[Sequence[Ids]], make: Callable[..., Rows], seed: int
) -> Mixture:
    """Rows of files by their shares.

    Args:
        specs: the files.
        documents: of each.
        make: rows of documents, with `seed` and `key`.
        seed: of all orders and choices.
    """
    streams = [make(some, seed=seed, key=key) for key, some in enumerate(documents)]
    return Mixture(streams, specs, seed)

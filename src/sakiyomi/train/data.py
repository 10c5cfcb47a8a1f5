"""Training text: files to documents, documents to token streams, streams to rows of a batch.

Order and position depend on the seed and on a small state alone, so that a resumed run sees the very rows of an
uninterrupted one.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from sakiyomi.errors import InputError, LoadError

Ids = npt.NDArray[np.int64]

# A book is cut at paragraph borders into excerpts of about this many characters (some 1,000 tokens, the longest row):
# shuffled whole, its chapters would fill batch after batch.
EXCERPT_CHARACTERS = 4000


class Encoder(Protocol):
    """The part of a tokenizer that this module needs."""

    eos_token_id: Any

    def __call__(self, text: Any, *, add_special_tokens: bool, verbose: bool) -> Any:
        """Encode a list of texts; the ids are under `input_ids`."""


def read_documents(path: Path) -> Iterator[str | list[int]]:
    """Documents of a `.jsonl(.gz)` file (`text`, or `tokens`, a list of ids) or of a `.txt(.gz)` file (one document).

    Text is stripped and its line ends are unified; documents left empty are passed over.

    Raises:
        LoadError: the file is missing, unreadable, or holds no document; a bad JSON line is named by its number.
        InputError: the ending is none of the four.
    """
    plain = path.with_suffix("") if path.suffix == ".gz" else path
    if plain.suffix not in (".jsonl", ".txt"):
        raise InputError(f"{path} is neither .jsonl nor .txt (.gz allowed); convert it first")
    found = 0
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
            lines = _json_documents(file, path) if plain.suffix == ".jsonl" else iter([file.read()])
            for item in lines:
                document = _normalise(item) if isinstance(item, str) else item
                if document:
                    found += 1
                    yield document
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise LoadError(f"cannot read training text {path}: {error}; expected UTF-8 text, plain or gzip") from error
    if not found:
        raise LoadError(f"{path} holds no document; expected at least one non-empty text")


def _json_documents(lines: Iterator[str] | Any, path: Path) -> Iterator[str | list[int]]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise LoadError(f"{path} line {number} is not JSON ({error.msg}); expected one object a line") from error
        record = record if isinstance(record, dict) else {}
        text, tokens = record.get("text"), record.get("tokens")
        if isinstance(text, str):
            yield text
        elif isinstance(tokens, list) and all(type(token) is int for token in tokens):
            yield tokens
        else:
            raise LoadError(
                f'{path} line {number} has no "text" string and no "tokens" list of ids; expected one of them'
            )


def _normalise(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n").strip()


def excerpts(text: str, limit: int = EXCERPT_CHARACTERS) -> list[str]:
    """Cut a text at blank lines into pieces of at most `limit` characters; one longer paragraph stays whole."""
    if len(text) <= limit:
        return [text]
    pieces: list[list[str]] = [[]]
    size = 0
    for paragraph in text.split("\n\n"):
        if pieces[-1] and size + len(paragraph) > limit:
            pieces.append([])
            size = 0
        pieces[-1].append(paragraph)
        size += len(paragraph) + 2
    return ["\n\n".join(piece).strip() for piece in pieces if any(part.strip() for part in piece)]


@dataclass(frozen=True)
class TextSpec:
    """One training file and its share of the rows, before and during the decay."""

    path: Path
    stable: float
    decay: float


def parse_text(spec: str) -> TextSpec:
    """Read FILE, FILE@SHARE or FILE@STABLE:DECAY.

    Raises:
        InputError: the shares are no numbers, or negative.
    """
    name, mark, shares = spec.rpartition("@")
    if not mark:
        return TextSpec(Path(spec), 1.0, 1.0)
    first, _, second = shares.partition(":")
    try:
        stable, decay = float(first), float(second or first)
    except ValueError:
        raise InputError(f"text {spec!r} ends in {shares!r}, expected FILE@STABLE:DECAY with two numbers") from None
    if not (0 <= stable < float("inf") and 0 <= decay < float("inf")):
        raise InputError(f"text {spec!r} has a share below 0 or infinite, expected FILE@STABLE:DECAY")
    return TextSpec(Path(name), stable, decay)


def encode_documents(documents: Sequence[str | list[int]], tokenizer: Encoder) -> list[Ids]:
    """Token ids of each excerpt, led by the end token: it says "begin" to the next document and "stop" to the last."""
    separator = int(tokenizer.eos_token_id)
    rows: list[Ids] = []
    texts: list[str] = []
    for document in documents:
        if isinstance(document, str):
            texts.extend(excerpts(document))
        else:
            rows.append(np.array(document if document[0] == separator else [separator, *document], dtype=np.int64))
    if texts:
        # verbose=False: an excerpt longer than the model's context is cut into rows, no reason for a warning
        encoded = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        rows.extend(np.array([separator, *ids], dtype=np.int64) for ids in encoded)
    return rows


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
        """Positions of all streams."""
        return [stream.state() for stream in self.streams]

    def restore(self, state: Sequence[Sequence[int]]) -> None:
        """Go to positions taken with `state`.

        Raises:
            LoadError: the checkpoint knows another number of training files.
        """
        if len(state) != len(self.streams):
            raise LoadError(
                f"the checkpoint has {len(state)} training files, the command {len(self.streams)}; give the same"
            )
        for stream, position in zip(self.streams, state, strict=True):
            stream.restore(position)


def load_mixture(specs: Sequence[TextSpec], tokenizer: Encoder, seed: int) -> Mixture:
    """Read and encode training files into a mixture."""
    streams = [
        Stream(encode_documents(list(read_documents(spec.path)), tokenizer), seed=seed, key=key)
        for key, spec in enumerate(specs)
    ]
    return Mixture(streams, [spec.stable for spec in specs], [spec.decay for spec in specs], seed)

"""Training text: files to documents, documents to token ids."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from sakiyomi.core.errors import InputError, LoadError

Ids = npt.NDArray[np.int64]
T = TypeVar("T")

# A book is cut between paragraphs into excerpts of about this many characters (some 1,000 tokens, the longest row):
# shuffled whole, its chapters would fill batch after batch.
EXCERPT_CHARACTERS = 4000
END_MARK = "<|endoftext|>"  # between the documents of a plain text, as data sets of stories have it
FEWEST_DOCUMENTS, SHORTEST_CHARACTERS = 20, 400


class Encoder(Protocol):
    """The part of a tokenizer that this module needs."""

    eos_token_id: Any

    def __call__(self, text: Any, *, add_special_tokens: bool, verbose: bool) -> Any:
        """Encode a list of texts; the ids are under `input_ids`."""


def read_documents(path: Path) -> Generator[str | list[int]]:
    """Documents of a `.jsonl(.gz)` file (`text`, or `tokens`, a list of ids), or of a `.txt(.gz)` file (see `split`).

    Text is stripped and its line ends are unified; documents left empty are passed over.

    Raises:
        LoadError: the file is missing, unreadable, or holds no document; a bad JSON line is named by its number.
        InputError: the ending is of another kind.
    """
    found = 0
    plain = ".txt" in path.suffixes[-2:]
    for number, record in read_records(path):
        document = _document(record, f"{path} line {number}")
        for part in split(document) if plain and isinstance(document, str) else [document]:
            if part:
                found += 1
                yield part
    if not found:
        raise LoadError(f"{path} holds no document; expected at least one non-empty text")


def read_records(path: Path) -> Generator[tuple[int, Any]]:
    """The objects of a `.jsonl(.gz)` file with the numbers of their lines, or of a list in a `.json(.gz)` file.

    Of a `.txt(.gz)` file it is the text, as number 1.

    Raises:
        LoadError: the file is missing or unreadable, or a line is not JSON.
        InputError: the ending is none of these.
    """
    plain = path.with_suffix("") if path.suffix == ".gz" else path
    if plain.suffix not in (".jsonl", ".json", ".txt"):
        raise InputError(f"{path} is neither .jsonl, .json nor .txt (.gz allowed); convert it first")
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
            if plain.suffix == ".txt":
                yield 1, {"text": file.read()}
                return
            if plain.suffix == ".json":
                found = _parsed(file.read(), path)
                if not isinstance(found, list):
                    raise LoadError(f"{path} holds a {type(found).__name__}; expected a list of objects")
                yield from enumerate(found, start=1)
                return
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, _parsed(line, path, number)
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise LoadError(f"cannot read training text {path}: {error}; expected UTF-8 text, plain or gzip") from error


def _parsed(text: str, path: Path, number: int | None = None) -> Any:
    """The value of one line, or of the whole file."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        expected = "one object a line" if number else "a list of objects"
        raise LoadError(
            f"{path} line {number or error.lineno} is not JSON ({error.msg}); expected {expected}"
        ) from error


def _document(record: Any, place: str) -> str | list[int]:
    record = record if isinstance(record, dict) else {}
    text, tokens = record.get("text"), record.get("tokens")
    if isinstance(text, str):
        return normalise(text)
    if isinstance(tokens, list) and all(type(token) is int for token in tokens):
        return tokens
    raise LoadError(f'{place} has no "text" string and no "tokens" list of ids; expected one of them')


def normalise(text: str) -> str:
    """Text stripped, with line ends of one kind."""
    return text.replace("\r\n", "\n").replace("\r", "\n").strip()


def split(text: str) -> list[str]:
    """The documents of a plain text: between end marks, else some paragraphs each, or some lines where none is blank.

    A text is cut into twenty at least, as far as it has so many paragraphs or lines of `SHORTEST_CHARACTERS`: some of
    them can be held out then.
    """
    if END_MARK in text:
        return [part.strip() for part in text.split(END_MARK)]
    limit = min(EXCERPT_CHARACTERS, max(len(text) // FEWEST_DOCUMENTS, SHORTEST_CHARACTERS))
    found = excerpts(text, limit)
    wanted = min(FEWEST_DOCUMENTS, len(text) // limit) / 2
    return found if len(found) >= wanted else excerpts(text, limit, "\n")


def excerpts(text: str, limit: int = EXCERPT_CHARACTERS, between: str = "\n\n") -> list[str]:
    """Cut a text at blank lines into pieces of at most `limit` characters; one longer paragraph stays whole.

    Args:
        text: of any length.
        limit: characters.
        between: what stands where it may be cut.
    """
    if len(text) <= limit:
        return [text]
    pieces: list[list[str]] = [[]]
    size = 0
    for paragraph in text.split(between):
        if pieces[-1] and size + len(paragraph) > limit:
            pieces.append([])
            size = 0
        pieces[-1].append(paragraph)
        size += len(paragraph) + len(between)
    return [between.join(piece).strip() for piece in pieces if any(part.strip() for part in piece)]


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


def parse_texts(flag: str, given: Sequence[str]) -> list[TextSpec]:
    """The files of a flag, see `parse_text` and `check_shares`."""
    specs = [parse_text(spec) for spec in given]
    check_shares(flag, specs)
    return specs


def check_shares(flag: str, specs: Sequence[TextSpec]) -> None:
    """Raise InputError where no file has a share above 0, before or during the decay."""
    for name, shares in (("STABLE", [spec.stable for spec in specs]), ("DECAY", [spec.decay for spec in specs])):
        if sum(shares) <= 0:
            raise InputError(f"the {name} shares of the files of {flag} sum to 0; give one file a share above 0")


def encode_file(path: Path, tokenizer: Encoder, vocab: int) -> list[Ids]:
    """Token ids of each excerpt of a file, as `encode_documents` gives them.

    Args:
        path: see `read_documents`.
        tokenizer: encodes what is text.
        vocab: tokens that the model knows.

    Raises:
        LoadError, InputError: see `read_documents`; or an id in the file lies outside the vocabulary.
    """
    documents = list(read_documents(path))
    for document in documents:
        if not isinstance(document, str):
            check_ids(document, vocab, str(path))
    return encode_documents(documents, tokenizer)


def check_ids(ids: Sequence[int], vocab: int, place: str) -> None:
    """Refuse token ids that the model does not know.

    Raises:
        LoadError: with the place that holds them.
    """
    if not 0 <= min(ids) <= max(ids) < vocab:
        raise LoadError(
            f"{place} holds token ids from {min(ids)} to {max(ids)}, the model knows {vocab} tokens; give text, or ids "
            "of this tokenizer"
        )


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


def hold_back(documents: list[T], among: Sequence[int], count: int, seed: tuple[int, ...]) -> list[T]:
    """Take documents out of a list, drawn with the seed: `count`, but at most every tenth.

    Args:
        documents: lose them.
        among: places of those that may be taken.
        count: documents wanted.
        seed: of the choice.
    """
    most = min(count, len(documents) // 10, len(among))
    chosen = set(np.random.default_rng(seed).choice(among, most, replace=False).tolist())
    held = [document for index, document in enumerate(documents) if index in chosen]
    documents[:] = [document for index, document in enumerate(documents) if index not in chosen]
    return held


class Library:
    """Files as encoded documents. Each is read once, and what is held back is gone for everybody who asks again.

    Args:
        tokenizer, vocab: see `encode_file`.
    """

    def __init__(self, tokenizer: Encoder, vocab: int) -> None:
        self._tokenizer, self._vocab = tokenizer, vocab
        self._files: dict[Path, list[Ids]] = {}

    def documents(self, path: Path) -> list[Ids]:
        """The documents of a file, without those held back."""
        place = path.resolve()
        if place not in self._files:
            self._files[place] = encode_file(path, self._tokenizer, self._vocab)
        return self._files[place]

    def hold_back(self, paths: Sequence[Path], count: int, longer_than: int, seed: int) -> list[Ids]:
        """Take some documents out, drawn with the seed: `count` in all, but at most every tenth of a file.

        Args:
            paths: the files, which give alike.
            count: documents wanted.
            longer_than: tokens; shorter documents stay.
            seed: of the choice.

        Raises:
            InputError: no file has ten documents and a long one among them.
        """
        held: list[Ids] = []
        for key, path in enumerate(paths):
            documents = self.documents(path)
            long = [index for index, document in enumerate(documents) if len(document) > longer_than]
            held += hold_back(documents, long, -(-count // len(paths)), (seed, key))
        if not held:
            raise InputError(
                f"the training text has too few documents to hold some back: none has ten, with one of more than "
                f"{longer_than} tokens; give more text, or held-out text with --valid NAME=FILE"
            )
        return held

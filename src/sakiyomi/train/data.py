"""Training text: files to documents, documents to token ids."""

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

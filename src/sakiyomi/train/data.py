"""Training files: which ones are read, and their records as texts, token ids, chats, and prompts with answers.

All recipes read all forms, by these functions; `counted` makes token ids of them.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sakiyomi.core.chats import Message, chat_messages
from sakiyomi.core.errors import InputError, LoadError
from sakiyomi.train.chats import written_chat

Ids = npt.NDArray[np.int64]

# A book is cut between paragraphs into excerpts of about this many characters (some 1,000 tokens, the longest row):
# shuffled whole, its chapters would fill batch after batch.
EXCERPT_CHARACTERS = 4000
END_MARK = "<|endoftext|>"  # between the documents of a plain text, as data sets of stories have it
ONLY_MARKS = re.compile(rf"(?:\s|{re.escape(END_MARK)})*")
FEWEST_DOCUMENTS, SHORTEST_CHARACTERS = 20, 400


# ---------------------------------------------------------------- which files


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


def parse_valid(specs: Sequence[str]) -> dict[str, Path]:
    """Held-out files by name, given as NAME=FILE.

    Raises:
        InputError: a name or a file is missing, or a name is given twice.
    """
    found: dict[str, Path] = {}
    for spec in specs:
        name, _, path = spec.partition("=")
        if not name or not path:
            raise InputError(f"valid is {spec!r}, expected NAME=FILE")
        if name in found:
            raise InputError(f"valid names {name!r} twice; give each file a name of its own")
        found[name] = Path(path)
    return found


# ---------------------------------------------------------------- what they hold


@dataclass(frozen=True)
class Record:
    """One record of a file: a text, token ids, a chat, or a prompt with its answer.

    Attributes:
        place: file and line, for messages.
        text: of a text; of a prompt with its answer the prompt.
        tokens: ids; None: it has none.
        asked: of these are a prompt, the others what follows.
        messages: of a chat; None: it is none.
        answer: to the prompt; None: it is no prompt.
        question: what the prompt asks, by itself; empty where the record does not say.
    """

    place: str
    text: str = ""
    tokens: list[int] | None = None
    asked: int = 0
    messages: list[Message] | None = None
    answer: str | None = None
    question: str = ""


def read_records(path: Path, *, answered: bool = False) -> Generator[Record]:
    """The records of a `.jsonl(.gz)` file, or of a list in a `.json(.gz)` file; a `.txt(.gz)` file is one text.

    The form of each is told by its keys:

    - `text`: a text;
    - `tokens`, a list of ids, perhaps with `prompt`, the number of those that are a prompt: what a target wrote;
    - `conversations` or `messages`: a chat; `turns`: a message of a user, the first of them;
    - `instruction` (with `input`) and `output`, as LongAlpaca and Alpaca have them: a message and its reply;
    - `prompt` and `answer`, texts as they are, perhaps with `question`.

    Texts are stripped and their line ends are unified; those left empty are passed over.

    Args:
        path: of the file.
        answered: of a record with a text and a prompt the prompt is read; else the text.

    Raises:
        LoadError: the file is missing, unreadable, or holds no record; a line that is not JSON or has none of these
            forms is named by its number.
        InputError: the ending is of another kind.
    """
    found = 0
    for number, value in _values(path):
        record = _record(value, f"{path} line {number}", answered)
        if record.text or record.tokens or record.messages is not None or record.answer is not None:
            found += 1
            yield record
    if not found:
        raise LoadError(f"{path} holds no document; expected at least one non-empty text or chat")


def _values(path: Path) -> Iterator[tuple[int, Any]]:
    """JSON values with their line numbers."""
    if not path.exists():
        raise LoadError(f"cannot read training text {path}: there is no such file; check the path")
    plain = path.with_suffix("") if path.suffix == ".gz" else path
    if plain.suffix not in (".jsonl", ".json", ".txt"):
        raise InputError(f"{path} is neither .jsonl, .json nor .txt (.gz allowed); convert it first")
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
            if plain.suffix == ".txt":
                text = file.read()
                yield 1, {"text": "" if ONLY_MARKS.fullmatch(text) else text}
            elif plain.suffix == ".json":
                found = _parsed(file.read(), path)
                if not isinstance(found, list):
                    raise LoadError(f"{path} holds a {type(found).__name__}; expected a list of objects")
                yield from enumerate(found, start=1)
            else:
                yield from ((i, _parsed(line, path, i)) for i, line in enumerate(file, start=1) if line.strip())
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


def _record(value: Any, place: str, answered: bool) -> Record:
    if not isinstance(value, dict):
        raise LoadError(f"{place} holds a {type(value).__name__}; expected an object")
    messages = chat_messages(value, place)
    if messages is not None:
        return Record(place, messages=messages)
    text = value.get("text")
    if isinstance(text, str) and not answered:
        return Record(place, normalise(text))
    if isinstance(value.get("instruction"), str):
        reply = _text(value, "output", place).strip()
        asked = "\n\n".join(part.strip() for part in (value["instruction"], _text(value, "input", place)) if part)
        return Record(place, messages=[("user", asked), *([("assistant", reply)] if reply else [])])
    if isinstance(value.get("prompt"), str):
        answer, question = (_text(value, name, place) for name in ("answer", "question"))
        return Record(place, normalise(value["prompt"]), answer=answer, question=question)
    if isinstance(text, str):
        return Record(place, normalise(text))
    tokens, prompt = value.get("tokens"), value.get("prompt", 0)
    if isinstance(tokens, list) and all(type(one) is int for one in (*tokens, prompt)) and 0 <= prompt <= len(tokens):
        return Record(place, tokens=tokens, asked=prompt)
    raise LoadError(
        f'{place} has no "text", no "conversations", "messages" or "turns", no "tokens" (ids, perhaps with "prompt", '
        'the number of those that are one), no "instruction" with "output" and no "prompt" with "answer"; expected '
        "one of them"
    )


def _text(record: dict[str, Any], key: str, place: str) -> str:
    value = record.get(key) or ""
    if not isinstance(value, str):
        raise LoadError(f'{place} has a {type(value).__name__} as "{key}"; expected a text')
    return value


def read_documents(path: Path, tokenizer: Any = None) -> Generator[str | list[int]]:
    """The records of a file as texts, or as token ids where it holds these; a plain text in parts, see `split`.

    Args:
        path: see `read_records`.
        tokenizer: whose template chats are written by; None: they are written plainly.
    """
    plain = ".txt" in path.suffixes[-2:]
    for record in read_records(path):
        if record.tokens is not None:
            yield record.tokens
        elif record.messages is not None:
            yield written_chat(tokenizer, record.messages)
        else:
            yield from split(record.text) if plain else [record.text + (record.answer or "")]


def read_texts(path: Path, tokenizer: Any = None) -> list[str]:
    """The same of a file that must hold texts or chats.

    Raises:
        InputError: it holds token ids.
    """
    documents = list(read_documents(path, tokenizer))
    texts = [document for document in documents if isinstance(document, str)]
    if len(texts) < len(documents):
        raise InputError(f"file {path} holds token ids, expected text: its characters are needed")
    return texts


def normalise(text: str) -> str:
    """Text stripped, with line ends of one kind."""
    return text.replace("\r\n", "\n").replace("\r", "\n").strip()


def split(text: str) -> list[str]:
    """The documents of a plain text: between end marks, else some paragraphs each, or some lines where none is blank.

    A text is cut into twenty at least, as far as it has so many paragraphs or lines of `SHORTEST_CHARACTERS`: some of
    them can be held out then.
    """
    if END_MARK in text:
        return [part.strip() for part in text.split(END_MARK) if part.strip()]
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

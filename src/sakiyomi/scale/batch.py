"""Answers a file of requests in pieces; a piece is written as a whole or not at all.

Input and output have OpenAI's batch format: a line is ``{"custom_id", "method", "url", "body"}``, and the reply to it
``{"id", "custom_id", "response": {"status_code", "request_id", "body"}, "error"}``. The input is cut into pieces of so
many lines; ``core/pieces.py`` stores their replies.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

from pydantic import ConfigDict

from sakiyomi.core.digests import file_digest
from sakiyomi.core.errors import InputError, LoadError
from sakiyomi.core.files import whole_file
from sakiyomi.core.pieces import ADVICE, Pieces
from sakiyomi.core.version import __version__
from sakiyomi.server.errors import ApiError
from sakiyomi.server.fields import Strict, Text
from sakiyomi.server.schema import read_as

ABOUT = "about.json"
IN_FLIGHT = 2  # pieces at a time for each engine, so that the end of one does not leave its batch half empty
Url = Literal["/v1/chat/completions", "/v1/completions"]
URLS = get_args(Url)


class Line(Strict):
    """A line of the input; further fields are not read."""

    model_config = ConfigDict(extra="ignore", strict=True)

    custom_id: Text
    method: Literal["POST"] = "POST"
    url: Url
    body: dict[str, Any]


class Endpoint(Protocol):
    """Answers requests: ``InProcessServer``, ``WorkerPool``, ``OneByOne``."""

    async def post(self, path: str, body: Any, client: str) -> tuple[int, Any]:
        """Status and object of the reply to a body."""


@dataclass(frozen=True)
class Piece:
    """Some lines of the input.

    Attributes:
        number: of the piece, from 0.
        line: number of its first line, from 1.
        start, size: where it is in the file, in bytes.
        lines: how many of them are requests; others are empty.
    """

    number: int
    line: int
    start: int
    size: int
    lines: int


@dataclass
class BatchProgress:
    """Progress of a batch.

    Attributes:
        lines: requests of the input.
        answered: answered requests, those of earlier runs included.
        failed: answered with an error.
        prompt_tokens, completion_tokens: of this run.
    """

    lines: int
    answered: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def add(self, replies: Sequence[Mapping[str, Any]]) -> None:
        """Count the replies of a piece."""
        self.answered += len(replies)
        self.failed += sum(map(_has_failed, replies))

    def count_tokens(self, replies: Sequence[Mapping[str, Any]]) -> None:
        """Count the tokens of a piece of this run."""
        for reply in replies:
            usage = ((reply["response"] or {}).get("body") or {}).get("usage") or {}
            self.prompt_tokens += usage.get("prompt_tokens", 0)
            self.completion_tokens += usage.get("completion_tokens", 0)


@dataclass
class BatchFile(Pieces):
    """An input file, its output, and the pieces.

    Args:
        source: the input.
        out: the output.
        settings: of the model; a run that continues another one must have the same.
        piece_lines: requests in a piece.

    Raises:
        LoadError: the input cannot be read.
        InputError: the output is there already, or its pieces are of another input or other settings.
    """

    source: Path
    out: Path
    settings: Mapping[str, Any]
    piece_lines: int = 32
    pieces: list[Piece] = field(init=False)
    twice: dict[int, int] = field(init=False)

    def __post_init__(self) -> None:
        if self.out.is_dir():
            raise InputError(f"{self.out} is a folder; name a file in it")
        try:
            self.pieces, self.twice = _scan(self.source, self.piece_lines)
        except OSError as error:
            raise LoadError(f"cannot read {self.source}: {error.strerror or error}") from None
        if not self.pieces:
            raise InputError(
                f"{self.source} has no requests; expected a JSON object with custom_id, url and body a line"
            )
        self.remove_leftovers()
        if self.out.exists() and not self.folder.exists():
            raise InputError(f"{self.out} is there already; choose another output, or remove it")
        self._compare()

    def missing(self) -> list[Piece]:
        """Pieces without replies."""
        return [piece for piece in self.pieces if not self.path(piece.number).exists()]

    def begin(self) -> BatchProgress:
        """Create the folder, and count the replies of earlier runs."""
        if len(self.missing()) == len(self.pieces):
            if self.out.exists():  # by a run that has ended since this one was made
                raise InputError(f"{self.out} is there already; choose another output, or remove it")
            with whole_file(self.folder / ABOUT, "choose another output") as fresh:
                fresh.write_text(json.dumps(self._about(), indent=1), encoding="utf-8")
        progress = BatchProgress(sum(piece.lines for piece in self.pieces))
        for piece in self.pieces:
            progress.add(self.kept(piece.number))
        return progress

    def read(self, piece: Piece) -> Iterator[tuple[int, bytes]]:
        """Its requests, each with the number of its line."""
        with self.source.open("rb") as file:
            file.seek(piece.start)
            lines = file.read(piece.size).split(b"\n")
        return ((piece.line + i, line) for i, line in enumerate(lines) if line.strip())

    def join(self) -> None:
        """Write the output from the pieces, all of which exist, and remove them."""
        with whole_file(self.out, ADVICE) as fresh, fresh.open("wb") as file:
            for piece in self.pieces:
                with self.path(piece.number).open("rb") as part:
                    shutil.copyfileobj(part, file)
        self.remove()

    def _about(self) -> dict[str, Any]:
        return {
            "input": file_digest(self.source),
            "piece_lines": self.piece_lines,
            "version": __version__,
            **self.settings,
        }

    def _compare(self) -> None:
        """Refuse pieces of a run with other settings."""
        if len(self.missing()) == len(self.pieces):
            return
        try:
            before = json.loads((self.folder / ABOUT).read_bytes())
        except (OSError, ValueError) as error:
            raise LoadError(f"cannot read {self.folder / ABOUT}: {error}; remove {self.folder} to begin anew") from None
        now = json.loads(json.dumps(self._about()))
        for name in dict.fromkeys([*before, *now]):
            if before.get(name) != now.get(name):
                what = "the input has changed" if name == "input" else (
                    f"{name} was {before.get(name)!r} and is {now.get(name)!r}"
                )  # fmt: skip
                raise InputError(
                    f"{self.folder} has pieces of another run: {what} since; use what it began with, or remove "
                    "that folder to begin anew"
                )


def _scan(source: Path, piece_lines: int) -> tuple[list[Piece], dict[int, int]]:
    """The pieces of a file, and for each line with a repeated custom_id the first line that has it."""
    pieces: list[Piece] = []
    seen: dict[bytes, int] = {}
    twice: dict[int, int] = {}
    start = end = lines = 0
    first = 1
    number = 0
    with source.open("rb") as file:
        for number, line in enumerate(file, 1):
            end += len(line)
            if line.strip():
                lines += 1
                if (name := _name(line)) is not None:
                    key = hashlib.blake2b(name.encode(), digest_size=16).digest()
                    if (before := seen.setdefault(key, number)) != number:
                        twice[number] = before
            if lines == piece_lines:
                pieces.append(Piece(len(pieces), first, start, end - start, lines))
                start, first, lines = end, number + 1, 0
    if lines:
        pieces.append(Piece(len(pieces), first, start, end - start, lines))
    return pieces, twice


def _name(line: bytes) -> str | None:
    """The custom_id of a line; None if it has none that UTF-8 can say."""
    try:
        name = json.loads(line)["custom_id"]
        name.encode()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return str(name)


# ---------------------------------------------------------------- answering


async def answer_missing(
    batch: BatchFile,
    endpoint: Endpoint,
    progress: BatchProgress,
    told: Callable[[BatchProgress], object],
    in_flight: int = IN_FLIGHT,
) -> None:
    """Answer the missing pieces, some at a time.

    Args:
        batch: has the pieces.
        endpoint: answers requests.
        progress: is updated.
        told: called after each piece.
        in_flight: pieces at a time.

    Raises:
        LoadError: a piece cannot be written.
    """
    free = asyncio.Semaphore(in_flight)

    async def answered(piece: Piece) -> None:
        try:
            replies = await asyncio.gather(
                *(_answer(endpoint, number, line, batch.twice) for number, line in batch.read(piece))
            )
        finally:
            free.release()
        batch.keep(piece.number, replies)
        progress.add(replies)
        progress.count_tokens(replies)
        told(progress)

    try:
        async with asyncio.TaskGroup() as group:
            for piece in batch.missing():
                await free.acquire()
                group.create_task(answered(piece))
    except ExceptionGroup as failures:  # of pieces that could not be written, say
        raise failures.exceptions[0] from None


async def _answer(endpoint: Endpoint, number: int, line: bytes, twice: Mapping[int, int]) -> dict[str, Any]:
    """The reply to a line, or its error; raises nothing."""
    try:
        if number in twice:
            raise InputError(f"custom_id is {_name(line)!r}, as in line {twice[number]}; give each line its own")
        asked = _request(line)
    except (InputError, ApiError) as error:
        return _reply(_name(line), None, {"code": "invalid_line", "message": f"line {number}: {error.message}"})
    status, reply = await endpoint.post(asked.url, seeded(asked.custom_id, asked.body), f"line {number}")
    response = {"status_code": status, "request_id": _identity(asked.custom_id), "body": reply}
    return _reply(asked.custom_id, response, None)


def _request(line: bytes) -> Line:
    """The request of a line.

    Raises:
        InputError, ApiError: the line is invalid.
    """
    try:
        asked = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"it is no JSON: {error}") from None
    if not isinstance(asked, dict):
        raise InputError("it is no JSON object; expected custom_id, method, url and body")
    found = read_as(Line, asked)
    if found.body.get("stream"):
        raise InputError("stream is on; a batch has whole replies: leave it out")
    return found


def seeded(name: str, body: dict[str, Any]) -> dict[str, Any]:
    """The body, with a seed made from its name if it samples without one, so that its text is reproducible."""
    if body.get("temperature") == 0 or body.get("seed") is not None:
        return body
    return body | {"seed": int.from_bytes(hashlib.blake2b(name.encode(), digest_size=6).digest())}


def _identity(name: str) -> str:
    return "batch_req_" + hashlib.blake2b(name.encode(), digest_size=12).hexdigest()


def _reply(name: str | None, response: Mapping[str, Any] | None, error: Mapping[str, Any] | None) -> dict[str, Any]:
    identity = None if name is None else _identity(name)
    return {"id": identity, "custom_id": name, "response": response, "error": error}


def _has_failed(reply: Mapping[str, Any]) -> bool:
    return reply["error"] is not None or reply["response"]["status_code"] != 200

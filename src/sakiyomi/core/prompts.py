"""Prompts: a few beginnings of stories that are part of the package, and files of the user."""

from __future__ import annotations

import gzip
import itertools
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sakiyomi.core.chats import Chat, asked, chat_messages
from sakiyomi.core.errors import InputError, LoadError

JUDGED = 512  # tokens on which a quantization is judged


def read_prompts(path: str | Path, count: int | None = None, category: str | None = None) -> list[str | Chat]:
    """Prompts of a file.

    Args:
        path: text, one prompt a line; or .jsonl, each line with ``text``, ``prompt``, or a chat: ``messages`` or
            ``conversations``, whose last message of the user is to be answered, or ``turns``, of which the first is.
            Either may end in .gz.
        count: how many prompts to read, from the first on; None: all.
        category: only the lines of a .jsonl with this ``category``, unless it has none of them.

    Returns:
        Texts, and of chats their messages.

    Raises:
        LoadError: the file cannot be read, or a line is not what it should be.
        InputError: it holds no prompt.
    """
    path, found = Path(path), list[str | Chat]()
    lines = list(_lines(path, None if category else count))
    of_it = [line for line in lines if isinstance(line[1], dict) and line[1].get("category") == category]
    for number, value in ((of_it if category else []) or lines)[:count]:
        found.append(_prompt(value, path, number) if _is_json(path) else value)
    if not found:
        raise InputError(f"there is no prompt in {str(path)!r}; expected one a line")
    return found


def text_of(prompt: str | Chat) -> str:
    """A text as it is, of a chat what its messages say, joined by blank lines."""
    return prompt if isinstance(prompt, str) else "\n\n".join(message["content"] for message in prompt)


def read_references(path: str | Path, count: int | None = None) -> list[str | None]:
    """The right answers to a file's prompts, in order: ``reference`` or ``answer`` of a .jsonl; the first of a list.

    None where a prompt has none.

    Raises:
        LoadError: the file cannot be read.
    """
    path = Path(path)
    return [_reference(value) if _is_json(path) else None for _, value in _lines(path, count)]


def read_text(path: str | Path) -> str:
    """A text file, or the texts of a .jsonl, joined by blank lines (see ``read_prompts``).

    Raises:
        LoadError, InputError: it cannot be read.
    """
    path = Path(path)
    return "\n\n".join(map(text_of, read_prompts(path))) if _is_json(path) else _read(path)


def _read(path: Path) -> str:
    try:
        raw = path.read_bytes()
        return (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise LoadError(f"{str(path)!r} cannot be read ({error}); expected a text or .jsonl file") from None


def _is_json(path: Path) -> bool:
    return path.name.removesuffix(".gz").endswith((".jsonl", ".json"))


def _lines(path: Path, count: int | None) -> Iterator[tuple[int, Any]]:
    """Number and text of the lines that are not blank; for .jsonl files their values, None for invalid JSON."""
    lines = enumerate(_read(path).replace("\r\n", "\n").split("\n"), start=1)
    for number, line in itertools.islice(((n, line) for n, line in lines if line.strip()), count):
        yield number, _value(line) if _is_json(path) else line


def _value(line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None


def _first(value: Any, *names: str) -> Any:
    """The first of these fields that an object has, or the value itself; the first entry of a list."""
    if isinstance(value, dict):
        value = next((value[name] for name in names if name in value), None)
    return value[0] if isinstance(value, list) and value else value


def _reference(value: Any) -> str | None:
    found = _first(value, "reference", "answer") if isinstance(value, dict) else None
    return str(found).strip() or None if isinstance(found, str | int | float) else None


def _prompt(value: Any, path: Path, number: int) -> str | Chat:
    place = f"line {number} of {str(path)!r}"
    messages = chat_messages(value, place) if isinstance(value, dict) else None
    if messages is not None and (chat := asked(messages)):
        return chat
    value = _first(value, "text", "prompt")
    if not isinstance(value, str) or not value:
        raise LoadError(
            f"{place} is no prompt; expected a JSON text, or an object with text, prompt, turns, or messages of which "
            "one is the user's"
        )
    return value


STORIES = tuple(map(text_of, read_prompts(Path(__file__).with_name("stories.jsonl"))))
"""Beginnings of stories, written for this package; about 60 words each: 64 tokens or more of most tokenizers."""


def judging_text(model: Any, tokenizer: Any) -> list[int]:
    """Tokens on which a quantization is judged: stories, or random tokens if the tokenizer cannot encode them.

    Args:
        model: a transformers model.
        tokenizer: of the model.
    """
    import torch

    width = int(model.get_output_embeddings().out_features)
    most = min(JUDGED, int(getattr(model.config.get_text_config(), "max_position_embeddings", 0) or JUDGED))
    try:
        tokens: list[int] = list(tokenizer("\n".join(STORIES))["input_ids"])[:most]
    except (AttributeError, KeyError, TypeError, ValueError):
        tokens = []
    if len(set(tokens)) < 16 or max(tokens) >= width:
        tokens = torch.randint(width, (most,), generator=torch.Generator().manual_seed(0)).tolist()
    return tokens

"""Prompts: a few beginnings of stories that are part of the package, and files of the user."""

from __future__ import annotations

import gzip
import itertools
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sakiyomi.core.errors import InputError, LoadError

JUDGED = 512  # tokens on which a quantization is judged

STORIES = (
    "Once upon a time, there was a little fox who lived under an old oak tree. Every morning the fox ran down to the "
    "river to drink and to look at the boats. One day a boat stopped by the bank, and a girl with a red hat jumped "
    'out. She looked at the fox and said, "Hello! My name is Lily. Would you like to',
    "Tom had a big blue kite. He liked to fly it on the hill behind his house. One windy day the string broke, and the "
    "kite flew away over the trees. Tom was very sad. His sister Mia took his hand and said that they would look for "
    "it together. They walked into the wood and",
    "There was once a small bear who did not want to sleep. All the other bears were in bed, because it was winter and "
    "the snow was deep. The small bear looked out of the window. He saw a light between the trees. It moved slowly, "
    "up and down. The small bear put on his boots and",
    "Sara and Ben were in the kitchen with their grandmother. They wanted to bake a cake for the birthday of their "
    "father. Grandmother put the flour and the eggs on the table. Ben broke the eggs and Sara mixed them with the "
    "sugar. Then they saw that there was no butter left. Sara said,",
    "In a village by the sea lived an old man who made clocks. His clocks could sing like birds. One night, when the "
    "moon was round and bright, one of the clocks began to talk. It told the old man about a ship that was lost behind "
    "the rocks. The old man took his lamp and went down to the",
    "One day, a little girl named Anna found a shiny stone in the garden. It was green and smooth and warm. She showed "
    "it to her mom. Her mom smiled and told her to be careful with it. That night Anna put the stone under her pillow. "
    "When she woke up, the stone was gone and",
    "A farmer had a donkey, a dog and a duck. They were good friends and did everything together. In the morning the "
    "donkey carried the apples to the market, the dog watched the gate, and the duck told them stories. But one day "
    "the duck did not come out of the barn. The dog looked inside and saw",
    "The princess did not like her golden shoes. They were heavy and they hurt her feet. She wanted to run in the "
    "grass like the other children. So one evening, when the queen was asleep, she took them off and climbed over the "
    "wall. Behind the wall stood a boy with a brown horse. He said to her,",
)
"""Written for this package; about 60 words each, so that 64 tokens of most tokenizers are there."""


def read_prompts(path: str | Path, count: int | None = None) -> list[str]:
    """Prompts of a file.

    Args:
        path: text, one prompt a line; or .jsonl, each line with ``text``, ``prompt`` or ``turns`` (the first is taken).
            Either may end in .gz.
        count: how many prompts to read, from the first on; None: all.

    Raises:
        LoadError: the file cannot be read, or a line is not what it should be.
        InputError: it holds no prompt.
    """
    path, found = Path(path), []
    for number, value in _lines(path, count):
        found.append(_prompt(value, path, number) if _is_json(path) else value)
    if not found:
        raise InputError(f"there is no prompt in {str(path)!r}; expected one a line")
    return found


def read_references(path: str | Path, count: int | None = None) -> list[str | None]:
    """The right answers to a file's prompts, in order: ``reference`` or ``answer`` of a .jsonl, of a list the first.

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
    return "\n\n".join(read_prompts(path)) if _is_json(path) else _read(path)


def _read(path: Path) -> str:
    try:
        raw = path.read_bytes()
        return (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise LoadError(f"{str(path)!r} cannot be read ({error}); expected a text or .jsonl file") from None


def _is_json(path: Path) -> bool:
    return path.name.removesuffix(".gz").endswith((".jsonl", ".json"))


def _lines(path: Path, count: int | None) -> Iterator[tuple[int, Any]]:
    """Lines that are not blank, by number; of a .jsonl file their values, None where a line is no JSON."""
    lines = enumerate(_read(path).replace("\r\n", "\n").split("\n"), start=1)
    for number, line in itertools.islice(((n, line) for n, line in lines if line.strip()), count):
        yield number, _value(line) if _is_json(path) else line


def _value(line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None


def _first(value: Any, *names: str) -> Any:
    """The first of these fields that an object has, or the value itself; of a list the first entry."""
    if isinstance(value, dict):
        value = next((value[name] for name in names if name in value), None)
    return value[0] if isinstance(value, list) and value else value


def _reference(value: Any) -> str | None:
    found = _first(value, "reference", "answer") if isinstance(value, dict) else None
    return str(found).strip() or None if isinstance(found, str | int | float) else None


def _prompt(value: Any, path: Path, number: int) -> str:
    value = _first(value, "text", "prompt", "turns")
    if not isinstance(value, str) or not value:
        raise LoadError(
            f"line {number} of {str(path)!r} is no prompt; expected a JSON text, or an object with text, prompt or "
            "turns"
        )
    return value


def judging_text(model: Any, tokenizer: Any) -> list[int]:
    """Tokens on which a quantization is judged: stories, or any tokens where the tokenizer knows no such text.

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

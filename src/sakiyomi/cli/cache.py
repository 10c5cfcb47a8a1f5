"""``sakiyomi cache``: beginnings that are read once and gone on from many times."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import typer

from sakiyomi.cli.common import JsonOption, command, load
from sakiyomi.core.errors import InputError, LoadError
from sakiyomi.engine.config import LLMConfig


@dataclass(frozen=True)
class BuildOptions:
    """What is read, and where it goes.

    Attributes:
        text: file with the beginning, UTF-8.
        out: file of the prefix, .safetensors.
    """

    text: str = field(metadata={"argument": "TEXT"})
    out: str = field(metadata={"argument": "OUT"})


@dataclass(frozen=True)
class InfoPlace:
    """Which file.

    Attributes:
        file: of a prefix.
    """

    file: str = field(metadata={"argument": "FILE"})


def register(app: typer.Typer) -> None:
    """Add the commands."""
    own = typer.Typer(rich_markup_mode=None, no_args_is_help=True)
    command(
        own,
        "build",
        BuildOptions,
        LLMConfig,
        JsonOption,
        help="Read a beginning, and keep what stays of it in a file.\n\n`generate --prefix OUT` goes on from it, with "
        "the same target, cache, kv_budget and chunk_size.",
        defaults={"draft": "none"},
    )(build)
    command(own, "info", InfoPlace, JsonOption, help="Show what a prefix holds, and what made it.")(info)
    app.add_typer(own, name="cache", help="Beginnings that are read once: documents, system prompts.")


def build(options: BuildOptions, model: LLMConfig, output: JsonOption) -> None:
    """Run the command."""
    from sakiyomi.cli.output import emit_json, progress, stdout
    from sakiyomi.core.memory import readable

    path = Path(options.text).expanduser()
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise LoadError(f"{path} cannot be read as UTF-8 text ({error}); check the path") from error
    if not text.strip():
        raise InputError(f"{path} holds no text; expected the beginning that is to be read")
    llm = load(model)
    with progress(f"reading {path.name}"):
        prefix = llm.prefix(text)
    prefix.save(options.out)
    found = {"out": options.out, "tokens": len(prefix.tokens), "pairs": prefix.pairs, "bytes": prefix.bytes}
    full = len(prefix.tokens) * llm.target.cache.pair_bytes
    stdout().out(
        f"{options.out}: {len(prefix.tokens)} tokens, keys and values {readable(prefix.bytes)} "
        f"(all of them would be {readable(full)})",
        highlight=False,
    )
    if output.json:
        emit_json(found | {"full_bytes": full, "recipe": prefix.recipe})


def info(place: InfoPlace, output: JsonOption) -> None:
    """Run the command."""
    from sakiyomi.cache.prefix import read_about
    from sakiyomi.cli.output import emit_json, stdout
    from sakiyomi.core.memory import readable

    about, shapes = read_about(place.file)
    keys = {name: shape for name, shape in shapes.items() if name.startswith("keys.")}
    packed = [shapes.get(name.replace("keys", "packed.2"), (0,)) for name in keys]
    counts = [shape[0] + before[0] for shape, before in zip(keys.values(), packed, strict=True)]
    layers = 1 + max(int(name.split(".")[1]) for name in keys)
    found: dict[str, Any] = {
        "file": place.file,
        "tokens": shapes["tokens"][0],
        "layers": layers,
        "heads": len(keys) // layers,
        "pairs": [min(counts), max(counts)],
        "file_bytes": Path(place.file).expanduser().stat().st_size,
        "text": about["text"],
        "recipe": about["recipe"],
    }
    console = stdout()
    fewest, most = found["pairs"]
    pairs = f"{most}" if fewest == most else f"{fewest} to {most}"
    console.out(
        f"{place.file}: {found['tokens']} tokens, of which {pairs} a head stay in {layers} layers of "
        f"{found['heads']} heads; {readable(found['file_bytes'])}",
        highlight=False,
    )
    for key, value in found["recipe"].items():
        console.out(f"  {key}: {value}", highlight=False)
    beginning = " ".join(about["text"].split())
    if beginning:
        console.out(f"  begins: {beginning[:100]}{'...' if len(beginning) > 100 else ''}", highlight=False)
    if output.json:
        emit_json(found)

"""``sakiyomi cache``: prompt caches, prefilled once and continued many times."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sakiyomi.cli.common import FileArgument, JsonOption, load
from sakiyomi.cli.output import progress, say, shortened
from sakiyomi.core.errors import InputError, LoadError
from sakiyomi.core.memory import readable
from sakiyomi.engine.config import LLMConfig


@dataclass(frozen=True)
class BuildOptions:
    """The text to prefill, and the file to write.

    Attributes:
        text: file with the text to prefill, UTF-8.
        out: prompt cache file to write, .safetensors.
    """

    text: str = field(metadata={"argument": "TEXT"})
    out: str = field(metadata={"argument": "OUT"})


def build(options: BuildOptions, model: LLMConfig, output: JsonOption) -> None:
    """Prefill a text, and keep its keys and values in a file.

    `generate --prefix OUT` continues from it. It needs the same target, cache, kv_budget and chunk_size.

    Example: sakiyomi cache build handbook.txt handbook.safetensors --model FOLDER
    """
    path = Path(options.text).expanduser()
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise LoadError(f"{path} cannot be read as UTF-8 text ({error}); check the path") from error
    if not text.strip():
        raise InputError(f"{path} holds no text; expected the text to prefill")
    llm = load(model)
    with progress(f"prefilling {path.name}"):
        prefix = llm.prefix(text)
    prefix.save(options.out)
    found = {"out": options.out, "tokens": len(prefix.tokens), "pairs": prefix.pairs, "bytes": prefix.bytes}
    full = len(prefix.tokens) * llm.target.cache.pair_bytes
    say(
        f"{options.out}: {len(prefix.tokens)} tokens, keys and values {readable(prefix.bytes)} "
        f"(a full cache: {readable(full)})"
    )
    output.emit(found | {"full_bytes": full, "recipe": prefix.recipe})


def info(place: FileArgument, output: JsonOption) -> None:
    """Show what a prompt cache holds, and how it was made.

    Example: sakiyomi cache info handbook.safetensors
    """
    from sakiyomi.cache.prefix import read_about

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
    fewest, most = found["pairs"]
    pairs = f"{most}" if fewest == most else f"{fewest} to {most}"
    say(
        f"{place.file}: {found['tokens']} tokens, {pairs} KV pairs kept per head, {layers} layers of "
        f"{found['heads']} heads; {readable(found['file_bytes'])}",
        *(f"  {key}: {value}" for key, value in found["recipe"].items()),
    )
    if beginning := shortened(about["text"], 100):
        say(f"  begins: {beginning}")
    output.emit(found)

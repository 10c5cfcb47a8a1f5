"""``sakiyomi memory``: show or remove a file in which drafters keep what they learn from a user's texts."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from sakiyomi.cli.common import FileArgument, JsonOption
from sakiyomi.cli.output import progress, say, shortened, table
from sakiyomi.core.errors import InputError, LoadError
from sakiyomi.core.memory import readable
from sakiyomi.core.sealed import SealedKind


@dataclass(frozen=True)
class ShowOptions:
    """What to show.

    Attributes:
        target: model whose tokenizer wrote the file (embedded name, folder or hub id); shows how each text begins.
    """

    target: str | None = None


def show(place: FileArgument, options: ShowOptions, output: JsonOption) -> None:
    """Show what a memory file holds.

    That of suffix:FILE holds the token ids of requests, prompts included. With --target they are shown as text. That of
    recycle:FILE holds tokens and what may follow them; that of [learn=FILE] what the draft has learnt.

    Example: sakiyomi memory show notes.mem --model tales
    """
    from sakiyomi.drafters import graph_file, learned_file
    from sakiyomi.drafters.memory import LIMIT, read_memory

    path = Path(place.file).expanduser()
    for kind, shown in ((learned_file.KIND, _show_learned), (graph_file.KIND, _show_graph)):
        if _is(path, kind):
            shown(path, output)
            return
    contents = read_memory(path)
    decode = _decoder(options.target, contents.tokenizer) if options.target else None
    documents: list[dict[str, Any]] = []
    for document in contents.documents:
        when = datetime.fromtimestamp(document.time).astimezone().isoformat(timespec="seconds")
        documents.append({"time": when, "tokens": len(document.tokens)})
        if decode is not None:
            documents[-1]["text"] = decode(document.tokens)
    size = sum(len(document.tokens) for document in contents.documents)
    found: dict[str, Any] = {
        "file": str(path),
        "bytes": path.stat().st_size,
        "limit_bytes": LIMIT,
        "tokenizer": contents.tokenizer,
        "tokens": size,
        "documents": documents,
    }
    say(
        f"{path}: {len(documents)} texts, {size} tokens, {readable(found['bytes'])} (tokens take {readable(LIMIT)} at "
        f"most), tokenizer {contents.tokenizer[:12]}"
    )
    table([entry | ({"text": shortened(entry["text"])} if "text" in entry else {}) for entry in documents])
    output.emit(found)


def clear(place: FileArgument, output: JsonOption) -> None:
    """Remove a memory file, damaged or not.

    Example: sakiyomi memory clear notes.mem
    """
    from sakiyomi.drafters import graph_file, learned_file, memory

    path = Path(place.file).expanduser()
    if not path.is_file():
        raise InputError(f"there is no file {path}")
    try:
        if not any(_is(path, module.KIND) for module in (memory, graph_file, learned_file)):
            raise InputError(f"{path} is no memory file of sakiyomi; it was left as it is")
        size = path.stat().st_size
        path.unlink()
    except OSError as error:
        raise LoadError(f"{path} cannot be removed: {error.strerror}") from None
    say(f"removed {path}, {size} bytes")
    output.emit({"file": str(path), "removed_bytes": size})


def _is(path: Path, kind: SealedKind) -> bool:
    """Whether a file exists and is of this kind, damaged or not."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(kind.magic)) == kind.magic


def _show_learned(path: Path, output: JsonOption) -> None:
    from sakiyomi.drafters.learned_file import read_learned

    learned = read_learned(path)
    found: dict[str, Any] = {
        "file": str(path),
        "bytes": path.stat().st_size,
        "draft": learned.draft,
        "texts": learned.texts,
        "tokens": learned.seen,
        "rows": len(learned.tokens),
    }
    say(
        f"{path}: learnt from {learned.seen} tokens of {learned.texts} texts, {len(learned.tokens)} rows of the head "
        f"changed, {readable(found['bytes'])}, draft {learned.draft[:12]}"
    )
    output.emit(found)


def _show_graph(path: Path, output: JsonOption) -> None:
    from sakiyomi.drafters.graph_file import read_graph

    graph = read_graph(path)
    counts = [len(after) for after in reversed(graph.after)]
    found: dict[str, Any] = {
        "file": str(path),
        "bytes": path.stat().st_size,
        "tokenizer": graph.tokenizer,
        "contexts": counts,
    }
    say(
        f"{path}: what may follow {counts[0]} tokens, {counts[1]} pairs and {counts[2]} triples of tokens, "
        f"{readable(found['bytes'])}, tokenizer {graph.tokenizer[:12]}"
    )
    output.emit(found)


def _decoder(target: str, digest: str) -> Any:
    from sakiyomi.core.digests import tokenizer_digest
    from sakiyomi.model_executor.loading import load_model

    with progress(f"loading {target}"):
        tokenizer = load_model(target).tokenizer
    if tokenizer_digest(tokenizer) != digest:
        raise InputError(f"the file belongs to another tokenizer than that of {target}; pass the target that wrote it")
    return tokenizer.decode

"""A GGUF file as a folder: what is beside a model's weights in Hugging Face format, made of the file once, and kept.

With it everything that works on folders works on such files: tokenizers, configurations, recordings, packed copies. The
weights stay in the file.
"""

from __future__ import annotations

import glob
import json
import shutil
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

from sakiyomi.core.checkpoint import GGUF_NOTE, Checkpoint
from sakiyomi.core.digests import json_digest
from sakiyomi.core.files import cache_folder, partial
from sakiyomi.core.gguf import GgufFile, pieces, read_gguf
from sakiyomi.core.version import __version__
from sakiyomi.model_executor.gguf.config import build_config
from sakiyomi.model_executor.gguf.tokenizer import build_tokenizer

_FLOATS = ("F64", "F32", "F16", "BF16")


def settings_folder(path: Path) -> Path:
    """The folder with configuration, generation settings and tokenizer of a GGUF file; it is made where there is none.

    Args:
        path: of the file, or of one of its pieces.

    Raises:
        LoadError: the file is damaged, or holds no model or no tokenizer.
        UnsupportedError: its architecture, tokenizer or positions are not known here.
    """
    states = [(each.name, each.stat().st_size, each.stat().st_mtime_ns) for each in pieces(path)]
    key = json_digest([__version__, version("transformers"), str(path.resolve()), *states])[:16]
    place = cache_folder() / "gguf" / f"{path.stem}-{key}"
    if (place / "config.json").is_file():
        return place
    file = read_gguf(path)
    config, tokenizer = build_config(file), build_tokenizer(file)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        fresh = partial(place)
        fresh.mkdir()
    except OSError:  # a cache folder that cannot be written: made anew by every process
        fresh = place = Path(tempfile.mkdtemp(prefix="sakiyomi-"))
    config.save_pretrained(fresh)
    ends = {"eos_token_id": list(tokenizer.ends)} if tokenizer.ends else {}
    settings = {"bos_token_id": tokenizer.begin, "pad_token_id": config.pad_token_id, **ends}
    _write(fresh / "generation_config.json", settings)
    _write(fresh / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **tokenizer.settings})
    tokenizer.backend.save(str(fresh / "tokenizer.json"), pretty=False)
    _write(fresh / GGUF_NOTE, {"file": str(path.resolve())})
    if fresh != place:
        try:
            fresh.rename(place)
        except OSError:  # another process was faster
            shutil.rmtree(fresh, ignore_errors=True)
        _remove_older(place, path)
    return place


def _write(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False), encoding="utf-8")


def _remove_older(place: Path, path: Path) -> None:
    """Remove what another version made of this file, or this one of the file that was there before."""
    for other in place.parent.glob(f"{glob.escape(path.stem)}-*/{GGUF_NOTE}"):
        with suppress(OSError, ValueError, KeyError):
            if other.parent != place and json.loads(other.read_text(encoding="utf-8"))["file"] == str(path.resolve()):
                shutil.rmtree(other.parent, ignore_errors=True)


def checkpoint_of(file: GgufFile) -> Checkpoint:
    """The weights of a file; blocks count as BF16, which they become where they are unpacked."""
    elements: dict[str, int] = {}
    for tensor in file.tensors.values():
        kind = tensor.kind if tensor.kind in _FLOATS else "BF16"
        elements[kind] = elements.get(kind, 0) + tensor.elements
    return Checkpoint(file.paths, elements, file.stored_bytes, _layers(file.tensors))


def _layers(names: Iterable[str]) -> int:
    return 1 + max((int(name.split(".")[1]) for name in names if name.startswith("blk.")), default=-1)

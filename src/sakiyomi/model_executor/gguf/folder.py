"""A GGUF file as a folder: what is beside a model's weights in Hugging Face format, made of the file once, and kept.

With it everything that works on folders works on such files: tokenizers, configurations, recordings, packed copies. The
weights stay in the file.
"""

from __future__ import annotations

import atexit
import glob
import json
import shutil
import tempfile
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sakiyomi.core.checkpoint import GGUF_NOTE, Checkpoint
from sakiyomi.core.digests import json_digest
from sakiyomi.core.errors import LoadError
from sakiyomi.core.files import cache_folder, partial
from sakiyomi.core.gguf import GgufFile, read_gguf
from sakiyomi.core.gguf_files import pieces
from sakiyomi.core.version import __version__
from sakiyomi.model_executor.gguf.config import build_config
from sakiyomi.model_executor.gguf.tokenizer import GgufTokenizer, build_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_FLOATS = ("F64", "F32", "F16", "BF16")


def settings_folder(path: Path) -> tuple[Path, Tokenizer | None]:
    """The folder with configuration, generation settings and tokenizer of a GGUF file; it is made where there is none.

    Args:
        path: of the file, or of one of its pieces.

    Returns:
        The folder, and the tokenizer where it was made now: to read it takes as long as to make it.

    Raises:
        LoadError: the file is damaged, or holds no model or no tokenizer.
        UnsupportedError: its architecture, tokenizer or positions are not known here.
    """
    states = [(each.name, each.stat().st_size, each.stat().st_mtime_ns) for each in pieces(path)]
    key = json_digest([__version__, version("transformers"), str(path.resolve()), *states])[:16]
    place = cache_folder() / "gguf" / f"{path.stem}-{key}"
    if (place / "config.json").is_file():
        return place, None
    file = read_gguf(path)
    config, tokenizer = build_config(file), build_tokenizer(file)
    fresh = partial(place)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        _write(fresh, config, tokenizer, path)
        with suppress(OSError):  # which is raised where another process was faster
            fresh.rename(place)
    except OSError as error:
        return _for_this_process(config, tokenizer, path, error), tokenizer.backend
    finally:  # Ctrl-C comes here, too
        shutil.rmtree(fresh, ignore_errors=True)
    _remove_older(place, path)
    return place, tokenizer.backend


def _for_this_process(config: Any, tokenizer: GgufTokenizer, path: Path, reason: OSError) -> Path:
    """The folder where the cache folder cannot be written, or is full: it is removed when the process ends."""
    try:
        place = Path(tempfile.mkdtemp(prefix="sakiyomi-"))
        atexit.register(shutil.rmtree, place, ignore_errors=True)
        _write(place, config, tokenizer, path)
    except OSError as error:
        raise LoadError(
            f"what belongs to {path} can be written neither in {cache_folder()} ({reason}) nor elsewhere ({error}); "
            "free space, or set SAKIYOMI_CACHE_DIR to a folder that can be written"
        ) from error
    return place


def _write(folder: Path, config: Any, tokenizer: GgufTokenizer, path: Path) -> None:
    folder.mkdir(exist_ok=True)
    config.save_pretrained(folder)
    ends = {"eos_token_id": list(tokenizer.ends)} if tokenizer.ends else {}
    files = {
        "generation_config.json": {"bos_token_id": tokenizer.begin, "pad_token_id": config.pad_token_id, **ends},
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", **tokenizer.settings},
        GGUF_NOTE: {"file": str(path.resolve())},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=1, ensure_ascii=False), encoding="utf-8")
    (folder / "tokenizer.json").write_text(tokenizer.backend.to_str(), encoding="utf-8")


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
    return Checkpoint(file.paths, elements, file.stored_bytes, file.layers)

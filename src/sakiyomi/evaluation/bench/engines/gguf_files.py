"""GGUF files of our models, which llama.cpp runs: the same weights, and the tokenizer."""

from __future__ import annotations

from pathlib import Path

from sakiyomi.core.checkpoint import read_checkpoint
from sakiyomi.core.digests import json_digest
from sakiyomi.core.files import cache_folder
from sakiyomi.core.gguf_files import gguf_file as given_file
from sakiyomi.model_executor.gguf.export import write_gguf
from sakiyomi.model_executor.loading import Loaded

KINDS = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "int8": "Q8_0", "int4": "Q4_0"}
"""ggml's names of torch's dtypes, and of its blocks of 32 weights in 8 or 4 bits."""
_LAYOUT = 3
"""Of the files; a change of it writes them anew."""


def gguf_folder() -> Path:
    """Folder of the files; each version of a model is written once."""
    return cache_folder() / "written"


def gguf_file(loaded: Loaded, kind: str) -> Path:
    """A GGUF file of a model, written if it is not there yet; of one that was loaded from such a file, this file.

    Args:
        loaded: its weights are read while the file is written.
        kind: ggml's name of the matrices' type, one of the values of ``KINDS``. All matrices have it, the embeddings
            too. (Files from elsewhere often spare some of them.)

    Raises:
        UnsupportedError: see ``write_gguf``.
        LoadError: the file cannot be written.
    """
    if (given := given_file(loaded.name)) is not None:
        return given
    assert loaded.folder is not None, "a benchmark names its models"
    states = [
        (path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in read_checkpoint(loaded.folder).files
    ]
    # A dtype other than the stored one rounds the weights.
    key = json_digest([_LAYOUT, str(loaded.folder.resolve()), str(loaded.model.dtype), *states])[:16]
    path = gguf_folder() / f"{Path(loaded.name).name}-{kind.lower()}-{key}.gguf"
    if not path.exists():
        write_gguf(path, loaded.model, loaded.tokenizer, kind)
    return path

"""GGUF files (llama.cpp's format), read through transformers: weights come back as ordinary numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sakiyomi.errors import LoadError, UnsupportedError

__all__ = ["read_gguf"]


def read_gguf(path: Path) -> tuple[Any, Any]:
    """Configuration and tokenizer of a GGUF file.

    Raises:
        LoadError: the package gguf is missing, or the file is damaged.
        UnsupportedError: transformers does not know the file's architecture.
    """
    try:
        import gguf  # noqa: F401
    except ImportError as error:
        raise LoadError(f"{path} is a GGUF file, which needs the package gguf; pip install gguf") from error
    from transformers import AutoConfig, AutoTokenizer

    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise LoadError(f"{path} does not begin as a GGUF file does; download it again")
    what = "its configuration"
    try:
        config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
        what = "its tokenizer"
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
    except Exception as error:  # transformers and gguf raise their own kinds
        said = " ".join(str(error).split())[:300]
        if "not supported" in said:
            raise UnsupportedError(f"{path}: {said}; use the model's folder in Hugging Face format") from error
        raise LoadError(f"{path}: {what} cannot be read ({type(error).__name__}: {said}); download it again") from error
    return config, tokenizer

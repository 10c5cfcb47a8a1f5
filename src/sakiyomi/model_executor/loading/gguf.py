"""GGUF files (llama.cpp's format), read through transformers: weights come back as ordinary numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sakiyomi.core.checkpoint import Checkpoint
from sakiyomi.core.errors import LoadError, SakiyomiError, UnsupportedError
from sakiyomi.core.messages import one_line
from sakiyomi.model_executor.loading.gguf_metadata import facts_of, use_facts
from sakiyomi.model_executor.loading.reader import quiet

_FLOATS = ("F32", "F16", "BF16")  # called alike in both formats
_TOKENS = "tokenizer.ggml.tokens"


def read_gguf(path: Path) -> tuple[Any, Any, Checkpoint]:
    """Configuration, tokenizer and weights (quantized ones count as BF16, which they become) of a GGUF file.

    Raises:
        LoadError: the package gguf is missing, the file is damaged, or it holds no tokenizer.
        UnsupportedError: transformers does not know the file's architecture.
    """
    try:
        import gguf
    except ImportError as error:
        raise LoadError(f"{path} is a GGUF file, which needs the package gguf; pip install gguf") from error
    from transformers import AutoConfig, AutoTokenizer

    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise LoadError(f"{path} does not begin as a GGUF file does; download it again")
    what = "its list of tensors"
    try:
        reader = gguf.GGUFReader(path)
        elements: dict[str, int] = {}
        for tensor in reader.tensors:
            kind = tensor.tensor_type.name if tensor.tensor_type.name in _FLOATS else "BF16"
            elements[kind] = elements.get(kind, 0) + int(tensor.n_elements)
        known, facts = _TOKENS in reader.fields, facts_of(reader)
        del reader
        with quiet():
            place: dict[str, Any] = {"gguf_file": path.name, "local_files_only": True}
            what = "its configuration"
            config = AutoConfig.from_pretrained(path.parent, **place)
            use_facts(config, facts, path)
            what = "its tokenizer"
            tokenizer = AutoTokenizer.from_pretrained(path.parent, **place) if known else None
    except SakiyomiError:
        raise
    except Exception as error:  # transformers and gguf raise their own kinds
        if "not supported" in str(error):
            raise UnsupportedError(
                f"{path}: {one_line(error).rstrip('.')}; use the model's folder in Hugging Face format"
            ) from error
        raise LoadError(
            f"{path} is no intact GGUF file: {what} cannot be read ({one_line(error)}); download it again"
        ) from error
    if tokenizer is None:
        raise LoadError(
            f"{path} holds no tokenizer; use the model's folder in Hugging Face format, or load the file with "
            "transformers and pass (model, tokenizer)"
        )
    return config, tokenizer, Checkpoint((path,), elements, path.stat().st_size)

"""Tokenizers of the vocabularies in llama.cpp's repository: GGUF files without weights, see ``real_files``."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from real_files import real
from sakiyomi.core.gguf import read_gguf
from sakiyomi.model_executor.gguf.tokenizer import GgufTokenizer, build_tokenizer

NAMES = (
    "llama-spm", "phi-3", "gpt-2", "llama-bpe", "qwen2", "falcon", "command-r", "deepseek-coder", "deepseek-llm",
    "gemma-4", "mpt", "qwen35", "refact", "starcoder",
)  # fmt: skip
"""Those that come with texts and their tokens; "bert-bge" is left out: it is an encoder's."""


def vocabulary(name: str) -> Path:
    """The file of a vocabulary; the test is skipped where the files are not at hand."""
    return real(f"llama.cpp/models/ggml-vocab-{name}.gguf")


@lru_cache
def built(name: str) -> GgufTokenizer:
    """One of ``NAMES``."""
    return build_tokenizer(read_gguf(vocabulary(name)))


def real_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """The same for transformers."""
    found = built(name)
    settings = {key: value for key, value in found.settings.items() if key != "chat_template"}
    return PreTrainedTokenizerFast(tokenizer_object=found.backend, **settings)


def examples(name: str) -> list[tuple[str, list[int]]]:
    """Texts that a vocabulary comes with, and their tokens without special ones."""
    path = vocabulary(name)
    texts = path.with_name(f"{path.name}.inp").read_text(encoding="utf-8").split("\n__ggml_vocab_test__\n")
    lines = path.with_name(f"{path.name}.out").read_text(encoding="utf-8").split("\n")
    return [(text, [int(token) for token in line.split()]) for text, line in zip(texts, lines, strict=False)]

"""Fast tokenizers of the vocabularies in llama.cpp's repository: GGUF files without weights, see ``SAKIYOMI_REAL``."""

from __future__ import annotations

import mmap
import os
import struct
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

NAMES = ("llama-spm", "phi-3", "gpt-2", "llama-bpe", "qwen2", "falcon")
_NUMBERS = ("<u1", "<i1", "<u2", "<i2", "<u4", "<i4", "<f4", "?", None, None, "<u8", "<i8", "<f8")
_TEXT, _LIST = 8, 9
CONTROL, USER = 3, 4
"""Kinds of tokens that are found in texts before anything else."""


def read_metadata(path: Path) -> dict[str, Any]:
    """The values in a GGUF file's head, by name; lists of numbers are arrays."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        assert data[:4] == b"GGUF"
        place = 24

        def number(form: str) -> Any:
            nonlocal place
            (value,) = struct.unpack_from(form, data, place)
            place += struct.calcsize(form)
            return value

        def text() -> str:
            nonlocal place
            size = number("<Q")
            place += size
            return data[place - size : place].decode()

        def value(kind: int) -> Any:
            nonlocal place
            if kind == _TEXT:
                return text()
            if kind != _LIST:
                found = np.frombuffer(data[place : place + 8], _NUMBERS[kind], 1)[0]
                place += found.nbytes
                return found.item()
            kind, count = number("<I"), number("<Q")
            if kind in (_TEXT, _LIST):
                return [value(kind) for _ in range(count)]
            size = count * np.dtype(_NUMBERS[kind]).itemsize
            place += size
            return np.frombuffer(data[place - size : place], _NUMBERS[kind])

        return {text(): value(number("<I")) for _ in range(struct.unpack_from("<Q", data, 16)[0])}


def _sentence_pieces(tokens: list[str], scores: list[float], unknown: str) -> Tokenizer:
    """As transformers' Llama 2: merges are all pairs that make a token, those of the best score first."""
    vocab = {token: i for i, token in enumerate(tokens)}
    pairs = [
        (-scores[i], vocab[token[:cut]], vocab[token[cut:]])
        for i, token in enumerate(tokens)
        for cut in range(1, len(token))
        if token[:cut] in vocab and token[cut:] in vocab
    ]
    merges = [(tokens[left], tokens[right]) for _, left, right in sorted(pairs)]
    made = Tokenizer(models.BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return made


def _byte_level(tokens: list[str], merges: list[str]) -> Tokenizer:
    vocab = {token: i for i, token in enumerate(tokens)}
    pairs = [tuple(merge.split(" ")) for merge in merges]
    made = Tokenizer(models.BPE(vocab, [(left, right) for left, right in pairs]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return made


@lru_cache
def real_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """One of ``NAMES``; the test is skipped where the files are not at hand."""
    folder = os.environ.get("SAKIYOMI_REAL")
    if not folder:
        pytest.skip("SAKIYOMI_REAL, a folder of vocabularies that others made, is not set")
    known = {
        key.removeprefix("tokenizer.ggml."): value
        for key, value in read_metadata(Path(folder) / f"llama.cpp/models/ggml-vocab-{name}.gguf").items()
    }
    tokens, kinds = known["tokens"], known["token_type"].tolist()
    special = {
        which: tokens[known[f"{which}_token_id"]] for which in ("bos", "eos", "unknown") if f"{which}_token_id" in known
    }
    if known["model"] == "llama":
        made = _sentence_pieces(tokens, known["scores"].tolist(), tokens[known.get("unknown_token_id", 0)])
    else:
        made = _byte_level(tokens, known["merges"])
    listed = [(token, kind) for token, kind in zip(tokens, kinds, strict=True) if kind in (CONTROL, USER)]
    made.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token, kind in listed if kind == CONTROL]
    )
    made.add_tokens([AddedToken(token, special=False, normalized=False) for token, kind in listed if kind == USER])
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        bos_token=special.get("bos"),
        eos_token=special.get("eos"),
        unk_token=special.get("unknown"),
        clean_up_tokenization_spaces=False,
    )

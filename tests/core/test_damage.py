"""No bad byte passes: every file that we write, damaged in every way, is refused or reads as it was written."""

from __future__ import annotations

import dataclasses
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from damage import DAMAGES, damaged, refusals
from medusa_toys import new_heads
from sakiyomi import LLM
from sakiyomi.cache.policies.merging.convolutions import Convolutions, MergingShape
from sakiyomi.cache.policies.merging.formats import read_merging, write_merging
from sakiyomi.cache.policies.retaining import formats as retaining
from sakiyomi.cache.policies.retaining.heads import RetainingHeads, RetainingShape
from sakiyomi.cache.prefix import Prefix, read_prefix
from sakiyomi.core.errors import SakiyomiError
from sakiyomi.drafters.medusa_heads import formats as medusa
from sakiyomi.drafters.medusa_heads.tuned import Tuned, read_tuned, write_tuned
from sakiyomi.drafters.memory import MemoryFile, read_memory
from sakiyomi.drafters.ngram_file import read_tables, write_tables
from sakiyomi.engine.tuned_profile import Profile, read_profile, write_profile
from sakiyomi.kernels import build
from sakiyomi.train.checkpoint import load_checkpoint, save_checkpoint
from sakiyomi.train.ngram import count_tables
from toys import save_model, tiny_llama, tiny_tokenizer


def plain(value: Any) -> Any:
    """What can be compared with ``==``."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.tolist()
    if isinstance(value, torch.nn.Module):
        return {name: plain(tensor) for name, tensor in value.state_dict().items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    return value


def prefix(folder: Path) -> Callable[[], Any]:
    tensors = {"keys.0.0": torch.randn(9, 8), "values.0.0": torch.randn(9, 8).to(torch.bfloat16)}
    Prefix([5, 6, 7], "a b c", {"model": "toy"}, tensors).save(folder / "prefix.safetensors")
    return lambda: read_prefix(folder / "prefix.safetensors")


def memory(folder: Path) -> Callable[[], Any]:
    file = MemoryFile(folder / "memory", "abc", 320)
    file.add([1, 2, 3] * 20)
    file.save()
    return lambda: read_memory(folder / "memory")


def ngrams(folder: Path) -> Callable[[], Any]:
    tensors = count_tables([[1, 2, 3, 4, 2, 3] * 8], 3, 320, least=1, keep=8)
    write_tables(folder / "grams", 3, tensors, {"tokenizer": "abc", "vocab_size": "320"})
    return lambda: vars(read_tables(folder / "grams", "abc", 320))["_unigrams"]


def profile(folder: Path) -> Callable[[], Any]:
    write_profile(folder / "profile.json", Profile("suffix", 4, 1.5, {"machine": "this"}, [{"gamma": 4}]))
    return lambda: read_profile(folder / "profile.json")


def medusa_heads(folder: Path) -> Callable[[], Any]:
    medusa.write_heads(new_heads(tiny_llama(), heads=2), folder, base="toy")
    return lambda: medusa.read_heads(folder)


def sizes(folder: Path) -> Callable[[], Any]:
    write_tuned(folder, Tuned(2, 3, 4, [[0.5, 0.1], [0.25, 0.125]], {"machine": "this"}, []))
    return lambda: read_tuned(folder)


def retaining_heads(folder: Path) -> Callable[[], Any]:
    heads = RetainingHeads(RetainingShape((12, 12), (2, 2), 4, "silu"), torch.float32, "cpu")
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter)
    retaining.write_heads(heads, folder, base="toy", recipe={"steps": 3})
    return lambda: retaining.read_heads(folder)


def merging(folder: Path) -> Callable[[], Any]:
    write_merging(Convolutions(MergingShape(((4, 6), (3, 3)), (2, 3), 3, 5)), folder, base="toy")
    return lambda: read_merging(folder)


def packed(folder: Path) -> Callable[[], Any]:
    source = save_model(folder.parent / "source", tiny_llama(dim=64), tiny_tokenizer())
    LLM(source, "none", quantize="int8", dtype="float32", compile=False)
    shutil.copytree(source / "sakiyomi-int8-float32", folder, dirs_exist_ok=True)
    return lambda: LLM(folder, "none", compile=False).generate([[5, 6, 7]])[0].token_ids


def checkpoint(folder: Path) -> Callable[[], Any]:
    save_checkpoint(folder, 8, {"weights": torch.randn(40, 30), "progress": {"step": 8, "losses": [0.5] * 50}})
    return lambda: load_checkpoint(folder)


def library(folder: Path) -> Callable[[], Any]:
    compiler = folder.parent / "compiler"
    compiler.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\nseq 2000 > "$2"\n', encoding="utf-8")
    compiler.chmod(0o755)
    os.environ |= {"CXX": str(compiler), "SAKIYOMI_CACHE_DIR": str(folder)}
    build._build()

    def read() -> Any:
        path = build.built() or build._build()  # a damaged one is made again
        return path.read_bytes()

    return read


FORMATS = [prefix, memory, ngrams, profile, medusa_heads, sizes, retaining_heads, merging, packed, library, checkpoint]


@pytest.mark.parametrize("make", FORMATS, ids=lambda make: make.__name__)
def test_damage_is_refused_or_does_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], Callable[[], Any]]
) -> None:
    monkeypatch.setenv("CXX", os.environ.get("CXX", ""))
    monkeypatch.setenv("SAKIYOMI_CACHE_DIR", str(tmp_path / "cache"))
    folder = tmp_path / "made"
    folder.mkdir()
    read = make(folder)
    right = plain(read())
    whole = {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
    rng = random.Random(make.__name__)
    for number in range(DAMAGES if make is not packed else DAMAGES // 2):
        # Most of the damage where most of the bytes are, and some in every file.
        weights = [len(data) if number % 2 else 1 for data in whole.values()]
        path = rng.choices(list(whole), weights)[0]
        path.write_bytes(damaged(whole[path], rng))
        try:
            found = plain(read())
        except SakiyomiError as error:
            assert str(folder.name) in error.message or path.name in error.message, error.message
        else:
            assert found == right, f"damage {number} of {path.name} was read"
        for there, data in whole.items():
            there.write_bytes(data)
        for stray in {path for path in folder.rglob("*") if path.is_file()} - whole.keys():
            stray.unlink()
    assert plain(read()) == right


@pytest.mark.thorough
def test_a_damaged_model_folder_is_refused_in_words_or_read(tmp_path: Path) -> None:
    """Of other tools' files nobody knows what they were: but none ends in an error of another kind."""
    folder = save_model(tmp_path / "model", tiny_llama(dim=64), tiny_tokenizer())
    paths = [path for path in sorted(folder.iterdir()) if path.is_file()]
    refused = refusals(paths, DAMAGES, lambda: LLM(folder, "none", compile=False).generate("the fox"))
    assert refused > DAMAGES // 4

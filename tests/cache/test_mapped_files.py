"""A cache that lies in mapped files: the text is that of the cache in memory, and no file is left."""

from __future__ import annotations

import copy
import ctypes
import errno
import gc
import logging
import mmap
import os
import re
import shutil
import sys
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

import seq2seq_toys
from architectures import VOCAB, model_of, prompt
from drafters import Branching, texts_of
from sakiyomi import LLM, SamplingParams
from sakiyomi.cache.layout import LayerShape
from sakiyomi.cache.mapped_files import MappedFiles
from sakiyomi.cache.policies import CacheSpec, read_cache
from sakiyomi.cache.slots import SlotCache
from sakiyomi.core.cache_specs import without_place
from sakiyomi.core.errors import InputError, MemoryLimitError, UnsupportedError
from sakiyomi.evaluation.bench.long.config import LongConfig
from sakiyomi.evaluation.bench.long.run import run
from sakiyomi.evaluation.bench.long.systems import System
from sakiyomi.model_executor.probe import Probed
from toys import character_tokenizer, tiny_llama, tiny_tokenizer

pytestmark = pytest.mark.skipif(
    not hasattr(os, "posix_fallocate"), reason="the system does not reserve space for files"
)

TOKENIZER = character_tokenizer("".join(map(chr, range(0x3041, 0x3041 + VOCAB - 2))))
PROMPTS = [prompt(150, 1), prompt(5, 2), prompt(80, 3)]
SHAPES = [LayerShape(2, 8, 8), LayerShape(1, 8, 4)]
Usage = namedtuple("Usage", "total used free")


def params(**values: Any) -> SamplingParams:
    return SamplingParams(**({"max_new_tokens": 60, "ignore_eos": True} | values))


def make(cache: str, draft: Any = "none", name: str = "llama", **options: Any) -> LLM:
    return LLM((model_of(name), TOKENIZER), draft, cache=cache, **({"compile": False} | options))


def texts(llm: LLM, **values: Any) -> list[list[int]]:
    return [out.token_ids for out in llm.generate(PROMPTS, params(**values))]


def mapped(folder: Path | str) -> list[str]:
    """Files in the folder that this process has mapped."""
    return [
        line
        for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
        if f"{folder}/sakiyomi-" in line
    ]


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


# ---------------------------------------------------------------- the same text


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["llama", "gemma3", "falcon"])
def test_the_text_of_a_full_cache(name: str, tmp_path: Path) -> None:
    """Plain, and read ahead in a batch of unequal lengths."""
    wanted = texts(make("full", name=name))
    llm = make(f"offload:{tmp_path}", name=name)
    assert texts(llm) == wanted
    assert len(mapped(tmp_path)) == 2 * len(llm.target.cache.shapes)
    assert llm.target.cache.slots == 4, "it never grew"
    drafter = Branching(texts_of(PROMPTS, wanted), "sometimes", VOCAB)
    llm = make(f"offload:{tmp_path}", drafter, name=name)
    done = llm.generate(PROMPTS, params(gamma=3))
    assert [out.token_ids for out in done] == wanted
    assert not llm.engine._speculation.broken and sum(out.stats.accepted for out in done) > 20


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("draft", "options", "values"),
    [
        ("none", {"exact": True}, {}),
        ("none", {}, {"temperature": 0.9, "seed": 3}),
        ("self-evicted:64", {}, {"gamma": 4}),
    ],
    ids=str,
)
def test_other_paths(draft: str, options: dict[str, Any], values: dict[str, Any]) -> None:
    assert texts(make("offload", draft, **options), **values) == texts(make("full", draft, **options), **values)


def test_prompts_that_are_read_in_part(tmp_path: Path) -> None:
    part = "minference[vertical=4,slash=4,block=8]"
    llm = make(f"{part}+offload:{tmp_path}", chunk_size=48)
    assert texts(llm) == texts(make(part, chunk_size=48))
    assert mapped(tmp_path)


@pytest.mark.thorough
def test_the_embedded_model() -> None:
    """As it is loaded, in bf16, with its draft, over columns that outgrow the first storage: the caches are equal bit
    for bit.
    """
    plain, llm = (LLM("tales", "auto", cache=cache, compile=False) for cache in ("full", "offload"))
    text = "Once upon a time there was a fox who lived in a wood. " * 16
    wanted, done = (some.generate(text, params(gamma=4)) for some in (plain, llm))
    assert done.token_ids == wanted.token_ids and done.stats.accepted == wanted.stats.accepted > 0
    assert llm.target.cache.room == 512
    for mine, theirs in zip(llm.target.cache.keys, plain.target.cache.keys, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.thorough
def test_conversations_and_prefixes(tmp_path: Path) -> None:
    """Where pairs lie is no part of a prefix: it is used again in memory and in another folder."""
    full, llm = make("full"), make(f"offload:{tmp_path}")
    tokens = [list(PROMPTS[2]), list(PROMPTS[2])]
    with full.conversation() as first, llm.conversation() as second:
        for turn in range(2):
            both = [some.generate(own, params()) for some, own in zip((first, second), tokens, strict=True)]
            assert both[0].token_ids == both[1].token_ids and both[0].stats.reused == both[1].stats.reused
            tokens = [[*own, *out.token_ids, *prompt(20, turn)] for own, out in zip(tokens, both, strict=True)]
    wanted = full.generate(PROMPTS, params(), prefix=full.prefix(PROMPTS[2]))
    llm.prefix(PROMPTS[2]).save(tmp_path / "beginning.safetensors")
    for other in (llm, full, make("offload")):
        done = other.generate(PROMPTS, params(), prefix=other.load_prefix(tmp_path / "beginning.safetensors"))
        assert [out.token_ids for out in done] == [out.token_ids for out in wanted]


# ---------------------------------------------------------------- files


def test_growth_and_release(tmp_path: Path) -> None:
    before = open_files()
    files = MappedFiles(str(tmp_path))
    cache = SlotCache(SHAPES, dtype=torch.bfloat16, max_slots=3, available=files.available, offloaded=files)
    cache.reserve(cache.take(), 10)
    written = [store[0, :, :10].normal_().clone() for store in (*cache.keys, *cache.values)]
    for slot, columns in ((0, 300), (2, 700)):
        cache.reserve(slot, columns)
        stores = [*cache.keys, *cache.values]
        assert all(torch.equal(store[0, :, :10], own) for store, own in zip(stores, written, strict=True))
        assert not any(bool(store[0, :, 10:].any() or store[1:].any()) for store in stores), "no zeros"
        assert len(mapped(tmp_path)) == len(stores), "the former storage was not released"
        del stores
    assert cache.room >= 700 and cache.slots == 3
    assert not list(tmp_path.iterdir()) and open_files() == before
    del cache
    gc.collect()
    assert not mapped(tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel for what a process holds")
def test_memory_is_taken_back_and_nothing_is_lost(tmp_path: Path) -> None:
    """What the system does under pressure, asked for here."""
    store = MappedFiles(str(tmp_path)).allocate((32 << 20,), dtype=torch.uint8)
    store.copy_(torch.arange(256, dtype=torch.uint8).repeat(len(store) // 256))
    held = psutil.Process().memory_info().rss
    libc = ctypes.CDLL(None, use_errno=True)
    assert not libc.madvise(ctypes.c_void_p(store.data_ptr()), ctypes.c_size_t(len(store)), mmap.MADV_DONTNEED)
    assert held - psutil.Process().memory_info().rss > 30 << 20
    assert bool((store.view(-1, 256) == torch.arange(256, dtype=torch.uint8)).all())


# ---------------------------------------------------------------- refused


def test_a_disk_that_is_too_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before any work, with the numbers; a shorter request goes on."""
    llm = make(f"offload:{tmp_path}")
    pair = llm.target.cache.pair_bytes
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(0, 0, 300 * pair))
    words = f"{300 * pair:,} are available in {tmp_path}; about 150 tokens"
    with pytest.raises(MemoryLimitError, match=re.escape(words)):
        llm.generate(PROMPTS[:2], params())
    assert len(llm.generate(PROMPTS[:1], params())[0].token_ids) == 60


def test_a_disk_that_is_filled_by_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the check: the storage stays as it was, and no file is left."""
    files = MappedFiles(str(tmp_path))
    cache = SlotCache(SHAPES, dtype=torch.float32, max_slots=3, available=files.available, offloaded=files)
    cache.reserve(0, 10)
    cache.keys[0].fill_(3)
    calls: list[int] = []

    def full(descriptor: int, start: int, count: int) -> None:
        calls.append(count)
        if len(calls) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    place = re.escape(str(tmp_path))
    with pytest.raises(MemoryLimitError, match=rf"32\.8 kB more .* in {place}, where .* free \(No space left"):
        cache.reserve(0, 500)
    assert cache.room == 256 and bool((cache.keys[0] == 3).all())
    assert not list(tmp_path.iterdir())
    gc.collect()
    assert len(mapped(tmp_path)) == 4


def test_folders_that_take_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    for name, reason in (("nowhere", "No such file"), ("file", "Not a directory")):
        with pytest.raises(InputError, match=rf"{name} \({reason}.*expected a folder"):
            make(f"offload:{tmp_path / name}")
    monkeypatch.delattr(os, "posix_fallocate")
    with pytest.raises(UnsupportedError, match="does not reserve space"):
        make("offload")


def test_models_whose_cache_is_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedError, match=r"has an encoder.*cache='full'"):
        LLM((seq2seq_toys.model_of("t5"), TOKENIZER), "none", cache="offload", compile=False)
    shapes = [LayerShape(2, 8, 8, torch.device("meta"))]  # in the place of a GPU
    monkeypatch.setattr("sakiyomi.model_executor.weights.probe", lambda *_: Probed(shapes, [], set()))
    with pytest.raises(UnsupportedError, match=r"cache='offload' on meta.*cache='quant-4'"):
        make("offload")


def test_a_folder_in_memory_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "inner").mkdir()
    parts = [SimpleNamespace(mountpoint="/", fstype="tmpfs"), SimpleNamespace(mountpoint=str(tmp_path), fstype="ext4")]
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: copy.copy(parts))
    with caplog.at_level(logging.WARNING, "sakiyomi"):
        MappedFiles(str(tmp_path / "inner")).prepare()
        assert not caplog.records
        parts.append(SimpleNamespace(mountpoint=str(tmp_path / "inner"), fstype="tmpfs"))
        MappedFiles(str(tmp_path / "inner")).prepare()
    assert f"{tmp_path / 'inner'}, lies in memory itself (tmpfs)" in caplog.text


def test_specs() -> None:
    assert read_cache("offload") == CacheSpec(offloaded=MappedFiles())
    assert read_cache("offload:/data/kv").offloaded == MappedFiles("/data/kv")
    both = read_cache("offload:/data/a+b+minference")
    assert both.sparse is not None and both.offloaded == MappedFiles("/data/a+b")
    assert [without_place(spec) for spec in ("full", "offload", "offload:/a+minference[block=8]", "h2o+quant-4")] == [
        *("full", "full", "minference[block=8]", "h2o+quant-4")
    ]


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("h2o+offload", "expected offload alone or with minference"),
        ("offload+quant-4", "expected offload alone or with minference"),
        ("offload:/a+lococo:b", "."),
        ("offload+offload:/a", "expected full, or at most one policy .* or offload:FOLDER"),
        ("offload+full", "expected full, or at most one policy"),
        ("offload[block=2]", "offload has no option 'block'"),
        ("offloaded", "expected full, or at most one policy"),
    ],
)
def test_specs_that_say_nothing(spec: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        read_cache(spec)


def test_a_budget_says_nothing() -> None:
    with pytest.raises(InputError, match="keeps everything"):
        make("offload", kv_budget=64)


# ---------------------------------------------------------------- measured


@pytest.mark.thorough
def test_the_long_bench() -> None:
    assert [System(spec, None).kind for spec in ("full", "offload", "offload:/a/b", "minference+offload")] == [
        *("full", "reduced", "reduced", "reduced")
    ]
    config = LongConfig(
        target="toy",
        systems=("full", "offload"),
        tasks=("passkey",),
        lengths=("256", "384"),
        count=1,
        seeds=("0",),
        memory=False,
    )
    lines = next(iter(run(config, target=(tiny_llama(), tiny_tokenizer())))).lines
    assert [(line["name"], line["state"]) for line in lines] == [*[("full", "")] * 2, *[("offload", "")] * 2]
    assert [line["kv_bytes"] for line in lines[:2]] == [line["kv_bytes"] for line in lines[2:]]
    assert [line["accuracy"] for line in lines[:2]] == [line["accuracy"] for line in lines[2:]]

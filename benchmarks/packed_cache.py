"""Caches in 8 to 2 bits: what they cost a model's predictions, and what a decoding pass costs over long caches.

    python benchmarks/packed_cache.py quality --text ../shared/data/text/children_books_valid.jsonl.gz
    python benchmarks/packed_cache.py speed --tokens 1024 --tokens 8192

Quality: `tales` reads windows of 1024 tokens in chunks of 64, so that all but the last 64 to 159 tokens are packed;
places from 256 on count. Speed: a random Llama of 8 layers, 768 wide, with a cache full of noise; laps take turns.
The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import time
from typing import Any

import torch
from torch import Tensor

from random_models import random_llama
from sakiyomi import LLM
from sakiyomi.cache.eviction_plan import EvictionPlan
from sakiyomi.cache.policies import read_cache
from sakiyomi.cache.quantized import GROUP
from sakiyomi.kernels.batch import SequenceRows
from sakiyomi.model_executor.build import build_runner
from sakiyomi.model_executor.runner import ModelRunner

WINDOW, CHUNK, FIRST = 1024, 64, 256
CACHES = ("full", "quant-8", "quant-4", "quant-2", "kvquant-4", "kvquant-3", "kvquant-2")


def read(llm: LLM, tokens: list[int]) -> Tensor:
    """Log probabilities (rows, V) of what follows each token from ``FIRST`` on."""
    model = llm.target
    slot, rows = model.cache.take(), []
    model.eviction.begin(slot)
    for first in range(0, len(tokens), CHUNK):
        piece = tokens[first : first + CHUNK]
        model.make_room(slot, first + len(piece))
        logits = model.score([SequenceRows(slot, first, piece, prompt=True)]).logits
        if first >= FIRST:
            rows.append(logits.float().log_softmax(-1))
        model.eviction.evict(slot, len(tokens), first + len(piece))
    model.eviction.end(slot)
    model.cache.release(slot)
    return torch.cat(rows)


def stored_bits(llm: LLM) -> float:
    """Bits of a number of packed columns, with what is stored beside them for each; without what is fitted once."""
    packed = llm.target.cache.packed
    if packed is None:
        return 8.0 * llm.target.dtype.itemsize
    groups = 64  # what is stored once for a text counts little
    numbers = sum(shape.heads * (shape.key_dim + shape.value_dim) for shape in packed.shapes) * GROUP * groups
    return 8 * (packed.bytes(1, groups * GROUP) - packed.bytes(0, groups * GROUP)) / numbers


def quality(text: str, windows: int, caches: list[str], budget: int | None) -> dict[str, Any]:
    """Perplexity and agreement of each cache."""
    llms = {}
    for name in caches:
        kept = budget if "quant" not in name.split("+")[0] and name != "full" else None
        llms[name] = LLM("tales", "none", cache=name, kv_budget=kept, chunk_size=CHUNK, dtype="float32", max_batch=1)
    with gzip.open(text, "rt", encoding="utf-8") as file:
        documents = [json.loads(line)["text"] for line in file]
    tokenizer = llms["full"].tokenizer
    pieces: list[list[int]] = []
    for document in documents:
        ids = tokenizer(document)["input_ids"]
        pieces += [ids[i : i + WINDOW] for i in range(0, len(ids) - WINDOW, 8 * WINDOW)]
    pieces = pieces[:windows]
    sums = {name: [0.0, 0.0, 0.0] for name in llms}
    for tokens in pieces:
        following = torch.tensor(tokens[FIRST + 1 :])
        full = None
        for name, llm in llms.items():
            found = read(llm, tokens)[:-1]
            full = found if full is None else full
            total = sums[name]
            total[0] -= float(found.gather(1, following[:, None]).sum())
            total[1] += float((found.argmax(-1) == full.argmax(-1)).sum())
            total[2] += float((full.exp() * (full - found)).sum())
    count = len(pieces) * (WINDOW - FIRST - 1)
    lines = {}
    for name, (loss, same, divergence) in sums.items():
        lines[name] = {
            "perplexity": round(float(torch.tensor(loss / count).exp()), 4),
            "top1_as_full": round(same / count, 5),
            "kl_nats": round(divergence / count, 6),
            "bits": round(stored_bits(llms[name]), 3),
        }
        print(f"{name:24} {lines[name]}")
    return {"text": text, "predictions": count, "caches": lines}


def filled(model: ModelRunner, tokens: int) -> int:
    """A slot with so many tokens of noise, packed as far as the cache is."""
    cache = model.cache
    slot = cache.take()
    for first in range(0, tokens, 512):
        last = min(first + 512, tokens)
        cache.reserve(slot, last)
        for layer in range(len(cache.shapes)):
            for part in cache.parts(layer, slot):
                for store in (part.keys, part.values):
                    store[:, first - part.dropped : last - part.dropped].normal_()
        cache.pack(slot, last)
    cache.reserve(slot, tokens + 64)
    return slot


def speed(lengths: list[int], dtype: torch.dtype, heads: int, laps: int) -> dict[str, Any]:
    """Milliseconds of a pass over one row and over eight, median and least of the laps, and bytes of the cache."""
    model = random_llama(768, 8, heads, 1024, 2048, dtype, positions=16384)
    lines = []
    with torch.no_grad():
        for tokens in lengths:
            packed: dict[str, tuple[ModelRunner, int]] = {}
            for name in CACHES:
                packing = read_cache(name).packing
                eviction = None if packing is None else EvictionPlan(None, None, 512, packing=packing)
                made = build_runner(model, max_slots=1, compile=False, eviction=eviction, text=range(256))
                packed[name] = made, filled(made, tokens)
            spent: dict[tuple[str, int], list[float]] = {}
            for _ in range(laps + 1):
                for rows in (1, 8):
                    for name, (each, slot) in packed.items():
                        began = time.perf_counter()
                        each.score([SequenceRows(slot, tokens, [1] * rows)])
                        spent.setdefault((name, rows), []).append((time.perf_counter() - began) * 1e3)
            for name, (each, _) in packed.items():
                line: dict[str, Any] = {"tokens": tokens, "cache": name, "mib": round(each.cache.bytes / 2**20, 1)}
                for rows in (1, 8):
                    line[f"ms_{rows}"] = round(statistics.median(spent[name, rows][1:]), 2)
                    line[f"least_ms_{rows}"] = round(min(spent[name, rows][1:]), 2)
                lines.append(line)
                print(line)
    about = {"dim": 768, "layers": 8, "heads": heads, "dtype": str(dtype), "threads": torch.get_num_threads()}
    return about | {"laps": laps, "passes": lines}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("quality", "speed"))
    parser.add_argument("--text", help="a gzipped file of JSON lines with a field text")
    parser.add_argument("--windows", type=int, default=20)
    parser.add_argument("--cache", action="append", help="beside full; by default all that there are")
    parser.add_argument("--kv-budget", type=int, default=256)
    parser.add_argument("--tokens", type=int, action="append", help="in the cache; by default 1024 to 8192")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--heads", type=int, default=12, help="of keys and of queries")
    parser.add_argument("--laps", type=int, default=15)
    given = parser.parse_args()
    if given.what == "quality":
        if not given.text:
            parser.error("quality needs --text")
        found = quality(given.text, given.windows, ["full", *(given.cache or CACHES[1:])], given.kv_budget)
    else:
        found = speed(given.tokens or [1024, 2048, 4096, 8192], getattr(torch, given.dtype), given.heads, given.laps)
    print(json.dumps(found))


if __name__ == "__main__":
    main()

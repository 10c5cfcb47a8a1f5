"""``sakiyomi bench locret``: which device each system fits in, one measurement, and the article's four tables of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sakiyomi.cache.policies import read_cache
from sakiyomi.cache.policies.retaining.formats import read_heads
from sakiyomi.core.checkpoint import Checkpoint, read_checkpoint
from sakiyomi.core.embedded import folder_of
from sakiyomi.core.errors import LoadError
from sakiyomi.evaluation.bench.config import Note, silent
from sakiyomi.evaluation.bench.long.config import LocretConfig, budget_pairs
from sakiyomi.evaluation.bench.long.run import run as run_long
from sakiyomi.evaluation.bench.report import Row
from sakiyomi.model_executor.loading.families import read_config, text_config
from sakiyomi.model_executor.loading.model import parse_dtype
from sakiyomi.theory.traffic import kv_bytes

SYSTEMS = ("FullAttn", "InfLLM", "HF-2bits", "SirLLM", "MInference", "Locret")
"""Of the article's first two tables, in its order."""
TABLES: dict[str, tuple[str, dict[str, str]]] = {
    "systems": (
        "figure 1: memory and score by system",
        {key: key for key in ("name", "length", "accuracy", "of_full", "kv_bytes", "far_bytes", "peak_bytes", "state")},
    ),
    "speed": (
        "tokens of the prompt a second, context and right answers; a star: the longest that fits",
        # Tokens of prompt and answer by the seconds of both, as the article counts them.
        {"name": "name", "tokens_per_second": "prefill_tokens_per_second"}
        | {key: key for key in ("decode_tokens_per_second", "length", "accuracy", "state")},
    ),
}
"""Their titles, and their columns with what each shows."""
NO_LOCOCO = "no convolutions were given: train some (sakiyomi train lococo), and pass --lococo FOLDER"
DEVICES = (8, 12, 16, 24, 40, 80)
"""GB of memory of common devices."""
CHUNK = 1024


Shape = tuple[int, int, int, int]
"""Of a model: layers, heads of queries, heads of keys, numbers of a head."""


def _shape(sizes: Any) -> Shape:
    """From a configuration of transformers."""
    heads = int(sizes.num_attention_heads)
    kv_heads = int(getattr(sizes, "num_key_value_heads", None) or heads)
    dim = int(getattr(sizes, "head_dim", None) or sizes.hidden_size // heads)
    return int(sizes.num_hidden_layers), heads, kv_heads, dim


def run(config: LocretConfig, note: Note = silent, *, pictures: str | None = None) -> Iterator[Row]:
    """Yield the table of devices, the rows of ``bench long``, and the article's tables.

    Args:
        config: what is asked for.
        note: receives progress messages.
        pictures: folder for maps of what each system kept of one prompt; None: none are drawn.

    Raises:
        SakiyomiError: what is asked for cannot be, or the heads are another model's; before any work.
    """
    folder = folder_of(config.target)
    shape = _shape(text_config(read_config(folder))) if folder.is_dir() else None
    if shape is not None:
        _check_heads(config.heads_name, shape)
    measured = run_long(config.long(), note, pictures=pictures)

    def rows() -> Iterator[Row]:
        if shape is not None:
            yield fitting(config, shape, read_checkpoint(folder))
        whole = next(measured)
        yield whole
        if whole.error is None:
            yield from _tables(config, whole)
        yield from measured

    return rows()


def _check_heads(name: str, shape: Shape) -> None:
    """Refuse the heads of another model, by their sizes.

    Raises:
        UnsupportedError: they are, with both numbers.
        LoadError: there are none.
    """
    if not (Path(name).expanduser().exists() or folder_of(name).exists()):
        raise LoadError(
            f"there are no heads {name!r} here; download them (huggingface-cli download {name} --local-dir FOLDER) and "
            "give --heads FOLDER"
        )
    layers, heads, kv_heads, dim = shape
    read_heads(name).check([dim * (heads + 2 * kv_heads)] * layers, [kv_heads] * layers, {})


def _tables(config: LocretConfig, whole: Row) -> Iterator[Row]:
    """The article's tables, by its names; a system whose prompts had to be shorter has a star."""
    names = {spec: name for name, spec in reversed(config.systems().items())}
    lines = [{**line, "name": names[line["spec"]] + "*" * line["starred"]} for line in whole.lines]
    for table, (title, columns) in TABLES.items():
        own = [line for line in lines if line["name"].rstrip("*") in SYSTEMS]
        yield Row(table, title, [{head: line.get(key) for head, key in columns.items()} for line in own])
    right: dict[int, dict[str, float | None]] = defaultdict(lambda: defaultdict(lambda: None))
    for line in lines:
        right[line["length"]][line["name"]] = 100 * line["accuracy"] if "accuracy" in line else None
    quantized = []
    for length, of in right.items():
        for name in ("FullAttn", "Locret"):
            plain, packed = of[name], of[f"{name}-4bits"]
            lost = None if plain is None or packed is None else plain - packed
            quantized.append({"name": name, "length": length, "M": plain, "M-4bits": packed, "minus_delta": lost})
    yield Row("quantized", "right answers in percent with keys and values in 4 bits, and what is lost", quantized)
    combined = [
        {"length": length} | {name: of[name] for name in ("LoCoCo", "Locret", "Combination")}
        for length, of in right.items()
    ]
    notes = [NO_LOCOCO] if all(line["LoCoCo"] is None for line in combined) else []
    yield Row("combined", "right answers in percent of LoCoCo, Locret and both", combined, notes=notes)


def fitting(config: LocretConfig, shape: Shape, checkpoint: Checkpoint) -> Row:
    """Weights, keys and values of each system at each length, and the smallest device that holds both.

    Activations of a chunk and memory of the libraries are not included.
    """
    dtype = parse_dtype(config.dtype)
    itemsize = dtype.itemsize if dtype is not None else {"float32": 4}.get(str(checkpoint.dtype), 2)
    layers, _, kv_heads, dim = shape
    weights, pair = checkpoint.bytes_as(itemsize), kv_bytes(layers, kv_heads, dim, itemsize)
    lines = []
    for length in config.long().numbers("lengths"):
        for name, spec in config.systems().items():
            policy, packing, _, _ = read_cache(spec)
            held = length
            if policy is not None:
                held = min(length, budget_pairs(config.budget, length) + (config.chunk_size or CHUNK))
            size = itemsize if packing is None else packing.bits / 8 + 4 / 32  # two halves a group of 32
            kept = held * pair * size / itemsize
            whole = (weights + kept) / 1e9
            lines.append(
                {
                    "name": name,
                    "length": length,
                    "kv GB": kept / 1e9,
                    "elsewhere GB": length * pair / 1e9 if policy is not None and policy.recalls else None,
                    "with weights GB": whole,
                    "fits in": next((f"{room} GB" for room in DEVICES if whole <= room), f"over {DEVICES[-1]} GB"),
                }
            )
    title = "on paper: keys and values, with the weights, and the smallest device that holds both"
    return Row("fits", title, lines, {"weights_bytes": weights, "dtype_bytes": itemsize})

"""``sakiyomi bench locret``: what fits, then every system once, then the article's four tables from those figures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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

SYSTEMS = ("FullAttn", "InfLLM", "HF-2bits", "SirLLM", "MInference", "Locret")
"""Of the article's first two tables, in its order."""


def run(config: LocretConfig, note: Note = silent, *, pictures: str | None = None) -> Iterator[Row]:
    """Give what fits in which memory, what was measured of every system, and the tables.

    Args:
        config: what is asked for.
        note: is told what is going on.
        pictures: folder for maps of what each system kept of one prompt; None: none are drawn.

    Raises:
        SakiyomiError: what is asked for cannot be, or the heads are another model's; before any work.
    """
    folder = folder_of(config.target)
    sizes = text_config(read_config(folder)) if folder.is_dir() else None
    if sizes is not None:
        _check_heads(config, sizes)
    measured = run_long(config.long(), note, pictures=pictures)

    def rows() -> Iterator[Row]:
        if sizes is not None:
            yield fitting(config, sizes, read_checkpoint(folder))
        whole = next(measured)
        yield whole
        if whole.error is None:
            lines = _named(config, whole.lines)
            title = "figure 1: memory and score by system"
            held = ("kv_bytes", "far_bytes", "peak_bytes")
            yield _systems("systems", title, lines, "length", "accuracy", "of_full", *held, "state")
            # Tokens of prompt and answer by the seconds of both, as the article counts them.
            title = "tokens of the prompt a second, context and right answers; a star: the longest that fits"
            keys = ("decode_tokens_per_second", "length", "accuracy", "state")
            yield _systems("speed", title, lines, *keys, tokens_per_second="prefill_tokens_per_second")
            yield _quantized(lines)
            yield _combined(lines)
        yield from measured

    return rows()


def _check_heads(config: LocretConfig, sizes: Any) -> None:
    """Refuse the heads of another model, by their sizes.

    Raises:
        UnsupportedError: they are, with both numbers.
        LoadError: there are none.
    """
    name = config.heads_name
    if not (Path(name).expanduser().exists() or folder_of(name).exists()):
        raise LoadError(
            f"there are no heads {name!r} here; download them (huggingface-cli download {name} --local-dir FOLDER) and "
            "give --heads FOLDER"
        )
    heads = int(sizes.num_attention_heads)
    dim = int(getattr(sizes, "head_dim", None) or sizes.hidden_size // heads)
    kv_heads = int(getattr(sizes, "num_key_value_heads", None) or heads)
    layers = int(sizes.num_hidden_layers)
    read_heads(name).check([dim * (heads + 2 * kv_heads)] * layers, [kv_heads] * layers, {})


def _named(config: LocretConfig, lines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The lines of every system by the article's names; a system whose prompts had to be shorter has a star."""
    names = {spec: name for name, spec in reversed(config.systems().items())}
    return [{**line, "system": names[line["spec"]] + "*" * line["starred"]} for line in lines]


def _systems(name: str, title: str, lines: Sequence[Mapping[str, Any]], *keys: str, **renamed: str) -> Row:
    """A table of the article's own systems with these figures, those first that have another name here."""
    own = [line for line in lines if line["system"].rstrip("*") in SYSTEMS]
    known = {"name": "system", **renamed, **dict(zip(keys, keys, strict=True))}
    return Row(name, title, [{head: line.get(key) for head, key in known.items()} for line in own])


def _quantized(lines: Sequence[Mapping[str, Any]]) -> Row:
    shown = []
    for length in dict.fromkeys(line["length"] for line in lines):
        found = {line["system"]: line.get("accuracy") for line in lines if line["length"] == length}
        for name in ("FullAttn", "Locret"):
            plain, packed = found.get(name), found.get(f"{name}-4bits")
            lost = None if plain is None or packed is None else 100 * (plain - packed)
            shown.append(
                {"name": name, "length": length, "M": _percent(plain), "M-4bits": _percent(packed), "minus_delta": lost}
            )
    return Row("quantized", "right answers in percent with keys and values in 4 bits, and what is lost", shown)


def _combined(lines: Sequence[Mapping[str, Any]]) -> Row:
    shown = []
    for length in dict.fromkeys(line["length"] for line in lines):
        found = {line["system"]: line.get("accuracy") for line in lines if line["length"] == length}
        shown.append({"length": length} | {n: _percent(found.get(n)) for n in ("LoCoCo", "Locret", "Combination")})
    title = "right answers in percent of LoCoCo, Locret and both"
    missing = all(line["LoCoCo"] is None for line in shown)
    notes = (
        ["no convolutions were given: train some (sakiyomi train lococo), and pass --lococo FOLDER"] if missing else []
    )
    return Row("combined", title, shown, notes=notes)


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


DEVICES = (8, 12, 16, 24, 40, 80)
"""GB of memory of common devices."""
CHUNK = 1024


def pair_bytes(sizes: Any, itemsize: float) -> float:
    """Bytes of one token's keys and values in all layers.

    Args:
        sizes: a configuration of transformers.
        itemsize: bytes of a number.
    """
    heads = int(sizes.num_attention_heads)
    dim = int(getattr(sizes, "head_dim", None) or sizes.hidden_size // heads)
    return 2 * int(sizes.num_hidden_layers) * int(getattr(sizes, "num_key_value_heads", None) or heads) * dim * itemsize


def fitting(config: LocretConfig, sizes: Any, checkpoint: Checkpoint) -> Row:
    """Weights, keys and values of each system at each length, and the smallest device that holds both.

    Rows of a chunk, and what the libraries take, come on top.
    """
    dtype = parse_dtype(config.dtype)
    itemsize = dtype.itemsize if dtype is not None else {"float32": 4}.get(str(checkpoint.dtype), 2)
    weights = checkpoint.bytes_as(itemsize)
    lines = []
    for length in config.long().numbers("lengths"):
        for name, spec in config.systems().items():
            policy, packing, _, _ = read_cache(spec)
            held = length
            if policy is not None:
                held = min(length, budget_pairs(config.budget, length) + (config.chunk_size or CHUNK))
            size = itemsize if packing is None else packing.bits / 8 + 4 / 32  # two halves a group of 32
            kept = held * pair_bytes(sizes, size)
            far = length * pair_bytes(sizes, itemsize) if policy is not None and policy.recalls else None
            whole = (weights + kept) / 1e9
            device = next((f"{room} GB" for room in DEVICES if whole <= room), f"over {DEVICES[-1]} GB")
            lines.append(
                {
                    "name": name,
                    "length": length,
                    "kv GB": kept / 1e9,
                    "elsewhere GB": None if far is None else far / 1e9,
                    "with weights GB": whole,
                    "fits in": device,
                }
            )
    title = "on paper: keys and values, with the weights, and the smallest device that holds both"
    return Row("fits", title, lines, {"weights_bytes": weights, "dtype_bytes": itemsize})

"""What this machine is, what it lacks, and what a step of a model costs on it. Measures; prints nothing."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sakiyomi.core.dtypes import dtype_name
from sakiyomi.core.memory import available_bytes
from sakiyomi.core.processors import usable_cpus
from sakiyomi.core.version import __version__
from sakiyomi.kernels import build
from sakiyomi.kernels.batch import SequenceRows
from sakiyomi.kernels.variants import cpuinfo, features
from sakiyomi.model_executor.own_forward import BY_TEXT, OwnForward
from sakiyomi.model_executor.weights import rounding_of

if TYPE_CHECKING:
    from sakiyomi.drafters import Drafter
    from sakiyomi.model_executor.runner import ModelRunner

ROWS = (1, 4, 8, 16)
_FLAGS = (
    "avx2",
    "avx_vnni",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "amx_bf16",
    "amx_int8",
    "asimddp",
    "bf16",
    "i8mm",
)
_PROBE_BYTES = 1 << 28


def _facts() -> dict[str, Any]:
    return {
        "sakiyomi": __version__,
        "commit": _commit(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "processor": processor(),
        "cores": len(usable_cpus()),
        "threads": torch.get_num_threads(),
    }


def describe() -> dict[str, Any]:
    """Versions, devices, threads, memory and what the processor can do."""
    return _facts() | {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "processor_features": [flag for flag in _FLAGS if flag in features()],
        "memory_available_bytes": available_bytes("cpu"),
        "devices": ["cpu", *_gpus()],
    }


def conditions(**more: Any) -> dict[str, Any]:
    """The few facts that belong beside every measurement, and more of them."""
    return _facts() | {"load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None} | more


_SPEED = {
    "x86_64": {
        "avx512f": "no AVX-512: the CPU kernels use narrower vectors",
        "avx512_vnni avx_vnni": "no VNNI of AVX: weights in 8 and 4 bits gain less in passes of many rows",
        "avx512_bf16": "no AVX-512 BF16: weights in bfloat16 are widened first, so that passes of many rows are slower",
    },
    "aarch64": {
        "asimddp": "no dot products of NEON (asimddp): weights in 8 and 4 bits gain less in passes of many rows"
    },
}
"""What goes with an instruction set, by the machine and the names in Linux of the flags of which one suffices."""


def lacks() -> list[str]:
    """What would make this machine faster and is not there; one sentence each, with the remedy."""
    found = []
    if build.native() is None:
        found.append(f"no CPU kernels ({build.origin()}): plain torch runs instead, slower, with the same tokens")
    if not torch.cuda.is_available():
        found.append("no CUDA device that torch can use: models run on the CPU")
    machine, flags = platform.machine().replace("AMD64", "x86_64"), features()
    if machine not in _SPEED and machine != "arm64":
        found.append(f"{machine}: the CPU kernels name instructions of x86-64 and AArch64 only")
    return found + [
        what for names, what in _SPEED.get(machine, {}).items() if flags and flags.isdisjoint(names.split())
    ]


def bandwidth(threads: int | None = None, device: str = "cpu") -> float:
    """Bytes per second that a device reads from its memory: it bounds plain decoding.

    Args:
        threads: that read together, on the CPU; None: torch's.
        device: "cpu", "cuda" or "cuda:N".
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        # An accelerator reads so fast that a small block would time the call.
        size = min(_PROBE_BYTES if device == "cpu" else 8 * _PROBE_BYTES, available_bytes(device) // 4)
        block = torch.ones(max(size // 8, 1), dtype=torch.int64, device=device)
        # The sum is read back, which waits for it.
        seconds = min(_timed(lambda: int(block.sum())) for _ in range(6))
        return block.numel() * 8 / seconds
    finally:
        torch.set_num_threads(before)


def costs(target: ModelRunner, drafter: Drafter | None, *, context: int = 128, repeats: int = 15) -> dict[str, Any]:
    """Milliseconds of target passes over T rows, of a draft step, and the ratios that the theory is about.

    Args:
        target: its recorded passes are used if there are any.
        drafter: if it runs a draft model, steps of that model are timed too.
        context: tokens in the cache.
        repeats: passes of each shape; medians are given, shapes take turns.

    Returns:
        ``target_ms`` and ``v`` (in plain target steps) by T; ``draft_ms`` and ``c`` (None without a draft model);
        ``runs``: what computes the target's passes, and why nothing faster does.
    """
    passes = pass_seconds(target, ROWS, context=context, repeats=repeats)
    model = drafter.model if drafter is not None else None
    draft = None if model is None else pass_seconds(model, (1,), context=context, repeats=repeats)[1]
    return {
        "context": context,
        "compiled": target.recorded() and (model is None or model.recorded()),
        "dtype": rounding_of(target.weights) or dtype_name(target.dtype),
        "draft_dtype": None if model is None else rounding_of(model.weights) or dtype_name(model.dtype),
        "target_ms": {rows: 1000 * seconds for rows, seconds in passes.items()},
        "v": {rows: seconds / passes[1] for rows, seconds in passes.items()},
        "draft_ms": None if draft is None else 1000 * draft,
        "c": None if draft is None else draft / passes[1],
        "runs": _path(target),
    }


def _path(model: ModelRunner) -> str:
    """What computes a model's passes, and, where it is not our cache and kernels, why."""
    if isinstance(model.module, OwnForward):
        way = BY_TEXT[model.module.reader.way]
        return f"each text by itself through its class's own forward, {way}: {model.module.why}"
    if model.weights.packed is None:
        return "plain torch" if model.device.type == "cpu" else "torch, with captured passes where it can have them"
    return "the compiled kernels"


def pass_seconds(model: ModelRunner, rows: Sequence[int], *, context: int = 128, repeats: int = 15) -> dict[int, float]:
    """Median seconds of a pass over so many rows of one request, behind ``context`` tokens in the cache."""
    context = max(1, min(context, model.max_context - max(rows)))
    tokens = [(7 * i + 1) % model.vocab_size for i in range(context + max(rows))]
    with model.cache.lent(context + max(rows)) as slot:
        model.score([SequenceRows(slot, 0, tokens[:context], prompt=True)], last=True)
        model.cache.commit(slot, 0, range(context))
        times: dict[int, list[float]] = {count: [] for count in rows}
        for repeat in range(repeats + 1):
            for count in rows:
                segment = SequenceRows(slot, context, tokens[context : context + count])
                seconds = _timed(lambda s=segment: model.score([s]))  # type: ignore[misc]
                if repeat:
                    times[count].append(seconds)
        return {count: statistics.median(found) for count, found in times.items()}


def _timed(run: Callable[[], Any]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def _commit() -> str | None:
    """The commit of a checkout that this package runs from, + where files differ from it; None for an installed one."""
    folder = Path(__file__).resolve().parent
    if not (folder.parents[2] / ".git").exists():
        return None
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=10, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def processor() -> str:
    """Its name, as the system tells it."""
    for key in ("model name", "Model"):
        for line in cpuinfo():
            if line.startswith(key):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _gpus() -> list[str]:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [f"cuda:{i} {torch.cuda.get_device_name(i)}" for i in range(count)]

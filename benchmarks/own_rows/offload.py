"""A target whose weights are read from the disk at every pass: how much of tau becomes speed with large trees."""

from __future__ import annotations

import os
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any

from sakiyomi.core.errors import UnsupportedError
from sakiyomi.core.params import SamplingParams
from sakiyomi.engine.llm import LLM
from sakiyomi.engine.plain import EngineView
from sakiyomi.evaluation.bench.frame import PairRow, Race, Races, Run, declared, run_peer
from sakiyomi.evaluation.bench.models import Pair
from sakiyomi.evaluation.bench.peers import Transformers
from sakiyomi.evaluation.bench.runner import Standing, TimedRun

__all__ = ["offload"]

TREES = ((8, 15), (16, 64), (16, 128))
"""Levels and nodes."""
RATE, GAMMAS = 0.95, (16, 24)
"""Of the oracle: 11.6 and 14.4 tokens a pass by theory."""
_BLOCK = 1 << 22


@declared("target read from the disk at every pass: speed-up against tau")
def offload(row: PairRow) -> Races:
    """Greedy text, one prompt at a time; what a pass reads is dropped from the page cache after it.

    So every pass reads the disk, as it does for a target larger than the memory. ``share`` is ratio / tau: 1 where a
    pass over a tree costs no more than one over a token, and drafting nothing.
    """
    if not hasattr(os, "posix_fadvise"):
        raise UnsupportedError(
            "row offload drops files from the page cache, which this system does not offer; use Linux"
        )
    drafted = row.llm(offload="disk")
    known = row.llm(f"oracle:{RATE:g}", offload="disk")
    for llm in (drafted, known):
        llm.target.watchers.append(lambda plan, seconds: _drop(_stream(drafted).files))
    speed = _disk_speed(_stream(drafted).files)

    def run(llm: LLM, way: Any = None, **params: Any) -> Run:
        return partial(_measured, _stream(llm), row.run(llm if way is None else way, ignore_eos=True, **params))

    runs = {"plain": run(drafted, EngineView(drafted), gamma=1)}
    runs |= {f"{nodes} nodes, {depth} levels": run(drafted, gamma=depth, nodes=nodes) for depth, nodes in TREES}
    runs["auto"] = run(drafted, gamma="auto")
    runs |= {f"oracle:{RATE:g}, gamma {gamma}": run(known, gamma=gamma, seed=0) for gamma in GAMMAS}
    if row.config.peers:
        runs["transformers plain"] = _peer(row.pair, row.params(gamma=1, ignore_eos=True))
    yield Race(runs, row.pair.judge(drafted), lines=lambda standings: map(_line, standings))
    return row.conditions(
        drafted,
        gamma="by line",
        read_bytes=sum(extent.nbytes for extent in _stream(drafted).extents.values()),
        disk_gb_per_second=speed / 1e9,
        page_cache="dropped after every pass (posix_fadvise)",
    )


def _stream(llm: LLM) -> Any:
    stream = llm.target.weights.stream
    assert stream is not None, "loaded with offload='disk'"
    return stream


def _measured(stream: Any, run: Run) -> TimedRun:
    _drop(stream.files)
    before = stream.bytes_read
    timed = run()
    return timed.more(read_gb_per_second=(stream.bytes_read - before) / timed.seconds / 1e9)


def _line(standing: Standing) -> dict[str, Any]:
    shown = standing.to_dict()
    tau, ratio, score = (shown.get(name) for name in ("tau", "ratio", "score_ms"))
    line = {name: shown.get(name) for name in ("name", "tokens_per_second", "ratio", "tau")}
    line |= {"share": ratio / tau if ratio and tau else None, "pass_seconds": score and score / 1000}
    line |= {name: shown.get(name) for name in ("draft_ms", "overhead_ms")}
    return line | {"read GB/s": shown.get("read_gb_per_second"), "equal": shown["equal"]}


def _peer(pair: Pair, params: SamplingParams) -> Any:
    """Transformers on the same files, offloaded by accelerate; they leave the page cache before each pass."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        pair.target.folder, device_map={"": "disk"}, dtype=pair.target.model.dtype
    )
    files = sorted(Path(pair.target.folder).glob("*.safetensors"))
    model.register_forward_pre_hook(lambda *_: _drop(files))
    peer = Transformers(model, None, 1, ())
    return partial(run_peer, peer, pair.prompts, params)


def _drop(files: list[Path]) -> None:
    for path in files:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _disk_speed(files: list[Path], most: int = 1 << 30) -> float:
    """Bytes a second of a sequential read; the median of three."""
    speeds = []
    block = bytearray(_BLOCK)
    for _ in range(3):
        _drop(files)
        began, done = time.perf_counter(), 0
        for path in files:
            with path.open("rb", buffering=0) as file:
                while done < most and (count := file.readinto(block)):
                    done += count
        speeds.append(done / (time.perf_counter() - began))
    return statistics.median(speeds)

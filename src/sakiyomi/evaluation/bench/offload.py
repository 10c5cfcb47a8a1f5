"""A target that is read from the disk at every pass: how much of its tau a large tree turns into speed."""

from __future__ import annotations

import os
import statistics
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sakiyomi.core.errors import UnsupportedError
from sakiyomi.core.params import SamplingParams
from sakiyomi.engine.plain import EngineView
from sakiyomi.evaluation.bench.config import BenchConfig, Note
from sakiyomi.evaluation.bench.models import Pair
from sakiyomi.evaluation.bench.peers import Transformers
from sakiyomi.evaluation.bench.report import Row, unclaimed
from sakiyomi.evaluation.bench.runner import Contender, Lap, Spread, Standing, race
from sakiyomi.evaluation.bench.speed import our_lap, pair_conditions, peer_lap

if TYPE_CHECKING:
    from sakiyomi.engine.llm import LLM

__all__ = ["offload"]

TREES = ((8, 15), (16, 64), (16, 128))
"""Levels and nodes."""
RATE, GAMMAS = 0.95, (16, 24)
"""Of the oracle: 11.6 and 14.4 tokens a pass by theory."""
_BLOCK = 1 << 22


def offload(config: BenchConfig, note: Note) -> Row:
    """Greedy text, one prompt at a time; what a pass reads is dropped from the page cache behind it.

    So every pass reads the disk, as it does for a target larger than the memory. ``share`` is ratio / tau: 1 where a
    pass over a tree costs no more than one over a token, and drafting nothing.
    """
    if not hasattr(os, "posix_fadvise"):
        raise UnsupportedError(
            "row offload drops files from the page cache, which this system does not offer; use Linux"
        )
    pair = Pair(config)
    note("offload: loading")
    drafted = pair.llm(offload="disk")
    known = pair.llm(f"oracle:{RATE:g}", offload="disk")
    for llm in (drafted, known):
        _stream(llm).cold = True
    drafted.wait()
    speed = _disk_speed(_stream(drafted).files)
    params = partial(SamplingParams, max_new_tokens=config.max_new_tokens, ignore_eos=True)
    judge, prompts = pair.judge(drafted), pair.prompts
    ways: dict[str, tuple[Any, LLM, SamplingParams]] = {"plain": (EngineView(drafted), drafted, params(gamma=1))}
    for depth, nodes in TREES:
        ways[f"{nodes} nodes, {depth} levels"] = (drafted, drafted, params(gamma=depth, nodes=nodes))
    ways["auto"] = (drafted, drafted, params(gamma="auto"))
    ways |= {f"oracle:{RATE:g}, gamma {gamma}": (known, known, params(gamma=gamma)) for gamma in GAMMAS}
    contenders = [
        Contender(name, partial(_lap, engine, llm, prompts, chosen), judge)
        for name, (engine, llm, chosen) in ways.items()
    ]
    if config.peers:
        contenders.append(Contender("transformers plain", _peer(pair, params(gamma=1)), judge))
    standings = race(contenders, repeats=config.repeats, note=note)
    spread = Spread.of(standings)
    conditions = pair_conditions(pair, drafted) | {
        "gamma": "by line",
        "laps": config.repeats,
        "A/A": spread and str(spread),
        "read_bytes": sum(extent.nbytes for extent in _stream(drafted).extents.values()),
        "disk_gb_per_second": speed / 1e9,
        "page_cache": "dropped behind every read (posix_fadvise)",
    }
    notes = [f"{s.name}: {s.agreement.note}" for s in standings if s.agreement.note] + unclaimed(standings, spread)
    title = "target read from the disk at every pass: speed-up against tau"
    return Row("offload", title, [_line(standing) for standing in standings], conditions, notes)


def _stream(llm: LLM) -> Any:
    stream = llm.target.weights.stream
    assert stream is not None, "loaded with offload='disk'"
    return stream


def _lap(engine: Any, llm: LLM, prompts: list[list[int]], params: SamplingParams) -> Lap:
    stream = _stream(llm)
    _drop(stream.files)
    before = stream.bytes_read
    lap = our_lap(engine, prompts, params)
    lap.figures["read_gb_per_second"] = (stream.bytes_read - before) / lap.seconds / 1e9
    return lap


def _line(standing: Standing) -> dict[str, Any]:
    shown = standing.to_dict()
    tau, ratio, score = (shown.get(name) for name in ("tau", "ratio", "score_ms"))
    return {
        "name": shown["name"],
        "tokens_per_second": shown["tokens_per_second"],
        "ratio": ratio,
        "tau": tau,
        "share": ratio / tau if ratio and tau else None,
        "pass_seconds": score and score / 1000,
        "draft_ms": shown.get("draft_ms"),
        "overhead_ms": shown.get("overhead_ms"),
        "read GB/s": shown.get("read_gb_per_second"),
        "equal": shown["equal"],
    }


def _peer(pair: Pair, params: SamplingParams) -> Any:
    """Transformers on the same files, by accelerate's own hooks; they are dropped before each of its passes."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        pair.target.folder, device_map={"": "disk"}, dtype=pair.target.model.dtype
    )
    files = sorted(Path(pair.target.folder).glob("*.safetensors"))
    model.register_forward_pre_hook(lambda *_: _drop(files))
    peer = Transformers(model, None, 1, ())
    return partial(peer_lap, peer, pair.prompts, params)


def _drop(files: list[Path]) -> None:
    for path in files:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _disk_speed(files: list[Path], most: int = 1 << 30) -> float:
    """Bytes a second of one reader, block after block; the median of three times."""
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

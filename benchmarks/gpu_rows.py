"""What `gpu.py` measures: the rows, and the inflated models that they run on."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch

from sakiyomi import LLM
from sakiyomi.cache.policies.specs import PACKINGS, POLICIES, SPARSE
from sakiyomi.core.embedded import DEFAULT, DRAFTS
from sakiyomi.core.errors import LoadError, UnsupportedError
from sakiyomi.engine.machine import bandwidth
from sakiyomi.engine.plain import EngineView
from sakiyomi.evaluation.bench.config import BenchConfig, silent
from sakiyomi.evaluation.bench.frame import PairRow, run_ours, run_peer
from sakiyomi.evaluation.bench.models import Pair
from sakiyomi.evaluation.bench.peers import Transformers
from sakiyomi.evaluation.bench.runner import Agreement, Contender, Outputs, Standing, TimedRun, same_tokens
from sakiyomi.evaluation.bench.speed import everybody

ROOT = Path(__file__).resolve().parents[1]
DTYPE = "bfloat16"
ROOMY, TIGHT = 4096, 64
"""Pairs of a head that hold every text here in any layer, and about half of one."""
TRAINED = {"locret": "tales-retaining"}
"""Policies with heads that belong to `tales`: its texts are those of the inflated targets."""

Lines = Iterator[dict[str, Any]]


def environment(**more: str) -> dict[str, str]:
    """Of a process that imports the package beside this folder."""
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    return os.environ | {"PYTHONPATH": path} | more


class Models:
    """Inflated models, each made by a process of its own.

    Args:
        folder: where they are, and stay; one that is there already is not made again.
        sizes: to be made, as `inflate.py` takes them.
    """

    def __init__(self, folder: Path, sizes: Sequence[str]) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        own = environment(OMP_NUM_THREADS=str(max(1, (os.cpu_count() or 1) // 3)))  # the rows need some, too
        self._makers: dict[str, subprocess.Popen[bytes]] = {}
        for size in sizes:
            if not (folder / size).exists():
                command = [sys.executable, str(ROOT / "benchmarks/inflate.py"), str(folder / size), "--params", size]
                with self._log(size).open("wb") as log:
                    self._makers[size] = subprocess.Popen(command, env=own, stdout=log, stderr=log)

    def _log(self, size: str) -> Path:
        return self.folder / f"{size}.log"

    def ready(self, size: str) -> bool:
        """Whether it is there, or could not be made. A model comes to its place when it is complete."""
        maker = self._makers.get(size)
        return (self.folder / size).exists() or (maker is not None and maker.poll() is not None)

    def get(self, size: str) -> str:
        """Its folder; waits for it."""
        while not self.ready(size):
            time.sleep(0.2)
        if not (self.folder / size).exists():
            raise LoadError(f"{size} was not made: {self._log(size).read_text(encoding='utf-8')[-300:]}")
        return str(self.folder / size)

    def close(self) -> None:
        """End what is not done."""
        for maker in self._makers.values():
            maker.send_signal(signal.SIGINT)  # it removes what it has begun
            try:
                maker.wait(10)
            except subprocess.TimeoutExpired:
                maker.kill()


@dataclass(frozen=True)
class Bench:
    """What a row is measured with.

    Attributes:
        device: where it runs.
        small: everything is in a small form.
        sizes: of the targets, by name.
        models: makes the targets.
        pairs: target and draft by size, once they are loaded.
        size: of the row's target.
    """

    device: str
    small: bool
    sizes: Mapping[str, str]
    models: Models
    pairs: dict[str, Pair]
    size: str = ""

    def row(self, **settings: Any) -> PairRow:
        """A row about the pair, with these settings where not everything is small."""
        count, tokens, laps = (2, 24, 1) if self.small else (8, 128, 3)
        config = BenchConfig(
            target=self.models.get(self.size),
            draft=f"model:{DRAFTS[DEFAULT]}",
            dtype=DTYPE,
            device=self.device,
            count=count,
            max_new_tokens=tokens,
            repeats=laps,
        )
        pair = self.pairs.setdefault(self.size, Pair(config))
        return PairRow(self.size, config if self.small else replace(config, **settings), silent, pair)

    def llm(self, pair: Pair, **options: Any) -> LLM:
        """Our engine on a pair whose target is in memory already."""
        target = pair.target.model, pair.target.tokenizer
        llm = LLM(target, pair.config.draft, dtype=DTYPE, device=self.device, **options)
        llm.wait()  # for compiled kernels; a GPU's passes are captured as they come, in the run that warms up
        return llm


def device(bench: Bench) -> Lines:
    """Of a copy the bytes that are read and those that are written count."""
    name, laps, size = bench.device, *((1, 1 << 24) if bench.small else (4, 1 << 28))
    if name != "cpu":
        found = torch.cuda.get_device_properties(name)
        about = f"{found.name}, {found.major}.{found.minor}, CUDA {torch.version.cuda}"
        yield {"name": about, "memory GB": found.total_memory / 1e9}
    yield {"name": "sum of a block", "GB/s": max(bandwidth(device=name) for _ in range(laps)) / 1e9}
    block = torch.ones(size, dtype=torch.int64, device=name)
    other, seconds = torch.empty_like(block), []
    for _ in range(20):
        began = time.perf_counter()
        other.copy_(block)
        int(other[-1])  # waits for it
        seconds.append(time.perf_counter() - began)
    yield {"name": "copy of a block", "GB/s": 2 * block.nbytes / min(seconds) / 1e9}


def tests(bench: Bench) -> Lines:
    """Files without such a test are not read: they may import what is not installed."""
    if importlib.util.find_spec("pytest") is None:
        raise UnsupportedError("pytest is not installed")
    files = [
        str(path)
        for path in (ROOT / "tests").rglob("test_*.py")
        if "pytest.mark.gpu" in path.read_text(encoding="utf-8")
    ]
    # Options of plugins that are not there, and warnings of other versions, are no failures.
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-W", "default", "-p", "no:cacheprovider"]
    command += ["-o", "addopts=--import-mode=importlib", *files]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, encoding="utf-8")
    counts = {kind: int(count) for count, kind in re.findall(r"(\d+) (passed|failed|skipped|error)", done.stdout)}
    wrong = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR", "E  "))]
    note = "; ".join(wrong) if counts else f"no test ran: {(done.stdout + done.stderr)[-300:]}"
    yield {"name": "pytest -m gpu", "passed": 0, **counts, "ok": done.returncode == 0, "note": note}


def single(bench: Bench) -> Lines:
    row = bench.row()
    llm = bench.llm(row.pair)
    return _lines(row.race(everybody(row, llm, auto=True)), llm)


def peers(bench: Bench) -> Lines:
    row = bench.row(max_new_tokens=48, repeats=1)
    llm = bench.llm(row.pair)
    return _lines(row.race(everybody(row, llm, peers=("plain", "assisted"))), llm)


def compiled(bench: Bench) -> Lines:
    row = bench.row(max_new_tokens=48, repeats=1)
    pair, llm = row.pair, bench.llm(row.pair)
    peer = Transformers(pair.target.model, None, 1, pair.stop, cache="static")
    run = partial(run_peer, peer, pair.prompts, row.params())
    return _lines(row.race([*everybody(row, llm), Contender("transformers static", run, pair.judge())]), llm)


def batches(bench: Bench) -> Lines:
    """Texts of a batch are compared with those of its requests alone."""
    counts = (1, 2, 4) if bench.small else (1, 4, 8, 16, 32, 64)
    row = bench.row(max_new_tokens=64, repeats=2)
    llm = bench.llm(row.pair, max_batch=counts[-1])
    ways = {"plain": EngineView(llm), "draft": llm}
    prompts = list(islice(cycle(row.pair.prompts), counts[-1]))
    alone = tuple(islice(cycle(row.run(ways["plain"], ignore_eos=True)().outputs), counts[-1]))
    near = row.pair.judge(llm, prompts)

    def judge(_: Outputs, got: Outputs) -> Agreement:
        return near(alone[: len(got)], got)

    for count in counts:
        runs = {
            name: row.run(way, prompts=prompts[:count], together=True, ignore_eos=True, gamma="auto")
            for name, way in ways.items()
        }
        row.warm(runs, llm)  # and once more in the race: lengths by measured costs try many shapes of passes
        yield from _lines(row.race(runs, judge), llm, batch=count)


def exact(bench: Bench) -> Lines:
    row = bench.row(max_new_tokens=32, repeats=1)
    llm = bench.llm(row.pair, exact=True)
    ways = {"plain": EngineView(llm), "draft": llm}
    runs = {f"{name}, one at a time": row.run(way) for name, way in ways.items()}
    runs |= {f"{name}, batch": row.run(way, together=True) for name, way in ways.items()}
    return _lines(row.race(runs, same_tokens), llm, row_counts=" ".join(map(str, llm.target.sizes)))


def caches(bench: Bench) -> Lines:
    """With room for all pairs texts have to be those of the full cache. Speeds are those of one run."""
    row = bench.row(max_new_tokens=64)
    pair, judge = row.pair, row.pair.judge()
    loaded = pair.target.model, pair.target.tokenizer

    def run(target: Any = loaded, **options: Any) -> tuple[TimedRun, str]:
        llm = LLM(target, "none", dtype=DTYPE, device=bench.device, **options)
        return run_ours(llm, pair.prompts, row.params(), together=True), _passes(llm)

    run()  # warms up
    full, mode = run()
    yield _cache_line("full", full, full, mode)
    for name in [*POLICIES, *SPARSE, *(f"{name}-{bits}" for name, made in PACKINGS.items() for bits in made.choices)]:
        roomy, tight = _budgets(name)
        try:
            (free, mode), (bound, _) = run(**roomy), run(**tight)
        except Exception as error:
            yield {"name": name, "error": shown(error)}
            continue
        found = judge(full.outputs, free.outputs)
        same = {"equal": found.equal, "ok": found.accepted, "note": found.note}
        yield _cache_line(name, free, bound, mode) | same


def _cache_line(name: str, free: TimedRun, bound: TimedRun, mode: str) -> dict[str, Any]:
    speeds = {"roomy tok/s": free.speed, "tokens_per_second": bound.speed}
    return {"name": name, **speeds, "kv_bytes": bound.figures["kv_bytes"], "passes": mode}


def _budgets(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options with which a cache holds all of a text as it is, and with which it does not."""
    if name in SPARSE:
        return {"cache": name}, {"cache": f"{name}[vertical=16,slash=16]"}
    if name not in POLICIES:
        return {"cache": f"{name}[residual={ROOMY}]"}, {"cache": f"{name}[residual=0]", "chunk_size": TIGHT // 2}
    own = {"cache": f"{name}:{TRAINED[name]}", "target": DEFAULT} if name in TRAINED else {"cache": name}
    return own | {"kv_budget": ROOMY}, own | {"kv_budget": TIGHT, "chunk_size": TIGHT // 2}


def _lines(standings: Sequence[Standing], llm: LLM, **first: Any) -> Lines:
    for standing in standings:
        passes = {} if standing.name.startswith("transformers") else {"passes": _passes(llm)}
        yield first | standing.to_dict() | passes | {"ok": standing.agreement.accepted}


def _passes(llm: LLM) -> str:
    """How the target's passes run; on a GPU with the number of shapes that were captured so far."""
    backend = llm.target.backend
    sized = getattr(backend, "sized", {})  # of Triton's kernels; torch's attention has frames
    shapes = sum(len(frame.captured) for frame in sized.values()) or len(getattr(backend, "frames", ()))
    return f"{llm.target.mode}, {shapes} shapes" if shapes else llm.target.mode


def shown(error: BaseException) -> str:
    """In one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"

"""Counts graphs that are compiled after the warm-up (none should be), and times a new process that has them on disk."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

from sakiyomi.core.errors import SakiyomiError
from sakiyomi.core.params import SamplingParams
from sakiyomi.evaluation.bench.config import BenchConfig
from sakiyomi.evaluation.bench.frame import PairRow
from sakiyomi.evaluation.bench.report import Row
from sakiyomi.model_executor.build import build_runner
from sakiyomi.model_executor.compiled import CompiledPasses

if TYPE_CHECKING:
    from sakiyomi.engine.llm import LLM

__all__ = ["compiling", "graph_count", "start_seconds"]


_PATIENCE = 600


def graph_count() -> int:
    """Graphs that torch has compiled in this process."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def compiling(row: PairRow) -> Row:
    """New graphs and eager passes after the warm-up; seconds a graph in a new process with a warm disk cache."""
    config, pair, llm = row.config, row.pair, row.llm(max_batch=8, device="cpu", compile=True)
    if not llm.compiled():
        raise SakiyomiError("graphs cannot be compiled here; see `sakiyomi info`")
    llm.generate(pair.prompts[:1], SamplingParams(max_new_tokens=16, gamma=config.gamma))
    before = graph_count()
    runs, eager = 0, _count_eager(llm)
    for size in range(1, 9):
        row.note(f"batch of {size}")
        for length, gamma in ((5, 1), (23, 2), (70, 4)):
            prompts = [(prompt * 8)[: length + 3 * i] for i, prompt in enumerate((pair.prompts * 8)[:size])]
            params = SamplingParams(max_new_tokens=8 + length, gamma=gamma, ignore_eos=True)
            llm.generate(prompts, params)
            runs += 1
    recompiles = graph_count() - before
    del llm
    row.note("a new process, to fill the disk cache")
    start_seconds(config)
    row.note("a new process with a warm disk cache")
    found = start_seconds(config)
    lines = [
        {"rows": int(size), "start_seconds": seconds, "new_graphs": None, "passes_without_graph": None}
        for size, seconds in found["graphs"].items()
    ]
    after = {"new_graphs": recompiles, "passes_without_graph": len(eager)}
    lines.append({"rows": "all batch sizes and lengths", "start_seconds": None, **after})
    conditions = {
        **pair.names,
        "dtype": pair.dtypes["dtype"],
        "quantize": config.quantize,
        "batches": f"{runs} runs: 1 to 8 requests x prompts of 5 to 91 tokens x gamma 1, 2, 4",
        "new_process": "target only, its weights as they are; its graphs come one after the other",
        "load_seconds": found["load_seconds"],
        "compiler_import_seconds": found["import_seconds"],
    }
    return Row(
        "compiling", "new graphs after the warm-up; seconds until a graph is there in a new process", lines, conditions
    )


def _count_eager(llm: LLM) -> list[int]:
    """Rows of every decoding pass of the target that finds no graph from now on."""
    found: list[int] = []
    recorder = llm.target.recorder
    assert recorder is not None
    run = recorder.run

    def counted(begin: Any, plan: Any, ids: Any, positions: Any) -> Any:
        replayed = run(begin, plan, ids, positions)
        if replayed is None:
            found.append(ids.shape[1])
        return replayed

    recorder.run = counted  # type: ignore[method-assign]
    return found


def start_seconds(config: BenchConfig) -> dict[str, Any]:
    """Load the target in a new process and time each of its graphs.

    Raises:
        SakiyomiError: the process failed.
    """
    command = [sys.executable, "-m", "sakiyomi.evaluation.bench.compiling", config.target, config.dtype]
    try:
        done = subprocess.run(
            command, capture_output=True, encoding="utf-8", errors="replace", check=False, timeout=_PATIENCE
        )
    except subprocess.TimeoutExpired:
        raise SakiyomiError(f"a new process had not compiled its graphs after {_PATIENCE} s") from None
    if done.returncode:
        raise SakiyomiError(f"a new process with the target failed: {(done.stderr.strip() or 'no message')[-300:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _start(target: str, dtype: str) -> dict[str, Any]:
    """In the new process: seconds of each graph, in the order in which a request asks for them."""
    from sakiyomi.kernels.build import native
    from sakiyomi.model_executor.loading import load_model
    from sakiyomi.model_executor.session import TARGET_SIZES

    native()  # built at a machine's first use, which is no graph's time
    began = time.perf_counter()
    loaded = load_model(target, dtype=dtype, device="cpu")
    load_seconds = time.perf_counter() - began
    model = build_runner(loaded.model, compile=False)
    recorder = CompiledPasses(model.forward, model.device, model.sizes)
    began = time.perf_counter()
    import torch._dynamo
    import torch._inductor.compile_fx  # noqa: F401

    import_seconds = time.perf_counter() - began
    found: dict[int, float] = {}
    for size in dict.fromkeys((*TARGET_SIZES, *model.sizes)):
        began = time.perf_counter()
        recorder.record(model.begin, size)
        if not recorder.has(size):
            raise SakiyomiError("graphs cannot be compiled here; see `sakiyomi info`")
        found[size] = time.perf_counter() - began
    return {"load_seconds": load_seconds, "import_seconds": import_seconds, "graphs": found}


if __name__ == "__main__":
    print(json.dumps(_start(sys.argv[1], sys.argv[2])))  # noqa: T201

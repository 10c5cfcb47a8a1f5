"""Seconds of a pass over an offloaded model: mapped weights of which the system reads the coming ones ahead, against
accelerate's own mapped files.

python benchmarks/offload_reading.py FOLDER [--laps 8]

The two take turns; before a cold pass the files are dropped from the page cache (Linux), a warm one finds them there.
Wall clock and the processor time of the whole process, medians.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from pathlib import Path
from unittest.mock import patch

from sakiyomi import LLM
from sakiyomi.engine.machine import conditions
from sakiyomi.kernels.batch import BatchPlan

ROWS = (1, 16, 65, 129)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--laps", type=int, default=8)
    arguments = parser.parse_args()
    ahead = LLM(arguments.folder, "none", offload="disk")
    with patch("sakiyomi.model_executor.weights.attach", lambda *_: None):
        mapped = LLM(arguments.folder, "none", offload="disk")
    stream = ahead.target.weights.stream
    assert stream is not None and mapped.target.weights.stream is None
    ways = [(name, llm, cold) for cold in (True, False) for name, llm in (("ahead", ahead), ("mapped", mapped))]
    wall: dict[tuple[str, int, bool], list[float]] = {}
    processor: dict[tuple[str, int, bool], list[float]] = {}
    for lap in range(arguments.laps + 1):
        for rows in ROWS:
            for name, llm, cold in ways:
                if cold:
                    drop(stream.files)
                began, used = time.perf_counter(), time.process_time()
                llm.target.run(BatchPlan([]), rows)
                if lap:
                    wall.setdefault((name, rows, cold), []).append(time.perf_counter() - began)
                    processor.setdefault((name, rows, cold), []).append(time.process_time() - used)
    print(f"{'':24}{'ahead':>10}{'mapped':>10}{'mapped / ahead':>18}{'processor, s':>20}")
    for cold in (True, False):
        for rows in ROWS:
            own, other = wall["ahead", rows, cold], wall["mapped", rows, cold]
            ratio = statistics.median(b / a for a, b in zip(own, other, strict=True))
            used = [statistics.median(processor[name, rows, cold]) for name in ("ahead", "mapped")]
            print(
                f"{'cold' if cold else 'warm'}, {rows:3} rows{'':10}{statistics.median(own):10.3f}"
                f"{statistics.median(other):10.3f}{ratio:18.2f}{used[0]:11.3f}{used[1]:9.3f}"
            )
    print(conditions(laps=arguments.laps, folder=arguments.folder))


def drop(files: list[Path]) -> None:
    for path in files:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    main()

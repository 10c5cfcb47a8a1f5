"""What starts from GGUF files and folders take: CPU and wall seconds, and memory above that of the libraries.

    python benchmarks/gguf_start.py SMALL.gguf FOLDER --rounds 3

Each start is a process of its own, `sakiyomi generate` of 30 tokens: the first one on a cache folder that holds only
the kernels, the second one with what the first has left there. Targets are interleaved; medians are printed. Memory is
that after the text, less that of a process which has imported the same modules and run nothing: private pages, and
pages of mapped files, which processes share. The peak is that of the whole start. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from sakiyomi.core.files import cache_folder

_PAGES = """
def pages():
    found = {"libraries": sorted(sys.modules)}
    for name in ("smaps_rollup", "status"):
        for line in open(f"/proc/self/{name}", encoding="utf-8"):
            key, *rest = line.split()
            if key in ("Rss:", "Private_Clean:", "Private_Dirty:", "VmHWM:"):
                found[key[:-1]] = 1024 * int(rest[0])
    return found
"""
START = f"""
import json, os, sys
out, *sys.argv[1:] = sys.argv[1:]
{_PAGES}
from sakiyomi.cli import main
from sakiyomi.engine import llm
kept, record = {{}}, llm.LLM.record
def noting(self):
    kept.update(pages(), cache=self.target.cache.bytes)
    record(self)
llm.LLM.record = noting
leave = os._exit
def leaving(code):
    kept.update(peak=pages()["VmHWM"])
    json.dump(kept, open(out, "w"))
    leave(code)
os._exit = leaving
main()
"""
BARE = f"""
import importlib, json, sys
{_PAGES}
for name in json.load(open(sys.argv[1])):
    try:
        importlib.import_module(name)
    except Exception:
        pass
json.dump(pages(), open(sys.argv[2], "w"))
"""


def started(target: str, cache: Path, out: Path) -> dict[str, Any]:
    """Seconds and bytes of one start."""
    command = [sys.executable, "-c", START, str(out), "generate", "Once upon a time", "--target", target]
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(
        [*command, "--max-new-tokens", "30", "--temperature", "0"],
        env=os.environ | {"SAKIYOMI_CACHE_DIR": str(cache)},
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        sys.exit(done.stderr)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"wall": wall, "cpu": cpu, **json.loads(out.read_text(encoding="utf-8"))}


def bare(libraries: list[str], folder: Path) -> dict[str, Any]:
    """Memory of a process with these libraries."""
    (folder / "names.json").write_text(json.dumps(libraries), encoding="utf-8")
    names, out = folder / "names.json", folder / "bare.json"
    subprocess.run([sys.executable, "-c", BARE, str(names), str(out)], capture_output=True, check=True)
    found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return found


def above(start: dict[str, Any], libraries: dict[str, Any]) -> dict[str, float]:
    """A start's figures: seconds, and MB above the libraries."""
    private = sum(start[key] - libraries[key] for key in ("Private_Clean", "Private_Dirty"))
    whole = start["Rss"] - libraries["Rss"]
    return {
        "cpu_s": start["cpu"], "wall_s": start["wall"], "memory_mb": whole / 1e6, "private_mb": private / 1e6,
        "shared_mb": (whole - private) / 1e6, "peak_mb": (start["peak"] - libraries["Rss"]) / 1e6,
        "cache_mb": start["cache"] / 1e6,
    }  # fmt: skip


def stored_mb(target: str) -> float:
    """Size of a file, or of a folder's weights."""
    path = Path(target)
    files = [path] if path.is_file() else list(path.glob("*.safetensors"))
    return sum(file.stat().st_size for file in files) / 1e6


def main() -> None:
    """Print a line a target and start."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="+")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    kernels = cache_folder() / "kernels"
    found: dict[str, dict[str, list[dict[str, float]]]] = {target: {} for target in options.targets}
    for _ in range(options.rounds):
        for target in options.targets:
            with tempfile.TemporaryDirectory() as folder:
                cache = Path(folder) / "cache"
                cache.mkdir()
                (cache / "kernels").symlink_to(kernels)
                for start in ("first", "second"):
                    one = started(target, cache, Path(folder) / "out.json")
                    found[target].setdefault(start, []).append(above(one, bare(one["libraries"], Path(folder))))
    shown: dict[str, Any] = {"load": os.getloadavg(), "targets": {}}
    for target, starts in found.items():
        shown["targets"][target] = {"stored_mb": stored_mb(target)}
        for start, each in starts.items():
            middle = {key: statistics.median(one[key] for one in each) for key in each[0]}
            shown["targets"][target][start] = middle
            print(
                Path(target).name, f"({stored_mb(target):.0f} MB)", start,
                *(f"{key}={value:.2f}" for key, value in middle.items()),
            )  # fmt: skip
    print(json.dumps(shown))


if __name__ == "__main__":
    main()

"""Linear layers of this checkout's kernels and of another's, call by call in turn within one process.

    git worktree add ../before HEAD~1
    python benchmarks/kernel_builds.py ../before --rows 1 --rows 32 --rows 340
    python benchmarks/kernel_builds.py ../before --kind int4 --kind Q4_K --width 768 --rows 1

Speeds of tiles and memory change several times within minutes on a shared machine, and from process to process. Weights
come from memory, not from a cache. Of each shape: the median of this checkout's time divided by the other's time just
before or after it, both medians in billions of operations a second, and the bytes of weights read a second. Ends with 1
if results are not the same bits.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from sakiyomi.kernels import variants
from sakiyomi.kernels.blocks import FORMATS

SOURCE = r"""
#include "multiply.h"
#include <omp.h>
static int threads = 1;
static int32_t shared(int64_t begin, int64_t end, int64_t, void (*f)(int64_t, int64_t, void*), void* context) {
#pragma omp parallel num_threads(threads)
  {
    const int64_t each = (end - begin + threads - 1) / threads, first = begin + omp_get_thread_num() * each;
    if (first < end) f(first, std::min(end, first + each), context);
  }
  return 0;
}
extern "C" void layer(const char* x, const char* weights, const float* scale, const int32_t* sum, char* y,
                      int64_t rows, int64_t in, int64_t out, int bits, int type, int count) {
  threads = count, torch.torch_parallel_for = shared;
  Weight w{};
  w.data = weights, w.in = in, w.out = out, w.half = true, w.scale = bits == 8 ? scale : nullptr, w.sum = sum;
  if (bits == 4) w.scales = (const bf16*)(weights + in * out / 2);
  if (type) w.form = block_format(type), w.grouped = true;
  void* outs[1] = {y};
  multiply<bf16>({&w}, (const bf16*)x, outs, rows);
}
"""
BITS = {"bf16": 16, "int8": 8, "int4": 4}
MEMORY = 1 << 27  # bytes of weights, which calls read one part after the other


def built(checkout: Path, variant: str, folder: Path, name: str) -> ctypes.CDLL:
    """The layer of a checkout's headers."""
    source, library = folder / "layer.cpp", folder / f"{name}.so"
    source.write_text(SOURCE, encoding="utf-8")
    headers, compiler = checkout / "src" / "sakiyomi" / "kernels", variants.compiler()
    if compiler is None or not (headers / "multiply.h").is_file():
        raise SystemExit("no C++ compiler; set CXX" if compiler is None else f"{checkout} has no kernels of ours")
    command = [compiler, *variants.options(variant), "-fopenmp", f"-I{headers}", str(source), "-o", str(library)]
    subprocess.run(command, check=True)
    found = ctypes.CDLL(str(library))
    found.layer.argtypes = [ctypes.c_void_p] * 5 + [ctypes.c_int64] * 3 + [ctypes.c_int] * 3
    return found


def size_of(kind: str, outputs: int, inputs: int) -> int:
    """Bytes of a layer's weights; in 4 bits with the scales, of 16 bits for each 32 weights."""
    if kind in FORMATS:
        return FORMATS[kind].size(outputs, inputs)
    return outputs * inputs * (2 * BITS[kind] + (kind == "int4")) // 16


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, help="another checkout")
    parser.add_argument("--rows", type=int, action="append", help="of a call (again for each); default 1, 8, 32, 128")
    kinds = [*BITS, *(name for name, form in FORMATS.items() if form.bits <= 8)]
    parser.add_argument("--kind", action="append", choices=kinds, help="of weights (again); default bf16, int8")
    parser.add_argument("--width", type=int, default=576)
    parser.add_argument("--inner", type=int, default=1536)
    parser.add_argument("--variant", choices=list(variants.VARIANTS), default=variants.fitting())
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--laps", type=int, default=200)
    args = parser.parse_args()
    step = max([64, *(FORMATS[kind].length for kind in args.kind or () if kind in FORMATS)])
    least = min(args.width, args.inner, args.laps, args.threads, *args.rows or ())
    if args.width % step or args.inner % step or least < 1:
        parser.error(f"width and inner are multiples of {step}; rows, laps and threads are 1 or more")
    if args.width * args.inner * 4 > MEMORY:
        parser.error(f"a layer has at most {MEMORY // 4} weights")
    here, same = Path(__file__).parents[1], True
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(MEMORY // 2, generator=generator).mul_(0.05).bfloat16()
    scale, sums = torch.ones(args.inner + 32), torch.zeros(args.inner + 32, dtype=torch.int32)
    with tempfile.TemporaryDirectory() as folder:
        libraries = [
            built(path, args.variant, Path(folder), name) for name, path in (("other", args.other), ("this", here))
        ]
        for kind in args.kind or ("bf16", "int8"):
            bits, number = BITS.get(kind, 0), FORMATS[kind].number if kind in FORMATS else 0
            for rows in args.rows or (1, 8, 32, 128):
                for width, inner in ((args.width, args.inner), (args.inner, args.width)):
                    x = torch.randn(rows, width, generator=generator).bfloat16()
                    made = [torch.empty(rows, inner, dtype=torch.bfloat16) for _ in libraries]
                    size, at, times = size_of(kind, inner, width), 0, ([], [])  # type: ignore[var-annotated]
                    for turn in range(args.laps):
                        for which in (0, 1) if turn % 2 else (1, 0):
                            at = (at + size) % (MEMORY - size) // 64 * 64
                            place = weights.data_ptr() + (at if turn else 0)
                            given = [x.data_ptr(), place, scale.data_ptr(), sums.data_ptr(), made[which].data_ptr()]
                            began = time.perf_counter()
                            libraries[which].layer(*given, rows, width, inner, bits, number, args.threads)
                            times[which].append(time.perf_counter() - began)
                        same &= turn > 0 or torch.equal(*(each.view(torch.int16) for each in made))
                    ratio = statistics.median(mine / other for other, mine in zip(*times, strict=True))
                    speeds = [2e-9 * rows * width * inner / statistics.median(each) for each in times]
                    shape = f"{kind}, {rows:4d} rows, {width} -> {inner}"
                    read = 1e-9 * size / statistics.median(times[1])
                    how = f"({speeds[0]:.0f} -> {speeds[1]:.0f}), {read:.1f} GB/s of weights"
                    print(f"{shape}: {ratio:.3f} of the time {how}", flush=True)
    if not same:
        sys.exit("the results differ")


if __name__ == "__main__":
    main()

"""Linear layers with and without the processor's matrix unit, pass by pass in turn; lowest milliseconds by rows.

python benchmarks/matrix_unit.py --bits 8 --width 768 --inner 2048
"""

from __future__ import annotations

import argparse
import time

import torch

from sakiyomi.kernels.batch import BatchPlan, SequenceRows
from sakiyomi.kernels.build import native
from sakiyomi.kernels.native import PackedWeights

ROWS = (1, 2, 5, 8, 16, 32, 64, 256)
LAYERS, LAPS = 12, 9


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bits", type=int, default=8, choices=(16, 8))
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--inner", type=int, default=2048)
    options = parser.parse_args()
    library, model = native(), PackedWeights.create()
    if library is None or model is None or not library.sk_tiles(1):
        raise SystemExit("no compiled kernels, or no matrix unit (AMX) here")
    width, inner = options.width, options.inner
    shapes = [(width, width)] * 4 + [(inner, width)] * 2 + [(width, inner)]
    weights = (torch.randn(shape).mul_(0.05).bfloat16() for _ in range(LAYERS) for shape in shapes)
    layers = [model.add_linear(weight, None, bits=options.bits) for weight in weights]
    lowest: dict[tuple[int, int], float] = {}
    for _ in range(LAPS):
        for rows in ROWS:
            inputs = {size: torch.randn(1, rows, size).bfloat16() for size in (width, inner)}
            for wanted in (0, 1):
                library.sk_tiles(wanted)
                model.begin(BatchPlan([SequenceRows(0, 0, [0] * rows)]), rows)
                began = time.perf_counter()
                for layer in layers:
                    layer(inputs[layer.in_features])
                spent = time.perf_counter() - began
                lowest[rows, wanted] = min(lowest.get((rows, wanted), spent), spent)
    print("rows  without  with")
    for rows in ROWS:
        print(f"{rows:4d}  {lowest[rows, 0] * 1e3:7.2f}  {lowest[rows, 1] * 1e3:4.2f}")


if __name__ == "__main__":
    main()

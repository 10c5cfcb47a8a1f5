"""Time of a training step beside the frozen target's plain passes over the same rows: retaining heads.

    python benchmarks/train_steps.py --target retriever --tasks passkey,kv --out steps --steps 20

The flags are those of `sakiyomi train retaining`. Behind the run, `TIMED` more steps are timed interleaved with plain
passes; the last line is one JSON object with the medians.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from sakiyomi.cli.train import script
from sakiyomi.drafters.medusa_heads.backbone import Backbone
from sakiyomi.train.commands import TrainRetaining
from sakiyomi.train.export import Result
from sakiyomi.train.loop import on_device
from sakiyomi.train.recipe import train
from sakiyomi.train.retaining import Retaining

TIMED = 5


class Timed(Retaining):
    def finish(self) -> Result:
        result = super().finish()
        print(json.dumps(step_times(self)))
        return result


def step_times(run: Retaining) -> dict[str, float]:
    """Steps of a finished run beside the target's plain passes over their rows; the first pair warms up."""
    loop, backbone = run.loop, Backbone(run.target)
    length = max(loop.config.row_tokens)
    steps, passes = [], []
    for i in range(TIMED + 1):
        batch = run.questions.batch(loop.progress.step + i, loop.config.step_tokens // length, length, True)
        rows = on_device(batch, run.device)
        with run.hooks():
            steps.append(seconds(partial(loop.learn, batch), run.device))
        passes.append(seconds(lambda rows=rows: plain(backbone, rows), run.device))
    return {
        "step_ms": 1000 * statistics.median(steps[1:]),
        "pass_ms": 1000 * statistics.median(passes[1:]),
        "ratio": statistics.median(a / b for a, b in zip(steps[1:], passes[1:], strict=True)),
    }


@torch.no_grad()
def plain(backbone: Backbone, rows: Any) -> None:
    for ids, _ in rows:
        backbone(ids[None])


def seconds(work: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


if __name__ == "__main__":
    script(
        TrainRetaining,
        lambda config, command: train(Timed(config), command),
        "Train retaining heads, and time steps beside the target's plain passes.",
    )

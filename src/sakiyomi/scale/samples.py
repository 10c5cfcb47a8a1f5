"""``train distill-data`` by several engines: its batches are the pieces, and no text depends on who writes it."""

from __future__ import annotations

import functools
from collections.abc import Generator, Iterable, Sequence
from typing import Any

from sakiyomi.core.errors import LoadError
from sakiyomi.scale.cluster import WorkersOption, import_ray
from sakiyomi.scale.spread import OneByOne, spread
from sakiyomi.train import distill_data
from sakiyomi.train.commands import TrainDistillData
from sakiyomi.train.samples import Asked, Write, sample_continuations, weights_digest


def train_distill_data(config: TrainDistillData, command: str = "") -> dict[str, Any]:
    """Run `sakiyomi train distill-data`, here or with workers; see ``train.distill_data``."""
    option = WorkersOption(config.workers or None, config.worker_cpus, config.address or None)
    if option.workers is None:
        return distill_data.train_distill_data(config, command)
    import_ray()  # or refuse before a model is loaded

    def write(digest: str) -> Write:
        def written(batches: Iterable[Asked]) -> Generator[tuple[Asked, Sequence[Sequence[int]]], None, None]:
            make = functools.partial(_worker, config, digest)
            return spread(make, option, config.device, ((one, one) for one in batches))

        return written

    return distill_data.train_distill_data(config, command, write)


def _worker(config: TrainDistillData, digest: str) -> OneByOne:
    llm, target = distill_data.load_writer(config)
    if weights_digest(target) != digest:
        raise LoadError(f"{config.target!r} is another model on a worker than here; have the same on all machines")
    return OneByOne(lambda asked: sample_continuations(llm, **vars(asked)))

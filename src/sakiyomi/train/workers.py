"""Processes that share the rows of every step, and agree on everything else.

The first of them leads: it alone hears signals and the clock, takes the optimizer's steps, measures and writes. The
others draw the same batch, compute the gradient of their part of it, and get the new weights. So a run of several
processes is that of one up to the order of sums, and its checkpoints do not know how many there were.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sakiyomi.core.errors import InputError
from sakiyomi.core.peers import ONE, PATIENCE, Peers, start

ADVICE = "continue from the last checkpoint with --resume, with as many workers as you like"


@dataclass(frozen=True)
class Workers:
    """The processes of a run, as one of them sees them.

    Args:
        peers: how they find each other.
    """

    peers: Peers = ONE

    @property
    def number(self) -> int:
        """Of this process, from 0."""
        return self.peers.number

    @property
    def count(self) -> int:
        """Of all processes."""
        return self.peers.count

    @property
    def leads(self) -> bool:
        """Whether this process decides, measures and writes."""
        return self.number == 0

    def connect(self) -> None:
        """Wait until all are there.

        Raises:
            WorkerError: one has ended instead.
        """
        if self.count == 1 or dist.is_initialized():
            return
        self.peers.greet(ADVICE)
        with self._together():
            dist.init_process_group(
                "gloo", store=self.peers.store, rank=self.number, world_size=self.count, timeout=PATIENCE
            )

    def leave(self) -> None:
        """Part from the others."""
        if self.peers.store is not None and dist.is_initialized():
            dist.destroy_process_group()

    def part(self, rows: int) -> slice:
        """Of so many rows those of this process."""
        each = rows // self.count
        return slice(self.number * each, (self.number + 1) * each)

    def told(self, *values: float) -> list[float]:
        """Numbers of the first process."""
        if self.count == 1:
            return list(values)
        numbers = torch.tensor(values, dtype=torch.float64)
        with self._together():
            dist.broadcast(numbers, 0)
        return numbers.tolist()

    def mean(self, values: Tensor) -> Tensor:
        """Mean over the processes."""
        if self.count == 1:
            return values
        values = values.clone()
        with self._together():
            dist.all_reduce(values)
        return values.div_(self.count)

    def divisor(self, counts: Tensor) -> Tensor:
        """By what to divide a sum over this process's rows, so that the mean over processes is that over all rows.

        Args:
            counts: of what this process sums over.

        Returns:
            Float32, of the shape of `counts`; where none has anything to sum, not 0.
        """
        return self.mean(counts.float()).clamp_min(1 / self.count)

    def gathered(self, values: Tensor) -> Tensor:
        """(n,) of this process to (count * n,) of all, in their order."""
        if self.count == 1:
            return values
        found = [torch.empty_like(values) for _ in range(self.count)]
        with self._together():
            dist.all_gather(found, values.contiguous())
        return torch.cat(found)

    def collect(self, weights: Sequence[nn.Parameter], loss: Tensor) -> Tensor:
        """Give the first process the mean gradient, in place.

        Args:
            weights: some of which may have no gradient in some processes.
            loss: of this process.

        Returns:
            The mean loss, to the first process.
        """
        if self.count == 1:
            return loss
        grads = [torch.zeros_like(weight) if weight.grad is None else weight.grad for weight in weights]
        there = torch.tensor([float(weight.grad is not None) for weight in weights])
        flat = torch.cat([*(grad.flatten().float() for grad in grads), there, loss.float().view(1)])
        with self._together():
            dist.reduce(flat, 0)
        if not self.leads:
            return loss
        *parts, there, loss = flat.split([*(weight.numel() for weight in weights), len(weights), 1])
        for weight, part, known in zip(weights, parts, there.tolist(), strict=True):
            weight.grad = part.div_(self.count).view_as(weight).to(weight.dtype) if known else None
        return loss[0] / self.count

    @torch.no_grad()
    def spread(self, weights: Sequence[nn.Parameter]) -> None:
        """Give all the weights of the first process, in place."""
        if self.count == 1:
            return
        flat = torch.cat([weight.flatten() for weight in weights])
        with self._together():
            dist.broadcast(flat, 0)
        if not self.leads:
            for weight, part in zip(weights, flat.split([weight.numel() for weight in weights]), strict=True):
                weight.copy_(part.view_as(weight))

    def log(self, path: Path) -> Path:
        """Where a log is written, which the first process does."""
        return path if self.leads else Path(os.devnull)

    @contextlib.contextmanager
    def _together(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # gloo knows no other
            raise self.peers.ended(ADVICE) from error


ALONE = Workers()


def _join(peers: Peers, work: Callable[..., None], *args: Any) -> None:
    work(Workers(peers), *args)


@contextlib.contextmanager
def started(wanted: int, given: Peers | None, work: Callable[..., None], *args: Any) -> Iterator[Workers]:
    """The processes of a run: those that torchrun has started, or this one and what it starts.

    Args:
        wanted: processes.
        given: see ``launched``.
        work: what another process does, with `Workers` and then `args`; both must be picklable.
        args: of it.

    Raises:
        InputError: torchrun has started another number than is wanted.
        WorkerError: one of the processes has ended.
    """
    if given is not None and wanted not in (1, given.count):
        raise InputError(f"workers is {wanted}, and torchrun has started {given.count}; leave --workers out")
    peers = given or (ONE if wanted == 1 else start(wanted, _join, work, *args))
    workers = Workers(peers)
    try:
        yield workers
    finally:
        workers.leave()
        peers.end()

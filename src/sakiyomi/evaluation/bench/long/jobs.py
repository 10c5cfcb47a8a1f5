"""Runs what a row of ``bench long`` asks of a system, in this process or in one of its own, and collects the lines.

A process of its own gives the system's own peak memory. If the operating system kills it, the other systems still run.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from sakiyomi.core.errors import MemoryLimitError, SakiyomiError
from sakiyomi.core.memory import peak_bytes, readable, reset_peak, resident_bytes
from sakiyomi.evaluation.bench.config import Note
from sakiyomi.evaluation.bench.long.config import LongConfig
from sakiyomi.evaluation.bench.long.questions import Source
from sakiyomi.evaluation.bench.long.systems import Loader, System
from sakiyomi.evaluation.bench.report import Row

Line = dict[str, Any]
OVER = (MemoryLimitError, MemoryError, torch.OutOfMemoryError)
_KILLED = -9  # exit code of a process that the system ended
_SHOWN = 300  # characters of what a process that failed said last


class Watch:
    """Measures the memory of this process or of the GPU, and enforces the limit.

    Args:
        device: "cpu" or a GPU.
        limit: most bytes that may be held at once; None: no limit.
    """

    def __init__(self, device: str, limit: int | None) -> None:
        self._gpu = torch.device(device) if device.startswith("cuda") else None
        self._limit = limit
        self.ready: int | None = None

    def begin(self, more: int) -> None:
        """Start measuring, before the questions of one length.

        Args:
            more: bytes that they need beyond those held now.

        Raises:
            MemoryLimitError: that is over the limit.
        """
        now = resident_bytes() if self._gpu is None else int(torch.cuda.memory_allocated(self._gpu))
        self.ready = now if self.ready is None else self.ready
        if self._limit is not None and now + more > self._limit:
            raise MemoryLimitError(
                f"{readable(now)} are held and {readable(more)} more are needed; the limit is {readable(self._limit)}"
            )
        if self._gpu is None:
            reset_peak()
        else:
            torch.cuda.reset_peak_memory_stats(self._gpu)

    def peak(self) -> int:
        """Most bytes held since ``begin``.

        Raises:
            MemoryLimitError: they are over the limit.
        """
        most = peak_bytes() if self._gpu is None else int(torch.cuda.max_memory_allocated(self._gpu))
        if self._limit is not None and most > self._limit:
            raise MemoryLimitError(f"{readable(most)} were held at once; the limit is {readable(self._limit)}")
        return most


Measure = Callable[[Loader, System, int, Any, Watch], Line]
"""Gives the figures of a system at one context length (tokens) from its prompts. It must be a function of a module, so
that it can be sent to another process."""


@dataclass(frozen=True)
class Job:
    """What a row asks of one system.

    Attributes:
        measure: gives the figures of one length.
        system: whose they are.
        batches: prompts by context length in tokens, shortest first.
        device: "cpu" or a GPU.
        limit: most bytes that may be held at once; None: no limit.
    """

    measure: Measure
    system: System
    batches: Mapping[int, Any]
    device: str = "cpu"
    limit: int | None = None


def lines(job: Job, make: Loader) -> Iterator[Line]:
    """Run a job: a line for each length, with figures or with the reason why there are none.

    After a length that does not fit into memory the longer ones are skipped. Errors that no user can cause are raised.
    """
    make.release()  # memory of an earlier job would count as this one's
    watch, over = Watch(job.device, job.limit), ""
    for length, given in job.batches.items():
        found: Line = {"state": "", "note": ""}
        try:
            if over:
                raise MemoryLimitError(over)
            found |= job.measure(make, job.system, length, given, watch)
        except OVER as error:
            found |= {"state": "OOM", "note": str(error) or "no memory is left"}
            over = f"{length} tokens are too many already"
        except SakiyomiError as error:
            found |= {"state": "refused", "note": error.message}
        yield job.system.line(length) | found


def apart(job: Job, options: Mapping[str, Any]) -> Iterator[Line]:
    """Run a job in a process of its own. If that process ends early, the missing lines say why.

    Args:
        job: see ``lines``.
        options: of ``Loader``.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    waiting = list(job.batches)
    with tempfile.TemporaryDirectory(prefix="sakiyomi-long-") as folder:
        log = Path(folder) / "log.txt"
        process = context.Process(target=_run, args=(log, theirs, job, options))
        process.start()
        theirs.close()
        try:
            while waiting:
                line = ours.recv()
                waiting.pop(0)
                yield line
        except EOFError:
            process.join()
        finally:  # also after Ctrl-C; the process may still be compiling kernels that nobody needs
            process.kill()
            process.join()
        said = log.read_text(errors="replace", encoding="utf-8")[-_SHOWN:] if log.is_file() else ""
    state, why = "refused", " ".join(said.split()) or f"exit code {process.exitcode}"
    if process.exitcode == _KILLED:
        state, why = "OOM", "the system ended the process, as it does when memory is short"
    for length in waiting:
        yield job.system.line(length) | {"state": state, "note": why}
        why = f"not measured after {waiting[0]} tokens"


def _run(log: Path, out: Connection, job: Job, options: Mapping[str, Any]) -> None:
    with log.open("wb") as file:  # output of libraries is shown only if the process fails
        for stream in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), stream.fileno())
    for line in lines(job, Loader(options)):
        out.send(line)


@dataclass(frozen=True)
class Bench:
    """What the rows have in common.

    Attributes:
        config: lengths, limit and so on.
        source: of the prompts.
        systems: in order.
        perform: runs a job, in this process or in one of its own.
        note: receives progress messages.
        device: "cpu" or a GPU.
        tokenizer: of the target, for rows that make prompts of their own.
        kept: receives the pairs that a system kept of the first prompt of each length; None: not wanted.
    """

    config: LongConfig
    source: Source
    systems: Sequence[System]
    perform: Callable[[Job], Iterable[Line]]
    note: Note
    device: str = "cpu"
    tokenizer: Any = None
    kept: Callable[[System, Any, list[list[list[int]]]], None] | None = None

    def lines(self, what: str, measure: Measure, system: System, batches: Mapping[int, Any]) -> list[Line]:
        """Run a job: a line for each length."""
        self.note(f"{what}: {system.label}")
        return list(self.perform(Job(measure, system, batches, self.device, self.config.limit_bytes)))


def row(name: str, title: str, found: Sequence[Line], conditions: Mapping[str, Any]) -> Row:
    """A row of these lines, with a note for each reason why a system has no figures."""
    lengths: dict[tuple[str, str], list[str]] = {}
    for line in found:
        if line["note"]:
            lengths.setdefault((line["name"], line["note"]), []).append(str(line["length"]))
    notes = [f"{name}, {', '.join(own)} tokens: {why}" for (name, why), own in lengths.items()]
    return Row(name, title, [{k: v for k, v in line.items() if k != "note"} for line in found], conditions, notes)


def means(names: Iterable[Any], values: Iterable[float]) -> dict[str, float]:
    """The mean of the values of each name."""
    groups: dict[str, list[float]] = defaultdict(list)
    for name, value in zip(names, values, strict=True):
        groups[str(name)].append(value)
    return {name: statistics.fmean(own) for name, own in groups.items()}


def spread(values: Collection[float]) -> float | None:
    """Standard deviation; None for a single value."""
    return statistics.stdev(values) if len(values) > 1 else None

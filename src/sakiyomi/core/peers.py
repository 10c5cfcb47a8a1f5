"""Processes of one job, started by the first of them or by torchrun. If one ends, the others raise one error."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed.rendezvous import rendezvous

from sakiyomi.core.errors import SakiyomiError, WorkerError

PATIENCE = timedelta(days=2)
"""Longest wait for another process. One that ends is noticed immediately; one that measures or reads may take long."""
JOINING = timedelta(minutes=1)
LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


@dataclass(frozen=True)
class Peers:
    """The processes of one job, as one of them sees them.

    Attributes:
        number: of this one, from 0.
        count: of all.
        local: of those on this machine.
        store: through which they find each other; None: there is one process, or they are connected already.
        children: processes that this one started, in order, each with the pipe that it reports to.
        said: pipe to the process that started this one; None: this one was not started by another.
    """

    number: int = 0
    count: int = 1
    local: int = 1
    store: Store | None = field(default=None, repr=False)
    children: Sequence[tuple[BaseProcess, Connection]] = ()
    said: Connection | None = None

    def greet(self, advice: str) -> None:
        """Wait until every process that this one started is ready to connect.

        Raises:
            WorkerError: one has ended before; see ``ended``.
        """
        if self.said is not None:
            self.said.send(True)
        for child, said in self.children:
            multiprocessing.connection.wait([said, child.sentinel])
            try:
                there = said.poll() and said.recv()
            except EOFError:
                there = False
            if there is not True:
                raise self.ended(advice, there or "")

    def ended(self, advice: str, heard: str = "") -> WorkerError:
        """The error to raise when another process does not answer any more.

        Args:
            advice: what to do.
            heard: error message that the process has sent already.
        """
        reasons = []
        for number, (child, said) in enumerate(self.children, 1):
            child.join(10.0)  # its connection closes before it is gone
            if code := child.exitcode:
                message = heard
                reason = f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
                with contextlib.suppress(EOFError, OSError):
                    while said.poll():
                        message = said.recv()
                if isinstance(message, str) and message:
                    reason = f"with: {message}"
                reasons.append((code > 0, f"process {number} of {self.count} (counted from 0) ended {reason}"))
        # One that was killed comes first: others end because of it.
        what = min(reasons)[1] if reasons else f"another of {self.count} processes ended"
        return WorkerError(f"{what}; {advice}")

    def end(self, seconds: float = 5.0) -> None:
        """End the processes that this one has started; those that are done get `seconds` to exit."""
        for child, _ in self.children:
            child.join(seconds)
            child.kill()


ONE = Peers()


def launched() -> Peers | None:
    """The peers that torchrun names in the environment.

    Its variables are removed: other libraries would act on them, too. Processes that are connected already, as Ray's
    TorchTrainer does it, stay connected.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) < 2 or "RANK" not in os.environ:
        return None
    local = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
    store: Store | None = None
    if dist.is_initialized():
        number, count = dist.get_rank(), dist.get_world_size()
    else:
        store, number, count = next(iter(rendezvous("env://")))
        store.set_timeout(PATIENCE)
    for name in LAUNCHER:
        os.environ.pop(name, None)
    return Peers(number, count, local, store)


def start(count: int, work: Callable[..., None], *args: Any) -> Peers:
    """Start further processes on this machine, `count` with this one.

    Args:
        count: of processes.
        work: what each of them does, with its ``Peers`` and then `args`; all must be picklable.
        args: of it.
    """
    store = TCPStore("127.0.0.1", 0, None, True, PATIENCE, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    children: list[tuple[BaseProcess, Connection]] = []
    for number in range(1, count):
        here, there = context.Pipe(duplex=False)
        child = context.Process(target=_child, args=(store.port, number, count, there, work, args), daemon=True)
        child.start()
        there.close()
        children.append((child, here))
    return Peers(0, count, count, store, children)


_partings: list[Callable[[], object]] = []


def parting(say: Callable[[], object]) -> None:
    """Register a call that ``part`` makes, to tell other processes something; a second call must do nothing."""
    _partings.append(say)


def part() -> None:
    """Make the calls of ``parting``: the process is about to end without Python's clean-up."""
    for say in _partings:
        say()


def _child(
    port: int, number: int, count: int, said: Connection, work: Callable[..., None], args: Sequence[Any]
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the first one's
    with open(os.devnull, "w", encoding="utf-8") as nowhere:  # noqa: PTH123 - the first one speaks
        os.dup2(nowhere.fileno(), 2)
    try:
        store = TCPStore("127.0.0.1", port, None, False, JOINING)
        store.set_timeout(PATIENCE)
        work(Peers(number, count, count, store, said=said), *args)
    except WorkerError:
        os._exit(1)  # another one's end, which the first one tells
    except BaseException as error:
        with contextlib.suppress(OSError):
            said.send(error.message if isinstance(error, SakiyomiError) else traceback.format_exc())
        os._exit(1)

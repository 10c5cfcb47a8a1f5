"""A pool of engines on a Ray cluster. A worker that dies is replaced, and its requests are repeated.

A request whose workers die is finally given to a worker without other requests. If such workers die too, the request
gets an error as its reply, and no other request does.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Any, Self

from sakiyomi.core.errors import LoadError, SakiyomiError
from sakiyomi.core.version import __version__
from sakiyomi.scale.batch import Endpoint
from sakiyomi.scale.cluster import Count, WorkersOption, check_room, check_version, connected, gpus_of

logger = logging.getLogger("sakiyomi")
Make = Callable[[], AbstractAsyncContextManager[Endpoint]]
TOGETHER, ALONE = 2, 2  # workers that may die during a request: with other requests, then with it alone
FUTILE = 3  # workers in a row that may die before their first reply


class _Actor:
    """The process of a worker: makes an endpoint, and answers by it."""

    def __init__(self) -> None:
        self._endpoint: Any = None

    async def begin(self, make: Make) -> tuple[str, SakiyomiError | None]:
        """Load the model. Gives the version of the library here, and an error of the user's settings."""
        try:
            self._context = await asyncio.to_thread(make)
            self._endpoint = await self._context.__aenter__()
        except SakiyomiError as error:
            return __version__, error
        return __version__, None

    async def post(self, path: str, body: Any, client: str) -> tuple[int, Any]:
        """See ``Endpoint``."""
        return await self._endpoint.post(path, body, client)  # type: ignore[no-any-return]


class _Worker:
    """One process of the pool.

    Attributes:
        actor: Ray's handle.
        ready: its model is loaded.
        running: its running requests.
        answered: requests that it has answered.
        reserved: it gets no more requests, so that one request can have it alone.
    """

    def __init__(self, actor: Any) -> None:
        self.actor = actor
        self.running = self.answered = 0
        self.ready = self.reserved = False


class WorkerPool:
    """Workers as one endpoint; an asynchronous context manager. Needs a connection to a cluster.

    Args:
        make: makes a worker's endpoint, in its process.
        count: of workers. More than the least are added while all are full and the cluster has room.
        cpus, gpus: of each worker.
        lines: requests that a worker gets at a time.

    Attributes:
        deaths: of workers, so far.
    """

    def __init__(self, make: Make, count: Count, *, cpus: float = 1, gpus: float = 0, lines: int) -> None:
        import ray

        self._make, self._count, self._cpus, self._gpus, self._lines = make, count, cpus, gpus, lines
        self._kind = ray.remote(num_cpus=cpus, num_gpus=gpus, max_restarts=0, max_concurrency=1 << 14)(_Actor)
        self._workers: list[_Worker] = []
        self._starting: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Condition()
        self._suspects = asyncio.Lock()
        self._failure: Exception | None = None
        self._futile = self.deaths = 0

    async def __aenter__(self) -> Self:
        for _ in range(self._count.least):
            self._start()
        return self

    async def __aexit__(self, *error: object) -> None:
        import ray

        for task in self._starting:
            task.cancel()
        await asyncio.gather(*self._starting, return_exceptions=True)
        for worker in self._workers:
            ray.kill(worker.actor)

    @property
    def ready(self) -> int:
        """Workers that are ready."""
        return sum(worker.ready for worker in self._workers)

    async def post(self, path: str, body: Any, client: str) -> tuple[int, Any]:
        """Status and object of the reply to a body.

        Raises:
            SakiyomiError: no worker can answer anything.
        """
        for _ in range(TOGETHER):
            if (reply := await self._ask(path, body, client, alone=False)) is not None:
                return reply
        async with self._suspects:  # one at a time: others need workers, too
            for _ in range(ALONE):
                if (reply := await self._ask(path, body, client, alone=True)) is not None:
                    return reply
        message = f"{TOGETHER + ALONE} workers died while they answered this request, {ALONE} of them had no other"
        return 500, {"error": {"message": message, "type": "server_error", "param": None, "code": "worker_died"}}

    async def _ask(self, path: str, body: Any, client: str, *, alone: bool) -> tuple[int, Any] | None:
        """The reply of a worker; None if it died."""
        from ray.exceptions import RayActorError

        worker = await self._take(alone)
        try:
            reply: tuple[int, Any] = await worker.actor.post.remote(path, body, client)
        except RayActorError:
            await self._lost(worker)
            return None
        else:
            worker.answered += 1
            self._futile = 0
            return reply
        finally:
            async with self._changed:
                worker.running -= 1
                worker.reserved = worker.reserved and not alone
                self._changed.notify_all()

    async def _take(self, alone: bool) -> _Worker:
        """A worker with room for a request; ``alone``: one that has no other request, and gets none meanwhile."""
        chosen: _Worker | None = None
        async with self._changed:
            while True:
                if self._failure is not None:
                    raise self._failure
                there = [worker for worker in self._workers if worker.ready]
                if alone:
                    if chosen not in there and there:
                        chosen = min(there, key=lambda worker: worker.running)
                        chosen.reserved = True
                    free = [worker for worker in there if worker is chosen and not worker.running]
                else:
                    free = [w for w in there if not w.reserved and w.running < self._lines]
                    if not free:
                        self._grow()
                if free:
                    worker = min(free, key=lambda worker: worker.running)
                    worker.running += 1
                    return worker
                await self._changed.wait()

    def _grow(self) -> None:
        """Add a worker, if there may be more and the cluster has room."""
        import ray

        if self._starting or len(self._workers) >= self._count.most:
            return
        room = ray.available_resources()
        if room.get("CPU", 0) >= self._cpus and room.get("GPU", 0) >= self._gpus:
            self._start()

    def _start(self) -> None:
        worker = _Worker(self._kind.remote())
        self._workers.append(worker)
        task = asyncio.ensure_future(self._begin(worker))
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)

    async def _begin(self, worker: _Worker) -> None:
        """Load the model in a new worker; waits until the cluster has room."""
        from ray.exceptions import RayError

        failure: Exception | None = None
        try:
            version, failure = await worker.actor.begin.remote(self._make)
            check_version(version)
        except LoadError as error:
            failure = error
        except RayError as error:
            self._futile += 1
            if self._futile < FUTILE:
                await self._lost(worker)
                return
            reason = str(error).strip().splitlines()[-1]
            failure = LoadError(
                f"{FUTILE} workers died before they answered anything ({type(error).__name__}: {reason:.200}); is "
                "there memory for the model on each machine, and the same sakiyomi?"
            )
        async with self._changed:
            self._failure = self._failure or failure
            worker.ready = failure is None
            self._changed.notify_all()

    async def _lost(self, worker: _Worker) -> None:
        """A worker has died: the first request that notices starts another one."""
        async with self._changed:
            if worker in self._workers:
                self._workers.remove(worker)
                self.deaths += 1
                logger.warning("a worker died after %d replies; another one takes its place", worker.answered)
                self._start()


@contextmanager
def pool_of(make: Make, option: WorkersOption, device: str, lines: int) -> Iterator[WorkerPool]:
    """A pool of workers, and the connection to their cluster.

    Args:
        make: makes a worker's endpoint, in its process.
        option: how many workers, and where.
        device: of each.
        lines: requests that each is given at a time.

    Raises:
        LoadError: there is no cluster.
        InputError: no machine has the processors for a worker.
    """
    assert option.count is not None
    with connected(option.address):
        check_room(option.worker_cpus, option.address)
        yield WorkerPool(make, option.count, cpus=option.worker_cpus, gpus=gpus_of(device), lines=lines)

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
    """A place in the pool, whose actor may change.

    Attributes:
        actor: Ray's handle; None while no actor is ready.
        running: its running requests.
        answered: requests that this actor has answered.
        reserved: it gets no more requests, so that one request can have it alone.
    """

    def __init__(self) -> None:
        self.actor: Any = None
        self.running = self.answered = 0
        self.reserved = False


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
        self._actors: list[Any] = []
        self._starting: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Condition()
        self._suspects = asyncio.Lock()
        self._failure: Exception | None = None
        self._futile = self.deaths = 0

    async def __aenter__(self) -> Self:
        for _ in range(self._count.least):
            self._add()
        return self

    async def __aexit__(self, *error: object) -> None:
        import ray

        for task in self._starting:
            task.cancel()
        await asyncio.gather(*self._starting, return_exceptions=True)
        for actor in self._actors:
            ray.kill(actor)

    @property
    def ready(self) -> int:
        """Workers that are ready."""
        return sum(worker.actor is not None for worker in self._workers)

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
        actor = worker.actor
        try:
            reply: tuple[int, Any] = await actor.post.remote(path, body, client)
        except RayActorError:
            await self._lost(worker, actor)
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
                there = [worker for worker in self._workers if worker.actor is not None]
                if alone:
                    if chosen is None and there:
                        chosen = min(there, key=lambda worker: worker.running)
                        chosen.reserved = True
                    free = [chosen] if chosen is not None and chosen.actor and not chosen.running else []
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
            self._add()

    def _add(self) -> None:
        worker = _Worker()
        self._workers.append(worker)
        self._start(worker)

    def _start(self, worker: _Worker) -> None:
        task = asyncio.ensure_future(self._begin(worker))
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)

    async def _begin(self, worker: _Worker) -> None:
        """Start an actor for this worker; waits until the cluster has room."""
        from ray.exceptions import RayError

        failure: Exception | None = None
        actor = self._kind.remote()
        self._actors.append(actor)
        try:
            version, failure = await actor.begin.remote(self._make)
            check_version(version)
        except LoadError as error:
            failure = error
        except RayError as error:
            self._futile += 1
            self.deaths += 1
            if self._futile < FUTILE:
                self._start(worker)
                return
            reason = str(error).strip().splitlines()[-1]
            failure = LoadError(
                f"{FUTILE} workers died before they answered anything ({type(error).__name__}: {reason:.200}); is "
                "there memory for the model on each machine, and the same sakiyomi?"
            )
        async with self._changed:
            if failure is not None:
                self._failure = failure
            else:
                worker.actor, worker.answered = actor, 0
            self._changed.notify_all()

    async def _lost(self, worker: _Worker, actor: Any) -> None:
        """A worker has died: the first request that notices starts another actor."""
        async with self._changed:
            if worker.actor is not actor:
                return
            worker.actor = None
            self.deaths += 1
            logger.warning("a worker died after %d replies; another one takes its place", worker.answered)
            self._start(worker)


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

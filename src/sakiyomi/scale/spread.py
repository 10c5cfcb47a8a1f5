"""Pieces of work that engines on a Ray cluster do, for a command that goes through them one by one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractAsyncContextManager
from itertools import islice
from typing import Any, TypeVar

from sakiyomi.core.errors import LoadError, SakiyomiError
from sakiyomi.scale.batch import IN_FLIGHT, Endpoint
from sakiyomi.scale.cluster import WorkersOption, connected, gpus_of
from sakiyomi.scale.workers import WorkerOptions, WorkerPool

__all__ = ["OneByOne", "spread"]

Key = TypeVar("Key")


class OneByOne(AbstractAsyncContextManager["OneByOne"]):
    """A worker's endpoint that does one piece after the other, off the loop.

    Args:
        do: a piece, from its body to its result.
    """

    def __init__(self, do: Callable[[Any], Any]) -> None:
        self._do, self._free = do, asyncio.Lock()

    async def __aexit__(self, *error: object) -> None:
        pass

    async def post(self, path: str, body: Any, client: str) -> tuple[int, Any]:
        """See ``Endpoint``."""
        async with self._free:
            try:
                return 200, await asyncio.to_thread(self._do, body)
            except SakiyomiError as error:
                return 500, {"error": {"message": error.message}}


def spread(
    make: Callable[[], AbstractAsyncContextManager[Endpoint]],
    option: WorkersOption,
    device: str,
    pieces: Iterable[tuple[Key, Any]],
) -> Generator[tuple[Key, Any], None, None]:
    """Results of pieces, each as soon as it is there; some are under way, and the next ones are not drawn yet.

    Args:
        make: a worker's endpoint, in its process.
        option: how many workers, and where.
        device: of each.
        pieces: what each is here, and its body.

    Raises:
        SakiyomiError: of a worker; or a piece whose workers die again and again.
    """
    count = option.count
    assert count is not None
    coming = iter(pieces)
    running: dict[asyncio.Task[tuple[int, Any]], Key] = {}
    with connected(option.address), asyncio.Runner() as runner:
        pool = WorkerPool(make, count, WorkerOptions(option.worker_cpus, gpus_of(device), IN_FLIGHT))
        runner.run(pool.__aenter__())
        try:
            while True:
                for key, body in islice(coming, IN_FLIGHT * count.most - len(running)):
                    running[runner.get_loop().create_task(pool.post("", body, ""))] = key
                if not running:
                    return
                for task in runner.run(_first(running)):
                    status, result = task.result()
                    key = running.pop(task)
                    if status != 200:
                        raise LoadError(result["error"]["message"])
                    yield key, result
        finally:
            for task in running:
                task.cancel()
            runner.run(pool.__aexit__(None, None, None))


async def _first(tasks: Iterable[asyncio.Task[Any]]) -> set[asyncio.Task[Any]]:
    return (await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED))[0]

"""Distributes pieces of work to engines on a Ray cluster, and yields their results."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractAsyncContextManager, ExitStack
from itertools import islice
from typing import Any, TypeVar

from sakiyomi.core.errors import InputError, LoadError, SakiyomiError
from sakiyomi.scale.batch import IN_FLIGHT
from sakiyomi.scale.cluster import WorkersOption
from sakiyomi.scale.workers import Make, pool_of

Key = TypeVar("Key")


class OneByOne(AbstractAsyncContextManager["OneByOne"]):
    """An endpoint that does one piece at a time, in a thread.

    Args:
        do: makes the result of a piece from its body.
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
                return 422 if isinstance(error, InputError) else 500, {"error": {"message": error.message}}


class Workers:
    """Workers of a Ray cluster that do pieces; a context manager.

    Args:
        make: a worker's endpoint, in its process.
        option: how many workers, and where.
        device: of each.
    """

    def __init__(self, make: Make, option: WorkersOption, device: str) -> None:
        assert option.count is not None
        self._made, self._most = pool_of(make, option, device, IN_FLIGHT), option.count.most

    def __enter__(self) -> Workers:
        with ExitStack() as opened:
            self._pool = opened.enter_context(self._made)
            self._runner = opened.enter_context(asyncio.Runner())
            self._runner.run(self._pool.__aenter__())
            opened.callback(lambda: self._runner.run(self._pool.__aexit__(None, None, None)))
            self._opened = opened.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._opened.close()

    def do(self, pieces: Iterable[tuple[Key, Any]]) -> Generator[tuple[Key, Any], None, None]:
        """Results of pieces, in the order in which they finish. Pieces are drawn as workers become free.

        Args:
            pieces: the key of each, and its body.

        Raises:
            SakiyomiError: an error of a worker, or too many workers died during a piece.
        """
        coming = iter(pieces)
        running: dict[asyncio.Task[tuple[int, Any]], Key] = {}
        try:
            while True:
                for key, body in islice(coming, IN_FLIGHT * self._most - len(running)):
                    running[self._runner.get_loop().create_task(self._pool.post("", body, ""))] = key
                if not running:
                    return
                for task in self._runner.run(_first(running)):
                    status, result = task.result()
                    key = running.pop(task)
                    if status != 200:
                        raise (InputError if status == 422 else LoadError)(result["error"]["message"])
                    yield key, result
        finally:
            for task in running:
                task.cancel()


def spread(
    make: Make, option: WorkersOption, device: str, pieces: Iterable[tuple[Key, Any]]
) -> Generator[tuple[Key, Any], None, None]:
    """Results of one set of pieces; see ``Workers``."""
    with Workers(make, option, device) as workers:
        yield from workers.do(pieces)


async def _first(tasks: Iterable[asyncio.Task[Any]]) -> set[asyncio.Task[Any]]:
    return (await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED))[0]

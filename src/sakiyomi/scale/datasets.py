"""Answers the rows of a Ray dataset with the engines of an actor pool.

Requests are answered by the server's code, as the lines of a batch are.
"""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from sakiyomi.core.errors import InputError
from sakiyomi.engine.config import LLMConfig
from sakiyomi.scale.batch import IN_FLIGHT, URLS, Endpoint, seeded
from sakiyomi.scale.cluster import Count, import_ray
from sakiyomi.scale.in_process import load_server, unlimited
from sakiyomi.scale.workers import Make

if TYPE_CHECKING:
    from ray.data import Dataset

Row = dict[str, Any]
RESTARTS, RETRIES = 3, 2  # of a worker that dies, and of a block whose worker died


def processor(
    model: LLMConfig | Make,
    body: Callable[[Row], Mapping[str, Any]],
    *,
    url: str = "/v1/chat/completions",
    workers: int | tuple[int, int] = 1,
    cpus: float = 1,
    gpus: float = 0,
    rows: int = 32,
) -> Callable[[Dataset], Dataset]:
    """Make a function that answers each row of a dataset, and adds the columns ``text``, ``status`` and ``reply``.

    ``text`` is that of the first choice, ``status`` 200 or that of an error, ``reply`` the whole object as JSON. A
    request that samples and has no seed gets one from what it asks, so that a row's text does not depend on when,
    where or how often it is written. A worker that dies is started again, and the block of rows that it had is answered
    again.

    Args:
        model: settings of the engines.
        body: makes the body of a request from a row.
        url: path of the requests, /v1/chat/completions or /v1/completions.
        workers: engines, each in a process of its own; (least, most) for a pool that grows.
        cpus, gpus: of each.
        rows: rows of a block, which is answered together; a worker has two blocks at a time.

    Raises:
        InputError: a value is invalid.
        LoadError: Ray is not installed.
    """
    if url not in URLS:
        raise InputError(f"url is {url!r:.80}; it is {' or '.join(URLS)}")
    count = Count.parse("workers", ":".join(map(str, workers)) if isinstance(workers, tuple) else str(workers))
    for name, value, least in (("rows", rows, 1), ("cpus", cpus, 0), ("gpus", gpus, 0)):
        if not isinstance(value, int | float) or value < least:
            raise InputError(f"{name} is {value!r}; expected a number from {least} on")
    import_ray()
    make = functools.partial(load_server, model, unlimited()) if isinstance(model, LLMConfig) else model

    def process(dataset: Dataset) -> Dataset:
        from ray.data import ActorPoolStrategy

        return dataset.map_batches(
            _Answering,
            fn_constructor_args=(make, body, url),
            batch_size=rows,
            num_cpus=cpus,
            num_gpus=gpus,
            compute=ActorPoolStrategy(
                min_size=count.least, max_size=count.most, max_tasks_in_flight_per_actor=2 * IN_FLIGHT
            ),
            max_concurrency=IN_FLIGHT,
            max_restarts=RESTARTS,
            max_task_retries=RETRIES,
        )

    return process


class _Answering:
    """A worker of Ray Data's pool."""

    def __init__(self, make: Make, body: Callable[[Row], Mapping[str, Any]], url: str) -> None:
        self._context, self._body, self._url = make(), body, url
        self._endpoint: asyncio.Future[Endpoint] | None = None

    async def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """The columns, with those of the replies added."""
        if self._endpoint is None:
            self._endpoint = asyncio.ensure_future(self._context.__aenter__())
        endpoint = await asyncio.shield(self._endpoint)
        names = list(batch)
        rows = [dict(zip(names, values, strict=True)) for values in zip(*batch.values(), strict=True)]
        replies = await asyncio.gather(*(self._answer(endpoint, row) for row in rows))
        return {
            **batch,
            "text": [_text(status, reply) for status, reply in replies],
            "status": [status for status, _ in replies],
            "reply": [json.dumps(reply, ensure_ascii=False) for _, reply in replies],
        }

    async def _answer(self, endpoint: Endpoint, row: Row) -> tuple[int, Any]:
        body = dict(self._body(row))
        name = json.dumps(body, sort_keys=True, default=str)
        return await endpoint.post(self._url, seeded(name, body), "dataset")


def _text(status: int, reply: Any) -> str:
    """Text of the first choice; "" for an error."""
    if status != 200:
        return ""
    choice = reply["choices"][0]
    return str((choice["message"]["content"] if "message" in choice else choice["text"]) or "")

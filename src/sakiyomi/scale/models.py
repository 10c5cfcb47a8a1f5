"""Several models behind one address, by name: each is loaded when a request names it, within a bound on memory.

If a model does not fit beside the others, the least recently used one is unloaded. Requests that a model is answering
are finished first; requests that come for it meanwhile wait until it is loaded again.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Any

from fastapi import FastAPI

from sakiyomi.core.errors import SakiyomiError
from sakiyomi.core.memory import readable
from sakiyomi.engine.config import LLMConfig
from sakiyomi.scale.front import make_front
from sakiyomi.scale.in_process import Asked, Part
from sakiyomi.scale.model_options import likely_bytes
from sakiyomi.scale.model_process import ModelDied, ModelProcess
from sakiyomi.server.config import ServerConfig
from sakiyomi.server.errors import ApiError, no_model, stopping
from sakiyomi.server.fields import Strict
from sakiyomi.server.transcriptions import read_form

logger = logging.getLogger("sakiyomi.server")
_JSON = [(b"content-type", b"application/json")]


class ModelName(Strict):
    """Body of ``/models/load`` and ``/models/unload``."""

    model: str


class _Model:
    """A model of the table.

    Attributes:
        users: running requests.
        used: time when a request last began or ended.
        leaving: it is unloaded as soon as it has no requests; new ones wait until it is loaded again.
        size: bytes after it was loaded; caches grow afterwards.
        loads: how often it was loaded.
        card: its entry in ``/v1/models``, from its last process.
    """

    def __init__(self, name: str, model: LLMConfig) -> None:
        self.name, self.model = name, model
        self.process: ModelProcess | None = None
        self.users, self.used, self.leaving, self.size, self.loads = 0, 0.0, False, 0, 0
        self.card: dict[str, Any] = {"id": name, "object": "model", "created": int(time.time()), "owned_by": "sakiyomi"}

    @property
    def loaded(self) -> bool:
        return self.process is not None and self.process.alive

    def weigh(self) -> int:
        """Bytes that it takes, or is expected to take."""
        taken = self.process.bytes if self.process is not None and self.process.alive else 0
        return taken or self.size or likely_bytes(self.model)

    def shown(self) -> dict[str, Any]:
        """Its card."""
        state = {"loaded": self.loaded, "bytes": self.weigh(), "requests": self.users}
        return self.card | state


class ModelTable:
    """Models by name, for ``make_front``.

    Args:
        models: settings of each; the first one is loaded at the start, and is the default of requests.
        config: of the server.
        memory: bytes that the models may take together; see ``room_of``.
        start: loads a model.
    """

    dead: tuple[type[BaseException], ...] = (ModelDied,)
    busy: tuple[type[BaseException], ...] = ()

    def __init__(
        self,
        models: Mapping[str, LLMConfig],
        config: ServerConfig,
        memory: int,
        start: Callable[[LLMConfig, ServerConfig], Coroutine[Any, Any, ModelProcess]] = ModelProcess.start,
    ) -> None:
        self._models = {name: _Model(name, model) for name, model in models.items()}
        self._config, self._start = config, start
        self._limit = memory
        self._door = asyncio.Lock()  # held while a model is loaded or unloaded
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Future[Any]] = set()
        self._waiting = 0  # requests that wait for their model
        self._loading: asyncio.Task[ModelProcess] | None = None
        self._draining = self._over = False

    # ------------------------------------------------------------ for the front

    async def ask(self, asked: Asked) -> AsyncGenerator[Part]:
        """Parts of a reply of the model that the request names."""
        if asked.path.startswith("/v1/models"):
            yield self._listed(asked.path)
            return
        async with self._lent(_named(asked)) as model:
            assert model.process is not None
            async with aclosing(model.process.ask(asked)) as parts:
                async for part in parts:
                    yield part

    async def figures(self) -> list[dict[str, Any]]:
        """Figures of each model; zeros for those that are not loaded."""
        found = []
        for model in self._models.values():
            said: dict[str, Any] = dict.fromkeys(("running", "waiting", "slots", "requests", "tokens"), 0)
            said |= {"pid": "", "tau": "", "cache": "", "metrics": ""}
            if model.process is not None and model.process.alive:
                try:
                    said |= {"pid": model.process.pid, **await model.process.figures()}
                except (TimeoutError, ModelDied):
                    logger.warning("model %s does not say how it is", model.name)
            said["metrics"] += _gauges(model)
            found.append({"replica": model.name, "machine": socket.gethostname(), **said})
        return found

    async def load_model(self, name: str) -> dict[str, Any]:
        """Load a model now; its card."""
        async with self._lent(name) as model:
            return model.shown()

    async def unload_model(self, name: str) -> dict[str, Any]:
        """Unload a model when it has no requests; its card."""
        model = self._find(name)
        async with self._door:
            try:
                while model.loaded and model.users:
                    model.leaving = True
                    await self._change()
                await self._stop(model)
            finally:
                model.leaving = False
        return model.shown()

    # ------------------------------------------------------------ for who listens

    @asynccontextmanager
    async def lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        """Load the first model; end all processes afterwards."""
        self._later(self._first())
        try:
            yield
        finally:
            self._draining = True
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await asyncio.gather(*(self._stop(model) for model in self._models.values()))

    @property
    def load(self) -> int:
        """Running requests, and those that wait for their model."""
        return self._waiting + sum(model.users for model in self._models.values())

    def drain(self) -> None:
        """Refuse new requests from now on."""
        self._draining = True

    def stop(self) -> None:
        """End running requests."""
        self._draining = self._over = True
        if self._loading is not None:
            self._loading.cancel()
        for model in self._models.values():
            self._later(self._stop(model))

    # ------------------------------------------------------------ lending

    @asynccontextmanager
    async def _lent(self, name: str | None) -> AsyncIterator[_Model]:
        """A loaded model, which is not unloaded during the block."""
        model = self._find(name)
        self._waiting += 1
        try:
            async with asyncio.timeout(self._config.request_timeout):
                await self._ready(model)
        except TimeoutError:
            raise ApiError(
                503,
                f"model {model.name!r} was not loaded within {self._config.request_timeout:g} s; try again later",
                code="model_not_loaded",
                headers={"retry-after": "30"},
            ) from None
        finally:
            self._waiting -= 1
        model.users += 1
        model.used = time.monotonic()
        try:
            yield model
        finally:
            model.users -= 1
            model.used = time.monotonic()
            self._changed.set()
            if self._taken() > self._limit:
                self._later(self._trim())

    def _find(self, name: str | None) -> _Model:
        if self._draining:
            raise stopping()
        if name is None:
            return next(iter(self._models.values()))
        if name not in self._models:
            raise no_model(name, ", ".join(map(repr, self._models)))
        return self._models[name]

    async def _ready(self, model: _Model) -> None:
        while not model.loaded or model.leaving:
            async with self._door:
                if self._over:
                    raise stopping()
                if not model.loaded:
                    await self._make_room(model)
                    await self._load(model)

    async def _make_room(self, model: _Model) -> None:
        """Unload others, the least recently used first; idle ones before busy ones."""
        self._check_size(model)
        needed = model.weigh()
        try:
            while self._taken() + needed > self._limit and (held := self._held()):
                victim = min(held, key=lambda one: (one.users > 0, one.used))
                if victim.users:
                    victim.leaving = True
                    await self._change()
                else:
                    await self._stop(victim)
        finally:
            for one in self._models.values():
                one.leaving = False

    async def _load(self, model: _Model) -> None:
        config = dataclasses.replace(self._config, served_name=model.name, api_key=None, cors_origins=())
        logger.info("loading model %s", model.name)
        began = time.monotonic()
        self._loading = asyncio.create_task(self._start(model.model, config))
        try:
            model.process = await self._loading
        except (SakiyomiError, ModelDied) as error:
            logger.error("model %s cannot be loaded: %s", model.name, error)
            raise ApiError(503, f"model {model.name!r} cannot be loaded: {error}", code="model_not_loaded") from error
        except asyncio.CancelledError:
            if self._over:
                raise stopping() from None
            raise
        finally:
            self._loading = None
        model.loads += 1
        model.used = time.monotonic()
        asked = Asked(f"/v1/models/{model.name}", None, method="GET")
        data = b"".join([part.data async for part in model.process.ask(asked)])
        model.card = json.loads(data) | {"created": model.card["created"]}
        model.size = model.weigh()
        logger.info("model %s is loaded: %s, %.1f s", model.name, readable(model.size), time.monotonic() - began)
        try:
            self._check_size(model)
        except ApiError as error:
            logger.error("%s", error.message)
            await self._stop(model)
            raise

    def _check_size(self, model: _Model) -> None:
        """Refuse a model that exceeds the limit of all models."""
        if (needed := model.weigh()) > self._limit:
            raise ApiError(
                503,
                f"model {model.name!r} takes {readable(needed)}, and models may take {readable(self._limit)} together",
                code="out_of_memory",
            )

    async def _trim(self) -> None:
        """Unload idle models until the others fit; the most recently used one stays."""
        async with self._door:
            while self._taken() > self._limit and len(held := self._held()) > 1:
                idle = [one for one in sorted(held, key=lambda one: one.used)[:-1] if not one.users]
                if not idle:
                    return
                await self._stop(idle[0])

    async def _stop(self, model: _Model) -> None:
        process, model.process, model.leaving = model.process, None, False
        if process is not None:
            await process.stop()
            logger.info("model %s is unloaded", model.name)

    async def _first(self) -> None:
        with suppress(ApiError):  # the log has it, and requests for the model get it
            await self.load_model(next(iter(self._models)))

    def _held(self) -> list[_Model]:
        return [model for model in self._models.values() if model.loaded]

    def _taken(self) -> int:
        return sum(model.weigh() for model in self._held())

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    def _later(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _listed(self, path: str) -> Part:
        name = path.removeprefix("/v1/models").removeprefix("/")
        if name:
            found: Any = self._find(name).shown()
        else:
            found = {"object": "list", "data": [model.shown() for model in self._models.values()]}
        return Part(200, _JSON, json.dumps(found).encode(), [])


def make_models_app(table: ModelTable, config: ServerConfig) -> FastAPI:
    """The application: a front, and paths that load and unload models."""
    app = make_front(table, config, table.lifespan)

    @app.post("/models/load")
    async def load(body: ModelName) -> dict[str, Any]:
        """Load a model before it is asked for."""
        return await table.load_model(body.model)

    @app.post("/models/unload")
    async def unload(body: ModelName) -> dict[str, Any]:
        """Unload a model as soon as it has no requests."""
        return await table.unload_model(body.model)

    return app


def _named(asked: Asked) -> str | None:
    """Name of the model in a request."""
    if isinstance(asked.body, Mapping):
        return asked.body.get("model")
    if isinstance(asked.body, bytes):
        names = read_form(asked.body, asked.kind).get("model")
        return names[-1].decode("utf-8", "replace") if names else None
    return None


def _gauges(model: _Model) -> str:
    """Metrics of the table itself, for Prometheus."""
    found = [
        ("sakiyomi:model_loaded", "gauge", "1 where the model is loaded", int(model.loaded)),
        ("sakiyomi:model_bytes", "gauge", "Memory of its process", model.weigh() if model.loaded else 0),
        ("sakiyomi:model_loads_total", "counter", "How often it was loaded", model.loads),
    ]
    return "".join(
        f'# HELP {name} {text}\n# TYPE {name} {kind}\n{name}{{model_name="{model.name}"}} {value}\n'
        for name, kind, text, value in found
    )

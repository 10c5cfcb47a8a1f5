"""Replicas of the engine behind one front, on Ray Serve, which starts, monitors, scales and drains them."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import os
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager, nullcontext
from typing import Any, TypeVar

from ray import serve
from ray.exceptions import RayActorError
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.exceptions import BackPressureError
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica
from ray.util import get_node_ip_address, list_named_actors

from sakiyomi.core.errors import InputError
from sakiyomi.core.version import __version__
from sakiyomi.engine.config import LLMConfig
from sakiyomi.scale.cluster import MAX_BATCH, Count, ReplicaOptions, check_version, gpus_of
from sakiyomi.scale.front import make_front
from sakiyomi.scale.in_process import Asked, InProcessServer, Part, load_server
from sakiyomi.scale.routing import ranked
from sakiyomi.scale.wire import Address, Dialer, Lines
from sakiyomi.server.config import ServerConfig

T = TypeVar("T")
PATIENCE = 5.0  # seconds in which a replica must give its figures
TARGET = 0.75  # share of a replica's slots that autoscaling aims at
THEIRS = ("address", "start_timeout", "host", "port", "kv_events", "kv_events_replay", "kv_events_topic")
"""Settings that `serve run` decides, or that a replica cannot have."""


class AffinityRouter(RequestRouter):  # type: ignore[misc]
    """Routes a request to the replica that has its conversation in the cache, unless that is busy; see ``routing``."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """One replica per rank, the best first; a request that names a replica gets that one alone, if it exists."""
        await asyncio.sleep(0)  # Serve retries at once while a replica is busy; let other tasks run
        asked = {} if pending_request is None else pending_request.kwargs
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        if (named := by_name.get(asked.get("replica", ""))) is not None:
            return [[named]]
        loads = {name: self.replica_queue_len_cache.get(replica.replica_id) or 0 for name, replica in by_name.items()}
        return [[by_name[name]] for name in ranked(asked.get("key", ""), loads)]


def make_server(version: str, model: LLMConfig, config: ServerConfig) -> InProcessServer:
    """The server of a replica, in its process.

    Args:
        version: of the library where the replica was asked for; another one here is refused.
        model: what it is made of.
        config: of the server.
    """
    check_version(version)
    return load_server(model, config)


class Replica:
    """A model in a process of Ray Serve.

    Args:
        make: makes its server.
    """

    def __init__(self, make: Any) -> None:
        self._name = serve.get_replica_context().replica_id.unique_id
        self._made = make()
        self._dialer = Dialer()
        self._ready: asyncio.Future[Any] | None = None

    async def _server(self) -> Any:
        """The server, started in the event loop of the handlers."""
        if self._ready is None:
            self._ready = asyncio.ensure_future(self._made.__aenter__())
        return await asyncio.shield(self._ready)

    async def ask(self, *, asked: Asked, key: str, address: Address | None) -> AsyncIterator[tuple[Part, bool]]:
        """Parts of a reply, each with whether the rest of the reply is sent to the address instead."""
        server = await self._server()
        async with aclosing(server.events(asked)) as parts:
            first = await anext(parts)
            async with self._dialer.opened(address if first.streams else None) as line:
                yield first, line is not None
                async for part in parts:
                    if line is None:
                        yield part, False
                    else:
                        await line.send(part)
                if line is not None:
                    await line.end()

    async def figures(self, *, replica: str) -> AsyncIterator[dict[str, Any]]:
        """The replica's figures, see ``InProcessServer.figures``."""
        server = await self._server()
        machine = {"replica": self._name, "machine": socket.gethostname(), "pid": os.getpid()}
        yield {**machine, **server.figures()}

    async def check_health(self) -> None:
        """Called by Serve, which replaces a replica that raises."""
        if self._ready is not None and self._ready.done() and not self._ready.result().alive:
            raise RuntimeError("the engine's last round failed")


class RayReplicas:
    """The replicas of a Ray Serve application; see ``front.Replicas``.

    Args:
        handle: Serve's, of the deployment ``Replica``.
    """

    dead: tuple[type[BaseException], ...] = (RayActorError, ConnectionError)
    busy: tuple[type[BaseException], ...] = (BackPressureError,)

    def __init__(self, handle: Any) -> None:
        self._handle, self._application = handle.options(stream=True), handle.app_name
        self._lines = Lines(get_node_ip_address())

    @asynccontextmanager
    async def lifespan(self, _: Any) -> AsyncIterator[None]:
        """Of the front: streams come by sockets, unless the cluster encrypts its traffic."""
        encrypted = os.environ.get("RAY_USE_TLS", "0") != "0"
        async with nullcontext() if encrypted else self._lines.listening():
            yield

    async def ask(self, asked: Asked) -> AsyncGenerator[Part]:
        """See ``front.Replicas``."""
        async with self._lines.line() as line:
            address = None if line is None else line.address
            parts = aiter(self._handle.ask.remote(asked=asked, key=asked.key, address=address))
            try:
                async for part, wired in parts:
                    yield part
                    if wired and line is not None:
                        watched = asyncio.ensure_future(anext(parts, None))
                        try:
                            async with aclosing(line.parts(watched, part)) as rest:
                                async for later in rest:
                                    yield later
                            await watched
                        finally:
                            watched.cancel()
                        return
            finally:
                parts.cancel()

    async def figures(self) -> list[dict[str, Any]]:
        """Figures of each replica; those that do not answer in time are left out."""
        names = await asyncio.to_thread(processes, self._application)

        async def one(name: str) -> dict[str, Any] | None:
            try:
                async with asyncio.timeout(PATIENCE):
                    return await anext(aiter(self._handle.figures.remote(replica=name)))
            except (TimeoutError, RayActorError):
                return None

        found = [
            await one(name) for name in names.values()
        ]  # one at a time: asked together, Serve mixes up their places and retries for ever
        return list({each["replica"]: each for each in found if each is not None}.values())


def processes(application: str) -> dict[str, str]:
    """Names of an application's replicas: in Ray, and in Serve."""
    prefix = f"SERVE_REPLICA::{application}#{Replica.__name__}#"
    names = [actor["name"] for actor in list_named_actors(all_namespaces=True)]
    return {name: name.removeprefix(prefix) for name in names if name.startswith(prefix)}


class Front:
    """One endpoint for all replicas, where Serve listens; see ``front``.

    Args:
        handle: Serve's, of the replicas.
        config: of the server.
    """

    def __init__(self, handle: Any, config: ServerConfig) -> None:
        self._replicas, self._config = RayReplicas(handle), config

    def __serve_build_asgi_app__(self) -> Any:
        return make_front(self._replicas, self._config, self._replicas.lifespan)


def deployment(make: Any, config: ServerConfig, options: ReplicaOptions, model: LLMConfig) -> Any:
    """The replicas, for ``serve.run``.

    Args:
        make: makes a replica's server, in its process.
        config: of the server.
        options: how many replicas, and what each has of its machine.
        model: of each.
    """
    assert options.replicas is not None
    count, slots = Count.parse("replicas", options.replicas), model.max_batch
    scaled: dict[str, Any] = {"num_replicas": count.least}
    if count.most > count.least:
        target = max(1.0, TARGET * slots)
        scaled = {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=count.least, max_replicas=count.most, target_ongoing_requests=target
            )
        }
    return serve.deployment(
        Replica,
        max_ongoing_requests=slots + config.max_queue,
        max_queued_requests=max(1, config.max_queue),
        graceful_shutdown_timeout_s=config.request_timeout,  # a replica that is removed finishes its requests first
        graceful_shutdown_wait_loop_s=0.5,
        health_check_period_s=2,
        health_check_timeout_s=30,
        request_router_config=RequestRouterConfig(request_router_class=AffinityRouter),
        ray_actor_options={
            "num_cpus": options.replica_cpus,
            "num_gpus": gpus_of(model.device),
        },
        **scaled,
    ).bind(make)


def application(replicas: Any, config: ServerConfig) -> Any:
    """The replicas and a front for them, where Serve listens.

    Args:
        replicas: see ``deployment``.
        config: of the server.
    """
    front = serve.deployment(
        serve.ingress()(Front),
        max_ongoing_requests=config.max_connections,
        graceful_shutdown_timeout_s=config.request_timeout,
        graceful_shutdown_wait_loop_s=0.5,
        ray_actor_options={"num_cpus": 0},
    )
    return front.bind(replicas, config)


def build(args: Mapping[str, Any]) -> Any:
    """What `serve run sakiyomi.scale:app target=tales replicas=2` runs; names are those of the flags of `serve`.

    Raises:
        InputError: a name is not known, or a value makes no sense.
    """
    if theirs := [name for name in THEIRS if name in args]:
        raise InputError(f"{theirs[0]!r} is a setting of `sakiyomi serve`; here Ray Serve decides")
    given = {"max_batch": MAX_BATCH, "replicas": "1", **args}
    options, model, config = _made(ReplicaOptions, given), _made(LLMConfig, given), _made(ServerConfig, given)
    if given:
        raise InputError(f"{next(iter(given))!r} is not a setting of a server; `sakiyomi serve --help` lists them")
    make = functools.partial(make_server, __version__, model, config)
    return application(deployment(make, config, options, model), config)


def _made(kind: type[T], given: dict[str, Any]) -> T:
    """A group of settings, of the values that are its own; they are taken out of what was given."""
    fields = {field.name: str(field.type) for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: _value(name, wanted, given.pop(name)) for name, wanted in fields.items() if name in given})


def _value(name: str, wanted: str, value: Any) -> Any:
    """A value of a field, converted if it is a text."""
    if not isinstance(value, str):
        return value
    try:
        if "tuple" in wanted:
            return tuple(value.split())
        if wanted.startswith("bool"):
            return {"true": True, "false": False}[value.lower()]
        if "int" in wanted and (value.isdigit() or "str" not in wanted):
            return int(value)
        return float(value) if "float" in wanted else value
    except (ValueError, KeyError):
        raise InputError(f"{name} is {value!r}; expected {wanted}") from None

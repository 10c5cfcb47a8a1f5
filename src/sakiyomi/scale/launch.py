"""``sakiyomi serve --replicas``: engines on Ray Serve, and the front for them in the command's own process.

A request then goes directly to its replica, and the front has the same listener and limits as a server without Ray.
(Under ``serve run`` a request also passes Serve's proxy and a process for the front.)
"""

from __future__ import annotations

import contextlib
import functools
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import ray
from ray import serve
from ray.serve.schema import ApplicationStatus

from sakiyomi.core.errors import LoadError
from sakiyomi.core.version import __version__
from sakiyomi.engine.config import LLMConfig
from sakiyomi.scale.cluster import ReplicaOptions, connected
from sakiyomi.scale.front import make_front
from sakiyomi.scale.serving import RayReplicas, Replica, deployment, make_server, processes
from sakiyomi.server.config import ServerConfig
from sakiyomi.server.run import Listening

QUIET = {"log_level": "ERROR", "enable_access_log": False}  # of what Serve writes
PAUSE = 0.5  # seconds between checks whether the replicas are ready, or have ended
ENDING = 10.0  # seconds in which they must end


def started(application: Any, name: str, limit: float, told: threading.Event, prefix: str | None = None) -> bool:
    """Start an application, and wait until its replicas answer.

    Args:
        application: see ``serving``.
        name: of the application in the cluster.
        limit: seconds to wait at most.
        told: an event that ends the wait.
        prefix: path prefix for Serve's own proxies; None: they do not serve it.

    Returns:
        False: the event was set.

    Raises:
        LoadError: the time is over, or a replica cannot be started.
    """
    target = serve.RunTarget(application, name=name, route_prefix=prefix, logging_config=QUIET)
    serve.run_many([target], wait_for_applications_running=False)
    until = time.monotonic() + limit
    while not told.wait(PAUSE):
        found = serve.status().applications[name]
        if found.status == ApplicationStatus.RUNNING:
            return True
        if found.status in (ApplicationStatus.DEPLOY_FAILED, ApplicationStatus.UNHEALTHY):
            raise LoadError(f"the replicas cannot be started: {' '.join(found.message.split())[-600:]}")
        if time.monotonic() > until:
            raise LoadError(
                f"the replicas were not ready within {limit:g} s ({_waiting(found)}); is there a free processor for "
                "each of them in the cluster (`ray status`), and is the model where they run? Give a longer "
                "--start-timeout if it takes so long to load"
            )
    return False


def _waiting(found: Any) -> str:
    """States of the replicas, and Serve's message."""
    replica = found.deployments.get(Replica.__name__)
    if replica is None:
        return str(found.status.value).lower()
    states = [
        f"{count} {str(getattr(state, 'value', state)).lower()}" for state, count in replica.replica_states.items()
    ]
    return ", ".join([*states, *([" ".join(replica.message.split())[:300]] if replica.message else [])])


@contextlib.contextmanager
def running(application: Any, name: str, limit: float, told: threading.Event) -> Iterator[RayReplicas | None]:
    """Replicas that run while the block does; what they still compute at its end is cancelled.

    Args:
        application, name, limit, told: see ``started``; the block gets None if the event was set.

    Raises:
        LoadError: see ``started``.
    """
    try:
        ready = started(application, name, limit, told)
        yield RayReplicas(serve.get_deployment_handle(Replica.__name__, name)) if ready else None
    finally:
        serve.delete(name, _blocking=False)
        until = time.monotonic() + ENDING
        while name in serve.status().applications and time.monotonic() < until:
            for actor in processes(name):  # Serve would wait for one that hangs as long as a request may take
                with contextlib.suppress(ValueError):  # gone meanwhile
                    ray.kill(ray.get_actor(actor, "serve"))
            time.sleep(PAUSE)
        if not serve.status().applications.keys() - {name}:
            serve.shutdown()


def run(
    model: LLMConfig, config: ServerConfig, options: ReplicaOptions, listening: Listening, say: Callable[[str], None]
) -> None:
    """Serve until SIGTERM or Ctrl-C; running requests then have ``shutdown_timeout`` to finish.

    Raises:
        LoadError: there is no cluster, or the model cannot be loaded in it.
    """
    told = threading.Event()
    before = {kind: signal.signal(kind, lambda *_: told.set()) for kind in (signal.SIGINT, signal.SIGTERM)}
    try:
        with connected(options.address):
            serve.start(logging_config=QUIET, proxy_location="Disabled")
            name = f"sakiyomi {socket.gethostname()} {config.port}"  # another command may serve in this cluster
            make = functools.partial(make_server, __version__, model, config)
            with running(deployment(make, config, options, model), name, options.start_timeout, told) as found:
                if found is not None:
                    name = config.served_name or model.target
                    app = make_front(found, config, found.lifespan)
                    listening.run(app, None, lambda url: say(f"serving {name} at {url}"))
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)

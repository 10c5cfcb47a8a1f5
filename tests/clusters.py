"""Ray nodes on this machine, on the loopback address alone, and stubs of engines for their workers and replicas."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

from sakiyomi.core.errors import LoadError
from sakiyomi.scale.in_process import InProcessServer, unlimited
from server_toys import toy_llm

QUIET = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # else 127.0.0.1 is replaced by the machine's outer address
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # as of those that the package starts
    "RAY_DATA_DISABLE_PROGRESS_BARS": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_TASK_EVENTS_REPORT_INTERVAL_MS": "0",
    "RAY_raylet_start_wait_time_s": "120",  # of a busy machine
    "OMP_NUM_THREADS": "1",
}
os.environ.update(QUIET)  # some are read when ray is imported
NOTICED = {  # a dead node is noticed after 2 s in place of 15
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 3,
    "health_check_initial_delay_ms": 2000,
}


@contextmanager
def cluster(nodes: int = 2, cpus: int = 1) -> Iterator[Any]:
    """A head without processors, and some nodes; this process is connected. Its workers import what this one does."""
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    import ray
    from ray.cluster_utils import Cluster

    each = {"object_store_memory": 100 << 20, "node_ip_address": "127.0.0.1"}
    head = {"num_cpus": 0, "include_dashboard": False, "_system_config": NOTICED, **each}
    made = Cluster(initialize_head=True, head_node_args=head)
    try:
        made.added = [made.add_node(num_cpus=cpus, wait=False, **each) for _ in range(nodes)]
        made.wait_for_nodes()
        ray.init(address=made.address, logging_level=logging.ERROR, log_to_driver=False, _node_ip_address="127.0.0.1")
        yield made
    finally:
        ray.shutdown()
        made.shutdown()


class Sleeper:
    """Stands for an engine: answers with the prompt, after a while; at "die" its process ends.

    Args:
        seconds: for an answer.
    """

    def __init__(self, seconds: float = 0.002) -> None:
        self._seconds = seconds

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        pass

    async def post(self, path: str, body: Any, client: str) -> tuple[int, Any]:
        if body["prompt"] == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        await asyncio.sleep(self._seconds)
        return 200, {"text": body["prompt"], "choices": [{"text": body["prompt"]}], "pid": os.getpid()}


def raises_load_error() -> Any:
    """A model that cannot be loaded."""
    raise LoadError("there is no such model")


class StubServer(InProcessServer):
    """Stands for a replica's server: the server's own application, on an engine that sleeps in place of computing.

    Args:
        seconds: for a round.
    """

    def __init__(self, seconds: float = 0.02) -> None:
        llm = toy_llm(draft="none", max_batch=32)
        step = llm.engine.step

        def slowly() -> Any:
            time.sleep(seconds)
            return step()

        llm.engine.step = slowly  # type: ignore[method-assign]
        super().__init__(llm, unlimited("toy"))

"""Connections to a Ray cluster, and the options of workers and replicas.

Ray is imported in the functions that need it, so that commands without workers or replicas do not need it.
"""

from __future__ import annotations

import logging
import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from sakiyomi.core.checks import at_least
from sakiyomi.core.errors import InputError, LoadError
from sakiyomi.core.version import __version__

logger = logging.getLogger("sakiyomi")
SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",  # no reports to the makers of Ray
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
LOOPBACK = "127.0.0.1"
OWN = {
    # Otherwise Ray uses the machine's outer address, to which a firewall may block connections.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    # Otherwise workers run at nice 15, and take minutes to start beside a compiler.
    "RAY_worker_niceness": "0",
}
"""Settings of a Ray that is started here, which listens at the loopback address only. Read when ray is imported."""
MAX_BATCH = 32  # default of requests at once in a server or a replica
REACHED = 5.0  # seconds in which a cluster must accept a connection
STORE = 128 << 20  # bytes of Ray's object store, which holds only requests and replies


@dataclass(frozen=True)
class ReplicaOptions:
    """Several engines behind one address.

    Attributes:
        replicas: engines that answer, each in a process of its own, on Ray Serve: N, or MIN:MAX for as many as the
            requests under way ask for. By default one, in this process, without Ray.
        replica_cpus: processors of each replica; a replica on cuda has a GPU as well.
        address: of the Ray cluster that this machine belongs to: auto, or HOST:PORT; by default Ray is started here,
            and ended afterwards.
        start_timeout: seconds in which all replicas must load the model.
    """

    replicas: str | None = None
    replica_cpus: int = 1
    address: str | None = None
    start_timeout: float = 900.0

    def __post_init__(self) -> None:
        at_least(self, replica_cpus=1)
        if not self.start_timeout > 0:
            raise InputError(f"start_timeout is {self.start_timeout:g}; expected seconds, more than 0")
        if self.address is not None and self.address.startswith("ray://"):
            raise InputError(
                f"address is {self.address!r}; replicas are asked from a machine of their cluster: give this command "
                "there, with --address auto"
            )
        if self.replicas is not None:
            Count.parse("replicas", self.replicas)
        elif self.address is not None or self.replica_cpus != 1:
            raise InputError("address and replica_cpus need replicas; say how many with --replicas, or leave them out")


@dataclass(frozen=True)
class WorkersOption:
    """Engines that share the work.

    Attributes:
        workers: engines that share the work, each in a process of its own, on a Ray cluster: N, or MIN:MAX for MIN and
            up to MAX where the cluster has room. By default one, in this process, without Ray.
        worker_cpus: processors of each worker; a worker on cuda has a GPU as well.
        address: of the cluster: auto for the one that runs on this machine, HOST:PORT or ray://HOST:PORT; by default
            Ray is started here, and ended afterwards.
    """

    workers: str | None = None
    worker_cpus: int = 1
    address: str | None = None

    def __post_init__(self) -> None:
        at_least(self, worker_cpus=1)
        if self.workers is not None:
            Count.parse("workers", self.workers)
        elif self.address is not None or self.worker_cpus != 1:
            raise InputError("address and worker_cpus need workers; say how many with --workers, or leave them out")

    @property
    def count(self) -> Count | None:
        """How many workers; None: the work is done in this process."""
        return None if self.workers is None else Count.parse("workers", self.workers)


@dataclass(frozen=True)
class Count:
    """How many of something: least and most.

    Attributes:
        least: started at the beginning.
        most: reached if there is work and room for them.
    """

    least: int
    most: int

    @classmethod
    def parse(cls, name: str, text: str | int) -> Count:
        """From N, or MIN:MAX; a file of settings has a number.

        Raises:
            InputError: it is neither.
        """
        found = re.fullmatch(r"(\d{1,6})(?::(\d{1,6}))?", str(text))
        count = cls(int(found[1]), int(found[2] or found[1])) if found else cls(0, 0)
        if not 1 <= count.least <= count.most:
            raise InputError(f"{name} is {text!r}; expected a number from 1 on, or MIN:MAX, for instance 2:8")
        return count


def import_ray() -> None:
    """Set Ray's environment variables, and check that it is installed.

    Raises:
        LoadError: it is not installed.
    """
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    try:
        from ray import init  # noqa: F401 - of a mere folder "ray", such as that below /tmp, there is none
    except ImportError as error:
        raise LoadError(f"this needs Ray, which is not installed ({error}); pip install 'sakiyomi[scale]'") from None


def check_room(cpus: int, address: str | None) -> None:
    """Check that a machine of the connected cluster has enough processors for a worker.

    Raises:
        InputError: this machine, on which Ray was started, has fewer.
    """
    import ray

    most = max((int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]), default=0)
    if cpus <= most:
        return
    if address is None:
        raise InputError(f"worker_cpus is {cpus}; this machine has {most}: ask for fewer")
    logger.warning("a worker takes %d processors, and no machine of the cluster has more than %d: waiting", cpus, most)


def gpus_of(device: str) -> int:
    """GPUs of a worker: 1 on a GPU, or with "auto" if the cluster has any."""
    if device != "auto":
        return int(device.startswith("cuda"))
    import ray

    return int(ray.is_initialized() and ray.cluster_resources().get("GPU", 0) > 0)


@contextmanager
def connected(address: str | None) -> Iterator[None]:
    """A connection to a cluster, closed afterwards.

    Args:
        address: "auto" for the cluster that runs on this machine, HOST:PORT or ray://HOST:PORT for another one; None:
            Ray is started on this machine, and ended afterwards. Where the program is connected already, it stays so.

    Raises:
        LoadError: Ray is not installed, there is no cluster, or it is of another version.
    """
    if address is None:
        for name, value in OWN.items():
            os.environ.setdefault(name, value)
    import_ray()
    import ray

    if ray.is_initialized():
        yield
        return
    options = {} if address is not None else {
        "include_dashboard": False, "object_store_memory": STORE, "_node_ip_address": LOOPBACK,
    }  # fmt: skip
    try:
        _reach(address)
        ray.init(address=address or "local", logging_level=logging.ERROR, log_to_driver=False, **options)
    except Exception as error:  # Ray raises no narrower one where its processes do not start in time
        reason = " ".join(str(error).split())[:300]
        if address is None:
            raise LoadError(f"Ray did not start on this machine ({reason}); try again when it is less busy") from None
        if "version" in reason.lower():
            raise LoadError(f"the cluster at {address!r} runs another version of Ray or Python: {reason}") from None
        raise LoadError(
            f"there is no Ray cluster at {address!r} ({reason}); start one with `ray start --head`, give its "
            "HOST:PORT, or leave the address out: then Ray is started on this machine"
        ) from None
    try:
        yield
    finally:
        ray.shutdown()


def _reach(address: str | None) -> None:
    """Check that a cluster listens at an address; Ray itself would retry for minutes.

    Raises:
        OSError: it does not.
    """
    if address is not None and (found := re.fullmatch(r"(?:ray://)?(.+):(\d+)", address)):
        socket.create_connection((found[1], int(found[2])), REACHED).close()


def check_version(there: str) -> None:
    """Refuse a worker with another version of this library, since its texts may differ.

    Raises:
        LoadError: the versions differ.
    """
    if there != __version__:
        raise LoadError(
            f"a worker of the cluster has sakiyomi {there}, and this is {__version__}; install the same version on all "
            "its machines"
        )

"""How many threads should compute: one for each fast core that this process may use. Knows no torch.

The system's files, /sys and /proc of Linux, are read below a root folder. Other systems have none of them: there all
processors compute.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_ROOT = Path("/")
_CPUS = "sys/devices/system/cpu"


def usable_cpus() -> frozenset[int]:
    """Numbers of the processors, hyperthreads included, that this process may run on."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux only
    return frozenset(affinity(0) if affinity is not None else range(os.cpu_count() or 1))


def physical_cores(cpus: frozenset[int], root: Path = _ROOT) -> frozenset[int]:
    """Of processors that are hyperthreads of one core the first: two share its units for products."""
    return frozenset(
        min(cpus & (_numbers(root / _CPUS / f"cpu{cpu}" / "topology" / "thread_siblings_list") | {cpu})) for cpu in cpus
    )


def fast_cores(cpus: frozenset[int], root: Path = _ROOT) -> frozenset[int]:
    """Processors without the efficient cores of a hybrid processor: a piece of a pass waits for its slowest thread.

    Where the system does not name the kinds of cores, those with less than half of the fastest one's capacity are left
    out.
    """
    named = cpus & _numbers(root / "sys/devices/cpu_core/cpus")
    if named:
        return named
    capacity = {cpu: min(_numbers(root / _CPUS / f"cpu{cpu}" / "cpu_capacity"), default=0) for cpu in cpus}
    return frozenset(cpu for cpu in cpus if 2 * capacity[cpu] >= max(capacity.values()))


def cpu_quota(root: Path = _ROOT) -> float | None:
    """Processors' worth of time that the control groups of this process allow; None without a limit."""
    found = []
    for version, group in control_groups("cpu", root):
        with suppress(OSError, ValueError):  # "max", or the root group
            names = ("cpu.max",) if version == "v2" else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            quota, period = " ".join((group / name).read_text(encoding="ascii") for name in names).split()
            if int(quota) > 0:
                found.append(int(quota) / int(period))
    return min(found, default=None)


def computing_threads(cpus: frozenset[int], root: Path = _ROOT) -> int:
    """Threads that should compute: a thread for each fast physical core, no more than the quota holds, at least one."""
    cores = len(fast_cores(physical_cores(cpus, root), root))
    quota = cpu_quota(root)
    return max(1, cores if quota is None else min(cores, int(quota)))


def control_groups(controller: str, root: Path = _ROOT) -> Iterator[tuple[str, Path]]:
    """Folders of this process's control groups for a controller such as "cpu", and of their parents: all limits hold.

    Yields:
        The version, "v1" or "v2", and the folder, which need not exist: inside a container the group is often mounted
        as the root itself.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / (controller if controllers else "")
        folder = top / path.lstrip("/")
        for group in (folder, *folder.parents):
            yield ("v1" if controllers else "v2"), group
            if group == top:
                break


def _numbers(path: Path) -> frozenset[int]:
    """The numbers of a list such as 0-3,8; none where there is no such file."""
    found: set[int] = set()
    with suppress(OSError, ValueError):
        for part in path.read_text(encoding="ascii").strip().split(","):
            first, _, last = part.partition("-")
            found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)

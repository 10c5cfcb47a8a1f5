"""Files by which Linux describes processors and control groups, below a folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def machine_files(
    root: Path,
    *,
    siblings: Sequence[str] = (),
    capacities: Sequence[int] = (),
    kinds: dict[str, str] | None = None,
    quota: str | None = None,
) -> None:
    """Write them.

    Args:
        root: the folder that stands for /.
        siblings: by processor, the hyperthreads of its core.
        capacities: by processor.
        kinds: lists of processors by kind, such as cpu_core.
        quota: of the process's group in version 2, with its period, microseconds.
    """
    for cpu, text in enumerate(siblings):
        write(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", text)
    for cpu, capacity in enumerate(capacities):
        write(root / f"sys/devices/system/cpu/cpu{cpu}/cpu_capacity", str(capacity))
    for kind, text in (kinds or {}).items():
        write(root / f"sys/devices/{kind}/cpus", text)
    if quota is not None:
        write(root / "proc/self/cgroup", "0::/inner")
        write(root / "sys/fs/cgroup/cpu.max", quota)


def write(path: Path, text: str) -> None:
    """A file, with its folders and the end of the line that the system's have."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n", encoding="ascii")

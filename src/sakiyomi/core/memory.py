"""How much memory is available, and refusals before something large is allocated. Knows no model."""

from __future__ import annotations

import ctypes
import gc
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from sakiyomi.core.errors import InputError, MemoryLimitError
from sakiyomi.core.processors import control_groups

_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of malloc.h
_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_GROUP_FILES = {
    "v1": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    "v2": ("memory.max", "memory.current", "inactive_file"),
}
"""By version of control groups: the files with the limit and the usage, and the statistic of unused file pages."""
_ROOT = Path("/")


@contextmanager
def loading() -> Iterator[None]:
    """While modules and a model are loaded, which stay, none of it is searched for garbage: a sixth of a start."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


def available_bytes(device: str = "cpu") -> int:
    """Bytes that can be allocated on a device now without swapping.

    On "cpu" this is the machine's available memory or what the process's control group leaves of its limit (containers
    see the whole machine's memory but are killed at their own limit), whichever is less.

    Args:
        device: "cpu", "cuda" or "cuda:N".
    """
    if device.startswith("cuda"):
        import torch

        place = torch.device(device)
        # torch keeps freed memory for its next tensors: the driver counts it as used.
        kept = torch.cuda.memory_reserved(place) - torch.cuda.memory_allocated(place)
        return int(torch.cuda.mem_get_info(place)[0]) + int(kept)
    import psutil

    available = int(psutil.virtual_memory().available)
    group = _group_headroom()
    return available if group is None else min(available, group)


def peak_bytes() -> int:
    """The peak of this process's resident memory so far."""
    if sys.platform == "win32":
        import psutil

        return int(psutil.Process().memory_info().peak_wset)
    with suppress(OSError):  # on Linux, where getrusage starts with the memory of the parent process
        for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
            if line.startswith("VmHWM:"):
                return 1024 * int(line.split()[1])
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def resident_bytes() -> int:
    """The memory that this process holds now."""
    import psutil

    return int(psutil.Process().memory_info().rss)


def reset_peak() -> bool:
    """Restart ``peak_bytes`` from what is held now; False where the system cannot (other than Linux)."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    except OSError:
        return False
    return True


def require_bytes(needed: int, what: str, *, device: str = "cpu", remedy: str) -> None:
    """Refuse what does not fit, before it is allocated.

    Args:
        needed: bytes.
        what: subject of the message, "the model 'x' in float32".
        device: where the bytes are to be.
        remedy: what to do instead; the largest that fits belongs here.

    Raises:
        MemoryLimitError: ``needed`` is more than is available.
    """
    available = available_bytes(device)
    if needed > available:
        raise MemoryLimitError(
            f"{what} needs {readable(needed)} on {device}, where {readable(available)} are available; {remedy}"
        )


def no_memory(
    error: BaseException,
    what: str = "a pass of the model",
    remedy: str = "shorten the prompt, or lower chunk_size or max_batch",
) -> MemoryLimitError | None:
    """The error to raise for an allocation that failed in the middle; None if the error is of another kind.

    torch has a class for it on accelerators only; on the CPU it is recognised by its message.

    Args:
        error: that came.
        what: was being done; the message's subject.
        remedy: what to do instead.
    """
    if not (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or "can't allocate memory" in str(error)
    ):
        return None
    found = MemoryLimitError(f"{what} ran out of memory; {remedy}")
    found.__cause__ = error
    return found


def readable(count: float) -> str:
    """Bytes for people: "1.5 GB" (decimal units, as disks and checkpoints are labelled)."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "bytes" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def parse_bytes(text: str, name: str = "the size") -> int:
    """Bytes as people write them: 500000000, 500MB, 2GiB.

    Args:
        text: of the number.
        name: of what was given, for the message.

    Raises:
        InputError: it is no such text.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    unit = _UNITS.get(found[2].lower()) if found else None
    if found is None or unit is None or not float(found[1]):
        raise InputError(f"{name}={text!r} is no number of bytes; expected one such as 500000000, 500MB or 2GiB")
    return int(float(found[1]) * unit)


@contextmanager
def returned_when_freed() -> Iterator[None]:
    """Inside, freed blocks of 1 MB and more go back to the system immediately (with glibc; elsewhere nothing changes).

    By default glibc keeps them for the next ones of their size. A model that is packed layer by layer then leaves holes
    between what stays: 1.2 GB of packed weights took 3.9 GB. At the end all pages that hold nothing go back, those from
    before, too: a tokenizer of 262,144 tokens, 95 MB, is read with 180 MB that are freed in small blocks.
    """
    system: Any = ctypes.CDLL(None) if sys.platform == "linux" else None
    set_option, trim = getattr(system, "mallopt", None), getattr(system, "malloc_trim", None)
    if set_option is None or trim is None:
        yield
        return
    set_option(_MMAP_THRESHOLD, 1 << 20)
    try:
        yield
    finally:
        set_option(_MMAP_THRESHOLD, 32 << 20)  # the value that glibc itself would reach
        trim(0)


def _group_headroom() -> int | None:
    """What the limits of this process's control groups leave; None without a limit or without control groups."""
    rooms = (_headroom(group, *_GROUP_FILES[version]) for version, group in control_groups("memory", _ROOT))
    return min((room for room in rooms if room is not None), default=None)


def _headroom(group: Path, limit_name: str, usage_name: str, cache_name: str) -> int | None:
    try:
        limit = int((group / limit_name).read_text(encoding="utf-8"))
        if limit >= 1 << 60:  # version 1 says "no limit" with a number near 2^63
            return None
        usage = int((group / usage_name).read_text(encoding="utf-8"))
        statistics = dict(line.split() for line in (group / "memory.stat").read_text(encoding="utf-8").splitlines())
    except (OSError, ValueError):  # no such group, or the limit is "max"
        return None
    # File pages not in use are given back under pressure.
    return max(limit - usage + int(statistics.get(cache_name, 0)), 0)

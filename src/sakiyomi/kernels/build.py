"""Compiles `cpu.cpp` with its headers at first use and keeps the result.

The library is built once for a (source, torch, processor) triple with the system's C++ compiler, put in place by an
atomic rename, and loaded from the user's cache folder afterwards. Where no compiler works, the caller gets None and
one log line: the plain torch path then runs, with the same tokens and less speed.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import torch

from sakiyomi.core.digests import file_digest
from sakiyomi.core.files import cache_folder, partial, remove_leftovers

logger = logging.getLogger("sakiyomi")
SOURCE = Path(__file__).with_name("cpu.cpp")
_int64, _pointer, _double = ctypes.c_int64, ctypes.c_void_p, ctypes.c_double
SIGNATURES: dict[str, tuple[list[type], type | None]] = {
    "sk_weights": ([], _int64),
    "sk_free_weights": ([_int64], None),
    "sk_session": ([_int64], _int64),
    "sk_free_session": ([_int64], None),
    "sk_weight": ([_int64, *[_pointer] * 5, _int64, _int64, ctypes.c_int], _int64),
    "sk_siblings": ([_int64, _int64, _pointer], None),
    "sk_layer": ([_int64, _int64, _pointer, _pointer, _int64, _pointer, _int64, _int64, ctypes.c_int], None),
    "sk_dropped": ([_int64, _pointer, _int64], None),
    "sk_packed": ([_int64, _int64, _pointer, _pointer, _pointer, _pointer, _int64, _int64], None),
    "sk_leveled": ([_int64, _int64, *[_pointer] * 8, _int64, _int64, _int64], None),
    "sk_packed_count": ([_int64, _pointer], None),
    "sk_source": ([_int64, _int64, _pointer, _pointer, _int64, _pointer, _int64, _int64, ctypes.c_int, _pointer], None),
    "sk_distances": ([_int64, _pointer, _int64], None),
    "sk_begin": ([_int64, _int64, _int64, ctypes.c_char_p], None),
    "sk_keep": ([_int64, _int64, _int64, _int64, _pointer], None),
    "sk_calls": ([], _int64),
    "sk_tiles": ([ctypes.c_int], ctypes.c_int),
    "sk_best": ([_pointer, ctypes.c_int, _int64], _int64),
    "sk_chance": ([_pointer, ctypes.c_int, _int64, _int64], _double),
    "sk_leading": ([_pointer, ctypes.c_int, _int64, _int64, _int64, _pointer, _pointer, _pointer], None),
    "sk_warp": ([_pointer, ctypes.c_int, _int64, _double, _int64, _double, _double, _pointer, _pointer], _int64),
    "sk_draw": ([_pointer, _int64, _double], _int64),
    "sk_residual": ([_pointer, _pointer, _int64, ctypes.c_float, _pointer], ctypes.c_float),
}


def compiler() -> str | None:
    """The C++ compiler to use: `$CXX`, else the first of g++, clang++, c++ on the path."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++", "c++"]
    return next((path for name in names if (path := shutil.which(name))), None)


def cpuinfo() -> list[str]:
    """What Linux tells of the processor; no lines on other systems."""
    try:
        return Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []


def _processor() -> str:
    return next((line for line in cpuinfo() if line.startswith(("flags", "Features"))), platform.processor())


_KEEP = """
import os, sys, xxhash
fresh, name = sys.argv[1:]
with open(fresh, "rb") as file:
    digest = xxhash.xxh3_64_hexdigest(file.read())
    os.fsync(file.fileno())
os.replace(fresh, f"{name}-{digest}.so")
"""


def _command(cxx: str, target: Path) -> list[str]:
    root = Path(torch.__file__).parent
    include, lib = root / "include", root / "lib"
    native = "-march=native" if platform.machine() in ("x86_64", "AMD64") else "-mcpu=native"
    options = ["-O3", native, "-std=c++20", "-fPIC", "-shared", "-fopenmp", "-DAT_PARALLEL_OPENMP=1", "-w"]
    includes = [f"-I{include}", f"-I{include / 'torch' / 'csrc' / 'api' / 'include'}"]
    libraries = [f"-L{lib}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{lib}"]
    return [cxx, *options, *includes, str(SOURCE), "-o", str(target), *libraries]


def built() -> Path | None:
    """The compiled library for this source, torch version and processor; None: there is none.

    Its name ends with the digest of its content: one that is damaged would end the process that loads it, and is
    removed.
    """
    name = _name()
    for path in name.parent.glob(f"{name.name}-*.so"):
        try:
            if path.stem.rpartition("-")[2] == file_digest(path):
                return path
            logger.warning("%s is damaged; the kernels are compiled again", path)
            path.unlink()
        except OSError:  # another process was faster, or it cannot be read
            continue
    return None


def _name() -> Path:
    """The library's path up to the digest of its content."""
    sources = (path.read_text() for path in (SOURCE, *sorted(SOURCE.parent.glob("*.h"))))
    key = "\0".join((*sources, torch.__version__, _processor(), platform.machine()))
    return cache_folder() / "kernels" / f"cpu-{hashlib.sha256(key.encode()).hexdigest()[:20]}"


def _build() -> Path:
    cxx = compiler()
    if cxx is None:
        raise OSError("no C++ compiler found (looked for $CXX, g++, clang++, c++)")
    path = _name()
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(path)
    fresh = partial(path)
    # A process group of its own, which also moves the result to its place: a first run that is over sooner than the
    # compiler still leaves the kernels to the next one.
    keep = shlex.join([sys.executable, "-c", _KEEP, str(fresh), str(path)])
    script = f'"$@" && {keep} || {{ rm -f "$0"; exit 1; }}'
    done = subprocess.run(
        ["sh", "-c", script, str(fresh), *_command(cxx, fresh)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        start_new_session=True,
    )
    if done.returncode:
        said = " ".join(done.stderr.split())[:300] or f"exit code {done.returncode}, without a word"
        raise OSError(f"{cxx} failed: {said}")
    found = built()
    if found is None:
        raise OSError(f"what {cxx} has written to {path.parent} is gone or damaged")
    return found


_lock = threading.Lock()


def native() -> ctypes.CDLL | None:
    """The compiled kernels, built if need be; None, after one warning, where that does not work.

    Set `SAKIYOMI_NATIVE=0` to run without them.
    """
    with _lock:  # one builder, however many models ask
        return _native()


def native_at_hand() -> bool:
    """Whether `native` answers at once. If not, the kernels are being built in the background from now on."""
    if os.environ.get("SAKIYOMI_NATIVE") == "0" or built() is not None:
        return True
    return not builder().is_alive()


@functools.cache
def builder() -> threading.Thread:
    """The thread that builds the kernels, begun by the first call."""
    thread = threading.Thread(target=native, name="sakiyomi-kernels", daemon=True)
    thread.start()
    return thread


def loaded() -> ctypes.CDLL | None:
    """The kernels if they are in use by now; never builds or loads them."""
    return _native() if _native.cache_info().currsize else None


@functools.cache
def _native() -> ctypes.CDLL | None:
    if os.environ.get("SAKIYOMI_NATIVE") == "0":
        return None
    try:
        path = built() or _build()
        torch.ops.load_library(str(path))
        library = ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning("CPU kernels are not available, plain torch runs instead: %s", error)
        return None
    for name, (arguments, result) in SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, result
    return library

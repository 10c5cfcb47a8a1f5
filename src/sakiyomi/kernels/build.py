"""The compiled kernels of this machine: a build from the wheel, else one that is compiled at first use and kept.

The features of the processor decide which build fits, see `variants`. Each build runs a self-test in its own process
before it is loaded. A build that is compiled here is put in place by an atomic rename, and later loaded from the user's
cache folder. If nothing works, the caller gets None, with one log line: plain torch then runs, with the same tokens and
less speed.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import re
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from sakiyomi.core.files import cache_folder, partial, remove_leftovers
from sakiyomi.kernels import variants
from sakiyomi.kernels.variants import PREBUILT, compiler

logger = logging.getLogger("sakiyomi")
_TYPES: dict[str, Any] = {
    "void": None, "int": ctypes.c_int, "int64_t": ctypes.c_int64, "uint64_t": ctypes.c_uint64, "float": ctypes.c_float,
    "double": ctypes.c_double, "const char*": ctypes.c_char_p,
}  # fmt: skip
_EXPORTED = re.compile(r"^(\w+|const char\*) (sk_\w+)\(([^)]*)\)", re.MULTILINE)


def signatures() -> dict[str, tuple[list[Any], Any]]:
    """Types of arguments and result of every function that the kernels' sources export, by name."""
    found: dict[str, tuple[list[Any], Any]] = {}
    for text in variants.sources():
        for result, name, given in _EXPORTED.findall(text.partition('extern "C" {')[2]):
            kinds = [kind.strip() for kind in given.split(",") if kind.strip()]
            found[name] = (
                [ctypes.c_void_p if "*" in kind else _TYPES[kind.partition(" ")[0]] for kind in kinds],
                _TYPES[result],
            )
    return found


def variant() -> str:
    """The name of the build that this process uses: the best one for the machine, or that of `$SAKIYOMI_NATIVE`.

    Raises:
        OSError: there is none.
    """
    asked = os.environ.get("SAKIYOMI_NATIVE", "")
    if asked == "0":
        raise OSError("SAKIYOMI_NATIVE=0 is set")
    if asked in ("", "1"):
        found = variants.fitting()
        if found is None:
            raise OSError("this processor has no AVX2")
        return found
    if asked not in variants.VARIANTS:
        raise OSError(f"SAKIYOMI_NATIVE={asked!r} is none of 0, 1, {', '.join(variants.VARIANTS)}")
    return asked


_refused: set[Path] = set()
"""Builds from the wheel that this machine cannot load."""


def built() -> Path | None:
    """The library for these sources and this machine, from the wheel or compiled here; None: there is none.

    Its name ends with the digest of its content. A damaged library is not used, and removed if it was compiled here.
    """
    try:
        name = variant()
    except OSError:
        return None
    for folder in (PREBUILT, cache_folder() / "kernels"):
        for path in folder.glob(f"{variants.stem(name)}-*.so"):
            try:
                if path.stem.rpartition("-")[2] != variants.digest(path):
                    logger.warning("%s is damaged; the kernels are compiled again", path)
                    if folder != PREBUILT:
                        path.unlink()
                elif path not in _refused:
                    return path
            except OSError:  # another process was faster, or it cannot be read
                continue
    return None


def _build() -> Path:
    cxx = compiler()
    if cxx is None:
        raise OSError("no C++ compiler found (looked for $CXX, g++, clang++, c++); install one, or set CXX")
    name = variant()
    path = cache_folder() / "kernels" / variants.stem(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(path)
    # In its own session: if the first run ends before the compiler, the next one still finds the kernels.
    done = subprocess.run(
        [sys.executable, "-I", "-S", variants.__file__, name, cxx, str(partial(path))],
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        timeout=300,
        check=False,
        start_new_session=True,
    )
    if done.returncode:
        raise OSError(done.stderr.strip())
    found = built()
    if found is None:
        raise OSError(f"what {cxx} has written to {path.parent} is gone or damaged")
    return found


_lock = threading.Lock()


def native() -> ctypes.CDLL | None:
    """The compiled kernels, built if necessary; None, after one warning, if that fails.

    Set `SAKIYOMI_NATIVE=0` to run without them, or to the name of a variant (`sakiyomi.kernels.variants`) to run that.
    """
    return _found()[0]


def origin() -> str:
    """The variant that runs and its origin; if none runs, the reason."""
    return _found()[1]


def _found() -> tuple[ctypes.CDLL | None, str]:
    with _lock:  # one builder for all models
        return _native()


def native_at_hand() -> bool:
    """Whether `native` answers at once. If not, this starts to build the kernels in the background."""
    if built() is not None:
        return True
    try:
        variant()
    except OSError:
        return True
    return not builder().is_alive()


@functools.cache
def builder() -> threading.Thread:
    """The thread that builds the kernels, started by the first call."""
    thread = threading.Thread(target=native, name="sakiyomi-kernels", daemon=True)
    thread.start()
    return thread


def building() -> bool:
    """Whether they are being built in the background."""
    return builder.cache_info().currsize > 0 and builder().is_alive()


def loaded() -> ctypes.CDLL | None:
    """The kernels if they are loaded; never builds or loads them."""
    return _native()[0] if _native.cache_info().currsize else None


@functools.cache
def _native() -> tuple[ctypes.CDLL | None, str]:
    try:
        name, path = variant(), built()
        if path is not None and path.parent == PREBUILT:
            try:
                return _load(path), f"{name}, prebuilt"
            except (OSError, subprocess.SubprocessError) as error:
                logger.warning("%s is not used: %s", path, error)
                _refused.add(path)
        return _load(built() or _build()), f"{name}, compiled here"
    except (OSError, subprocess.SubprocessError) as error:
        if os.environ.get("SAKIYOMI_NATIVE") != "0":
            logger.warning("CPU kernels are not available, plain torch runs instead: %s", error)
        return None, str(error)


_TEST = "import ctypes, sys; sys.exit(ctypes.CDLL(sys.argv[1]).sk_self_test())"


def _prove(path: Path) -> None:
    """Run a build's self-test once, in its own process, which protects this one from a crash.

    Raises:
        OSError: the self-test fails.
    """
    proven = cache_folder() / "kernels" / f"{path.stem}.proven"
    if proven.exists():
        return
    command = [sys.executable, "-I", "-S", "-c", _TEST, str(path)]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", timeout=60, check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines()
        raise OSError(f"its self-test ends with {done.returncode}" + (f" ({said[-1]})" if said else ""))
    with suppress(OSError):  # the cache may be read-only
        proven.parent.mkdir(parents=True, exist_ok=True)
        proven.touch()


def _load(path: Path) -> ctypes.CDLL:
    """Load a build and register its operators with torch.

    Raises:
        OSError: it fails its self-test, or does not support this version of torch.
    """
    _prove(path)
    library = ctypes.CDLL(str(path))
    for name, (arguments, result) in signatures().items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, result
    wrong = library.sk_bind(ctypes.CDLL(torch._C.__file__)._handle)
    if wrong:
        raise OSError(f"torch {torch.__version__} does not take it: {wrong.decode()}")
    return library

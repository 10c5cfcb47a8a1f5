"""The compiled kernels of this machine: those that the wheel brought, else compiled at first use, and kept.

Which build fits is decided by what the processor can do, see `variants`. Each proves itself in a process of its own
before it is loaded. What is compiled here is put in place by an atomic rename, and loaded from the user's cache folder
afterwards. Where nothing works, the caller gets None and one log line: the plain torch path then runs, with the same
tokens and less speed.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import torch

from sakiyomi.core.files import cache_folder, partial, remove_leftovers
from sakiyomi.kernels import variants
from sakiyomi.kernels.variants import PREBUILT, compiler

logger = logging.getLogger("sakiyomi")
_int64, _pointer, _double = ctypes.c_int64, ctypes.c_void_p, ctypes.c_double
SIGNATURES: dict[str, tuple[list[type], type | None]] = {
    "sk_bind": ([_pointer], ctypes.c_char_p),
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
    "sk_layer_scores": ([_int64, _int64, _pointer, _pointer, ctypes.c_double, ctypes.c_int], None),
    "sk_site": ([_int64, _int64, _int64, *[_pointer] * 5], None),
    "sk_fold": ([_int64, _int64, _int64], None),
    "sk_keep_rows": ([_int64, _int64, _int64, _int64, _pointer], None),
    "sk_begin": ([_int64, _int64, _int64, ctypes.c_char_p], None),
    "sk_keep": ([_int64, _int64, _int64, _int64, _pointer], None),
    "sk_want": ([_int64, _pointer, _int64], None),
    "sk_calls": ([], _int64),
    "sk_device_plan": ([_int64, _int64, _int64, _pointer], _int64),
    "sk_tiles": ([ctypes.c_int], ctypes.c_int),
    "sk_best": ([_pointer, ctypes.c_int, _int64], _int64),
    "sk_chance": ([_pointer, ctypes.c_int, _int64, _int64], _double),
    "sk_leading": ([_pointer, ctypes.c_int, _int64, _int64, _int64, _pointer, _pointer, _pointer], None),
    "sk_warp": ([_pointer, ctypes.c_int, _int64, _double, _int64, _double, _double, _pointer, _pointer], _int64),
    "sk_draw": ([_pointer, _int64, _double, _pointer, _int64], _int64),
    "sk_without": ([_pointer, _int64, _int64, _pointer], ctypes.c_float),
    "sk_verify": ([_int64, ctypes.c_char_p, ctypes.c_char_p, _pointer, ctypes.c_int, _int64, _pointer, _pointer], None),
    "sk_grown": ([_int64, _int64, _pointer, _pointer, _pointer], None),
    "sk_program": ([_int64, _int64, _pointer, _int64, _pointer, _int64, _pointer, _int64, _pointer], _int64),
    "sk_free_program": ([_int64], None),
    "sk_constant": ([_int64, _int64, _pointer, _int64, _int64, _pointer, _pointer], None),
    "sk_run": ([_int64, _int64, _pointer, _pointer, _int64, *[_pointer] * 3], ctypes.c_int),
    "sk_rounds": ([*[_pointer] * 5], _int64),
    "sk_free_rounds": ([_int64], None),
    "sk_enter": ([_int64, ctypes.c_char_p, *[_int64] * 5, ctypes.c_char_p], _int64),
    "sk_seat": ([_int64, _int64, ctypes.c_char_p, _int64, _int64, ctypes.c_char_p], None),
    "sk_draft": ([_int64, _int64, ctypes.c_char_p, ctypes.c_char_p], None),
    "sk_states": ([_int64, _pointer], None),
    "sk_leave": ([_int64, _int64], None),
    "sk_round": ([_int64, _int64, ctypes.c_char_p, _pointer, _pointer], _int64),
    "sk_pass": ([_int64, _int64, _pointer, _double], _int64),
    "sk_ranked": ([_pointer, _int64, _int64, ctypes.c_uint64, _int64, _pointer, _int64, _pointer, _pointer], _int64),
    "sk_residual": ([_pointer, _pointer, _int64, ctypes.c_float, _pointer], ctypes.c_float),
}


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
"""Builds of the wheel that this machine cannot load."""


def built() -> Path | None:
    """The library for these sources and this machine: the wheel's, or the one compiled here; None: there is none.

    Its name ends with the digest of its content: a damaged one is not used, and removed where it was compiled here.
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
    # A session of its own: a first run that is over sooner than the compiler still leaves the kernels to the next one.
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
    """The compiled kernels, built if need be; None, after one warning, where that does not work.

    Set `SAKIYOMI_NATIVE=0` to run without them, or to the name of a variant (`sakiyomi.kernels.variants`) to run that.
    """
    return _found()[0]


def origin() -> str:
    """Which variant runs and where it comes from; where none does, why."""
    return _found()[1]


def _found() -> tuple[ctypes.CDLL | None, str]:
    with _lock:  # one builder, however many models ask
        return _native()


def native_at_hand() -> bool:
    """Whether `native` answers at once. If not, the kernels are being built in the background from now on."""
    if built() is not None:
        return True
    try:
        variant()
    except OSError:
        return True
    return not builder().is_alive()


@functools.cache
def builder() -> threading.Thread:
    """The thread that builds the kernels, begun by the first call."""
    thread = threading.Thread(target=native, name="sakiyomi-kernels", daemon=True)
    thread.start()
    return thread


def building() -> bool:
    """Whether they are being built in the background."""
    return builder.cache_info().currsize > 0 and builder().is_alive()


def loaded() -> ctypes.CDLL | None:
    """The kernels if they are in use by now; never builds or loads them."""
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
    """Have a build test itself in a process of its own, once: what it does wrong must not end or spoil this one.

    Raises:
        OSError: it fails.
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
    """Load a build and give torch its operators.

    Raises:
        OSError: it fails its self-test, or does not go with this torch.
    """
    _prove(path)
    library = ctypes.CDLL(str(path))
    for name, (arguments, result) in SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, result
    wrong = library.sk_bind(ctypes.CDLL(torch._C.__file__)._handle)
    if wrong:
        raise OSError(f"torch {torch.__version__} does not take it: {wrong.decode()}")
    return library

"""The builds of the kernels, for kinds of processors, and how one is made.

A wheel for Linux contains all builds for its kind of machine, x86-64 or AArch64. On other systems the build that fits
is compiled when it is first needed. This file only needs the standard library: ``setup.py`` loads it by its path, and
as a script it makes one build.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

SOURCE = Path(__file__).with_name("cpu.cpp")
PREBUILT = Path(__file__).with_name("prebuilt")
"""Folder of the builds in a wheel."""
NATIVE = "native"
"""The build for the processor that compiles it, on systems without ``VARIANTS``."""


class Variant(NamedTuple):
    """A build: the compiler's options, and what `features` must hold."""

    options: tuple[str, ...]
    needs: frozenset[str]

    def and_also(self, *options: str, needs: str) -> Variant:
        """A build with further options and needs."""
        return Variant((*self.options, *options), self.needs | set(needs.split()))


_AVX2 = Variant(("-march=x86-64-v3",), frozenset(["avx2", "fma", "f16c", "bmi1", "bmi2", "movbe", "abm"]))
_AVX_VNNI = _AVX2.and_also("-mavxvnni", needs="avx_vnni")
_AVX512 = _AVX2.and_also(
    "-march=x86-64-v4", "-mavx512vnni", needs="avx512f avx512bw avx512cd avx512dq avx512vl avx512_vnni"
)
_BF16 = _AVX512.and_also("-mavx512bf16", needs="avx512_bf16")
# Products of bf16 by AVX-512 are faster on AMD's processors only; on Intel's, those of its matrix unit are.
_ZEN4 = _BF16.and_also("-DBF16_PAIRS", needs="AuthenticAMD")
_AMX = _BF16.and_also("-mamx-tile", "-mamx-int8", "-mamx-bf16", needs="amx_tile amx_int8 amx_bf16")
_NEON = Variant(("-march=armv8-a",), frozenset())
_DOTPROD = _NEON.and_also("-march=armv8.2-a+dotprod", needs="atomics asimddp")
_I8MM = _DOTPROD.and_also("-march=armv8.2-a+dotprod+i8mm", needs="i8mm")
MACHINES = {
    "x86_64": {"amx": _AMX, "zen4": _ZEN4, "avx512": _AVX512, "avx_vnni": _AVX_VNNI, "avx2": _AVX2},
    "aarch64": {"i8mm": _I8MM, "dotprod": _DOTPROD, "neon": _NEON},
}
"""Builds by name, the best first, for each kind of machine."""
VARIANTS = MACHINES.get(platform.machine(), MACHINES["x86_64"])
"""Those for this kind of machine."""


@functools.cache
def cpuinfo() -> list[str]:
    """Lines of Linux about the processor; none on other systems."""
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


def features() -> frozenset[str]:
    """Features and vendor of the processor, by their names in Linux; empty if not known."""
    facts = dict(line.partition(":")[::2] for line in reversed(cpuinfo()))  # of the first core
    found = {name.strip(): value.split() for name, value in facts.items()}
    return frozenset(word for name in ("vendor_id", "flags", "Features") for word in found.get(name, ()))


def multiplies_bf16() -> bool:
    """Whether the processor has products of bfloat16; without them torch takes several times as long as in float32."""
    return not features().isdisjoint({"avx512_bf16", "amx_bf16", "bf16"})


def distributed() -> bool:
    """Whether this system is one for which wheels have builds."""
    return sys.platform == "linux" and platform.machine() in MACHINES


def fitting() -> str | None:
    """The best variant for this machine; None: there is none."""
    if not distributed():
        return NATIVE
    found = features()
    return next((name for name, variant in VARIANTS.items() if variant.needs <= found), None)


def compiler() -> str | None:
    """The C++ compiler to use: `$CXX`, else the first of g++, clang++, c++ on the path."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++", "c++"]
    return next((path for name in names if (path := shutil.which(name))), None)


def options(variant: str) -> list[str]:
    """What the compiler is given for a variant, but for names of files."""
    if variant in VARIANTS:
        own = VARIANTS[variant].options
    elif sys.platform == "darwin" and platform.machine() == "arm64":
        own = ("-mcpu=apple-m1",)  # not every clang of Apple knows "native"; all of these processors have dot products
    else:
        own = ("-march=native" if platform.machine() in ("x86_64", "AMD64") else "-mcpu=native",)
    return ["-O3", *own, "-std=c++20", "-fPIC", "-shared", "-s", "-w"]


@functools.cache
def sources() -> tuple[str, ...]:
    """The texts of the kernels' source files."""
    return tuple(path.read_text(encoding="utf-8") for path in (SOURCE, *sorted(SOURCE.parent.glob("*.h"))))


@functools.cache
def stem(variant: str) -> str:
    """The name of a build's file without the digest of its content; it depends on the sources and options."""
    machine = (platform.machine(), *sorted(features())) if variant == NATIVE else ()
    key = "\0".join((*sources(), *options(variant), *machine))
    return f"cpu-{variant}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"


def digest(path: Path) -> str:
    """The digest of a file's content: a damaged library would crash the process that loads it."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def make(variant: str, cxx: str, fresh: Path) -> Path:
    """Compile a variant to a path, and give it its name beside that.

    Raises:
        OSError: the compiler fails, with what it said.
    """
    command = [cxx, *options(variant), str(SOURCE), "-o", str(fresh)]
    try:
        done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", check=False)
        if done.returncode:
            said = " ".join(done.stderr.split())[:300] or f"exit code {done.returncode}, without a word"
            raise OSError(f"{cxx} failed: {said}")
        with fresh.open("rb") as file:  # or the name could be on the disk before the content
            os.fsync(file.fileno())
        return fresh.replace(fresh.with_name(f"{stem(variant)}-{digest(fresh)}.so"))
    finally:
        fresh.unlink(missing_ok=True)


if __name__ == "__main__":
    try:
        make(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
    except OSError as error:
        sys.exit(str(error))

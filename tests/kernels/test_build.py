"""Where the compiled kernels come from: which build fits a machine, a wheel that brings it, and a compiler."""

from __future__ import annotations

import ctypes
import json
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from processes import until
from sakiyomi.kernels import build, variants
from warm import warm

ROOT = Path(__file__).parents[2]
HAS_KERNELS = build.native() is not None
wheels_have_kernels = pytest.mark.skipif(not variants.distributed(), reason="wheels have kernels for Linux only")


# ---------------------------------------------------------------- which one


def cpu(monkeypatch: pytest.MonkeyPatch, without: str = "", machine: str = "x86_64") -> None:
    """A processor that can do all that any variant of its kind needs, without these."""
    builds = variants.MACHINES[machine]
    found = frozenset().union(*(variant.needs for variant in builds.values())) - set(without.split())
    monkeypatch.setattr(variants, "VARIANTS", builds)
    monkeypatch.setattr(variants, "features", lambda: found)
    monkeypatch.setattr(variants, "distributed", lambda: True)


@pytest.mark.parametrize(
    ("without", "fits"),
    [
        ("", "amx"),
        ("amx_int8", "zen4"),
        ("amx_int8 AuthenticAMD", "avx512"),
        ("avx512_bf16", "avx512"),
        ("avx512f", "avx_vnni"),
        ("avx512_vnni", "avx_vnni"),
        ("avx512_vnni avx_vnni", "avx2"),
    ],
)
def test_the_best_variant_that_the_processor_can_run(monkeypatch: pytest.MonkeyPatch, without: str, fits: str) -> None:
    cpu(monkeypatch, without)
    monkeypatch.delenv("SAKIYOMI_NATIVE", raising=False)
    assert build.variant() == fits
    monkeypatch.setenv("SAKIYOMI_NATIVE", "avx2")
    assert build.variant() == "avx2"


@pytest.mark.parametrize(("without", "fits"), [("", "i8mm"), ("i8mm", "dotprod"), ("asimddp", "neon")])
def test_the_best_variant_of_aarch64(monkeypatch: pytest.MonkeyPatch, without: str, fits: str) -> None:
    cpu(monkeypatch, without, "aarch64")
    monkeypatch.delenv("SAKIYOMI_NATIVE", raising=False)
    assert build.variant() == fits


def test_without_avx2_plain_torch_runs(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Before anything is compiled or loaded, and said in one line."""
    cpu(monkeypatch, "avx2")
    monkeypatch.delenv("SAKIYOMI_NATIVE", raising=False)
    library, why = build._native.__wrapped__()
    assert library is None and why == "this processor has no AVX2"
    assert [record.message for record in caplog.records] == [
        "CPU kernels are not available, plain torch runs instead: this processor has no AVX2"
    ]
    assert build.built() is None and build.native_at_hand()


def test_a_variant_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAKIYOMI_NATIVE", "sse9")
    with pytest.raises(OSError, match="SAKIYOMI_NATIVE='sse9' is none of 0, 1, amx, "):
        build.variant()


def test_elsewhere_the_compiler_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert variants.fitting() == variants.NATIVE
    assert "-mcpu=native" in variants.options(variants.NATIVE)
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert variants.fitting() == variants.NATIVE
    assert "-mcpu=apple-m1" in variants.options(variants.NATIVE)


# ---------------------------------------------------------------- a wheel

# Products in every format and an attention, as one number, and where the kernels come from.
RESULTS = """
import hashlib, json
import torch
from sakiyomi.kernels import build
from sakiyomi.kernels.batch import BatchPlan, SequenceRows
from sakiyomi.kernels.native import PackedWeights
from sakiyomi.cache.layout import LayerShape
from sakiyomi.cache.slots import SlotCache
from sakiyomi.model_executor.attention.cpu import CpuBackend
from sakiyomi.model_executor.attention.registry import BackendNeeds

random, found = torch.Generator().manual_seed(0), hashlib.sha256()
weights = PackedWeights.create()
for dtype in (torch.float32, torch.bfloat16):
    for bits in (16, 8, 4):
        weight, bias = torch.randn(300, 256, generator=random).to(dtype), torch.randn(300, generator=random)
        layer = weights.add_linear(weight, bias, bits=bits)
        for rows in (1, 5, 100):
            weights.begin(BatchPlan([SequenceRows(0, 0, [0] * rows)]), rows)
            found.update(layer(torch.randn(1, rows, 256, generator=random).to(dtype)).float().numpy().tobytes())
    cache = SlotCache([LayerShape(2, 64, 64)], dtype=dtype, max_slots=2)
    cache.reserve(1, 400)
    backend = CpuBackend(BackendNeeds(torch.device("cpu"), packed=weights), cache)
    for prompt, length, rows in ((True, 0, 150), (True, 150, 50), (False, 200, 7)):
        backend.begin(BatchPlan([SequenceRows(0, length, [0] * rows, prompt=prompt)]), rows)
        q, k, v = (torch.randn(1, heads, rows, 64, generator=random).to(dtype) for heads in (4, 2, 2))
        found.update(backend.attend(q, k, v, 0, 0.125, 0.0, 0).float().numpy().tobytes())
print(json.dumps([build.origin(), found.hexdigest()]))
"""


def results(site: Path, cache: Path, **environment: str) -> tuple[list[str], str]:
    """What `RESULTS` says with the package in a folder, and what is logged; there is no compiler on the path."""
    clean = {name: value for name, value in os.environ.items() if name not in ("CXX", "SAKIYOMI_NATIVE")}
    clean |= {"PATH": str(cache), "PYTHONPATH": str(site), "SAKIYOMI_CACHE_DIR": str(cache), **environment}
    done = subprocess.run([sys.executable, "-c", RESULTS], env=clean, capture_output=True, encoding="utf-8", check=True)
    return json.loads(done.stdout), done.stderr


def wheel(folder: Path, cxx: str) -> Path:
    """A wheel of this checkout without its models, made with this compiler."""
    (source := folder / "source").mkdir(parents=True)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    ignored = shutil.ignore_patterns("models", "__pycache__", "*.egg-info", "prebuilt")
    shutil.copytree(ROOT / "src", source / "src", ignore=ignored)
    code = f"from setuptools import build_meta; print(build_meta.build_wheel({str(folder)!r}))"
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(
        command, cwd=source, env=os.environ | {"CXX": cxx}, capture_output=True, encoding="utf-8", check=False
    )
    assert done.returncode == 0, done.stderr
    return folder / done.stdout.splitlines()[-1]


def unpacked(path: Path, to: Path) -> Path:
    zipfile.ZipFile(path).extractall(to)
    return to


def copying(folder: Path, library: Path) -> str:
    """A compiler that gives a library that is there: making one takes a minute."""
    (folder / "tools").mkdir()
    return compiler_that(folder / "tools", f'cp {shlex.quote(str(library))} "$out"')["CXX"]


@pytest.mark.thorough
@wheels_have_kernels
@pytest.mark.skipif(not HAS_KERNELS, reason="the C++ kernels are not available here")
def test_a_wheel_runs_without_a_compiler(tmp_path: Path) -> None:
    """It brings all variants, and is taken where the cache is empty; damage and faults in it lead to plain torch."""
    here = build.built()
    assert here is not None
    made = wheel(tmp_path, copying(tmp_path, here))
    assert made.name.endswith(f"-py3-none-linux_{platform.machine()}.whl")
    site = unpacked(made, tmp_path / "site")
    prebuilt = sorted((site / "sakiyomi" / "kernels" / "prebuilt").iterdir())
    assert sorted(path.stem.rpartition("-")[0] for path in prebuilt) == sorted(map(variants.stem, variants.VARIANTS))
    (cache := tmp_path / "cache").mkdir()
    found, said = results(site, cache)
    assert found[0] == f"{build.variant()}, prebuilt" and not said
    assert not list(cache.rglob("*.so"))
    assert found[1] == results(ROOT / "src", cache, SAKIYOMI_CACHE_DIR=os.fspath(here.parents[1]))[0][1]


@pytest.mark.thorough
def test_a_wheel_of_a_machine_without_a_compiler_is_for_all(tmp_path: Path) -> None:
    made = wheel(tmp_path, str(tmp_path / "none"))
    assert made.name.endswith("-py3-none-any.whl")
    assert not any(name.endswith(".so") for name in zipfile.ZipFile(made).namelist())


@pytest.mark.slow
@wheels_have_kernels
@pytest.mark.parametrize("name", list(variants.VARIANTS))
def test_a_wheel_computes_what_is_compiled_here(tmp_path_factory: pytest.TempPathFactory, name: str) -> None:
    """To the last bit, for each variant that this machine runs."""
    if not variants.VARIANTS[name].needs <= variants.features():
        pytest.skip(f"this processor does not run {name}")
    folder = tmp_path_factory.getbasetemp() / "whole-wheel"
    if not folder.exists():
        unpacked(wheel(folder, build.compiler() or "none"), folder / "site")
        (folder / "empty").mkdir()
    found, _ = results(folder / "site", folder / "empty", SAKIYOMI_NATIVE=name)
    cxx = build.compiler() or "none"
    other, _ = results(ROOT / "src", folder / "compiled", SAKIYOMI_NATIVE=name, CXX=cxx, PATH=os.environ["PATH"])
    assert found == [f"{name}, prebuilt", other[1]] and other[0] == f"{name}, compiled here"


# ---------------------------------------------------------------- a self-test


def library(folder: Path, self_test: str, machine: str = "") -> Path:
    """A library that has a self-test and nothing else, as if it had been compiled here."""
    cxx = build.compiler()
    if cxx is None:
        pytest.skip("there is no compiler")
    source, fresh = folder / "fault.cpp", folder / "fresh"
    source.write_text(f'extern "C" int sk_self_test() {{ {self_test} }}', encoding="utf-8")
    subprocess.run([cxx, "-shared", "-fPIC", str(source), "-o", str(fresh)], check=True)
    if machine:  # another one's, by two bytes of the header
        data = bytearray(fresh.read_bytes())
        data[18:20] = bytes.fromhex(machine)
        fresh.write_bytes(data)
    return fresh


@pytest.mark.parametrize(
    ("self_test", "machine", "says"),
    [
        ("__builtin_trap();", "", "its self-test ends with -"),
        ("return 5;", "", "its self-test ends with 5"),
        ("return 0;", "b700", "its self-test ends with 1 (OSError: "),  # AArch64
    ],
)
def test_a_build_that_fails_its_self_test_is_not_loaded(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    self_test: str,
    machine: str,
    says: str,
) -> None:
    """An instruction that the processor lacks, a wrong result, another machine's library: this process sees none of it.

    One of the wheel is replaced by what is compiled here; if that fails, too, plain torch runs.
    """
    monkeypatch.delenv("SAKIYOMI_NATIVE", raising=False)
    monkeypatch.setenv("SAKIYOMI_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "PREBUILT", tmp_path / "prebuilt")
    monkeypatch.setattr(build, "_refused", set())
    fresh = library(tmp_path, self_test, machine)
    name = f"{variants.stem(build.variant())}-{variants.digest(fresh)}.so"
    for folder in (tmp_path / "prebuilt", tmp_path / "cache" / "kernels"):
        folder.mkdir(parents=True)
        shutil.copy(fresh, folder / name)
    found, why = build._native.__wrapped__()
    assert found is None and why.startswith(says)
    first, second = (record.message for record in caplog.records)
    assert first.startswith(f"{tmp_path / 'prebuilt' / name} is not used: {says}")
    assert second.startswith(f"CPU kernels are not available, plain torch runs instead: {says}")


BROKEN = {
    "whole": ("", ""),
    "too many sums in 16 bits": ("most <= 31 ? 4 : 2", "most <= 31 ? 8 : 4"),
    "the signs of weights": ("_mm256_abs_epi8((__m256i)weights)", "(__m256i)weights"),
    "the offset of 8 forgotten": ("Whole{} - 8 * x.sums", "Whole{} - 7 * x.sums"),
    "another channel of a byte": ("64 * k + at), 4 * z) & 15", "64 * k + at), 4 - 4 * z) & 15"),
    "one input of bf16": ("even = (Own)(both << 16)", "even = (Own)(both & 0xffff0000u)"),
    "another key": ("keys + std::min(t, count - 1) * dim", "keys + std::min(t + 1, count - 1) * dim"),
    "another stretch of a row": ("row + s * stretch, std::min", "row, std::min"),
}


x86_alone = pytest.mark.skipif(platform.machine() != "x86_64", reason="compiles for AVX2")


@pytest.mark.slow
@x86_alone
@pytest.mark.parametrize("what", BROKEN)
def test_the_self_test_sees_broken_kernels(tmp_path: Path, what: str) -> None:
    right, wrong = BROKEN[what]
    found = 0
    for path in variants.SOURCE.parent.glob("*.h"):
        source = path.read_text(encoding="utf-8")
        found += right in source
        (tmp_path / path.name).write_text(source.replace(right, wrong, 1) if right else source, encoding="utf-8")
    assert found == 1 or not right
    (tmp_path / "test.cpp").write_text(
        '#include "selftest.h"\nextern "C" int sk_self_test() { return self_test(); }\n', encoding="utf-8"
    )
    command = [
        build.compiler() or "none",
        "-O1",
        "-march=x86-64-v3",
        "-std=c++20",
        "-fPIC",
        "-shared",
        "-w",
        "test.cpp",
        "-o",
        "test.so",
    ]
    subprocess.run(command, cwd=tmp_path, check=True)
    done = subprocess.run([sys.executable, "-I", "-S", "-c", build._TEST, str(tmp_path / "test.so")], check=False)
    assert (done.returncode == 0) == (what == "whole")


PRODUCTS = Path(__file__).with_name("products.cpp")


def products(folder: Path, cxx: str, options: tuple[str, ...], *emulator: str) -> str:
    """What `products.cpp` prints, compiled so and run; its self-test must not fail."""
    program = folder / "products"
    command = [cxx, "-O1", "-w", "-std=c++20", *options, "-I", str(variants.SOURCE.parent), str(PRODUCTS), "-o"]
    subprocess.run([*command, str(program), "-ldl"], check=True)
    done = subprocess.run([*emulator, str(program)], capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == 0, f"the self-test ends with {done.returncode}"
    return done.stdout


@pytest.fixture(scope="module")
def products_of_avx2(tmp_path_factory: pytest.TempPathFactory) -> str:
    options = variants.MACHINES["x86_64"]["avx2"].options
    return products(tmp_path_factory.mktemp("avx2"), build.compiler() or "none", options)


@pytest.mark.slow
@x86_alone
@pytest.mark.parametrize("name", [name for name in variants.MACHINES["x86_64"] if name != "avx2"])
def test_builds_compute_the_same_from_bytes(tmp_path: Path, products_of_avx2: str, name: str) -> None:
    """To the last bit, and right: weights in 8 and 4 bits, and all block formats."""
    options, needs = variants.MACHINES["x86_64"][name]
    if not needs - {"AuthenticAMD"} <= variants.features():
        pytest.skip(f"this processor does not run {name}")
    assert products(tmp_path, build.compiler() or "none", options) == products_of_avx2


CROSS, EMULATOR = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64")


@pytest.mark.slow
@x86_alone
@pytest.mark.skipif(CROSS is None or EMULATOR is None, reason="no aarch64-linux-gnu-g++ with qemu-aarch64 here")
@pytest.mark.parametrize("name", variants.MACHINES["aarch64"])
def test_builds_for_aarch64_compute_the_same(tmp_path: Path, products_of_avx2: str, name: str) -> None:
    options = variants.MACHINES["aarch64"][name].options
    assert products(tmp_path, str(CROSS), options, str(EMULATOR), "-L", "/usr/aarch64-linux-gnu") == products_of_avx2


# ---------------------------------------------------------------- compiling


def compiler_that(folder: Path, does: str) -> dict[str, str]:
    """Environment with a stand-in for the C++ compiler; `$out` is the file that it shall write."""
    script = folder / "compiler"
    script.write_text(f'#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\nout="$2"\n{does}\n', encoding="utf-8")
    script.chmod(0o755)
    return {"CXX": str(script), "SAKIYOMI_CACHE_DIR": str(folder / "cache")}


def files(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def test_a_failed_build_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the compiler says need not be UTF-8."""
    fails = 'echo half > "$out"; printf "plus de papier \\351puis\\351" >&2; exit 1'
    for name, value in compiler_that(tmp_path, fails).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(OSError, match=r"plus de papier .puis."):
        build._build()
    assert not files(tmp_path / "cache" / "kernels")


def test_a_build_outlives_the_process_that_began_it(tmp_path: Path) -> None:
    environment = os.environ | compiler_that(tmp_path, 'sleep 1; echo library > "$out"')
    code = """
import time
from sakiyomi.kernels.build import native_at_hand
print(native_at_hand())
time.sleep(0.4)
"""
    done = subprocess.run([*warm(), "-c", code], env=environment, capture_output=True, encoding="utf-8", check=True)
    assert done.stdout.split() == ["False"]
    folder = tmp_path / "cache" / "kernels"
    until(lambda: bool(list(folder.glob("*.so"))))
    [path] = folder.iterdir()
    assert path.read_text(encoding="utf-8") == "library\n"
    assert path.stem.endswith(f"-{variants.digest(path)}")


def test_two_processes_may_build_at_once(tmp_path: Path) -> None:
    environment = os.environ | compiler_that(tmp_path, 'sleep 0.3; echo library > "$out"')
    code = "from sakiyomi.kernels import build; print(build._build().read_text())"
    both = [
        subprocess.Popen([*warm(), "-c", code], env=environment, stdout=subprocess.PIPE, encoding="utf-8")
        for _ in range(2)
    ]
    assert [process.communicate(timeout=120)[0].strip() for process in both] == ["library"] * 2
    assert len(files(tmp_path / "cache" / "kernels")) == 1


@pytest.mark.thorough
def test_what_a_killed_build_left_is_removed_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """kill -9 of all of it, in the middle of the compiler's writing."""
    group = shlex.quote(str(tmp_path / "group"))
    environment = os.environ | compiler_that(tmp_path, f'echo half > "$out"; echo $$ > {group}; sleep 60')
    folder = tmp_path / "cache" / "kernels"
    code = "from sakiyomi.kernels import build; build._build()"
    process = subprocess.Popen([sys.executable, "-c", code], env=environment, stderr=subprocess.DEVNULL)
    until(lambda: (tmp_path / "group").exists() and (tmp_path / "group").read_text(encoding="utf-8").strip() != "", 60)
    process.kill()
    os.killpg(os.getpgid(int((tmp_path / "group").read_text(encoding="utf-8"))), signal.SIGKILL)
    process.wait()
    assert [path.read_text(encoding="utf-8") for path in folder.iterdir()] == ["half\n"]
    for name, value in compiler_that(tmp_path, 'echo library > "$out"').items():
        monkeypatch.setenv(name, value)
    assert build._build().read_text(encoding="utf-8") == "library\n"
    assert len(files(folder)) == 1


@pytest.mark.skipif(os.name != "posix", reason="a file that is no folder")
def test_without_a_place_for_kernels_there_are_none(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    environment = os.environ | compiler_that(tmp_path, 'echo library > "$out"')
    environment |= {"SAKIYOMI_CACHE_DIR": str(tmp_path / "file" / "cache")}
    code = "from sakiyomi.kernels.build import native; print(native())"
    done = subprocess.run([*warm(), "-c", code], env=environment, capture_output=True, encoding="utf-8", check=True)
    assert done.stdout.strip() == "None" and "plain torch runs instead" in done.stderr


@pytest.mark.parametrize("damage", ["cut", "zeroed", "empty", "flipped"])
def test_a_damaged_library_is_built_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str) -> None:
    """Loading one that is cut off ends the process by SIGBUS, at every start."""
    for name, value in compiler_that(tmp_path, 'echo library > "$out"').items():
        monkeypatch.setenv(name, value)
    path = build._build()
    whole = path.read_bytes()
    path.write_bytes({"cut": whole[:4], "zeroed": bytes(8), "empty": b"", "flipped": b"L" + whole[1:]}[damage])
    assert build.built() is None
    assert not path.exists()
    assert build._build().read_bytes() == whole


@pytest.mark.skipif(
    build.compiler() is None or os.environ.get("SAKIYOMI_NATIVE") == "0",
    reason="there is no compiler, or the kernels are switched off",
)
def test_the_kernels_compile_where_a_compiler_is() -> None:
    """Else the tests of the kernels would be skipped, and everything would run on plain torch, slower, unseen."""
    assert build.native() is not None


def test_functions_have_the_types_of_the_sources() -> None:
    """A pointer that is passed as an int of 32 bits would crash the process."""
    found = build.signatures()
    number, pointer = ctypes.c_int64, ctypes.c_void_p
    assert found["sk_weights"] == ([], number)
    one = ctypes.c_int
    assert found["sk_weight"] == ([number, *[pointer] * 5, number, number, one, number, one], number)
    assert found["sk_bind"] == ([pointer], ctypes.c_char_p)
    assert found["sk_free_weights"] == ([number], None)
    assert found["sk_ranked"][0][3] == ctypes.c_uint64
    assert found["sk_residual"] == ([pointer, pointer, number, ctypes.c_float, pointer], ctypes.c_float)
    assert found["sk_draw"][0][2] == ctypes.c_double
    code = "".join(path.read_text(encoding="utf-8") for path in Path(build.__file__).parents[1].rglob("*.py"))
    called = set(re.findall(r"\.(sk_\w+)\b", code))
    assert called and called <= found.keys()

"""Settings of the whole suite, made before torch is imported; its two tiers; turns for tests that watch the clock; what
tests cost, and a limit of it.
"""

from __future__ import annotations

import gc
import os
import sys
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from surroundings import build_kernels, fix_examples, neutralise, same_draws
from tiers import sort_into_tiers

neutralise()
fix_examples()
# Without a GPU its kernels are interpreted.
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"
# What somebody has tuned on this machine is not what draft "auto" is tested with.
os.environ["SAKIYOMI_PROFILES"] = str(Path(__file__).with_name("no-profiles"))
os.environ["SAKIYOMI_RECORD"] = "off"

WORKER_BYTES = 3 << 30
"""Of a process that runs thousands of tests: torch, transformers, and models that tests share."""

MOST_SECONDS = 60.0
"""Of computing, by this process and programs that a test has waited for; by the processor's clock, which other work on
the machine changes little.
"""


def pytest_sessionstart(session: pytest.Session) -> None:
    """See ``build_kernels``; before other processes begin to run tests."""
    if "PYTEST_XDIST_WORKER" not in os.environ and not session.config.option.collectonly:
        build_kernels()


def _affordable(item: pytest.Item) -> Generator[None, Any, Any]:
    """A test, or what it is set up with, that computes for too long fails: all of them are run for every change."""
    before = os.times()
    result = yield
    used = sum(now - then for now, then in zip(os.times()[:4], before[:4], strict=True))
    item.user_properties.append(("processor seconds", used))
    if used > MOST_SECONDS and item.get_closest_marker("slow") is None:
        pytest.fail(
            f"it computed for {used:.0f} s, and {MOST_SECONDS:.0f} are allowed: make it smaller, share what it makes, "
            "start programs by warm.py, or mark it slow"
        )
    return result


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of the suite's own."""
    parser.addoption("--thorough", action="store_true", help="run both tiers, as .ci/run does")
    parser.addoption("--costs", action="store_true", help="end with a table: folder, tests, seconds of the processor")


def pytest_configure(config: pytest.Config) -> None:
    """Both tiers where they are asked for; a test that is asked for by its name runs, whatever its marks."""
    asked = [str(argument) for argument in config.invocation_params.args]
    chosen = any(argument.startswith("-m") for argument in asked)
    if config.getoption("--thorough"):
        if chosen:
            raise pytest.UsageError('--thorough and -m choose tests in two ways; give one: -m "not gpu" has both tiers')
        config.option.markexpr = "not slow and not gpu"
    elif not chosen and any("::" in argument for argument in asked):
        config.option.markexpr = ""


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """The table of ``--costs``: seconds of setups and of tests, by the folders of ``tests/``."""
    if not config.getoption("--costs"):
        return
    tests: Counter[str] = Counter()
    seconds: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if getattr(report, "when", None) == "teardown":
                _, *folders = report.nodeid.partition("::")[0].split("/")[:-1]
                folder = folders[0] if folders else "."
                tests[folder] += 1
                seconds[folder] += sum(value for name, value in report.user_properties if name == "processor seconds")
    terminalreporter.section("processor seconds")
    for folder in [*sorted(tests), None]:
        count = tests.total() if folder is None else tests[folder]
        used = seconds.total() if folder is None else seconds[folder]
        terminalreporter.write_line(f"| {folder or 'all'} | {count:,} | {used:,.0f} |")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """What ``-n auto`` means: one process for each processor that this one may use, and as memory allows."""
    from sakiyomi.core.memory import available_bytes

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, available_bytes() // WORKER_BYTES))


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what the option -m does not name
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """See ``tiers``."""
    sort_into_tiers(items)


def pytest_collection_finish() -> None:
    """Modules and tests stay until the end. Searching them for garbage again and again took a tenth of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 10)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, Any, Any]:
    """See ``same_draws`` and ``_affordable``; for fixtures of its module, too."""
    same_draws()
    return (yield from _affordable(item))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """See ``_affordable``."""
    return (yield from _affordable(item))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """Where several processes run tests, one marked ``alone`` waits until the others rest, and they for it."""
    if "PYTEST_XDIST_WORKER" not in os.environ or os.name != "posix":
        return (yield)
    import fcntl

    here = Path(__file__)  # any two files that are there
    with here.open(encoding="utf-8") as gate, here.with_name("toys.py").open(encoding="utf-8") as turn:
        # Who waits for a turn holds the gate, so that others cannot go past for ever.
        fcntl.flock(gate, fcntl.LOCK_EX)
        fcntl.flock(turn, fcntl.LOCK_EX if item.get_closest_marker("alone") else fcntl.LOCK_SH)
        fcntl.flock(gate, fcntl.LOCK_UN)
        try:
            return (yield)
        finally:
            fcntl.flock(turn, fcntl.LOCK_UN)  # a child that was forked may still have the file


@pytest.fixture
def own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[None, Any, None]:
    """Code that comes with models is copied to a folder of this test, and forgotten when it is over."""

    def forget() -> None:
        for name in [name for name in sys.modules if name.partition(".")[0] == "transformers_modules"]:
            del sys.modules[name]

    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    forget()
    yield
    forget()

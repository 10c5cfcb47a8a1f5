"""What the suite is run by: a limit of cost, and programs that are forks."""

from __future__ import annotations

import signal
import subprocess
from typing import Any

import pytest

import conftest
from warm import warm


class Item:
    """As much of a test as the limit reads."""

    def __init__(self, *marks: str) -> None:
        self._marks = marks
        self.user_properties: list[tuple[str, object]] = []

    def get_closest_marker(self, name: str) -> str | None:
        return name if name in self._marks else None


@pytest.mark.parametrize(("marks", "most", "fails"), [((), 1e-6, True), (("slow",), 1e-6, False), ((), 60.0, False)])
def test_a_dear_test_fails(marks: tuple[str, ...], most: float, fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conftest, "MOST_SECONDS", most)
    running: Any = conftest._affordable(Item(*marks))  # type: ignore[arg-type]
    next(running)
    sum(range(3_000_000))  # longer than the clock's hundredth
    with pytest.raises(pytest.fail.Exception if fails else StopIteration, match="allowed: make it" if fails else None):
        running.send(None)


def run(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*warm(), *arguments], capture_output=True, text=True, check=False, **options)


def test_a_fork_is_as_good_as_a_process(tmp_path: Any) -> None:
    code = (
        "import os, sys\nprint(sys.argv, os.getcwd(), os.environ['ONLY'], 'HOME' in os.environ, sys.stdin.read())\n"
        "print('x', file=sys.stderr)\nsys.exit(3)"
    )
    done = run("-c", code, "a", cwd=tmp_path, env={"ONLY": "this"}, input="heard")
    assert (done.returncode, done.stderr) == (3, "x\n")
    assert done.stdout == f"['-c', 'a'] {tmp_path} this False heard\n"
    (tmp_path / "script.py").write_text(
        "import sys; print(__name__, sys.argv[1:]); raise ValueError('no')", encoding="utf-8"
    )
    done = run(str(tmp_path / "script.py"), "b")
    assert done.returncode == 1 and done.stdout == "__main__ ['b']\n" and done.stderr.endswith("ValueError: no\n")
    assert run("-m", "sakiyomi", "--version").stdout.startswith("sakiyomi ")
    assert run("-c", "import os; os.abort()").returncode == -signal.SIGABRT


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 7), (signal.SIGTERM, -signal.SIGTERM)])
def test_signals_reach_a_fork(number: int, code: int) -> None:
    text = "import time\ntry:\n  print(1, flush=True); time.sleep(60)\nexcept KeyboardInterrupt:\n  raise SystemExit(7)"
    with subprocess.Popen([*warm(), "-c", text], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        process.send_signal(number)
        assert process.wait(60) == code


def test_a_fork_does_not_outlive_who_started_it() -> None:
    code = "import time; print(1, flush=True); time.sleep(60)"
    with subprocess.Popen([*warm(), "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        process.kill()
        assert process.stdout.read() == b""  # ends with its last writer

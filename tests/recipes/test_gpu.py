"""The script that measures a GPU: rows that fail, take too long or find other texts; and its small form."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import gpu as module
from gpu_rows import Bench, Lines, Models

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, dict[str, dict[str, Any]]]]:
    """Runs these rows; gives the exit code, and the rows of the file by name."""

    def run(
        *arguments: str, most: float = 60, **rows: Callable[[Bench], Lines]
    ) -> tuple[int, dict[str, dict[str, Any]]]:
        steps = tuple(module.Step(name, "{medium}", row, None, 5, most) for name, row in rows.items())
        out = tmp_path / "gpu.json"
        given = ["gpu.py", "--device", "cpu", "--small", "--out", str(out), "--models", str(tmp_path / "models")]
        monkeypatch.setattr(module, "STEPS", steps)
        monkeypatch.setattr(sys, "argv", [*given, "--seconds", "1e9", *arguments])
        code = module.main()
        return code, {row["row"]: row for row in json.loads(out.read_text(encoding="utf-8"))["rows"]}

    return run


def good(bench: Bench) -> Lines:
    yield {"name": "some", "tokens_per_second": 12.0, "ok": True}


@pytest.mark.thorough
def test_after_an_error_the_others_go_on(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    def bad(bench: Bench) -> Lines:
        yield {"name": "first", "ok": True}
        raise ValueError("nothing\nfits")

    code, rows = run(bad=bad, good=good)
    assert code == 0
    assert rows["bad"]["error"] == "ValueError: nothing fits"
    assert [line["name"] for line in rows["bad"]["lines"]] == ["first"], "what was there before stays"
    assert rows["good"]["error"] is None
    said = capsys.readouterr()
    assert "the row ended: ValueError: nothing fits" in said.out
    assert [line.partition(":")[0] for line in said.err.splitlines()] == ["bad", "good"]


@pytest.mark.thorough
def test_the_file_has_a_line_as_soon_as_it_is_there(run: Any, tmp_path: Path) -> None:
    seen = []

    def row(bench: Bench) -> Lines:
        yield {"name": "first"}
        seen.append(json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8"))["rows"][0]["lines"])

    run(row=row)
    assert seen == [[{"name": "first"}]]


@pytest.mark.thorough
def test_a_row_that_takes_too_long_is_stopped(run: Any) -> None:
    def slow(bench: Bench) -> Lines:
        yield {"name": "first"}
        try:
            time.sleep(60)
        except Exception:
            time.sleep(60)

    code, rows = run(slow=slow, good=good, most=0.2)
    assert code == 0
    assert rows["slow"]["error"] == "OutOfTime: stopped after 0 s"
    assert rows["slow"]["lines"] and rows["good"]["lines"]


@pytest.mark.thorough
def test_without_time_a_row_is_skipped(run: Any) -> None:
    code, rows = run("--seconds", "0", good=good)
    assert code == 0
    assert "skipped" in rows["good"]["error"] and not rows["good"]["lines"]


@pytest.mark.thorough
def test_another_text_is_a_failure(run: Any) -> None:
    def other(bench: Bench) -> Lines:
        yield {"name": "some", "ok": False, "note": "text 0 differs"}

    code, rows = run(other=other, good=good)
    assert code == 1
    assert rows["good"]["lines"]


def test_a_row_waits_for_its_model_and_others_come_first(tmp_path: Path) -> None:
    models = Models(tmp_path, ())
    bench = Bench("cpu", True, {"medium": "21M", "large": "24M"}, models, {})
    steps = [
        module.Step(name, "", good, target, 0, 9) for name, target in (("a", "large"), ("b", "medium"), ("c", None))
    ]
    (tmp_path / "21M").mkdir()
    until = time.time() + 1
    assert [module.next_step(steps, bench, until).name for _ in range(3)] == ["b", "c", "a"]
    assert time.time() >= until, "nobody makes it"


@pytest.mark.slow
def test_its_small_form(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--device", "cpu", "--small"]
    command += ["--out", str(tmp_path / "gpu.json"), "--models", str(tmp_path / "models"), "--seconds", "280"]
    done = subprocess.run(
        [*command, "--rows", "device", "single", "exact"], capture_output=True, encoding="utf-8", check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8"))
    assert [row["row"] for row in found["rows"]] == ["device", "single", "exact"]
    for row in found["rows"]:
        assert row["error"] is None and row["lines"]
    _, single, exact = (row["lines"] for row in found["rows"])
    assert [line["equal"] for line in (*single, *exact)] == [True] * 7

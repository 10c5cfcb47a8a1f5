"""Pictures of the benchmark's rows: what is refused before measuring, what is drawn, what is not."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import rows as script
from sakiyomi.cli import app
from sakiyomi.core.errors import InputError, LoadError, UnsupportedError
from sakiyomi.evaluation.bench import plot, suites
from sakiyomi.evaluation.bench.report import Row


def race_row(**changed: Any) -> Row:
    lines = [
        {"name": "transformers plain", "tokens_per_second": 50.0, "low": 45.0, "high": 52.0, "ratio": 1.0},
        {"name": "sakiyomi plain", "tokens_per_second": 90.0, "low": 90.0, "high": 95.0, "ratio": 1.8},
        {"name": "other text", "tokens_per_second": None, "low": None, "high": None, "ratio": None},
    ]
    return Row("speculative", "tokens/s", [lines[0] | changed, *lines[1:]], {"target": "tales", "gamma": 4})


def sweep_row() -> Row:
    lines = []
    for size in (1, 2, 4):
        line: dict[str, Any] = {"batch": size, "stops": size == 2}
        for way, speed in (("plain", 50.0 * size), ("speculative", 80.0 * size**0.5)):
            figures = {"tokens_per_second": speed, "low": speed - 5, "high": speed + 5, "latency_seconds": size / speed}
            line |= {f"{way}_{name}": value for name, value in figures.items()}
        lines.append(line)
    lines.append(lines[-1] | {"batch": 8, "speculative_tokens_per_second": None})
    return Row("sweep", "total tokens/s", lines, {"target": "tales"})


def oracle_row() -> Row:
    lines: list[dict[str, Any]] = []
    for rate, gamma in ((0.5, 4), (0.8, 4), (1.0, 4), (1.0, 8)):
        expected = sum(rate**i for i in range(gamma + 1))
        figures = {"expected": expected, "tau": expected, "predicted": expected / 2, "ratio": expected / 2 or None}
        counts = {"passes": 9, "least": 9 if rate == 1.0 else None, "oracle_tokens_per_second": 100.0}
        lines.append({"rate": rate, "gamma": gamma} | figures | counts)
    lines[1]["ratio"] = lines[1]["oracle_tokens_per_second"] = None  # other text than the plain one
    return Row("oracle", "tokens a pass", lines, {"target": "tales"})


@pytest.mark.thorough
@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_rows_are_drawn_one_below_the_other(tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"rows.{suffix}"
    table = Row("bookkeeping", "ms a round", [{"sampling": "greedy", "ours_ms": 0.4}])
    assert plot.draw([race_row(), table, sweep_row(), oracle_row()], str(path), {"processor": "one"})
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG" if suffix == "png" else b"<?xml")
    alone = tmp_path / f"alone.{suffix}"
    plot.draw([race_row()], str(alone), {})
    assert alone.stat().st_size < len(content)


def test_nothing_is_written_where_nothing_can_be_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "none.png"
    assert not plot.draw([Row("stories", "failed", [], error="no model")], str(path), {})
    assert not path.exists()
    with pytest.raises(LoadError, match="cannot write"):
        plot.draw([race_row()], str(tmp_path / "gone" / "a.png"), {})


@pytest.mark.parametrize("name", ["rows.jpg", "rows", "nowhere/rows.png", "folder.png"])
def test_places_that_cannot_be_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(InputError, match="plot is"):
        plot.check(str(tmp_path / name))


def test_without_matplotlib_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UnsupportedError, match="pip install matplotlib"):
        plot.check(str(tmp_path / "a.png"))


def test_the_command_draws_and_refuses_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setitem(suites.ROWS, "stories", lambda row: race_row())
    path = tmp_path / "a.png"
    result = CliRunner().invoke(app, ["bench", "--rows", "stories", "--plot", str(path), "--json"])
    assert result.exit_code == 0, result.output
    assert path.stat().st_size > 1000
    assert json.loads(result.stdout.splitlines()[-1])["rows"][0]["row"] == "speculative"
    monkeypatch.setitem(suites.ROWS, "stories", lambda row: pytest.fail("measured"))
    result = CliRunner().invoke(app, ["bench", "--rows", "stories", "--plot", str(tmp_path / "a.gif")])
    assert result.exit_code == 2 and "plot" in result.output


def test_the_script_refuses_rows_that_cannot_be_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    for name in script.TABLES:
        monkeypatch.setitem(script.ROWS, name, lambda row: pytest.fail("measured"))
        result = CliRunner().invoke(script.app, ["--rows", name, "--plot", str(tmp_path / "a.png")])
        assert isinstance(result.exception, InputError) and "nothing to draw" in result.exception.message

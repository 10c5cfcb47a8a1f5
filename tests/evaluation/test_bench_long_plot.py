"""Pictures of the long-context rows, and the map of what a cache kept."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sakiyomi.core.errors import InputError, LoadError, UnsupportedError
from sakiyomi.evaluation.bench.long import plot
from sakiyomi.evaluation.bench.report import Row

PNG = b"\x89PNG"


def line(name: str, length: int, **changed: Any) -> dict[str, Any]:
    figures = {"accuracy": 0.75, "accuracy_spread": 0.1, "kv_bytes": 1000 * length, "grown_bytes": 2000 * length}
    head = {"name": name, "spec": name, "budget": None, "length": length, "starred": False}
    return head | figures | changed


def rows() -> list[Row]:
    refused = {"name": "h2o", "budget": "1/8", "length": 1024, "starred": False, "state": "refused"}
    lines = [line("full", 1024), line("full", 4096), line("full *", 6000, starred=True), refused]
    lines += [line("locret", n, budget="512", kv_bytes=300_000, grown_bytes=0) for n in (1024, 4096)]
    slopes = [
        {"name": "full", "budget": None, "kv_slope": 1.0, "process_slope": 1.0, "class": "full", "on_paper": 1.0},
        {
            "name": "locret",
            "budget": "512",
            "kv_slope": 0.0,
            "process_slope": None,
            "class": "bounded",
            "on_paper": 0.0,
        },
    ]
    series = {"tokens": [10, 20], "kv": [100, 200], "resident": [1, 1]}
    books = [line("full", 1024, perplexity=20.0, perplexity_spread=None, agreement=1.0, agreement_spread=None)]
    return [
        Row("long", "right answers", lines, {"target": "retriever"}),
        Row("memory", "exponents", slopes),
        Row("books", "perplexity", books),
        Row("turns", "turns", [{"name": "full", "budget": None, "accuracy": 1.0, "series": series}]),
    ]


@pytest.mark.thorough
def test_every_row_has_its_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    folder = tmp_path / "new" / "pictures"
    plot.check(str(folder))
    written = plot.draw(rows(), str(folder), {"processor": "one"})
    assert sorted(path.name for path in written) == ["accuracy.png", "books.png", "memory.png", "turns.png"]
    assert all(path.read_bytes().startswith(PNG) for path in written)


def test_what_has_no_figures_is_not_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    refused = [{"name": "h2o", "budget": None, "length": 64, "starred": False, "state": "refused"}]
    assert plot.draw([Row("long", "", refused), Row("books", "", refused)], str(tmp_path), {}) == []
    with pytest.raises(LoadError, match="cannot write"):
        plot.draw(rows(), str(tmp_path / "gone"), {})


def test_folders_that_cannot_be_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(InputError, match="cannot be a folder"):
        plot.check(str(tmp_path / "file"))


def test_without_matplotlib_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UnsupportedError, match="pip install matplotlib"):
        plot.check(str(tmp_path))


# ---------------------------------------------------------------- what was kept


def test_shares_of_what_was_kept() -> None:
    found = plot.shares([[0, 2], [1]], 4)
    assert found.tolist() == [[1, 0, 1, 0], [0, 1, 0, 0]]
    long = plot.shares([range(0, 4000, 2)], 4000)  # ten tokens a column, every other one kept
    assert long.shape == (1, plot.CELLS) and np.allclose(long, 0.5)
    assert plot.shares([[3]], 4).tolist() == [[0, 0, 0, 1]]


def test_the_map_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    words = ["Once", "\n", "$5", "狐狸"] * 20  # of the last the font has no glyph: it is drawn without a warning
    kept = [[[0, 1, 2], [0, 40]], [[7], [8]]]
    plain, marked = tmp_path / "plain.png", tmp_path / "marked.png"
    plot.kept_map(kept, words, plain)
    plot.kept_map(kept, words, marked, spans=[(40, 44)], title="What was kept")
    assert plain.read_bytes().startswith(PNG) and plain.read_bytes() != marked.read_bytes()

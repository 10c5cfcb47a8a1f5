"""`sakiyomi models`: a table is read, filtered, and made into a page."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from causal_models import page
from sakiyomi.cli import app

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["models", *arguments], prog_name="sakiyomi")
    return result.exit_code, result.stdout, result.stderr


def test_the_page_is_current() -> None:
    """`python tests/causal_models.py` writes both."""
    assert page() == (ROOT / "docs" / "models.md").read_text(encoding="utf-8")


def test_a_part_of_a_name() -> None:
    code, out, _ = run("qwen3_n")
    assert code == 0
    assert out.splitlines() == ["qwen3_next  runs", "1 model types: 1 runs"]
    assert "qwen2_moe" in run("Qwen2MoeFor")[1]


def test_json() -> None:
    code, out, _ = run("blt", "--json")
    (row,) = json.loads(out.splitlines()[-1])["models"]
    assert code == 0 and row["class"] == "BltForCausalLM" and row["state"] == "refused" and row["why"]


def test_an_unknown_name() -> None:
    code, _, err = run("lama3")
    assert code == 2 and err.count("\n") == 1 and "'lama3'" in err and "sakiyomi models" in err

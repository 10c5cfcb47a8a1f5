"""Recipes on the command line: `python recipes/FILE`, with the flags that `sakiyomi train` makes of a dataclass."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from edits import EditsConfig, train_edits
from pair_toys import edits_config, tones_config
from retriever import RetrieverConfig, train_retriever
from sakiyomi.cli import app
from sakiyomi.cli.train import helps, script
from sakiyomi.train.checkpoint import load_checkpoint
from tones import TonesConfig, train_tones
from train_toys import flags

PAIRS = [("edits", EditsConfig, train_edits, edits_config), ("tones", TonesConfig, train_tones, tones_config)]


def run(monkeypatch: pytest.MonkeyPatch, name: str, config: type, train: Any, arguments: list[str]) -> int:
    """What `python recipes/NAME.py ARGUMENTS` ends with."""
    monkeypatch.setattr(sys, "argv", [f"recipes/{name}.py", *arguments])
    with pytest.raises(SystemExit) as done:
        script(config, train, "Train it.")
    return int(done.value.code or 0)


@pytest.mark.parametrize(("name", "config", "train", "make"), PAIRS)
def test_every_field_has_a_flag_and_a_help(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, config: type, train: Any, make: Any
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "dumb")
    assert run(monkeypatch, name, config, train, ["--help"]) == 0
    shown = capsys.readouterr().out
    for flag in config.flags():
        assert helps(config)[flag.name]
        # Long flags are cut in the table of the help; the beginning identifies them.
        assert "--" + flag.name.replace("_", "-")[:16] in shown


def test_the_retriever_has_a_flag_and_a_help_for_every_field(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    test_every_field_has_a_flag_and_a_help(
        monkeypatch, capsys, "retriever", RetrieverConfig, train_retriever, edits_config
    )
    done = CliRunner().invoke(app, ["train", "retriever", "--out", "x"])
    assert done.exit_code == 2
    assert "python recipes/retriever.py --out OUT" in done.output


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "config", "train", "make"), PAIRS)
def test_pairs_print_one_json_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    config: type,
    train: Any,
    make: Callable[[Path], Any],
) -> None:
    arguments = flags(make(tmp_path))
    assert run(monkeypatch, name, config, train, [*arguments, "--json"]) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary["finished"]
    assert load_checkpoint(Path(summary["out"]) / "draft" / "checkpoints")["progress"]["step"] == 3
    card = json.loads(Path(summary["target"], "card.json").read_text(encoding="utf-8"))
    assert card["command"].startswith(f"python recipes/{name}.py --out ")

"""`sakiyomi train` on the command line: flags from the dataclasses, JSON on stdout, errors without a traceback."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sakiyomi.cli.train import app
from sakiyomi.train.config import DraftConfig, TargetConfig
from train_toys import target_config, tiny_target

runner = CliRunner()


def flags(config: object, *, leave_out: tuple[str, ...] = ()) -> list[str]:
    """The command line that gives `config`."""
    given: list[str] = []
    for field in dataclasses.fields(config):  # type: ignore[arg-type]
        value, flag = getattr(config, field.name), "--" + field.name.replace("_", "-")
        if field.name in leave_out or value == field.default:
            continue
        if isinstance(value, bool):
            given.append(flag if value else f"--no-{flag[2:]}")
        else:
            for item in value if isinstance(value, tuple) else (value,):
                given += [flag, str(item)]
    return given


@pytest.mark.parametrize(("name", "config"), [("target", TargetConfig), ("draft", DraftConfig)])
def test_every_field_has_a_flag_and_a_help(name: str, config: type) -> None:
    result = runner.invoke(app, [name, "--help"], env={"COLUMNS": "200", "TERM": "dumb"})
    assert result.exit_code == 0
    for field in dataclasses.fields(config):
        assert field.metadata["help"]
        # Long flags are cut in the table of the help; the beginning identifies them.
        assert "--" + field.name.replace("_", "-")[:16] in result.output


def test_train_target_prints_one_json_line(tmp_path: Path) -> None:
    config = target_config(tmp_path)
    result = runner.invoke(app, ["target", *flags(config), "--json"])
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout.splitlines()[-1])
    assert summary["finished"]
    assert summary["config"]["row_tokens"] == [32, 64]
    assert "step 8" in result.stderr
    assert "step 8" not in result.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["target"], 2, "--out"),
        (["target", "--out", "OUT", "--text", "OUT/none.jsonl"], 1, "none.jsonl"),
        (["target", "--out", "OUT", "--text", "OUT/none.jsonl@x"], 2, "STABLE:DECAY"),
        (["draft", "--out", "OUT", "--text", "OUT/a.txt", "--target", "OUT/none"], 1, "none is no folder"),
        (["draft", "--out", "OUT", "--text", "OUT/none.txt", "--target", "TINY", "--valid", "OUT/a"], 2, "NAME=FILE"),
        (["target", "--no-such-flag"], 2, "No such option"),
    ],
)
def test_errors_are_one_line(tmp_path: Path, arguments: list[str], code: int, message: str) -> None:
    if "TINY" in arguments:
        tiny_target(tmp_path)
    places = {"OUT": str(tmp_path), "TINY": str(tmp_path / "tiny")}
    given = [argument.replace("OUT", places["OUT"]).replace("TINY", places["TINY"]) for argument in arguments]
    result = runner.invoke(app, [*given, *(["--samples", "0"] if "TINY" in arguments else [])])
    assert result.exit_code == code
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_importing_the_command_line_loads_no_torch() -> None:
    code = "import sakiyomi.cli.train, sys; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

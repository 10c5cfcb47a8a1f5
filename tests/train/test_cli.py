"""`sakiyomi train` on the command line: flags from the dataclasses, JSON on stdout, errors without a traceback."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sakiyomi.cli.train import app, helps
from sakiyomi.train.commands import TrainDraft, TrainLococo, TrainNgram, TrainRetaining, TrainTarget
from train_toys import draft_config, flags, stop_at, story_file, target_config, tiny_target

runner = CliRunner()


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("target", TrainTarget),
        ("draft", TrainDraft),
        ("retaining", TrainRetaining),
        ("lococo", TrainLococo),
        ("ngram", TrainNgram),
    ],
)
def test_every_field_has_a_flag_and_a_help(name: str, config: type) -> None:
    result = runner.invoke(app, [name, "--help"], env={"COLUMNS": "200", "TERM": "dumb"})
    assert result.exit_code == 0
    for flag in config.flags():
        assert helps(config)[flag.name]
        # Long flags are cut in the table of the help; the beginning identifies them.
        assert "--" + flag.name.replace("_", "-")[:16] in result.output


def test_train_target_prints_one_json_line(tmp_path: Path) -> None:
    config = target_config(tmp_path)
    result = runner.invoke(app, ["target", *flags(config), "--json"])
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout.splitlines()[-1])
    assert summary["finished"]
    assert summary["config"]["row_tokens"] == [32, 64]
    assert "step 8" in result.stderr
    assert "step 8" not in result.stdout
    assert "it/s" not in result.stderr, "no bars where nobody watches"


@pytest.mark.few(1)
@pytest.mark.parametrize("as_json", [False, True])
def test_an_interrupted_run_exits_130_and_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_json: bool
) -> None:
    config = target_config(tmp_path)
    with monkeypatch.context() as patch:
        stop_at(patch, 3, signal.SIGINT)
        result = runner.invoke(app, ["target", *flags(config), *(["--json"] if as_json else [])])
    assert result.exit_code == 130
    if as_json:
        assert json.loads(result.stdout)["finished"] is False
    else:
        assert result.stdout.endswith("the same command with --resume continues from here\n")
    assert Path(config.loop.out, "checkpoints", "step-00000004.pt").exists()
    assert runner.invoke(app, ["target", *flags(config), "--resume"]).exit_code == 0


def test_train_draft_without_held_out_text_prints_alpha_and_the_speed_up(tmp_path: Path) -> None:
    config = draft_config(tmp_path, tiny_target(tmp_path), valid=(), samples=0)
    result = runner.invoke(app, ["draft", *flags(config)])
    assert result.exit_code == 0, result.output
    for line in (
        "held-out held_back:",
        "  alpha: ",
        "  expected_speedup_greedy: ",
        "cost: 0.1",
        "cost_source: given by",
    ):
        assert line in result.stdout
    assert "None" not in result.stdout
    assert "it/s" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["target"], 2, "--out"),
        (["target", "--out", "OUT", "--text", "OUT/none.jsonl"], 1, "none.jsonl"),
        (["target", "--out", "OUT", "--text", "OUT/none.jsonl@x"], 2, "STABLE:DECAY"),
        (["draft", "--target", "OUT/none"], 2, "give --out (a folder for the model) and --text (training text"),
        (["draft", "--out", "OUT/new", "--text", "TEXT", "--target", "OUT/none"], 1, "no folder 'OUT/none'"),
        (["draft", "--out", "OUT/new", "--text", "TEXT", "--target", "TINY", "--valid", "OUT/a"], 2, "NAME=FILE"),
        (["draft", "--out", "OUT/new", "--text", "TEXT", "--target", "TINY", "--valid", "a=typo.txt"], 1, "typo.txt"),
        (["draft", "--out", "OUT/new", "--text", "TEXT", "--target", "TINY", "--kv-heads", "0"], 2, "set --kv-heads"),
        (["draft", "--out", "TEXT", "--text", "TEXT", "--target", "TINY"], 2, "which is a file"),
        (["target", "--no-such-flag"], 2, "No such option"),
        (["draft", "--eval-tokens", "9"], 2, "No such option"),
    ],
)
def test_errors_are_one_line(tmp_path: Path, arguments: list[str], code: int, message: str) -> None:
    if "TINY" in arguments:
        tiny_target(tmp_path)

    def placed(argument: str) -> str:
        text = str(story_file(tmp_path / "text.jsonl"))
        return argument.replace("TEXT", text).replace("TINY", f"{tmp_path}/tiny").replace("OUT", str(tmp_path))

    result = runner.invoke(app, [placed(argument) for argument in arguments])
    assert result.exit_code == code
    assert placed(message) in result.stderr
    assert "Traceback" not in result.stderr


def test_importing_the_command_line_loads_no_torch() -> None:
    code = "import sakiyomi.cli.train, sys; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

"""kill -9 at the steps of writing of every command that writes: the next run ends as if nothing had been.

``SAKIYOMI_KILLS`` is the number of steps of each that are tried.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from train_toys import stories, story_file, tiny_target
from warm import warm

KILLED = Path(__file__).parents[1] / "killed.py"
KILLS = int(os.environ.get("SAKIYOMI_KILLS", "3"))
NAMES = ("train medusa", "train ngram", "cache build", "a suffix memory", "a packed copy")


def commands(folder: Path, made: Path) -> dict[str, list[str]]:
    """By name; each writes into the folder ``made``."""
    target, text = tiny_target(folder), folder / "text.txt"
    text.write_text(stories(1)[0], encoding="utf-8")
    grams = ["--text", str(story_file(folder / "grams.jsonl")), "--tokenizer", str(target)]
    loop = ["--tokens", "256", "--row-tokens", "32", "--step-tokens", "64", "--warmup-steps", "1", "--threads", "1"]
    loop += ["--save-minutes", "0", "--no-compile", "--eval-prompts", "2"]
    valid = story_file(folder / "valid.jsonl", count=4, seed=1)
    heads = ["--target", str(target), "--data", str(folder / "grams.jsonl"), "--valid", f"stories={valid}"]
    write = ["generate", "Once upon a time", "--max-new-tokens", "8", "--compile", "false"]
    return {
        "train medusa": ["train", "medusa", *heads, "--heads", "2", *loop, "--out", str(made)],
        "train ngram": ["train", "ngram", *grams, "--out", str(made / "grams.safetensors")],
        "cache build": ["cache", "build", str(text), str(made / "p.safetensors"), "--target", str(target)],
        "a suffix memory": [*write, "--target", str(target), "--draft", f"suffix:{made / 'one.memory'}"],
        "a packed copy": [*write, "--target", str(made), "--draft", "none", "--quantize", "int8"],
    }


@pytest.mark.skipif(not hasattr(os, "fork"), reason="it forks")
@pytest.mark.parametrize("name", NAMES)
def test_the_next_run_ends_as_if_nothing_had_been(tmp_path: Path, name: str) -> None:
    made = tmp_path / "made"
    asked = {"folder": str(made), "command": commands(tmp_path, made)[name], "most": KILLS, "resume": "train" in name}
    asked["base"] = str(tmp_path / "tiny")
    done = subprocess.run(
        [*warm(), str(KILLED)], input=json.dumps(asked), capture_output=True, encoding="utf-8", check=False,
        timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert not told.get("failed"), told["failed"]
    assert told["steps"] >= 2 and told["right"]
    for outcome in told["tried"]:
        assert outcome["killed"], outcome
        assert outcome["again"] == 0, outcome.get("said")
        assert outcome["right"] == told["right"], outcome
        assert not outcome["left"], outcome

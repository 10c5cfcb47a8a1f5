"""Commands write a continuation with the space that it begins with, and stop where they are told to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sakiyomi.cli import app
from spaced import WHOLE, spaced_toy
from toys import save_model

runner = CliRunner()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = save_model(tmp_path_factory.mktemp("model"), *spaced_toy())
    return ["--target", str(folder), "--draft", "suffix", "--compile", "false"]


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("more", "text"),
    [
        ([], WHOLE),
        (["--no-stream"], WHOLE),
        (["--trace"], WHOLE),
        (["--trace", "--no-stream"], WHOLE),
        (["--stop", "<|im_end|>"], WHOLE.rstrip()),
        (["--trace", "--stop", " home<|im_end|>"], " fox ran😀"),
    ],
)
def test_generate(base: list[str], more: list[str], text: str) -> None:
    done = runner.invoke(app, ["generate", "the the", *base, *more])
    assert (done.exit_code, done.stdout) == (0, text + "\n"), done.output


def test_several_prompts_and_json(base: list[str]) -> None:
    done = runner.invoke(app, ["generate", "the", "the the", *base, "--trace", "--n", "2"])
    assert done.stdout == "\n".join([WHOLE + "\n"] * 4)
    found = json.loads(runner.invoke(app, ["generate", "the", *base, "--json"]).stdout.splitlines()[-1])
    assert found["generations"][0]["text"] == WHOLE


@pytest.mark.parametrize("more", [[], ["--trace"]])
def test_chat(base: list[str], more: list[str]) -> None:
    done = runner.invoke(app, ["chat", *base, *more], input="the\n")
    assert done.exit_code == 0 and WHOLE in done.stdout


def test_tree_shows_the_spaces_of_tokens(base: list[str]) -> None:
    drawn = runner.invoke(app, ["tree", "the", *base, "--draft", "none"]).stdout
    assert "' fox' 1.000" in drawn


def test_a_batch(base: list[str], tmp_path: Path) -> None:
    asked, out = tmp_path / "asked.jsonl", tmp_path / "out.jsonl"
    body = {"prompt": "the", "max_tokens": 20, "temperature": 0, "stop": ["<|im_end|>\n"]}
    asked.write_text(
        json.dumps({"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": body}) + "\n",
        encoding="utf-8",
    )
    done = runner.invoke(app, ["batch", str(asked), str(out), *base])
    assert done.exit_code == 0, done.output
    (line,) = out.read_text(encoding="utf-8").splitlines()
    assert json.loads(line)["response"]["body"]["choices"][0]["text"] == WHOLE.rstrip()

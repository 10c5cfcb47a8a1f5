"""Row ``kinds``: a model by kinds of prompts and weights, beside other engines; its table as Markdown."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fake_engines import GOOD, Fake, fake
from sakiyomi.cli import app
from sakiyomi.core.errors import InputError, LoadError
from sakiyomi.core.prompts import read_prompts, text_of
from sakiyomi.evaluation.bench import by_kind, plot, suites
from sakiyomi.evaluation.bench.by_kind import pivoted
from sakiyomi.evaluation.bench.config import BenchConfig
from sakiyomi.evaluation.bench.runner import Agreement, Standing, TimedRun
from sakiyomi.kernels.build import native
from sakiyomi.model_executor.gguf.export import write_gguf
from toys import save_model, tiny_llama, tiny_tokenizer

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


def written(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, tokenizer = tmp_path_factory.mktemp("models"), tiny_tokenizer()
    save_model(folder / "draft", tiny_llama(seed=1, layers=1), tokenizer)
    tokenizer.chat_template = TEMPLATE
    save_model(folder / "target", tiny_llama(), tokenizer)
    write_gguf(folder / "target.gguf", tiny_llama(), tokenizer, "Q8_0")
    written(folder / "chat.jsonl", *({"turns": [f"Who are you, {name}?"]} for name in "abcdef"))
    several = [{"category": "code", "turns": ["x = 1"]}, {"category": "sums", "turns": ["1 + 1"]}]
    written(folder / "several.jsonl", *several)
    return folder


@pytest.fixture(scope="module")
def config(folder: Path) -> BenchConfig:
    return BenchConfig(
        rows=("kinds",),
        target=str(folder / "target"),
        task=(f"chat={folder / 'chat.jsonl'}", f"sums={folder / 'several.jsonl'}"),
        repeats=1,
        max_new_tokens=6,
        count=2,
        gamma=2,
        compile=False,
        quantize="int8",
    )


def test_prompts_by_kind_are_spread_over_their_files(config: BenchConfig, folder: Path) -> None:
    found = config.kinds()
    texts = {name: list(map(text_of, several)) for name, several in found.items()}
    assert texts == {"chat": ["Who are you, a?", "Who are you, d?"], "sums": ["1 + 1"]}
    several = str(folder / "several.jsonl")
    assert dataclasses.replace(config, task=(f"other={several}",)).kinds() == {"other": read_prompts(several)}
    assert list(map(text_of, read_prompts(several))) == ["x = 1", "1 + 1"] and len(read_prompts(several, 1)) == 1
    assert dataclasses.replace(config, task=()).kinds() == {}
    for kind in (("chat=",), ("=x",), ("a=x", "a=x")):
        with pytest.raises((InputError, LoadError)):
            dataclasses.replace(config, task=kind).kinds()


@pytest.mark.thorough
@pytest.mark.skipif(native() is None, reason="needs the compiled kernels")
@pytest.mark.skipif(os.name == "nt", reason="the fake environments are links")
def test_a_line_for_each_program_and_format(
    config: BenchConfig, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    absent = Fake("Engine absent", "absent", "absent-package", ("float32", "int8"))
    monkeypatch.setattr(by_kind, "ENGINES", (absent, fake(tmp_path, GOOD, "good"), fake(tmp_path, GOOD, "llamacpp")))
    asked = dataclasses.replace(
        config,
        draft=f"model:{folder / 'draft'}",
        gguf=str(folder / "target.gguf"),
        environments=str(tmp_path),
        dtype="float32",
    )
    (row,) = suites.run(asked)
    assert row.error is None
    theirs = ["transformers plain", "transformers assisted", "transformers prompt lookup"]
    ours = ["sakiyomi plain", "sakiyomi free drafts", "sakiyomi draft model"]
    engines = [f"Engine {name} {way}" for name in ("good", "llamacpp") for way in ("plain", "draft model")]
    expected = [("float32", name) for name in [*theirs, *ours, *engines]]
    expected += [("int8", name) for name in ours] + [("Q8_0 blocks", name) for name in [*ours, "Engine llamacpp"]]
    assert [(line["format"], line["name"]) for line in row.lines] == expected
    for line in row.lines:
        assert line["chat_tokens_per_second"] > 0 and line["sums_tokens_per_second"] > 0 and line["ratio"] > 0
        assert line["equal"] or "Engine" in line["name"] or line["format"] != "float32"
        assert set(line["by_category"]) == {"chat", "sums"}
    assert len({line["by_category"]["chat"]["tokens"] for line in row.lines if line["format"] == "float32"}) == 1
    assert [note for note in row.notes if "absent" in note] == [
        note for note in row.notes if note.startswith("Engine absent is left out: not installed")
    ]
    assert row.conditions["prompts"] == "chat 2, sums 1"
    assert str(row.conditions["Engine good plain, float32"]).startswith("version 1.0")
    assert plot.draw([row], str(tmp_path / "kinds.svg"), {})
    assert "float32, sakiyomi plain" in (tmp_path / "kinds.svg").read_text(encoding="utf-8")


def test_texts_end_where_the_plain_text_ends(config: BenchConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """All contenders write as many tokens as the plain texts have, here 3 and 6."""
    whole, asked = by_kind.generated, itertools.count()

    def ended(way: Any, calls: Any) -> tuple[TimedRun, Any]:
        run, done = whole(way, calls)
        return (run, done) if next(asked) else (dataclasses.replace(run, outputs=((1,) * 3, (1,) * 6)), done)

    monkeypatch.setattr(by_kind, "generated", ended)
    row = suites.measure("kinds", dataclasses.replace(config, task=config.task[:1], peers=False))
    assert [line["by_category"]["chat"]["tokens"] for line in row.lines[:2]] == [9, 9]


def test_the_table_as_markdown(config: BenchConfig, folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "new" / "table.md"
    arguments = ["bench", "--rows", "kinds", "--model", config.target, "--no-peers", "--no-compile", "--count", "1"]
    arguments += ["--max-new-tokens", "4", "--repeats", "1", "--task", config.task[0], "--quantize", "int8"]
    result = CliRunner().invoke(app, [*arguments, "--markdown", str(page), "--json"])
    assert result.exit_code == 0, result.output
    lines = page.read_text(encoding="utf-8").splitlines()
    assert lines[0].startswith("## kinds: greedy")
    assert lines[2] == "| format | name | chat tok/s | ratio | tau | equal |"
    assert lines[3] == "| --- | --- | ---: | ---: | ---: | --- |"
    assert lines[4].startswith("| float32 | sakiyomi plain | ")
    assert any(line.startswith("- target ") for line in lines) and "load average" in lines[-1]
    found = json.loads(result.stdout.splitlines()[-1])["rows"][0]["lines"]
    assert found[0]["format"] == "float32" and "by_category" in found[0]


def test_a_program_that_fell_out_has_no_ratio() -> None:
    def standing(name: str, speed: float, *, right: bool = True) -> Standing:
        run = TimedRun(1.0, int(speed), ((1,),), {"tau": 2.0} if name == "b" else {})
        return Standing(name, (run,), speed / 10, Agreement(right, right))

    found = pivoted(
        {"chat": [standing("a", 10), standing("b", 20)], "code": [standing("a", 10), standing("c", 5, right=False)]}
    )
    assert [(line["name"], line["ratio"], line["tau"], line["equal"]) for line in found] == [
        ("a", 1.0, None, True),
        ("b", None, 2.0, True),
        ("c", None, None, False),
    ]
    assert found[1]["code_tokens_per_second"] is None and found[2]["code_tokens_per_second"] is None

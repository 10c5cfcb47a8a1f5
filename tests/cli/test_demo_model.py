"""``sakiyomi demo --model``: plain against drafted texts of the user's own model, with bars and a conclusion."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from real_files import FOLDER, GGUF, real
from sakiyomi.cli import app, own_model
from sakiyomi.core.errors import InputError, UnsupportedError
from sakiyomi.engine.config import LLMConfig
from sakiyomi.engine.llm import LLM
from sakiyomi.evaluation.bench import own_model as measured
from sakiyomi.evaluation.bench.own_model import FREE, PLAIN, Plan, as_tokens, own_prompts, ways
from sakiyomi.evaluation.bench.report import Row
from seq2seq_toys import build
from toys import save_model, tiny_llama, tiny_tokenizer

runner = CliRunner()
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders target, with a chat template, and draft, which is always right."""
    folder, tokenizer = tmp_path_factory.mktemp("models"), tiny_tokenizer()
    save_model(folder / "draft", tiny_llama(max_position_embeddings=4096), tokenizer)
    tokenizer.chat_template = TEMPLATE
    save_model(folder / "target", tiny_llama(max_position_embeddings=4096), tokenizer)
    return folder


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """One text of each kind, one run."""
    monkeypatch.setattr(Plan, "of", classmethod(lambda cls, llm, prompts, new: cls(1, new or 16, 1)))
    monkeypatch.setattr(own_model, "RECORDED", 0.0)


def lines_of(stdout: str) -> list[str]:
    """Lines of the table, each of which has the time of a first token."""
    return [line for line in stdout.splitlines() if re.search(r" ms( |$)", line)]


def test_plain_against_free_drafts_on_three_kinds_of_prompts(models: Path, short: None, tmp_path: Path) -> None:
    picture = tmp_path / "bars.svg"
    target = str(models / "target")
    result = runner.invoke(app, ["demo", "--model", target, "--plot", str(picture), "--json"])
    assert result.exit_code == 0, result.output
    value = json.loads(result.stdout.splitlines()[-1])
    found = [(line["prompts"], line["draft"]) for row in value["rows"] for line in row["lines"]]
    assert found == [(kind, draft) for kind in ("chat", "code", "summary") for draft in (PLAIN, FREE)]
    for line in (line for row in value["rows"] for line in row["lines"]):
        assert line["equal"] is True and line["tokens_per_second"] > 0
        assert line["first_token_seconds"] > 0 and line["tokens"] == 16
    shown = lines_of(result.stdout)
    assert [line.split()[0] for line in shown] == ["chat", "free", "code", "free", "summary", "free"]
    assert all(line.endswith(" yes") for line in shown[1::2])
    assert max(line.count("\u2588") for line in shown) == own_model.BAR
    assert value["conditions"]["template"] == "chat" and value["conditions"]["weights"] == "float32"
    assert f"sakiyomi tune --model {target} --train 60" in value["conclusion"]
    assert "chat: free drafts" in picture.read_text(encoding="utf-8")


def test_a_draft_that_is_given_stands_beside_the_free_ones(models: Path, short: None) -> None:
    arguments = [
        "demo",
        "--model",
        str(models / "target"),
        "--draft",
        f"model:{models / 'draft'}",
        "--quantize",
        "int8",
    ]
    result = runner.invoke(app, [*arguments, "--prompt", "the fox", "--gamma", "3", "--json"])
    assert result.exit_code == 0, result.output
    value = json.loads(result.stdout.splitlines()[-1])
    (row,) = value["rows"]
    assert [line["name"] for line in row["lines"]] == ["prompt: plain", "prompt: free drafts", "prompt: draft model"]
    assert row["lines"][2]["tau"] > 1 and row["lines"][2]["equal"]
    assert value["conditions"]["weights"] == "int8" and "--train" not in value["conclusion"]


def test_ctrl_c_shows_what_was_measured(models: Path, short: None, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = measured.measure

    def stopped(*given: Any) -> Iterator[Row]:
        yield next(whole(*given))
        raise KeyboardInterrupt

    monkeypatch.setattr(measured, "measure", stopped)
    result = runner.invoke(app, ["demo", "--model", str(models / "target")])
    assert result.exit_code == 130
    assert [line.split()[0] for line in lines_of(result.stdout)] == ["chat", "free"]
    assert "interrupted" in result.stderr and "Traceback" not in result.output


def test_prompts_are_chats_and_have_room(models: Path) -> None:
    llm = LLM(models / "target", "none", compile=False)
    chats = own_prompts()
    assert {name: len(several) for name, several in chats.items()} == {"chat": 3, "code": 3, "summary": 3}
    (ids,) = as_tokens(llm, ["the fox"], 8)
    assert llm.tokenizer.decode(ids) == "<user>the fox<assistant>"
    (cut,) = as_tokens(llm, chats["summary"][:1], 4096 - 20)
    assert len(cut) == 20
    with pytest.raises(InputError, match="ask for fewer"):
        as_tokens(llm, ["the fox"], 4096)
    assert list(ways(llm)) == [PLAIN, FREE]


def test_a_model_with_an_encoder_is_refused(tmp_path: Path) -> None:
    llm = LLM(save_model(tmp_path, build("t5"), tiny_tokenizer()), "none", compile=False)
    with pytest.raises(UnsupportedError, match="use bench tasks"):
        as_tokens(llm, ["the fox"], 8)


@pytest.mark.parametrize(("speed", "texts", "new"), [(1000.0, 3, 64), (30.0, 2, 37), (0.1, 1, 16)])
def test_slow_machines_write_less(
    speed: float, texts: int, new: int, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Run:
        pass

    Run.speed = speed  # type: ignore[attr-defined]
    monkeypatch.setattr(measured, "_answered", lambda *given: Run)
    plan = Plan.of(LLM(models / "target", "none", compile=False), {"a": [[1]] * 3, "b": [[1]] * 3, "c": [[1]]}, None)
    assert (plan.texts, plan.new) == (texts, new)


def line(kind: str, draft: str, ratio: float | None, faster: bool | None, **more: Any) -> dict[str, Any]:
    speed = None if ratio is None else 10.0 * ratio
    found = {"prompts": kind, "draft": draft, "ratio": ratio, "faster": faster, "tokens_per_second": speed, "tau": 1.0}
    return {**found, "first_token_seconds": 0.01, "equal": ratio is not None, **more}


def test_the_conclusion_says_what_is_gained_and_what_to_do() -> None:
    def said(*lines: dict[str, Any]) -> list[str]:
        return own_model._conclusion([Row("demo", "", lines)], LLMConfig("my model", quantize="int8"))

    plain = line("chat", PLAIN, 1.0, None)
    gained = said(plain, line("chat", FREE, 1.0, None), line("summary", FREE, 1.44, True))
    assert gained[0] == "free drafts: 1.00x on chat, 1.44x on summary; 1.20x together; faster on summary"
    assert gained[1].endswith("sakiyomi tune --model 'my model' --quantize int8 --train 60")
    nothing = said(plain, line("chat", FREE, 1.0, None), line("chat", "draft eagle", 0.9, False))
    assert nothing[1] == "draft eagle: 0.90x on chat; no gain beyond the noise of this machine"
    assert nothing[2].endswith("sakiyomi tune --model 'my model' --quantize int8")
    assert len(said(plain, line("chat", "draft eagle", 1.5, True))) == 1
    (defect, _) = said(plain, line("chat", FREE, None, None))
    assert "a defect" in defect and "sakiyomi audit --model 'my model'" in defect


def test_other_programs_are_named() -> None:
    assert own_model._busy({"cores": 2, "load_average": 2.9}) == own_model._busy({"cores": 2}) == []
    (text,) = own_model._busy({"cores": 2, "load_average": 8.17})
    assert text.startswith("other programs are running (load average 8.2 on 2 cores)")


def test_texts_are_the_same_or_not() -> None:
    assert own_model._same(line("chat", FREE, 1.0, None)) == "yes"
    assert own_model._same(line("chat", FREE, 1.0, None, equal=False)) == "but for near-ties"
    assert own_model._same(line("chat", FREE, None, None)) == "no: a defect"
    assert own_model._cells(line("chat", FREE, None, None), 10.0)["tokens/s"] is None


def test_bars_of_a_terminal_without_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="latin-1"))
    assert own_model._bar(0.5).rstrip() == "#" * (own_model.BAR // 2)


@pytest.mark.thorough
@pytest.mark.parametrize("name", [FOLDER, GGUF])
def test_a_real_model_writes_the_same_text(name: str, short: None) -> None:
    result = runner.invoke(app, ["demo", "--model", str(real(name)), "--max-new-tokens", "12", "--json"])
    assert result.exit_code == 0, result.output
    value = json.loads(result.stdout.splitlines()[-1])
    assert value["conditions"]["template"] == "chat"
    for one in (one for row in value["rows"] for one in row["lines"]):
        assert one["tokens_per_second"] and (one["equal"] or "near-tie" in " ".join(map(str, value["rows"])))

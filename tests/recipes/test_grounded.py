"""The benchmark of encoder-decoder pairs: with transformers alone, and with an engine that stands in for ours."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import grounded as module
from edits import train_edits
from grounded import app, grounded
from pair_toys import edits_config, tones_config
from sakiyomi.core.errors import LoadError, UnsupportedError
from sakiyomi.core.outputs import Stats
from sakiyomi.evaluation.bench.config import BenchConfig, silent
from sakiyomi.evaluation.bench.models import Pair
from tones import train_tones


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Hardly trained pairs."""
    folder = tmp_path_factory.mktemp("pairs")
    return {"edits": train_edits(edits_config(folder)), "tones": train_tones(tones_config(folder))}


def bench_config(pair: dict[str, Any], **changes: Any) -> BenchConfig:
    settings: dict[str, Any] = {
        "target": pair["target"],
        "draft": f"model:{pair['draft']}",
        "dtype": "float32",
        "device": "cpu",
        "count": 2,
        "repeats": 1,
        "max_new_tokens": 6,
        "gamma": 2,
        "compile": False,
    }
    return BenchConfig(**(settings | changes))


class Stand:
    """An engine with the call that ours has, made of transformers' own loop; `wrong` changes the first token."""

    def __init__(self, pair: dict[str, Any], config: BenchConfig, wrong: bool = False) -> None:
        self.loaded, self.config, self.wrong = module._load(pair["target"], config), config, wrong
        self.seen: list[Any] = []

    def generate(self, prompts: list[Any], params: Any) -> list[Any]:
        self.seen += prompts
        done = []
        for prompt in prompts:
            if isinstance(prompt, str):
                read = self.loaded.tokenizer([prompt], return_tensors="pt")
                read = {name: read[name] for name in ("input_ids", "attention_mask")}
            else:
                read = dict(self.loaded.extractor(prompt.samples, sampling_rate=prompt.rate, return_tensors="pt"))
            ids = self.loaded.model.generate(**read, max_new_tokens=params.max_new_tokens, do_sample=False)[0].tolist()
            if self.wrong:
                ids[1] = ids[1] % 20 + 5
            done.append(SimpleNamespace(token_ids=ids, stats=Stats()))
        return done


@pytest.mark.thorough
@pytest.mark.parametrize(("kind", "tasks"), [("edits", ["fix", "continue"]), ("tones", ["tones"])])
def test_transformers_and_a_stand_in(
    pairs: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch, kind: str, tasks: list[str]
) -> None:
    config = bench_config(pairs[kind])
    stand = Stand(pairs[kind], config)
    monkeypatch.setattr(Pair, "llm", lambda self, spec: stand)
    audio = lambda samples, rate: SimpleNamespace(samples=samples, rate=rate)  # noqa: E731
    monkeypatch.setattr("sakiyomi.Audio", audio, raising=False)
    row = grounded(config, silent)
    names = [f"transformers {way}" for way in ("plain", "assisted")]
    names += [f"sakiyomi {way}" for way in ("plain", "draft model", "draft model, auto")]
    expected = [
        f"{task}: {name}"
        for task in tasks
        for name in (names if task == "tones" else [*names, "sakiyomi prompt-lookup"])
    ]
    assert [line["name"] for line in row.lines] == expected
    for line in row.lines:
        assert line["equal"] is True
        assert line["tokens_per_second"] > 0
        assert ("word_error_rate" in line) == (not line["name"].startswith("continue"))
        if "transformers plain" in line["name"]:
            assert line["tau"] == 1
    assert row.conditions["dtype"] == "float32"
    assert stand.seen


@pytest.mark.thorough
def test_who_writes_something_else_gets_no_speed(
    pairs: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = bench_config(pairs["edits"])
    stand = Stand(pairs["edits"], config, wrong=True)
    monkeypatch.setattr(Pair, "llm", lambda self, spec: stand)
    monkeypatch.setattr(module, "NEAR_TIE", 0.0)
    row = grounded(config, silent)
    for line in row.lines:
        assert (line["tokens_per_second"] is None) == ("sakiyomi" in line["name"])
    assert any("no near-tie" in note for note in row.notes)


@pytest.mark.thorough
def test_what_cannot_run_the_pair_is_left_out(
    pairs: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Pair, spec: Any) -> Any:
        raise UnsupportedError("not this one")

    monkeypatch.setattr(Pair, "llm", refuse)
    row = grounded(bench_config(pairs["tones"]), silent)
    assert [line["name"] for line in row.lines] == ["tones: transformers plain", "tones: transformers assisted"]
    assert "sakiyomi prompt-lookup is left out: not this one" in row.notes
    with pytest.raises(LoadError, match="nobody can run"):
        grounded(bench_config(pairs["tones"], peers=False), silent)


def test_a_folder_without_examples_is_refused_by_the_command() -> None:
    result = CliRunner().invoke(app, ["--target", "tales", "--draft", "model:tales-draft"])
    assert result.exit_code == 1
    assert "held_out.jsonl" in result.output


@pytest.mark.thorough
def test_near_ties_are_measured_where_answers_part(pairs: dict[str, dict[str, Any]]) -> None:
    config = bench_config(pairs["edits"])
    target = module._load(pairs["edits"]["target"], config)
    example = module.read_examples(Path(pairs["edits"]["target"]))[0]
    question = target.question(example)
    start = torch.tensor([[target.model.config.decoder_start_token_id]])
    with torch.no_grad():
        logits = target.model(**question, decoder_input_ids=start).logits[0, -1]
    gap, limit = module._gap(target, example, [7, 8], [9, 8])
    assert gap == pytest.approx(abs(float(logits[7] - logits[9])), abs=1e-5)
    assert 0 < limit < 1e-4

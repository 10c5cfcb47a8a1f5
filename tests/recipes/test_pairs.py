"""Training of encoder-decoder pairs: tiny runs end to end, resumed, stopped; what is made for them to learn."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq, AutoProcessor, AutoTokenizer

from edits import CONTINUE, FIX, Edits, train_edits
from held_out import Example, read_examples, write_examples, write_questions
from pair_toys import edits_config, tones_config
from pairs import states
from sakiyomi.core.audio import Audio
from sakiyomi.core.errors import InputError, LoadError
from sakiyomi.evaluation.bench.tasks.data import Question, read_questions
from sounds import HIGH, LETTERS, LOW, RATE, recording, spelled
from texts import read_texts
from tones import Tones, letters_tokenizer, train_tones
from train_toys import losses, stop_at


@pytest.mark.thorough
def test_a_tiny_pair_that_corrects_text(tmp_path: Path) -> None:
    config = edits_config(tmp_path, tokens=40 * 256, note=("Stories of the tests",))
    summary = train_edits(config, "python recipes/edits.py --out x")
    assert summary["finished"]
    seen = losses(config.loop.out + "/target")
    assert sum(seen[-5:]) < 0.8 * sum(seen[:5])
    for part in ("target", "draft"):
        folder = Path(summary[part])
        model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
        assert model.dtype == torch.bfloat16
        read = tokenizer([FIX + "Tom had a bal."], return_tensors="pt", return_token_type_ids=False)
        assert read["input_ids"][0, -1] == tokenizer.eos_token_id
        done = model.generate(**read, max_new_tokens=3)
        assert done[0, 0] == model.config.decoder_start_token_id
        card = json.loads((folder / "card.json").read_text(encoding="utf-8"))
        assert card["architecture"] == "Pegasus"
        assert {"exact_match", "word_error_rate", "right_tokens"} <= card["held_out"]["fix"].keys()
        assert ("agreement" in card["held_out"]["continue"]) == (part == "draft")
        text = (folder / "README.md").read_text(encoding="utf-8")
        assert "python recipes/edits.py --out x" in text
        assert "Stories of the tests" in text
        examples = read_examples(folder)
        assert [example.task for example in examples] == ["fix"] * 3 + ["continue"] * 3
    assert sorted(path.name for path in Path(config.loop.out).iterdir()) == ["draft", "target", "tokenizer"]
    assert sorted(path.name for path in Path(config.loop.out, "draft").iterdir()) == ["checkpoints", "model"]


@pytest.mark.thorough
def test_a_tiny_pair_that_hears(tmp_path: Path) -> None:
    summary = train_tones(tones_config(tmp_path))
    for part in ("target", "draft"):
        folder = Path(summary[part])
        model, processor = AutoModelForSpeechSeq2Seq.from_pretrained(folder), AutoProcessor.from_pretrained(folder)
        (example, *_) = read_examples(folder)
        read = processor(recording(example.target, example.seed), sampling_rate=RATE, return_tensors="pt")
        assert read["input_features"].shape == (1, 40, 100)
        assert model.generate(read["input_features"].bfloat16(), max_new_tokens=4).shape[0] == 1
        assert (
            processor.tokenizer.decode(processor.tokenizer("abc d")["input_ids"], skip_special_tokens=True) == "abc d"
        )
    assert {"target, tones", "draft, tones"} == set(summary["held_out"])


@pytest.mark.thorough
@pytest.mark.parametrize("part", ["target", "draft"])
def test_a_stopped_run_goes_on_to_the_same_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    whole = train_edits(edits_config(tmp_path))
    out = str(tmp_path / "parts")
    with monkeypatch.context() as patch:
        stop_at(patch, 1, signal.SIGINT)
        stopped = train_edits(edits_config(tmp_path, out=out))
    assert not stopped["finished"]
    assert stopped["part"] == "target"
    if part == "draft":
        with monkeypatch.context() as patch:
            stop_at(patch, 1, signal.SIGINT)
            stopped = train_edits(edits_config(tmp_path, out=out, resume=True))
        assert stopped["part"] == "draft"
    again = train_edits(edits_config(tmp_path, out=out, resume=True))
    for name in ("target", "draft"):
        first, second = (AutoModelForSeq2SeqLM.from_pretrained(one[name]).state_dict() for one in (whole, again))
        assert all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.thorough
def test_nothing_half_written_is_taken_for_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tones_config(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr("pairs._measures", _interrupted)
        with pytest.raises(KeyboardInterrupt):
            train_tones(config)
    assert [path.name for path in Path(config.loop.out, "target").iterdir()] == ["checkpoints"]
    assert train_tones(tones_config(tmp_path, resume=True))["finished"]


def _interrupted(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.thorough
def test_an_earlier_run_is_not_spoilt(tmp_path: Path) -> None:
    train_tones(tones_config(tmp_path))
    with pytest.raises(InputError, match="--resume"):
        train_tones(tones_config(tmp_path))
    with pytest.raises(InputError, match="hidden is 64"):
        train_tones(tones_config(tmp_path, hidden=64, resume=True))
    with pytest.raises(LoadError, match="no checkpoint"):
        train_tones(tones_config(tmp_path, out=str(tmp_path / "new"), resume=True))


def test_other_text_than_the_checkpoints_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = edits_config(tmp_path)
    with monkeypatch.context() as patch:
        stop_at(patch, 1, signal.SIGINT)
        train_edits(config)
    lines = Path(config.text.text[0]).read_text(encoding="utf-8").splitlines()
    Path(config.text.text[0]).write_text("\n".join(lines[:40]) + "\n", encoding="utf-8")
    with pytest.raises(LoadError, match="text has changed"):
        train_edits(config.changed(resume=True))


def test_batches_of_text_are_what_a_teacher_forces(tmp_path: Path) -> None:
    config = edits_config(tmp_path)
    task = Edits(config, *read_texts(config))
    batch = task.rows.batch(3, 8, 32, False)
    again = task.rows.batch(3, 8, 32, False)
    assert all(np.array_equal(batch[name], again[name]) for name in batch)
    assert not np.array_equal(batch["labels"], task.rows.batch(4, 8, 32, False)["labels"])
    start = task.new_model("target").config.decoder_start_token_id
    assert (batch["inputs"][:, 0] == start).all()
    assert np.array_equal(batch["inputs"][:, 1:], batch["labels"][:, :-1])
    for row in range(8):
        text = task.tokenizer.decode(batch["labels"][row][batch["known"][row] == 1], skip_special_tokens=True)
        source = task.tokenizer.decode(batch["input_ids"][row], skip_special_tokens=True)
        assert source.startswith((FIX, CONTINUE))
        assert text
    # The loss that is trained is transformers' own.
    model = task.new_model("target").eval()
    tensors = {name: torch.from_numpy(part) for name, part in batch.items()}
    hidden = states(model, tensors)
    got = torch.nn.functional.cross_entropy(
        (hidden @ model.lm_head.weight.T)[0], tensors["labels"][tensors["known"].bool()]
    )
    labels = tensors["labels"].masked_fill(tensors["known"] == 0, -100)
    read = {name: tensors[name] for name in ("input_ids", "attention_mask")}
    expected = model(**read, labels=labels, decoder_input_ids=tensors["inputs"]).loss
    assert torch.allclose(got, expected, atol=1e-5)


def test_held_out_text_is_other_text(tmp_path: Path) -> None:
    config = edits_config(tmp_path)
    texts, held_out = read_texts(config)
    assert (len(texts), len(held_out)) == (57, 3)
    named = edits_config(tmp_path, valid=(f"own={config.text.text[0]}",))
    assert [len(some) for some in read_texts(named)] == [60, 60]
    few = tmp_path / "few.jsonl"
    few.write_text('{"text": "One. Two."}\n', encoding="utf-8")
    with pytest.raises(InputError, match="--valid"):
        read_texts(edits_config(tmp_path, text=(str(few),)))


def test_recordings_are_chords() -> None:
    sound = recording("q", 3)
    assert sound.dtype == np.float32
    assert np.array_equal(sound, recording("q", 3))
    assert not np.array_equal(sound, recording("q", 4)[: len(sound)])
    assert np.abs(sound).max() <= 1
    for letter in LETTERS:
        played = recording(letter, 5)[-int(0.06 * RATE) :]
        power = np.abs(np.fft.rfft(played * np.hanning(len(played)), RATE)) ** 2
        high, low = divmod(LETTERS.index(letter), len(LOW))
        assert max(LOW, key=lambda hertz: power[hertz]) == LOW[low]
        assert max(HIGH, key=lambda hertz: power[hertz]) == HIGH[high]
    assert spelled("Don't go, ‘Tom’ — 3 cats!") == ["dont", "go", "tom", "cats"]
    longest = max(len(recording("m" * 35, seed)) for seed in range(20))
    assert longest < 4 * RATE


def test_batches_of_tones_fit_the_encoder(tmp_path: Path) -> None:
    config = tones_config(tmp_path)
    task = Tones(config, *read_texts(config))
    batch = task.rows.batch(0, 4, 8, False)
    assert batch["input_features"].shape == (4, 40, 100)
    for row in range(4):
        known = batch["labels"][row][batch["known"][row] == 1]
        assert known[-1] == task.tokenizer.eos_token_id
        assert 1 <= len(known) <= 8
    ids = letters_tokenizer()("ab c", add_special_tokens=False)["input_ids"]
    assert len(ids) == 4


@pytest.mark.parametrize(
    ("make", "changes", "message"),
    [
        (tones_config, {"row_tokens": (9,), "step_tokens": 36}, "at most 8 letters in 1 seconds"),
        (edits_config, {"draft_heads": 3}, "a divisor of hidden 16"),
        (edits_config, {"continue_share": 1.5}, "--continue-share"),
        (edits_config, {"text": ()}, "--text"),
    ],
)
def test_settings_that_cannot_work(tmp_path: Path, make: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make(tmp_path, **changes)


def test_examples_survive_their_file(tmp_path: Path) -> None:
    examples = [Example("fix", "fix: “a”", "b"), Example("tones", "", "abc", (2, 1, 0))]
    write_examples(tmp_path, examples)
    assert read_examples(tmp_path) == examples
    assert [example.grounded for example in [*examples, Example("continue", "x", "y")]] == [True, True, False]
    (tmp_path / "held_out.jsonl").write_text('{"task": "fix"}\n', encoding="utf-8")
    with pytest.raises(LoadError, match=r"recipes/edits\.py"):
        read_examples(tmp_path)


def test_examples_become_questions_of_bench_tasks(tmp_path: Path) -> None:
    pytest.importorskip("soundfile", reason="recordings are read with soundfile")
    examples = [Example("fix", "fix: a", "b"), Example("tones", "", "abc", (2, 1, 0)), Example("tones", "", "d", (2,))]
    write_questions(examples, tmp_path / "questions")
    names = {name: name for name in ("source", "audio", "reference")}

    def read(kind: str, task: str) -> list[Question]:
        path = tmp_path / "questions" / f"{task}.jsonl"
        return read_questions(kind, path, names, 9, language=None, seconds=2.0)

    assert read("translation", "fix") == [Question(("fix: a",), ("b",))]
    heard = read("speech", "tones")
    assert [question.references for question in heard] == [("abc",), ("d",)]
    (sound,) = heard[0].prompts
    assert isinstance(sound, Audio)
    np.testing.assert_allclose(sound.samples, recording("abc", (2, 1, 0)), atol=1e-4)

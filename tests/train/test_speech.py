"""`sakiyomi train speech`: windows and labels, a tiny run end to end, and what is refused."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import WhisperForConditionalGeneration
from typer.testing import CliRunner

from sakiyomi import LLM
from sakiyomi.cli.train import app
from sakiyomi.core.errors import InputError, LoadError, SakiyomiError, UnsupportedError
from sakiyomi.core.transcripts import Timestamps, TranscriptionParams
from sakiyomi.engine.transcription import Transcriber
from sakiyomi.train.commands import TrainSpeech
from sakiyomi.train.speech import acceptance, new_draft, read, train_speech, verdict
from sakiyomi.train.speech_windows import (
    HELD_OUT,
    TRAIN,
    Heard,
    Labelling,
    Labels,
    Padding,
    WindowFolder,
    batch_of,
    in_sets,
    sound_files,
    stretches,
    transcribe,
)
from seq2seq_toys import MELS
from speech_toys import END, PROCESSOR, SILENT, START, noise, save_speech, speech_llm, toy, wav
from toys import tiny_llama
from train_toys import flags, losses, stop_at

PAD = Padding(END, 100)


def recordings(folder: Path, lengths: tuple[float, ...] = (4.6, 2.2, 0.7)) -> Path:
    """A folder of sounds, with a file that is none."""
    (folder / "sounds").mkdir()
    (folder / "sounds" / "notes.txt").write_text("no sound", encoding="utf-8")
    for number, seconds in enumerate(lengths):
        (folder / "sounds" / f"{number}.wav").write_bytes(wav(noise(seconds, number)))
    return folder / "sounds"


@pytest.fixture(autouse=True)
def short_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two minutes of sound are for figures that somebody reads."""
    monkeypatch.setattr("sakiyomi.train.speech.MEASURED_SECONDS", 0.5)


def config_of(folder: Path, **changes: Any) -> TrainSpeech:
    """A run of a few steps."""
    settings: dict[str, Any] = {
        "out": str(folder / "draft"),
        "target": str(folder / "whisper"),
        "audio": (str(folder / "sounds"),),
        "tokens": 12 * 64,
        "row_tokens": (16,),
        "step_tokens": 64,
        "warmup_steps": 2,
        "top": 8,
        "eval_windows": 4,
        "precision": "no",
        "device": "cpu",
        "threads": 1,
    }
    return TrainSpeech.of(**(settings | changes))


# ---------------------------------------------------------------- windows


def test_every_eighth_stretch_is_held_out_unless_there_are_others() -> None:
    sounds = [noise(0.1, seed) for seed in range(11)]
    names = [name for name, _ in in_sets({}, sounds)]
    assert [place for place, name in enumerate(names) if name == HELD_OUT] == [1, 9]
    given = list(in_sets({"calls": sounds[:2]}, sounds[2:]))
    assert [name for name, _ in given] == ["calls"] * 2 + [TRAIN] * 9
    assert [part for _, part in given] == sounds


def test_a_sound_that_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    folder, notes = recordings(tmp_path), list[str]()
    (folder / "1.wav").write_bytes(b"RIFF")
    parts = list(stretches(sound_files([str(folder)]), 1.0, notes.append))
    assert [round(part.seconds, 1) for part in parts][-1] == 0.7
    assert sum(part.seconds for part in parts) == pytest.approx(5.3)
    assert max(part.seconds for part in parts) <= 4
    assert len(notes) == 1 and "1.wav" in notes[0]


@pytest.mark.parametrize("timed", [False, True])
def test_windows_are_those_of_the_transcription(timed: bool) -> None:
    """The target's tokens in every window, the prompt before them included; times come only where they are wanted."""
    llm = speech_llm()
    transcriber, audio = Transcriber(llm), noise(2.6, 3)
    heard = list(transcribe(transcriber, llm.engine, [audio], timed=timed))
    times: Timestamps = "segment" if timed else "none"
    params = TranscriptionParams(temperatures=(0.0,), timestamps=times, no_speech_threshold=None)
    parts = [audio] if timed else audio.split(1.0, at_silences=True)
    said = [segment.tokens for part in parts for segment in transcriber.transcribe(part, params).segments]
    text = ["".join(chr(token) for token in each.tokens[each.begin :] if token < END) for each in heard]
    assert said and all("".join(map(chr, tokens)) in "|".join(text) for tokens in said)
    assert len(heard) >= 3
    for each in heard:
        assert (each.tokens[each.begin - 1] == SILENT) != timed
        assert not timed or each.tokens[each.begin] > SILENT, "it begins with a time"


def test_labels_are_the_targets_probabilities_and_its_own_token() -> None:
    features = torch.randn(1, MELS, 100, generator=torch.Generator().manual_seed(1))
    tokens = [START, 9, 11, 8, 7, 30]
    found = Labels(toy(), 4, 0.5, 3, "no").of(Heard(features, tokens, 2))
    with torch.no_grad():
        logits = toy()(features, decoder_input_ids=torch.tensor([tokens])).logits[0]
    assert found["tokens"].tolist() == tokens[:5], "three tokens behind the two that it began with"
    assert found["encoded"].shape == (50, 32)
    for row, place in enumerate((1, 2, 3)):
        probs = logits[place].softmax(-1)
        kept = found["ids"][row].tolist()
        assert tokens[place + 1] in kept and len(set(kept)) == 4
        top = probs.topk(4).indices.tolist()
        assert kept == top or kept == [*top[:3], tokens[place + 1]]
        share = torch.tensor([0.0 if token not in top else float(probs[token]) for token in kept])
        own = torch.tensor([float(token == tokens[place + 1]) for token in kept])
        wanted = (share / share.sum() + 0.5 * own) / 1.5
        assert torch.allclose(found["wanted"][row].float(), wanted, atol=1e-3)


def test_a_full_disk_space_ends_a_set(tmp_path: Path) -> None:
    folder, window = WindowFolder(tmp_path, 300), {"x": torch.zeros(10)}  # a file has 100 bytes and more
    assert folder.add(TRAIN, "00000", [window]) and not folder.add(TRAIN, "00001", [window] * 9)
    kept = [path.relative_to(tmp_path) for path in WindowFolder(tmp_path, 0).sets()[TRAIN]]
    assert kept == [Path(TRAIN, batch, "0000.safetensors") for batch in ("00000", "00001")]
    assert not WindowFolder(tmp_path, 300).add(TRAIN, "00002", [window] * 9), "files of an earlier run count"


def test_the_target_itself_agrees_with_its_transcripts(tmp_path: Path) -> None:
    """A batch gives each window its own rows, whatever stands beside it; the measures count all accepted."""
    llm = speech_llm()
    folder, labels = WindowFolder(tmp_path, 1 << 30), Labels(toy(), 4, 0.5, 99, "no")
    for audio in (noise(0.9, 1), noise(1.7, 2)):
        for each in transcribe(Transcriber(llm), llm.engine, [audio], timed=False):
            tokens = each.tokens[: each.begin + 9] if audio.seconds < 1 else each.tokens
            folder.add(TRAIN, f"{folder.count(TRAIN)}", [labels.of(Heard(each.features, tokens, each.begin))])
    windows = folder.sets()[TRAIN]
    batch = {name: torch.from_numpy(part) for name, part in batch_of(windows, PAD).items()}
    with torch.no_grad():
        together = read(toy(), batch)
        alone = [read(toy(), {k: torch.from_numpy(v) for k, v in batch_of([one], PAD).items()}) for one in windows]
    assert torch.allclose(together, torch.cat(alone), atol=1e-4)
    found = acceptance(toy(), windows, PAD, frozenset({END}))
    assert found["greedy_agreement"] > 0.9 and found["tokens"] == len(batch["labels"])
    wrong = acceptance(new_draft(toy(), 1), windows, PAD, frozenset({END}))
    assert wrong["tau"] < found["tau"] <= 5


# ---------------------------------------------------------------- runs


@pytest.mark.thorough
def test_a_draft_is_trained_and_used(tmp_path: Path) -> None:
    folder, sounds = save_speech(tmp_path / "whisper"), recordings(tmp_path)
    config = config_of(tmp_path, tokens=40 * 64)
    result = CliRunner().invoke(app, ["speech", *flags(config)])
    assert result.exit_code == 0, result.output
    assert "sakiyomi transcribe FILE" in result.stdout
    found = losses(config.loop.out)
    assert sum(found[-5:]) < 0.8 * sum(found[:5])
    out = Path(config.loop.out)
    draft = WhisperForConditionalGeneration.from_pretrained(out / "model")
    assert draft.config.decoder_layers == 1 and len(draft.model.decoder.layers) == 1
    ours, theirs = draft.state_dict(), toy().state_dict()
    trained = {name for name, weight in ours.items() if not torch.equal(weight, theirs[name])}
    assert trained and all(".decoder.layer" in name for name in trained)
    windows = WindowFolder(out / "windows", 0).sets()
    assert set(windows) == {TRAIN, HELD_OUT}
    begins = {len(one["tokens"]) - len(one["ids"]) for one in map(load_file, windows[TRAIN])}
    assert len(begins) > 1, "with and without times"
    plain, drafted = LLM(folder, "none"), LLM(folder, f"model:{out}", strict=True)
    params = TranscriptionParams(temperatures=(0.0,))
    texts = [llm.transcribe(str(sounds / "1.wav"), params).text for llm in (plain, drafted)]
    assert texts[0] == texts[1] != ""


@pytest.mark.thorough
def test_a_stopped_run_goes_on_as_if_it_had_not_been_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_speech(tmp_path / "whisper"), recordings(tmp_path)
    whole = config_of(tmp_path, out=str(tmp_path / "whole"))
    assert train_speech(whole)["finished"]
    config = config_of(tmp_path)
    with monkeypatch.context() as patch:
        stop_at(patch, 4, signal.SIGINT)
        assert not train_speech(config)["finished"]
    monkeypatch.delattr(Labelling, "run")  # the windows are there already
    summary = train_speech(config.changed(resume=True))
    assert summary["finished"] and summary["epochs"]["windows"] > 1
    assert losses(config.loop.out) == losses(whole.loop.out)


@pytest.mark.thorough
def test_ctrl_c_keeps_the_windows_that_are_labelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same command makes the others; then all are those of a run that was not interrupted."""
    monkeypatch.setattr("sakiyomi.train.speech_windows.TOGETHER", 1)
    save_speech(tmp_path / "whisper"), recordings(tmp_path, (4.6, 8.2, 12.7))
    whole, config = config_of(tmp_path, out=str(tmp_path / "whole")), config_of(tmp_path)
    made: list[tuple[str, str]] = []
    keep, of = Labelling._keep, Labels.of

    def kept(self: Labelling, name: str, batch: str, sounds: Any) -> bool:
        made.append((name, batch))
        return keep(self, name, batch, sounds)

    def interrupted(self: Labels, heard: Heard) -> Any:
        if len(made) == 3 and (tmp_path / "draft" / "windows" / TRAIN).exists():
            raise KeyboardInterrupt
        return of(self, heard)

    monkeypatch.setattr(Labelling, "_keep", kept)
    assert train_speech(whole)["finished"]
    batches = made.copy()
    made.clear()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Labels, "of", interrupted)
        train_speech(config)
    windows = WindowFolder(tmp_path / "draft" / "windows", 0)
    assert made == batches[:3] and sum(map(len, windows.sets().values())) > 1
    assert "windows are kept in" in capsys.readouterr().err
    with pytest.raises(InputError, match="with another top; delete it"):
        train_speech(config.changed(top=5))
    made.clear()
    assert train_speech(config)["finished"]
    assert made == batches[2:]
    expected = WindowFolder(tmp_path / "whole" / "windows", 0).sets()
    assert {name: [path.read_bytes() for path in some] for name, some in windows.sets().items()} == {
        name: [path.read_bytes() for path in some] for name, some in expected.items()
    }
    assert losses(config.loop.out) == losses(whole.loop.out)


@pytest.mark.thorough
def test_held_out_files_are_measured_under_their_names(tmp_path: Path) -> None:
    save_speech(tmp_path / "whisper"), recordings(tmp_path)
    config = config_of(tmp_path, valid=(f"short={tmp_path / 'sounds' / '2.wav'}",), audio=(f"{tmp_path}/sounds/1.wav",))
    summary = train_speech(config.changed(tokens=64))
    assert set(summary["held_out"]) == {"short"}
    assert summary["measured"]["seconds_of_sound"] == pytest.approx(0.7)


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"audio": ("nowhere",)}, LoadError, "there is no file or folder 'nowhere'"),
        ({"audio": ("empty",)}, InputError, "holds no sound file"),
        ({"audio": ("sounds/2.wav",)}, InputError, "too little to learn from"),
        ({"target": "llama"}, UnsupportedError, r"target '.*llama' \(llama\) is no speech model"),
        ({"layers": 3}, InputError, "layers is 3, and .* has 2"),
        ({"valid": ("train=sounds/2.wav",)}, InputError, "valid names 'train'"),
        ({"workers": 2}, InputError, "workers is 2, expected 1"),
    ],
)
def test_what_is_refused(tmp_path: Path, changes: dict[str, Any], error: type[SakiyomiError], message: str) -> None:
    save_speech(tmp_path / "whisper"), recordings(tmp_path)
    (tmp_path / "empty").mkdir()
    for part in (tiny_llama(), PROCESSOR.tokenizer):
        part.save_pretrained(tmp_path / "llama")

    def placed(name: str, value: Any) -> Any:
        if name == "audio" and value != ("nowhere",):
            return tuple(str(tmp_path / each) for each in value)
        if name == "valid":
            return tuple(each.replace("=", f"={tmp_path}/") for each in value)
        return str(tmp_path / value) if name == "target" else value

    with pytest.raises(error, match=message) as caught:
        train_speech(config_of(tmp_path, **{name: placed(name, value) for name, value in changes.items()}))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("speedup", "word"), [(1.3, "makes it faster"), (1.0, "not worth it yet")])
def test_the_verdict_tells_what_to_type(tmp_path: Path, speedup: float, word: str) -> None:
    figures = {"plain_times_real_time": 2.0, "times_real_time": 2 * speedup, "seconds_of_sound": 60.0, "tau": 2.0}
    told = verdict(config_of(tmp_path), figures | {"speedup": speedup})
    assert word in told and f"--draft model:{tmp_path}/draft" in told

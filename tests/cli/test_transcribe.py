"""``sakiyomi transcribe``: texts as they come, files in every form, and what happens to bad files and Ctrl-C."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from sakiyomi import LLM, Audio, TranscriptionParams
from sakiyomi.cli import app
from sakiyomi.core.subtitles import WRITERS, clock, verbose
from sakiyomi.core.transcripts import Transcript
from sakiyomi.engine.transcription import SoundInWork
from seq2seq_toys import TOKENIZER, model_of
from speech_toys import noise, save_speech, wav

Run = Callable[..., Result]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_speech(tmp_path_factory.mktemp("speech"))


@pytest.fixture(scope="module")
def own(model: str) -> LLM:
    return LLM(model, "none", compile=False)


@pytest.fixture
def run(model: str) -> Run:
    def run(*arguments: str | Path, **options: Any) -> Result:
        words = ["transcribe", *map(str, arguments), "--model", model, "--draft", "none", "--compile", "false"]
        # Texts of random weights are poor, and would be tried again.
        return CliRunner().invoke(app, [*words, "--temperature", "0.01", "--seed", "3"], **options)

    return run


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    found = [tmp_path / "a.wav", tmp_path / "b.wav"]
    for seed, path in enumerate(found):
        path.write_bytes(wav(noise(2.4, seed)))
    return found


def wanted(own: LLM, path: Path, **params: Any) -> Transcript:
    asked = TranscriptionParams(**({"temperatures": (0.01,), "seed": 3} | params))
    found: Transcript = own.transcribe(Audio.read(path), asked)
    assert len(found.segments) > 1
    return found


def test_the_text_comes_in_lines_and_with_times_on_a_terminal(run: Run, own: LLM, files: list[Path]) -> None:
    transcript = wanted(own, files[0])
    plain = run(files[0])
    assert plain.exit_code == 0, plain.output
    assert plain.stdout == WRITERS["txt"](transcript)
    assert f"{files[0]}: 2 s of sound, " in plain.stderr and "x real time" in plain.stderr
    shown = run(files[0], env={"FORCE_COLOR": "1"})
    assert shown.stdout == "".join(
        f"[{clock(one.start)} --> {clock(one.end)}] {one.text.strip()}\n" for one in transcript.segments
    )


@pytest.mark.thorough
def test_every_form(run: Run, own: LLM, files: list[Path], tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    done = run(*files, "--format", "all", "--output-dir", folder, "--language", "fr", "--timestamps", "word")
    assert done.exit_code == 0, done.output
    transcripts = [wanted(own, path, language="fr", timestamps="word") for path in files]
    assert {path.name for path in folder.iterdir()} == {f"{stem}.{ending}" for stem in "ab" for ending in WRITERS}
    for path, transcript in zip(files, transcripts, strict=True):
        for ending, write in WRITERS.items():
            assert (folder / f"{path.stem}.{ending}").read_text(encoding="utf-8") == write(transcript)
    assert any(
        "words" in segment for segment in json.loads((folder / "a.json").read_text(encoding="utf-8"))["segments"]
    )
    assert done.stdout == "".join(map(WRITERS["txt"], transcripts))


@pytest.mark.thorough
def test_stdin_stdout_and_json(run: Run, own: LLM, files: list[Path]) -> None:
    transcript = wanted(own, files[0])
    assert run("-", "--format", "srt", input=files[0].read_bytes()).stdout == WRITERS["srt"](transcript)
    found = run(files[0], "--json")
    assert found.stdout.count("\n") == 1
    (one,) = json.loads(found.stdout)["files"]
    assert one == json.loads(json.dumps({"file": str(files[0])} | verbose(transcript)))


@pytest.mark.thorough
def test_a_bad_file_does_not_stop_the_others(run: Run, own: LLM, files: list[Path], tmp_path: Path) -> None:
    bad = tmp_path / "text.mp3"
    bad.write_text("no sound", encoding="utf-8")
    done = run(bad, files[0], tmp_path / "none.wav", files[1], "--format", "vtt", "--output-dir", tmp_path, "--json")
    assert done.exit_code == 1
    first, second, third, fourth = json.loads(done.stdout)["files"]
    assert "text.mp3' is no sound file" in first["error"] and "there is no file" in third["error"]
    assert done.stderr.count("error: ") == 2 and "Traceback" not in done.stderr
    assert (second["file"], fourth["file"]) == (str(files[0]), str(files[1]))
    for path in files:
        assert path.with_suffix(".vtt").read_text(encoding="utf-8") == WRITERS["vtt"](wanted(own, path))


@pytest.mark.thorough
def test_ctrl_c_keeps_what_is_finished(
    run: Run, own: LLM, files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transcripts = [wanted(own, path) for path in files]
    take = SoundInWork.take
    lengths: list[float] = []

    def interrupted(sound: SoundInWork, *arguments: Any) -> Any:
        lengths.append(id(sound))
        if len(set(lengths)) == 2 and lengths.count(id(sound)) == 2:  # in the second file's second window
            raise KeyboardInterrupt
        return take(sound, *arguments)

    monkeypatch.setattr(SoundInWork, "take", interrupted)
    done = run(*files, "--format", "srt", "--output-dir", tmp_path / "out")
    assert done.exit_code == 130
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["a.srt"]
    text = "".join(map(WRITERS["txt"], transcripts))
    assert text.startswith(done.stdout) and len(WRITERS["txt"](transcripts[0])) < len(done.stdout) < len(text)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "no file was given"),
        (["a.wav", "--format", "lrc"], "expected txt, srt, vtt, tsv, json, all"),
        (["a.wav", "--format", "all"], "give --output-dir"),
        (["a.wav", "b.wav", "--format", "srt"], "give --output-dir"),
        (["a.wav", "x/a.mp3", "--format", "srt", "--output-dir", "out"], "would be written to one file, a.srt"),
        (["a.wav", "--task", "sing"], "expected transcribe or translate"),
        (["a.wav", "--temperature", "9"], "expected 0 to 2"),
        (["none.wav"], "there is no file"),
    ],
)
def test_misuse_is_refused_before_the_model_is_loaded(arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(app, ["transcribe", *arguments, "--model", "tales"])
    assert result.exit_code in (1, 2), result.output
    assert words in result.stderr and "Traceback" not in result.stderr


@pytest.mark.thorough
def test_other_models_are_refused(files: list[Path], tmp_path: Path) -> None:
    model_of("bart").save_pretrained(tmp_path / "bart")
    TOKENIZER.save_pretrained(tmp_path / "bart")
    for target in (str(tmp_path / "bart"), "tales"):
        options = ["--target", target, "--draft", "none", "--compile", "false"]
        result = CliRunner().invoke(app, ["transcribe", str(files[0]), *options])
        assert result.exit_code == 1 and "load a speech model" in result.stderr, result.output

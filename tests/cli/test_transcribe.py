"""``sakiyomi transcribe``: texts as they come, files in every form, and what happens to bad files and Ctrl-C."""

from __future__ import annotations

import dataclasses
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


@pytest.fixture
def ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the second file's third window."""
    take = SoundInWork.take
    windows: list[int] = []

    def interrupted(sound: SoundInWork, *arguments: Any) -> Any:
        windows.append(id(sound))
        if len(set(windows)) == 2 and windows.count(id(sound)) == 3:
            raise KeyboardInterrupt
        return take(sound, *arguments)

    monkeypatch.setattr(SoundInWork, "take", interrupted)


def begun(own: LLM, path: Path) -> tuple[Transcript, str]:
    """What was said in two windows, and where the third one begins."""
    whole = wanted(own, path)
    *seeks, third = sorted({segment.seek for segment in whole.segments})[:3]
    stopped = f"stopped at {clock(third / 100)} of {clock(whole.seconds)}"
    return dataclasses.replace(whole, segments=tuple(s for s in whole.segments if s.seek in seeks)), stopped


@pytest.mark.thorough
@pytest.mark.parametrize("earlier", [False, True])
def test_ctrl_c_keeps_what_was_said(
    earlier: bool, run: Run, own: LLM, files: list[Path], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """A whole transcript of before, too."""
    kept = {f"{files[1].stem}.srt": "all of it"} if earlier else {}
    for name, text in kept.items():
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / name).write_text(text, encoding="utf-8")
    part, stopped = begun(own, files[1])
    transcripts = [wanted(own, files[0]), part]
    request.getfixturevalue("ctrl_c")
    done = run(*files, tmp_path / "c.wav", "--format", "srt", "--output-dir", tmp_path / "out")
    assert done.exit_code == 130
    names = [f"{files[0].stem}.srt", f"{files[1].stem}{'.partial' * earlier}.srt"]
    assert {path.name: path.read_text(encoding="utf-8") for path in (tmp_path / "out").iterdir()} == kept | {
        name: WRITERS["srt"](transcript) for name, transcript in zip(names, transcripts, strict=True)
    }
    assert done.stdout == "".join(map(WRITERS["txt"], transcripts))
    *_, told, last = done.stderr.splitlines()
    assert told == f"{files[1]}: {stopped}, and what was said until then is in {tmp_path / 'out'}"
    assert last == "interrupted"


@pytest.mark.thorough
def test_ctrl_c_ends_the_json_with_what_was_said(
    run: Run, own: LLM, files: list[Path], request: pytest.FixtureRequest
) -> None:
    part, stopped = begun(own, files[1])
    transcripts = [wanted(own, files[0]), part]
    request.getfixturevalue("ctrl_c")
    done = run(*files, "c.wav", "--json")
    assert done.exit_code == 130
    first, second = json.loads(done.stdout)["files"]
    assert second.pop("error") == stopped and "error" not in first
    for one, path, transcript in zip((first, second), files, transcripts, strict=True):
        assert one == json.loads(json.dumps({"file": str(path)} | verbose(transcript)))


@pytest.mark.thorough
def test_thresholds_can_be_switched_off(run: Run, files: list[Path], tmp_path: Path) -> None:
    """Texts of random weights pass no threshold, and would be tried again at the second temperature."""
    names = ["logprob_threshold", "compression_ratio_threshold"]
    (tmp_path / "own.toml").write_text("".join(f'{name} = "none"\n' for name in names), encoding="utf-8")
    flags = [part for name in names for part in ("--" + name.replace("_", "-"), "none")]
    environment = {f"SAKIYOMI_{name.upper()}": "None" for name in names}
    ways: list[tuple[list[str], dict[str, str]]] = [
        ([], {}),
        (["--logprob-threshold", "-1000", "--compression-ratio-threshold", "9"], {}),
        (flags, {}),
        ([], environment),
        (["--config", str(tmp_path / "own.toml")], {}),
    ]
    temperatures = []
    for more, env in ways:
        done = run(files[0], "--temperature", "0.02", "--no-speech-threshold", "none", "--json", *more, env=env)
        assert done.exit_code == 0, done.output
        temperatures.append({one["temperature"] for one in json.loads(done.stdout)["files"][0]["segments"]})
    assert 0.01 in temperatures[0]
    assert temperatures[1:] == [{0.02}] * 4


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
        (["a.wav", "--logprob-threshold", "off"], "logprob_threshold is 'off'; expected a number, or none"),
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

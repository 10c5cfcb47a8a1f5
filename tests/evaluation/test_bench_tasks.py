"""A pair on its readers' tasks: texts and sounds, scores by libraries, every way of holding weights, and bad data."""

from __future__ import annotations

import gzip
import json
import sys
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.ipc
import pytest
import soundfile
from transformers import WhisperFeatureExtractor
from typer.testing import CliRunner

from sakiyomi import Audio, InputError, LoadError, UnsupportedError
from sakiyomi.cli import app
from sakiyomi.evaluation.bench.tasks.config import TasksConfig
from sakiyomi.evaluation.bench.tasks.data import read_questions, scorer
from sakiyomi.evaluation.bench.tasks.peer import judged
from sakiyomi.evaluation.bench.tasks.run import draw, run
from seq2seq_toys import FRAMES, MELS, TOKENIZER, build, sources
from toys import save_model, tiny_llama

RATE = 16000
NAMES = {"source": "source", "audio": "audio", "reference": "reference"}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tasks")


def saved(name: str, root: Path) -> str:
    folder = root / name
    if not folder.exists():
        save_model(folder, tiny_llama(vocab_size=60) if name == "llama" else build(name), TOKENIZER)
        if name == "whisper":
            WhisperFeatureExtractor(
                feature_size=MELS, sampling_rate=RATE, hop_length=160, chunk_length=FRAMES // 100, n_fft=400
            ).save_pretrained(folder)
    return str(folder)


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def sound(path: Path, seconds: float = 0.5, rate: int = RATE) -> Path:
    soundfile.write(path, 0.3 * np.sin(np.arange(int(seconds * rate)) / 9), rate)
    return path


def texts(root: Path) -> Path:
    lines = [TOKENIZER.decode(ids) for ids in sources("bart", (12, 9))]
    return write(root / "texts.jsonl", *({"source": text, "reference": [text, text[:5]]} for text in lines))


def config(kind: str, file: Path, model: str, **changes: Any) -> TasksConfig:
    few: dict[str, Any] = {"gamma": 2, "repeats": 1, "max_new_tokens": 5, "count": 2, "device": "cpu"}
    own = {"data": (f"{kind}={file}",), "target": model, "draft": f"model:{model}"}
    return TasksConfig(**(own | few | changes))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "model", "score"),
    [("summaries", "bart", "rouge_l"), ("translation", "marian", "bleu"), ("translation", "t5", "bleu"),
     ("code", "llama", "chrf"), ("speech", "whisper", "word_error_rate")],
)  # fmt: skip
def test_every_contender_has_the_score_of_plain(kind: str, model: str, score: str, root: Path) -> None:
    data = texts(root)
    if kind == "speech":
        sound(root / "a.flac", 1.3)
        data = write(root / "sounds.jsonl", {"audio": "a.flac", "reference": "two words"})
    ways = ("float32", "int8", "offload") if model in ("bart", "llama") else ("float32",)
    (row,) = run(config(kind, data, saved(model, root), ways=ways))
    assert row.error is None, row.error
    measured = dict.fromkeys(line["way"] for line in row.lines)
    assert tuple(measured) == ways
    for way in measured:
        lines = [line for line in row.lines if line["way"] == way]
        assert [line["name"] for line in lines] == [
            "transformers plain", "transformers assisted", "sakiyomi plain", "sakiyomi draft, gamma 2",
            "sakiyomi draft, auto",
        ]  # fmt: skip
        same = lines if way != "int8" else lines[2:]
        assert len({line[score] for line in same}) == 1
        assert all(line["seconds_per_answer"] for line in lines), row.notes
        assert all(line["over_assisted"] for line in lines)


@pytest.mark.thorough
def test_open_chat_has_no_score_and_may_be_sampled(root: Path, tmp_path: Path) -> None:
    data = write(tmp_path / "chat.jsonl", {"source": TOKENIZER.decode(sources("bart", (9,))[0])})
    asked = config("chat", data, saved("llama", root), ways=("float32",), temperatures=(0.0, 1.0), peers=False)
    (row,) = run(asked)
    assert [(line["temperature"], line["equal"]) for line in row.lines] == [(0.0, True)] * 3 + [(1.0, None)] * 3
    draw([row], str(tmp_path / "tasks.png"), {})
    assert (tmp_path / "tasks.png").stat().st_size > 5000


def test_scores_are_those_of_the_libraries() -> None:
    def of(kind: str, answer: str, *references: str) -> float:
        found = scorer(kind)
        assert found is not None
        return found[1]([answer], [references])

    assert of("speech", "The cat, sat.", "the cat sat") == 0.0
    assert of("speech", "the cat", "the cat sat down") == 0.5
    assert of("summaries", "a b c d", "x", "a b c d") == pytest.approx(100.0)
    assert of("summaries", "a b", "a b c d") == pytest.approx(100 * 2 / 3)
    same = "the quick brown fox jumps over it"
    assert of("translation", same, same) == pytest.approx(100.0) == of("code", same, same)
    assert scorer("chat") is None


@pytest.mark.parametrize(
    ("kind", "library"), [("speech", "jiwer"), ("summaries", "rouge_score"), ("code", "sacrebleu")]
)
def test_a_missing_library_is_named_with_its_extra(kind: str, library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (library, f"{library}.rouge_scorer"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UnsupportedError, match=rf"{kind} are scored by {library}.*sakiyomi\[tasks\]"):
        scorer(kind)


def read(kind: str, path: Path, **more: Any) -> Any:
    return read_questions(kind, path, NAMES | more, 4, language=None, seconds=1.0)


def dataset(folder: Path, *rows: dict[str, Any]) -> Path:
    """As save_to_disk of datasets leaves it: streams of Arrow, and a file that names them."""
    table = pyarrow.Table.from_pylist(list(rows))
    folder.mkdir(parents=True)
    with pyarrow.ipc.new_stream(str(folder / "data-00000-of-00001.arrow"), table.schema) as stream:
        stream.write_table(table)
    (folder / "state.json").write_text(
        json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}), encoding="utf-8"
    )
    return folder


def test_folders_of_datasets_are_read(tmp_path: Path) -> None:
    stored = {"bytes": sound(tmp_path / "a.flac", 1.6).read_bytes(), "path": None}
    folder = dataset(tmp_path / "saved", {"file": stored, "text": "one two"})
    (question,) = read("speech", folder, audio="file", reference="text")
    assert [part.sampling_rate for part in question.prompts] == [RATE, RATE]
    assert question.references == ("one two",)
    dataset(tmp_path / "both" / "test", {"source": "a"})
    for splits in (["train", "test"], ["test"]):
        (tmp_path / "both" / "dataset_dict.json").write_text(json.dumps({"splits": splits}), encoding="utf-8")
        if len(splits) > 1:
            with pytest.raises(InputError, match="splits train, test"):
                read("chat", tmp_path / "both")
    assert read("chat", tmp_path / "both")[0].prompts == ("a",)
    (folder / "data-00000-of-00001.arrow").write_bytes(b"none")
    with pytest.raises(LoadError, match="save the dataset again"):
        read("speech", folder, audio="file", reference="text")


def test_long_sounds_are_cut_where_they_are_silent(tmp_path: Path) -> None:
    loud = np.ones(RATE)
    samples = np.concatenate([loud[: 3 * RATE // 4], 0 * loud[: RATE // 4], loud, loud])
    parts = Audio(samples, RATE).split(1.0, at_silences=True)
    assert max(part.seconds for part in parts) <= 1.0
    assert 0.75 < parts[0].seconds < 1.0
    assert np.concatenate([part.samples for part in parts]).tolist() == samples.tolist()


@pytest.mark.parametrize(
    ("kind", "row", "words"),
    [
        ("summaries", {"source": "a"}, r"row 1 of .* has no 'reference', by which summaries are scored.*--columns"),
        ("summaries", {"source": "a", "reference": " "}, "has no 'reference'"),
        ("summaries", {"source": "a", "reference": 3}, "reference of row 1 .* is 3; expected a text"),
        ("chat", {"text": "a"}, "has no text as 'source'.*--columns source=NAME"),
        ("speech", {"reference": "a"}, "names no sound file.*--columns audio=NAME"),
        ("speech", {"reference": "a", "audio": "none.wav"}, "the sound of row 1 of .*: there is no file .*none.wav"),
        ("speech", {"reference": "a", "audio": "slow.wav"}, "has 4000 samples a second; speech needs 8000"),
        ("speech", {"reference": "a", "audio": "text.mp4"}, "is no sound file that can be read .*ffmpeg"),
    ],
)
def test_bad_data_is_refused_in_one_line(kind: str, row: dict[str, Any], words: str, tmp_path: Path) -> None:
    sound(tmp_path / "slow.wav", rate=4000)
    (tmp_path / "text.mp4").write_text("no sound", encoding="utf-8")
    with pytest.raises((InputError, LoadError), match=words) as error:
        read(kind, write(tmp_path / "data.jsonl", row))
    assert "\n" not in str(error.value)
    with pytest.raises((InputError, LoadError), match=words):  # before anything is loaded
        run(TasksConfig(data=(f"{kind}={tmp_path / 'data.jsonl'}",)))


def test_other_bad_input(root: Path, tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="no folder that datasets saved"):
        read("chat", tmp_path)
    with pytest.raises(InputError, match="is a sound, and the target reads text"):
        sound(tmp_path / "a.wav")
        data = write(tmp_path / "s.jsonl", {"audio": "a.wav", "reference": "a"})
        read_questions("speech", data, NAMES, 4, language=None, seconds=None)
    for wrong, words in (
        ({"data": ()}, "no data is given"),
        ({"data": ("songs=a.jsonl",)}, "expected KIND=FILE"),
        ({"data": ("chat=a", "chat=b")}, "at most once"),
        ({"ways": ("float16",)}, "ways is float16"),
        ({"temperatures": (-1.0,)}, "temperatures"),
        ({"columns": ("question=a",)}, "columns is 'question=a'"),
    ):
        with pytest.raises(InputError, match=words):
            config("chat", tmp_path, "tales", **wrong)
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"source": "a", "reference": "b"}\nno JSON\n', encoding="utf-8")
    with pytest.raises(LoadError, match=r"row 2 of .* is 'no JSON'; expected a JSON object"):
        read("code", broken)
    with pytest.raises(LoadError, match=r"there is no file or folder 'none.jsonl' with questions"):
        run(TasksConfig(data=("chat=none.jsonl",)))
    zipped = tmp_path / "z.jsonl.gz"
    zipped.write_bytes(gzip.compress(b'{"source": "a", "reference": "b"}\n'))
    assert read("code", zipped)[0].references == ("b",)
    done = CliRunner().invoke(app, ["bench", "tasks", "chat=none.jsonl", "--target", saved("llama", root)])
    assert done.exit_code == 2


def test_a_text_that_parts_without_a_near_tie_gets_no_speed() -> None:
    import torch

    judge = judged(lambda number, answer: torch.tensor([0.0, 5.0, 5.0 - 1e-7]), torch.float32, 0, 1)
    assert judge(((1,),), ((2,),)).accepted
    assert not judge(((1,),), ((0,),)).accepted


def test_wav_files_of_floats_are_read(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "f.wav", np.array([0.25, -0.5]), 8000, subtype="FLOAT")
    assert Audio.read(tmp_path / "f.wav").samples.tolist() == [0.25, -0.5]
    with pytest.raises(wave.Error), wave.open(str(tmp_path / "f.wav")):
        pass

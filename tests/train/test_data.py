"""Reading training text, streams and mixtures, the tokenizer."""

from __future__ import annotations

import gzip
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from sakiyomi.core.errors import InputError, LoadError
from sakiyomi.train.counted import Library
from sakiyomi.train.data import TextSpec, excerpts, parse_text, read_documents, read_records, split
from sakiyomi.train.rows import FixedRows, Mixture, Rows, Stream
from sakiyomi.train.tokenizer import END, train_tokenizer
from train_toys import stories, story_file

DOCUMENTS = [np.array([0, *range(10 * n, 10 * n + 7)]) for n in range(1, 9)]


def test_all_four_formats_are_read_and_normalised(tmp_path: Path) -> None:
    lines = "\n".join(json.dumps({"text": text}) for text in ("  a\r\nb ", "", "“c”")) + "\n\n"
    (tmp_path / "a.jsonl").write_text(lines, encoding="utf-8")
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (tmp_path / "a.txt").write_text("one\n\ntwo\n", encoding="utf-8")
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress("昔々\n".encode()))
    assert list(read_documents(tmp_path / "a.jsonl")) == ["a\nb", "“c”"]
    assert list(read_documents(tmp_path / "a.jsonl.gz")) == ["a\nb", "“c”"]
    assert list(read_documents(tmp_path / "a.txt")) == ["one\n\ntwo"]
    assert list(read_documents(tmp_path / "a.txt.gz")) == ["昔々"]


def test_a_text_beside_a_prompt_is_the_document(tmp_path: Path) -> None:
    """Prompts with answers are wanted of the same file by other recipes."""
    both = [{"instruction": "Ask.", "output": "Say."}, {"prompt": "Ask.", "answer": "Say."}, {"prompt": "Ask."}]
    path = tmp_path / "a.jsonl"
    path.write_text(
        "".join(json.dumps(one | {"text": f"Tale {n}."}) + "\n" for n, one in enumerate(both)), encoding="utf-8"
    )
    assert list(read_documents(path)) == ["Tale 0.", "Tale 1.", "Tale 2."]
    asked = list(read_records(path, answered=True))
    assert asked[0].messages == [("user", "Ask."), ("assistant", "Say.")]
    assert [(one.text, one.answer) for one in asked[1:]] == [("Ask.", "Say."), ("Ask.", "")]


def test_a_plain_text_is_split_into_documents() -> None:
    stories = [f"Story {n}. " + "The fox ran. " * 20 for n in range(30)]
    assert split("\n<|endoftext|>\n".join(stories)) == [story.strip() for story in stories]
    for between in ("\n\n", "\n"):
        found = split(between.join(stories) * 9)
        assert len(found) >= 15
        assert all("Story" in part for part in found)
    assert split("one\n\ntwo") == ["one\n\ntwo"]
    lines = "\n".join(f"Line {n} of a file without blank ones." for n in range(600))
    assert len(split(lines)) >= 15 and "\n".join(split(lines)) == lines


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"text": \n', "line 2 is not JSON"),
        ("a.jsonl", b'{"text": "x"}\n\n{"title": "x"}\n', 'line 3 has no "text"'),
        ("a.jsonl", b'{"tokens": [1, "x"]}\n', 'line 1 has no "text"'),
        ("a.jsonl", b"", "holds no document"),
        ("a.txt", b" \n", "holds no document"),
        ("a.txt", b"<|endoftext|>\n<|endoftext|>\n", "holds no document"),
        ("a.txt", b"\xff\xfe", "cannot read"),
        ("a.txt.gz", b"no gzip", "cannot read"),
        ("a.txt.gz", gzip.compress(b"once upon a time " * 99, mtime=0)[:-12], "cannot read"),
        (
            "a.txt.gz",
            gzip.compress(b"once upon a time " * 99, mtime=0).replace(b"\xcb\xcf", b"\x34\xcf"),
            "cannot read",
        ),
        ("b.txt", None, "cannot read.*no such file"),
        ("b", None, "cannot read.*no such file"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(LoadError, match=message) as error:
        list(read_documents(tmp_path / name))
    assert name in error.value.message


def test_other_endings_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").touch()
    with pytest.raises(InputError, match=r"neither \.jsonl, \.json nor \.txt"):
        list(read_documents(tmp_path / "a.parquet"))


def test_shares_are_parsed() -> None:
    assert parse_text("a.txt") == TextSpec(Path("a.txt"), 1.0, 1.0)
    assert parse_text("a@b.txt@0.5") == TextSpec(Path("a@b.txt"), 0.5, 0.5)
    assert parse_text("a.txt@0.5:2") == TextSpec(Path("a.txt"), 0.5, 2.0)
    for wrong in ("a.txt@x", "a.txt@-1", "a.txt@1:nan"):
        with pytest.raises(InputError, match="expected FILE@STABLE:DECAY"):
            parse_text(wrong)


def test_excerpts_keep_all_paragraphs_in_order() -> None:
    text = "\n\n".join(f"{number} " + "x" * 30 for number in range(20))
    pieces = excerpts(text, limit=100)
    assert "\n\n".join(pieces) == text
    assert max(map(len, pieces)) <= 100
    assert excerpts("y" * 500, limit=100) == ["y" * 500]


def test_every_token_of_an_epoch_is_read_once_as_a_target() -> None:
    stream = Stream(DOCUMENTS, seed=3, key=0)
    rows = [stream.take(9) for _ in range(stream.size // 8)]
    for before, after in itertools.pairwise(rows):
        assert before[-1] == after[0], "rows share their border token"
    read = np.concatenate([rows[0][:1], *(row[1:] for row in rows)])[: stream.size]
    assert sorted(read.tolist()) == sorted(np.concatenate(DOCUMENTS).tolist())


@pytest.mark.parametrize("kind", ["stream", "fixed"])
def test_positions_can_be_taken_and_restored(kind: str) -> None:
    def make() -> Rows:
        return Stream(DOCUMENTS, seed=1, key=2) if kind == "stream" else FixedRows(DOCUMENTS, 8, seed=1, key=2)

    whole, first, second = make(), make(), make()
    expected = [whole.take(9).tolist() for _ in range(20)]
    got = [first.take(9).tolist() for _ in range(11)]
    second.restore(first.state())
    got += [second.take(9).tolist() for _ in range(9)]
    assert got == expected


def test_fixed_rows_come_back_in_each_epoch() -> None:
    rows = FixedRows(DOCUMENTS, 8, seed=1, key=0)
    epochs = [sorted(tuple(rows.take(9).tolist()) for _ in range(rows.size)) for _ in range(3)]
    assert epochs[0] == epochs[1] == epochs[2]
    assert rows.epoch == 2


def test_shares_switch_with_the_decay() -> None:
    streams = [Stream([np.full(50, number)], seed=0, key=number) for number in (1, 2)]
    mixture = Mixture(streams, [TextSpec(Path("a"), 1, 1), TextSpec(Path("b"), 0, 3)], seed=5)
    assert np.unique(mixture.batch(0, 40, 4, decaying=False)).tolist() == [1]
    share = (mixture.batch(1, 400, 4, decaying=True) == 2).mean()
    assert 0.65 < share < 0.85


def test_tokenizer_round_trips_any_text(tmp_path: Path) -> None:
    train_tokenizer(stories(40), 300, 128).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokenizer) == 300
    for text in ("Once upon a time", "昔々、あるところに", "👩‍👧 emoji 🎈", "a  b\n\n\tc ", "“Ä” \x00 ￿", " leading"):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.decode(ids) == text
        assert tokenizer(text)["input_ids"] == [tokenizer.bos_token_id, *ids], "a prompt begins as a document does"
    assert tokenizer.bos_token == tokenizer.eos_token == END
    assert tokenizer.eos_token_id == 0
    assert tokenizer.pad_token_id == 1
    assert tokenizer.decode([0, *ids, 0], skip_special_tokens=True) == " leading"


def test_documents_are_led_by_the_end_token(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(stories(40), 300, 128)
    path = story_file(tmp_path / "a.jsonl", count=3)
    with path.open("a", encoding="utf-8") as file:
        file.write('{"tokens": [5, 6]}\n{"tokens": [0, 7]}\n')
    encoded = Library(tokenizer, 300).documents(path)
    assert [int(row[0]) for row in encoded] == [0] * 5
    assert sorted(row.tolist() for row in encoded if len(row) < 4) == [[0, 5, 6], [0, 7]]


def test_documents_held_back_are_gone_for_every_reader(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(stories(40), 300, 128)
    paths = [story_file(tmp_path / "a.jsonl"), story_file(tmp_path / "b.jsonl", count=9, seed=1)]
    whole = Library(tokenizer, 300).documents(paths[0])
    library = Library(tokenizer, 300)
    held = library.hold_back(paths, 8, 64, seed=1)
    assert len(held) == 4, "half of eight from each file, none from one with fewer than ten documents"
    left = library.documents(tmp_path / "." / "a.jsonl")
    assert sorted(map(bytes, [*left, *held])) == sorted(map(bytes, whole))
    assert [bytes(row) for row in Library(tokenizer, 300).hold_back(paths, 8, 64, seed=1)] == [*map(bytes, held)]
    assert len(Library(tokenizer, 300).hold_back(paths[:1], 100, 64, seed=1)) == 6, "a tenth at most"
    with pytest.raises(InputError, match="more than 500 tokens; give more text"):
        library.hold_back(paths, 8, 500, seed=1)


def test_too_small_vocabularies_and_texts_are_refused() -> None:
    with pytest.raises(InputError, match="at least 258"):
        train_tokenizer(["abc"], 200, 128)
    with pytest.raises(InputError, match="give more text"):
        train_tokenizer(["abc"], 300, 128)

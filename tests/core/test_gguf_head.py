"""Heads of GGUF files: what is read, and one clear error for all that is wrong."""

from __future__ import annotations

import random
import struct
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from damage import DAMAGES, refusals
from sakiyomi.core.errors import LoadError, SakiyomiError, UnsupportedError
from sakiyomi.core.gguf import BLOCKS, read_gguf
from sakiyomi.core.gguf_files import pieces

_FORMS = {
    "u8": 0,
    "i8": 1,
    "u16": 2,
    "i16": 3,
    "u32": 4,
    "i32": 5,
    "f32": 6,
    "bool": 7,
    "u64": 10,
    "i64": 11,
    "f64": 12,
}
_LETTERS = dict(zip(_FORMS, "BbHhIif?Qqd", strict=True))


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def number(form: str, value: float) -> bytes:
    return struct.pack("<I", _FORMS[form]) + struct.pack(f"<{_LETTERS[form]}", value)


def strings(values: Sequence[str]) -> bytes:
    return struct.pack("<IIQ", 9, 8, len(values)) + b"".join(map(text, values))


def numbers(form: str, values: Sequence[float]) -> bytes:
    return struct.pack("<IIQ", 9, _FORMS[form], len(values)) + struct.pack(f"<{len(values)}{_LETTERS[form]}", *values)


def tensor(name: str, kind: int, shape: Sequence[int], offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], kind, offset)


def head(metadata: dict[str, bytes], tensors: Sequence[bytes] = (), version: int = 3, tail: int = 256) -> bytes:
    body = b"".join(text(key) + value for key, value in metadata.items()) + b"".join(tensors)
    start = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata)) + body
    return start + bytes(-len(start) % 32) + bytes(range(256)) * (tail // 256 + 1)


def refused(path: Path, data: bytes, *words: str, kind: type[SakiyomiError] = LoadError) -> None:
    path.write_bytes(data)
    with pytest.raises(kind) as caught:
        read_gguf(path)
    message = str(caught.value)
    assert "\n" not in message
    for word in (str(path), *words):
        assert word in message, message


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


def test_values_of_every_type(path: Path) -> None:
    given = {form: number(form, 1) for form in _FORMS}
    given |= {"text": struct.pack("<I", 8) + text("昔々"), "texts": strings(["a", "", "b\nc"])}
    given |= {"list": numbers("i32", [3, -1]), "eps": number("f32", 1e-6)}
    given["lists"] = struct.pack("<IIQ", 9, 9, 2) + strings(["x"])[4:] + numbers("u8", [7])[4:]
    path.write_bytes(head(given))
    found = read_gguf(path).metadata
    assert [found[form] for form in _FORMS] == [1] * len(_FORMS)
    assert (found["text"], found["texts"], found["eps"]) == ("昔々", ["a", "", "b\nc"], 1e-6)
    assert found["list"].tolist() == [3, -1]
    assert found["lists"][0] == ["x"] and found["lists"][1].tolist() == [7]


def test_tensors_are_mapped(path: Path) -> None:
    path.write_bytes(head({}, [tensor("a", 0, (2, 3), 0), tensor("b", 8, (1, 32), 32)]))
    found = read_gguf(path).tensors
    assert (found["a"].shape, found["a"].kind, found["a"].elements) == ((2, 3), "F32", 6)
    data = found["a"].bytes()
    assert isinstance(data, np.memmap) and data.shape == (2, 12)
    assert data.ravel().tolist() == list(range(24))
    assert found["b"].bytes().ravel().tolist() == list(range(32, 66))


def test_sizes_of_blocks_are_those_of_ggml() -> None:
    gguf = pytest.importorskip("gguf")
    known = {kind.value: (kind.name, *sizes) for kind, sizes in gguf.GGML_QUANT_SIZES.items()}
    known[9] = ("Q8_1", 32, 36)  # two float16 and 32 bytes; the package says 40, as old versions had it
    assert {kind: known[kind] for kind in BLOCKS} == BLOCKS


@pytest.mark.parametrize(("data", "word"), [
    (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60), "keys"),
    (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0), "tensors"),
    (head({"a": struct.pack("<I", 8) + struct.pack("<Q", 1 << 62)}), "cut off"),
    (head({"a": struct.pack("<IIQ", 9, 8, 1 << 50)}), "texts of a"),
    (head({"a": struct.pack("<IIQ", 9, 6, 1 << 62)}), "values of a"),
    (head({"a": struct.pack("<IIQ", 9, 9, 1 << 62)}), "lists of a"),
    (head({"a": struct.pack("<I", 99)}), "type 99"),
    (head({"a": struct.pack("<IIQ", 9, 9, 1) * 6}), "lists"),
    (head({"general.alignment": number("u32", 0)}), "general.alignment"),
    (head({}, [text("t") + struct.pack("<I", 5)]), "5 dimensions"),
    (head({}, [tensor("t", 0, (0, 4), 0)]), "'t'"),
    (head({}, [tensor("t", 2, (2, 31), 0)]), "Q4_0 [2, 31]"),
    (head({}, [tensor("t", 0, (1 << 40, 1 << 40), 0)]), "'t'"),
    (head({}, [tensor("t", 0, (300,), 0)]), "would lie at"),
    (head({}, [tensor("t", 0, (2,), 7)]), "would lie at"),
    (head({}, [tensor("t", 0, (2,), 0)] * 2), "twice"),
])  # fmt: skip
def test_sizes_that_cannot_be(data: bytes, word: str, path: Path) -> None:
    tracemalloc.start()
    refused(path, data, word, "no intact GGUF file", "download it again")
    assert tracemalloc.get_traced_memory()[1] < 8 << 20
    tracemalloc.stop()


def test_other_versions_and_types(path: Path) -> None:
    refused(path, head({}, version=1), "version 1", kind=UnsupportedError)
    refused(path, b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian", kind=UnsupportedError)
    refused(path, head({}, [tensor("t", 77, (32,), 0)]), "type 77", kind=UnsupportedError)
    refused(path, b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull")


def test_a_model_in_pieces(tmp_path: Path) -> None:
    names = [f"m-{part:05}-of-00003.gguf" for part in (1, 2, 3)]
    for part, name in enumerate(names):
        kinds = {"split.count": number("u16", 3), "split.no": number("u16", part)} | {"who": number("u8", part)}
        (tmp_path / name).write_bytes(head(kinds, [tensor(f"t{part}", 0, (2,), 0)]))
    found = read_gguf(tmp_path / names[1])
    assert [each.name for each in found.paths] == names == [each.name for each in pieces(tmp_path / names[0])]
    assert found.metadata["who"] == 0 and sorted(found.tensors) == ["t0", "t1", "t2"]
    (tmp_path / "alone.gguf").write_bytes((tmp_path / names[0]).read_bytes())
    with pytest.raises(LoadError, match="one of 3 pieces"):
        read_gguf(tmp_path / "alone.gguf")
    (tmp_path / names[2]).unlink()
    with pytest.raises(LoadError, match=r"1 of the 3 pieces of 'm' are missing .*m-00003-of-00003"):
        read_gguf(tmp_path / names[0])
    wrong = tmp_path / "m-00004-of-00003.gguf"
    wrong.write_bytes(b"")
    with pytest.raises(LoadError, match="piece 4 of 3"):
        read_gguf(wrong)


def test_damage_is_refused_in_words_or_read(path: Path) -> None:
    chance = random.Random(0)
    metadata: dict[str, Any] = {f"key {n}": number(form, 1) for n, form in enumerate(_FORMS)}
    metadata["tokens"] = strings([chance.choice("abc") * n for n in range(40)])
    path.write_bytes(head(metadata, [tensor(f"t{n}", 0, (4, 4), 64 * n) for n in range(4)]))
    assert refusals([path], 10 * DAMAGES, lambda: [each.bytes() for each in read_gguf(path).tensors.values()])

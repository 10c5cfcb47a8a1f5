"""Digests of tensor files: our own, and those recorded beside files of others. Damage in bulk: test_damage.py."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sakiyomi.core.digests import Digests, load_tensors, save_tensors, sealed, tensor_digest, unsealed
from sakiyomi.core.embedded import HEADS, embedded
from sakiyomi.core.errors import LoadError

TENSORS = {
    "a": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "b": torch.randn(5).to(torch.bfloat16),
    "empty": torch.empty(0, 3, dtype=torch.int64),
    "number": torch.tensor(3),
    "flags": torch.tensor([True, False]),
}


def same(found: dict[str, torch.Tensor]) -> bool:
    return found.keys() == TENSORS.keys() and all(
        found[name].dtype == tensor.dtype and torch.equal(found[name], tensor) for name, tensor in TENSORS.items()
    )


def flip(path: Path, place: int) -> None:
    """Change a byte and leave the file's time."""
    time = path.stat()
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(time.st_atime_ns, time.st_mtime_ns))


def test_tensors_come_back_and_others_can_read_them(tmp_path: Path) -> None:
    path = tmp_path / "file.safetensors"
    save_tensors(path, TENSORS, {"kind": "test"})
    assert same(load_tensors(path)) and same(load_file(path))
    assert set(load_tensors(path, wanted=lambda name: name in "ab")) == {"a", "b"}
    assert Digests.of(path).header.metadata["kind"] == "test"


def test_views_and_shared_memory_are_written_each_for_itself(tmp_path: Path) -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    views = {"row": whole[1], "columns": whole[:, 1:3], "whole": whole, "again": whole}
    save_tensors(tmp_path / "file", views)
    assert all(torch.equal(tensor, views[name]) for name, tensor in load_tensors(tmp_path / "file").items())


@pytest.mark.parametrize("place", [-1, -20, 9, 60])
def test_a_changed_byte_is_refused_with_its_place(tmp_path: Path, place: int) -> None:
    path = tmp_path / "file.safetensors"
    save_tensors(path, TENSORS)
    flip(path, place)
    with pytest.raises(
        LoadError, match=r"file\.safetensors .*(damaged|no intact).*; (build it again|download it again)"
    ):
        load_tensors(path, "build it again")


def test_a_tensor_of_another_file_is_refused(tmp_path: Path) -> None:
    save_tensors(tmp_path / "one", {"a": torch.zeros(4)})
    save_tensors(tmp_path / "two", {"a": torch.ones(4)})
    mixed = (tmp_path / "one").read_bytes()[:-16] + (tmp_path / "two").read_bytes()[-16:]
    (tmp_path / "one").write_bytes(mixed)
    with pytest.raises(LoadError, match="tensor a was changed after it was written"):
        load_tensors(tmp_path / "one")


def test_a_foreign_file_is_unverified_once_and_watched_then(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "heads.safetensors"
    save_file(TENSORS, path)
    with caplog.at_level(logging.INFO, "sakiyomi"):
        assert same(load_tensors(path))
        assert same(load_tensors(path))
    assert caplog.text.count("unverified") == 1
    flip(path, -1)
    with pytest.raises(LoadError, match="changed after it was first read here"):
        load_tensors(path)
    save_file(TENSORS | {"a": torch.zeros(2)}, path)  # another file, by its time: it is a new one
    assert load_tensors(path)["a"].tolist() == [0, 0]


def test_tensors_of_a_foreign_file_are_watched_as_they_are_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path)
    for name in "ab":
        load_tensors(path, wanted=lambda other, name=name: other == name)  # type: ignore[misc]
    said = json.loads((tmp_path / "model.safetensors.digest.json").read_text(encoding="utf-8"))
    assert said["tensors"] == {name: tensor_digest(TENSORS[name]) for name in "ab"}


@pytest.mark.skipif(os.geteuid() == 0, reason="the administrator may write everywhere")
def test_a_foreign_file_in_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path)
    tmp_path.chmod(0o555)
    try:
        assert same(load_tensors(path))
    finally:
        tmp_path.chmod(0o755)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"size": 3}', '{"tensors": []}', "\x00"])
def test_a_damaged_record_is_made_again(tmp_path: Path, text: str) -> None:
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path)
    (tmp_path / "model.safetensors.digest.json").write_text(text, encoding="utf-8")
    assert same(load_tensors(path))
    assert len(json.loads((tmp_path / "model.safetensors.digest.json").read_text(encoding="utf-8"))["tensors"]) == len(
        TENSORS
    )


def test_sealed_objects() -> None:
    content = {"b": [1, 2], "a": {"x": None}}
    assert unsealed(sealed(content)) == content == unsealed(content)
    assert unsealed(dict(reversed(sealed(content).items()))) == content  # whatever the order
    with pytest.raises(ValueError, match="changed after it was written"):
        unsealed(sealed(content) | {"b": [1, 3]})


def test_embedded_heads_carry_digests() -> None:
    for name in HEADS:
        for path in embedded(name).glob("*.safetensors"):
            assert not Digests.of(path).recorded, path

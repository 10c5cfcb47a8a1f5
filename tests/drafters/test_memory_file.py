"""The memory file: whole or not there, private, bounded, one tokenizer's, and refused when damaged."""

from __future__ import annotations

import json
import os
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sakiyomi import LLM, SamplingParams
from sakiyomi.cli import app
from sakiyomi.core.digests import tokenizer_digest
from sakiyomi.core.errors import LoadError, UnsupportedError
from sakiyomi.drafters import memory as module
from sakiyomi.drafters.memory import KIND, MemoryFile, read_memory
from sakiyomi.drafters.suffix import SuffixDrafter
from text_drafters import context
from toys import tiny_llama, tiny_tokenizer

A, B = "a" * 64, "b" * 64
runner = CliRunner()


def filled(path: Path, *texts: list[int], limit: int = 4000) -> MemoryFile:
    memory = MemoryFile(path, A, 100, limit)
    for text in texts:
        memory.add(text)
    memory.save()
    return memory


def tokens_in(path: Path) -> list[list[int]]:
    return [list(document.tokens) for document in read_memory(path).documents]


def test_a_folder_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    """A wrong path would otherwise become a tree of folders."""
    with pytest.raises(LoadError, match=r"there is no folder .*one/two; check the path"):
        MemoryFile(tmp_path / "one" / "two" / "memory", A, 100)
    assert not list(tmp_path.iterdir())


def test_what_is_saved_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "memory"
    filled(path, [1, 2, 3], [99])
    assert tokens_in(path) == [[1, 2, 3], [99]]
    assert [list(document.tokens) for document in MemoryFile(path, A, 100).documents] == [[1, 2, 3], [99]]
    assert [entry.name for entry in path.parent.iterdir()] == ["memory"], "nothing is left beside it"
    assert read_memory(path).documents[0].time > 1.7e9


@pytest.mark.skipif(os.name != "posix", reason="file modes of POSIX")
def test_only_its_owner_may_read_it(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        filled(tmp_path / "memory", [1])
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "memory").stat().st_mode) == 0o600


def test_the_oldest_go_first(tmp_path: Path) -> None:
    path = tmp_path / "memory"
    filled(path, [1] * 40, [2] * 40, [3] * 40, limit=400)
    assert tokens_in(path) == [[2] * 40, [3] * 40]
    filled(path, [4] * 150, limit=400)
    assert tokens_in(path) == [[4] * 100]


def test_a_text_that_comes_again_is_kept_once_as_the_newest(tmp_path: Path) -> None:
    path = tmp_path / "memory"
    filled(path, [1, 2], [3])
    memory = MemoryFile(path, A, 100)
    assert not memory.add([1, 2])
    assert memory.add([4])
    memory.save()
    assert tokens_in(path) == [[3], [1, 2], [4]]


def test_two_processes_share_a_file(tmp_path: Path) -> None:
    path = tmp_path / "memory"
    first, second = (MemoryFile(path, A, 100) for _ in range(2))
    first.add([1])
    second.add([2])
    first.save()
    second.save()
    second.save()
    assert tokens_in(path) == [[1], [2]]


def test_an_interrupted_save_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "memory"
    filled(path, [1, 2])
    before = path.read_bytes()

    def full(self: Path, target: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    memory = MemoryFile(path, A, 100)
    memory.add([3])
    with pytest.raises(LoadError, match="No space left"):
        memory.save()
    assert path.read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 1


def test_every_damaged_byte_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "memory"
    filled(path, list(range(20)), [5, 6])
    whole = path.read_bytes()
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(LoadError):
            MemoryFile(path, A, 100)
    for length in (0, 5, len(KIND.magic), len(KIND.magic) + 9, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(LoadError):
            read_memory(path)
    path.write_bytes(whole + b"\0")
    with pytest.raises(LoadError, match="checksum"):
        read_memory(path)


def test_what_is_refused_and_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "memory"
    filled(path, [50])
    with pytest.raises(LoadError, match="of another tokenizer"):
        MemoryFile(path, B, 100)
    with pytest.raises(LoadError, match="does not know"):
        MemoryFile(path, A, 50)
    with pytest.raises(LoadError, match="cannot be read"):
        read_memory(tmp_path)
    monkeypatch.setattr(module, "KIND", replace(KIND, version=2))
    with pytest.raises(LoadError, match="format '1', this version reads 2"):
        read_memory(path)
    with pytest.raises(UnsupportedError, match="does not give its vocabulary"):
        tokenizer_digest(object())


def test_the_drafter_reads_and_adds(tmp_path: Path) -> None:
    path = tmp_path / "memory"
    drafter = SuffixDrafter(MemoryFile(path, A, 100))
    first, second = context([1, 2, 3, 4, 5, 6], number=1), context([7, 8], number=2)
    drafter.propose([first, second], [4, 4])
    drafter.end(first)
    drafter.end(second)
    assert tokens_in(path) == [[1, 2, 3, 4, 5, 6], [7, 8]]
    for one in (drafter, SuffixDrafter(MemoryFile(path, A, 100))):
        (draft,) = one.propose([context([9, 2, 3], number=3)], [4])
        assert draft.tree.tokens == (4, 5, 6)[: len(draft)]
        assert len(draft)


def test_a_conversation_is_remembered_once(tmp_path: Path) -> None:
    path = tmp_path / "memory"
    drafter = SuffixDrafter(MemoryFile(path, A, 100))
    first, second = context([1, 2, 3], number=1), context([1, 2, 3, 4], number=2)
    drafter.propose([first], [1])
    drafter.inherit(second, first)
    drafter.end(first)
    assert not path.exists()
    drafter.propose([second], [1])
    drafter.end(second)
    assert tokens_in(path) == [[1, 2, 3, 4]]


def test_a_file_that_is_damaged_meanwhile_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "memory"
    drafter = SuffixDrafter(MemoryFile(path, A, 100))
    path.write_bytes(b"somebody's letter")
    request = context([1, 2])
    drafter.propose([request], [1])
    drafter.end(request)
    assert path.read_bytes() == b"somebody's letter"
    assert "not remembered" in caplog.text


def test_old_texts_leave_the_automaton_too(tmp_path: Path) -> None:
    drafter = SuffixDrafter(MemoryFile(tmp_path / "memory", A, 100, limit=80))
    for number in range(12):
        request = context([number * 8 + i for i in range(8)], number=number)
        drafter.propose([request], [1])
        drafter.end(request)
        assert drafter.shared is not None
        assert drafter.shared.size <= 60
    assert len(tokens_in(tmp_path / "memory")) == 2


def test_an_engine_with_a_memory(tmp_path: Path) -> None:
    spec = f"suffix:{tmp_path / 'memory'}"
    pair = (tiny_llama(), tiny_tokenizer())
    plain = LLM(pair, draft="none", compile=False).generate("Once upon a time", SamplingParams(max_new_tokens=12))
    for _ in range(2):
        out = LLM(pair, draft=spec, compile=False).generate("Once upon a time", SamplingParams(max_new_tokens=12))
        assert out.token_ids == plain.token_ids
    assert out.stats.acceptance_rate == 1.0
    other = (tiny_llama(vocab=280), tiny_tokenizer(280))
    with pytest.raises(LoadError, match="of another tokenizer"):
        LLM(other, draft=spec, compile=False)


def test_show_and_clear(tmp_path: Path) -> None:
    path = tmp_path / "memory"
    filled(path, [1, 2, 3], [4])
    shown = runner.invoke(app, ["memory", "show", str(path), "--json"])
    assert shown.exit_code == 0, shown.output
    found = json.loads(shown.stdout.splitlines()[-1])
    assert (found["tokens"], found["tokenizer"]) == (4, A)
    assert [entry["tokens"] for entry in found["documents"]] == [3, 1]
    path.write_bytes(path.read_bytes()[:-1])
    damaged = runner.invoke(app, ["memory", "show", str(path)])
    assert damaged.exit_code == 1
    assert "damaged" in damaged.stderr
    cleared = runner.invoke(app, ["memory", "clear", str(path), "--json"])
    assert cleared.exit_code == 0
    assert not path.exists()
    assert json.loads(cleared.stdout.splitlines()[-1])["removed_bytes"] > 0
    assert runner.invoke(app, ["memory", "clear", str(path)]).exit_code == 2


def test_clear_removes_no_other_file(tmp_path: Path) -> None:
    path = tmp_path / "letter.txt"
    path.write_text("dear", encoding="utf-8")
    result = runner.invoke(app, ["memory", "clear", str(path)])
    assert result.exit_code == 2
    assert "left as it is" in result.stderr or "left as it was" in result.stderr
    assert path.read_text(encoding="utf-8") == "dear"


def test_texts_are_shown_to_who_has_the_tokenizer(tmp_path: Path) -> None:
    from toys import save_model

    folder = save_model(tmp_path / "model", tiny_llama(), tiny_tokenizer())
    tokenizer = tiny_tokenizer()
    memory = MemoryFile(tmp_path / "memory", tokenizer_digest(tokenizer), 320)
    memory.add(tokenizer("a little fox")["input_ids"])
    memory.save()
    result = runner.invoke(app, ["memory", "show", str(tmp_path / "memory"), "--target", str(folder)])
    assert result.exit_code == 0, result.output
    assert "a little fox" in result.stdout
    filled(tmp_path / "other", [1])
    result = runner.invoke(app, ["memory", "show", str(tmp_path / "other"), "--target", str(folder)])
    assert result.exit_code == 2
    assert "another tokenizer" in result.stderr

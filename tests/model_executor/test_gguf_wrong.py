"""GGUF files whose metadata and tensors contradict each other: refused in one line, never a part of a model."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from changed_gguf import MISSING, changed
from sakiyomi import LLM, LoadError
from sakiyomi.core.draft_specs import split_spec
from sakiyomi.core.gguf_files import gguf_file
from sakiyomi.model_executor.gguf import folder as folders
from sakiyomi.model_executor.gguf.export import write_gguf
from sakiyomi.model_executor.gguf.folder import settings_folder
from sakiyomi.model_executor.loading import load_model
from sakiyomi.model_executor.loading.recorder import save_recording
from toys import tiny_llama, tiny_tokenizer

pytest.importorskip("gguf")


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sound") / "sound.gguf"
    write_gguf(path, tiny_llama(), tiny_tokenizer(), "F32")
    return path


def zeros(*shape: int) -> Any:
    return np.zeros(shape, np.float32)


@pytest.mark.few(6)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("keys", "tensors", "word"), [
    ({"split.count": [1, 2, 3]}, {}, ""),
    ({"llama.block_count": 1}, {}, "holds 2 layers, and its metadata speak of 1"),
    ({"llama.block_count": 0}, {}, "speak of 0"),
    ({"llama.block_count": 1 << 31}, {}, "holds 2 layers"),
    ({"llama.block_count": MISSING}, {}, "does not say block_count"),
    ({"llama.attention.head_count": MISSING}, {}, "does not say attention.head_count"),
    ({"llama.attention.layer_norm_rms_epsilon": MISSING}, {}, "does not say attention.layer_norm_rms_epsilon"),
    ({"llama.attention.head_count_kv": 3}, {}, "blk.0.attn_k.weight of [16, 32]"),
    ({}, {"blk.0.attn_q.weight": zeros(31, 32)}, "blk.0.attn_q.weight of [31, 32]"),
    ({}, {"blk.0.attn_q.weight": zeros(1, 32, 32)}, "blk.0.attn_q.weight of [1, 32, 32]"),
    ({}, {"blk.0.attn_norm.weight": zeros(31)}, "blk.0.attn_norm.weight of [31], and its metadata speak of [32]"),
    ({}, {"blk.1.ffn_norm.weight": zeros(2, 32)}, "blk.1.ffn_norm.weight of [2, 32]"),
    ({"tokenizer.ggml.tokens": 3}, {}, "tokenizer.ggml.tokens is no list of texts"),
    ({"tokenizer.ggml.tokens": [1, 2]}, {}, "tokenizer.ggml.tokens is no list of texts"),
    ({"tokenizer.ggml.tokens": "abc"}, {}, "tokenizer.ggml.tokens is no list of texts"),
    ({"tokenizer.ggml.token_type": 3}, {}, "tokenizer"),
    ({"tokenizer.ggml.token_type": ["a", "b"]}, {}, "tokenizer"),
])  # fmt: skip
def test_contradictions_are_refused(
    keys: dict[str, Any], tensors: dict[str, Any], word: str, packed: bool, sound: Path, tmp_path: Path
) -> None:
    file = changed(sound, tmp_path / "m.gguf", keys, tensors)
    if not word:  # a value that says nothing
        assert load_model(file, packed=packed).model.config.num_hidden_layers == 2
        return
    with pytest.raises(LoadError) as caught:
        load_model(file, packed=packed)
    message = str(caught.value)
    assert str(file) in message and word in message and "\n" not in message, message


@pytest.mark.few(2)
@pytest.mark.parametrize("packed", [False, True])
def test_tensors_with_names_of_their_own_are_named(
    packed: bool, sound: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = changed(sound, tmp_path / "m.gguf", {}, {"blk.x.attn_q.weight": zeros(4, 32), "blk.": zeros(4, 32)})
    load_model(file, packed=packed)
    assert "2 tensors of the file are not used: blk.x.attn_q.weight, blk." in caplog.text


def test_layers_that_predict_further_tokens_are_left_out(sound: Path, tmp_path: Path) -> None:
    """Their tensors follow those of the model, and the number of layers counts them."""
    keys = {"llama.block_count": 3, "llama.nextn_predict_layers": 1}
    file = changed(sound, tmp_path / "m.gguf", keys, {"blk.2.nextn.eh_proj.weight": zeros(32, 64)})
    assert load_model(file).model.config.num_hidden_layers == 2


def test_special_tokens_behind_the_last_are_none(
    sound: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """As in llama.cpp; some files have 2^32 - 1 there."""
    keys = {f"tokenizer.ggml.{name}_token_id": (1 << 32) - 1 for name in ("bos", "eos", "padding")}
    loaded = load_model(changed(sound, tmp_path / "m.gguf", keys))
    config = loaded.model.config
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (None, None, None)
    assert "within the vocabulary" not in "".join(capfd.readouterr())


# ---------------------------------------------------------------- names of files


def test_a_file_without_its_suffix_is_known_by_its_content(sound: Path, tmp_path: Path) -> None:
    """So Ollama keeps its models."""
    blob = Path(shutil.copy(sound, tmp_path / "sha256-0123"))
    assert gguf_file(str(blob)) == blob
    assert load_model(blob).model.config.model_type == "llama"
    assert split_spec(str(blob)) == [f"model:{blob}"]
    blob.write_bytes(b"something else")
    assert gguf_file(str(blob)) is None


def test_every_piece_stands_for_the_first(tmp_path: Path) -> None:
    """Or each would have a packed copy of its own."""
    names = [tmp_path / f"m-{number:05}-of-00002.gguf" for number in (1, 2)]
    for path in names:
        path.write_bytes(b"GGUF")
    assert [gguf_file(str(path)) for path in names] == [names[0], names[0]]


# ---------------------------------------------------------------- cache folders that cannot be written


def full(*_: object, **__: object) -> None:
    raise OSError(28, "No space left on device")


def test_a_full_cache_folder(sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What belongs to the file lies elsewhere then, as long as the process runs, and nothing half written stays."""
    cache = tmp_path / "cache"
    monkeypatch.setenv("SAKIYOMI_CACHE_DIR", str(cache))
    removed: list[Any] = []
    monkeypatch.setattr(folders.atexit, "register", lambda *call, **_: removed.append(call))
    write = folders._write

    def half(folder: Path, *given: Any) -> None:
        write(folder, *given)
        if folder.is_relative_to(cache):
            full()

    monkeypatch.setattr(folders, "_write", half)
    place, _ = settings_folder(sound)
    assert (place / "tokenizer.json").is_file() and not place.is_relative_to(cache)
    assert list((cache / "gguf").iterdir()) == [] and removed == [(shutil.rmtree, place)]
    monkeypatch.setattr(folders, "_write", full)
    with pytest.raises(LoadError, match=r"No space left on device.*set SAKIYOMI_CACHE_DIR"):
        settings_folder(sound)


def test_without_a_packed_copy_nothing_is_recorded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A full disk is named once, where the copy cannot be written."""
    runner: Any = None  # is not asked
    with caplog.at_level("INFO", "sakiyomi"):
        assert not save_recording(tmp_path, None, None, tmp_path / "no copy", tiny_tokenizer(), runner)
    assert not caplog.records


def test_ctrl_c_leaves_nothing(sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAKIYOMI_CACHE_DIR", str(tmp_path / "cache"))
    write = folders._write

    def interrupted(*given: Any) -> None:
        write(*given)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(folders, "_write", interrupted)
        settings_folder(sound)
    assert list((tmp_path / "cache" / "gguf").iterdir()) == []
    assert LLM(sound, "none", compile=False).generate("the fox")

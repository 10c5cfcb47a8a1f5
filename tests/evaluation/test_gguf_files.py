"""GGUF files of our models: written once for each version, whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import LlamaForCausalLM

from sakiyomi.core.errors import LoadError
from sakiyomi.core.gguf import read_gguf
from sakiyomi.evaluation.bench.engines import gguf_files
from sakiyomi.evaluation.bench.engines.gguf_files import gguf_file, gguf_folder
from sakiyomi.model_executor.gguf import export
from sakiyomi.model_executor.loading import Loaded, load_model
from toys import save_model, tiny_llama, tiny_tokenizer


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_files, "cache_folder", lambda: tmp_path / "cache")


def tiny(folder: Path, model: LlamaForCausalLM) -> Loaded:
    return load_model(str(save_model(folder, model, tiny_tokenizer())), dtype="float32")


def test_a_file_is_written_once_for_each_version_of_a_model(tmp_path: Path) -> None:
    loaded = tiny(tmp_path / "model", tiny_llama())
    first = gguf_file(loaded, "Q8_0")
    written = first.stat().st_mtime_ns
    assert gguf_file(loaded, "Q8_0") == first
    assert first.stat().st_mtime_ns == written
    assert first.stat().st_size < gguf_file(loaded, "BF16").stat().st_size
    again = gguf_file(tiny(tmp_path / "model", tiny_llama(seed=1)), "Q8_0")
    assert again != first
    assert again.name.startswith("model-q8_0-")


def test_rows_of_the_model_behind_the_last_token_are_unused_tokens(tmp_path: Path) -> None:
    """And rows that are no whole blocks are kept in 16 bits."""
    loaded = tiny(tmp_path / "model", tiny_llama(vocab=328, dim=48, head_dim=12))
    found = read_gguf(gguf_file(loaded, "Q8_0"))
    kinds = found.metadata["tokenizer.ggml.token_type"].tolist()
    tokens = found.metadata["tokenizer.ggml.tokens"]
    known = len(loaded.tokenizer)
    assert len(kinds) == len(tokens) == 328
    assert tokens[known:] == [f"<unused {i}>" for i in range(known, 328)]
    assert set(kinds[known:]) == {5} and set(kinds[1:known]) == {1}
    assert found.tensors["blk.0.attn_q.weight"].kind == "F16"
    assert found.tensors["blk.0.ffn_down.weight"].kind == "Q8_0"


def test_a_target_from_a_gguf_file_is_that_file(tmp_path: Path) -> None:
    file = gguf_file(tiny(tmp_path / "model", tiny_llama()), "Q8_0")
    assert gguf_file(load_model(str(file)), "F32") == file


def test_nothing_half_written_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise OSError(28, "No space left on device")

    loaded = tiny(tmp_path / "model", tiny_llama())
    with monkeypatch.context() as patch, pytest.raises(LoadError, match="No space left"):
        patch.setattr(export, "_rounded", fails)
        gguf_file(loaded, "F32")
    assert not list(gguf_folder().iterdir())

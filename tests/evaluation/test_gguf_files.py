"""GGUF files of our models: written once for each version, whole or not at all; what cannot be written is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from sakiyomi.core.errors import LoadError, UnsupportedError
from sakiyomi.evaluation.bench.engines import gguf_files
from sakiyomi.evaluation.bench.engines.gguf_files import gguf_file, gguf_folder
from sakiyomi.model_executor.loading import Loaded, load_model
from toys import save_model, tiny_llama, tiny_tokenizer

gguf = pytest.importorskip("gguf")


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
    found = gguf.GGUFReader(gguf_file(loaded, "Q8_0"))
    kinds = found.fields["tokenizer.ggml.token_type"].contents()
    tokens = found.fields["tokenizer.ggml.tokens"].contents()
    known = len(loaded.tokenizer)
    assert len(kinds) == len(tokens) == 328
    assert tokens[known:] == [f"<unused {i}>" for i in range(known, 328)]
    assert set(kinds[known:]) == {gguf.TokenType.UNUSED} != set(kinds[1:known]) == {gguf.TokenType.NORMAL}
    stored = {tensor.name: tensor.tensor_type.name for tensor in found.tensors}
    assert stored["blk.0.attn_q.weight"] == "F16"
    assert stored["blk.0.ffn_down.weight"] == "Q8_0"


def test_a_target_from_a_gguf_file_has_no_configuration_beside_it(tmp_path: Path) -> None:
    target = tmp_path / "files" / "target.gguf"
    target.parent.mkdir()
    target.write_bytes(b"GGUF")
    loaded = dataclasses.replace(tiny(tmp_path / "model", tiny_llama()), name=str(target), folder=target.parent)
    first = gguf_file(loaded, "F32")
    target.write_bytes(b"GGUF of other weights")
    assert gguf_file(loaded, "F32") != first


def test_nothing_half_written_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(path: Path, *_: object) -> None:
        path.write_bytes(b"GGUF")
        raise OSError(28, "No space left on device")

    loaded = tiny(tmp_path / "model", tiny_llama())
    with monkeypatch.context() as patch, pytest.raises(LoadError, match="No space left"):
        patch.setattr(gguf_files, "_write", fails)
        gguf_file(loaded, "F32")
    assert not list(gguf_folder().iterdir())


@pytest.mark.parametrize("values", [{"attention_bias": True}, {"hidden_act": "gelu"}])
def test_other_models_are_refused(tmp_path: Path, values: dict[str, object]) -> None:
    with pytest.raises(UnsupportedError, match="without biases"):
        gguf_file(tiny(tmp_path / "model", tiny_llama(**values)), "F32")  # type: ignore[arg-type]


def test_other_tokenizers_are_refused(tmp_path: Path) -> None:
    words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")))
    loaded = dataclasses.replace(tiny(tmp_path / "model", tiny_llama()), tokenizer=words)
    with pytest.raises(UnsupportedError, match="byte-level BPE"):
        gguf_file(loaded, "F32")
    assert not list(gguf_folder().iterdir())


def test_without_the_package_one_line_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_files, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match=r"gguf, .* is not installed; pip install 'sakiyomi\[bench\]'"):
        gguf_file(tiny(tmp_path / "model", tiny_llama()), "F32")

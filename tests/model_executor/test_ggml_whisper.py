"""Whisper models of whisper.cpp: written here from a tiny model, or from one that others made."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import quantize
from safetensors.numpy import load_file
from tokenizers import Tokenizer
from transformers import AutoTokenizer, WhisperForConditionalGeneration
from transformers.convert_slow_tokenizer import bytes_to_unicode
from typer.testing import CliRunner

from real_files import real
from sakiyomi import LLM, Audio, LoadError, TranscriptionParams, UnsupportedError
from sakiyomi.cli import app
from sakiyomi.core.checkpoint import read_json
from sakiyomi.core.gguf import BLOCKS
from sakiyomi.model_executor.gguf.blocks import dequantize
from sakiyomi.model_executor.gguf.quantize import K_FORMATS, quantize_k
from sakiyomi.model_executor.loading import ct2_whisper
from sakiyomi.model_executor.loading.ggml_whisper import import_whisper, openai_name
from toys import tiny_tokenizer
from whisper_toys import toy

NUMBERS = {name: number for number, (name, *_) in BLOCKS.items()}
FILE_TYPES = {
    "F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "Q4_K": 12, "Q5_K": 13, "Q6_K": 14,
}  # fmt: skip
"""GGML's numbers of them, which are others than those of types."""
BYTES = {sign: value for value, sign in bytes_to_unicode().items()}
OTHERS = 1 + 1 + 99 + 6 + 1501
"""End, start, languages, tasks and marks, times."""
SIZES = {
    "d_model": 256, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 1024, "decoder_ffn_dim": 1024,
}  # fmt: skip
TEXTS = (
    "The fox went 12345 miles, didn't it?  WE'LL see!", "\n\n\tif x == 1:\r\n    y\u00a0\u2003\u3000z ",
    "昔々、🙂 Vi\u1ec7t", "\xf1and\xfa\u2028\x0b\ufeff½ \x85", "<|endoftext|> <|0.00|> a <|1.02|>", "", " ", "   ",
)  # fmt: skip


def words() -> list[bytes]:
    """Tokens of a small vocabulary, bytes first."""
    names = tiny_tokenizer().convert_ids_to_tokens(range(1, len(tiny_tokenizer())))
    return [bytes(BYTES[sign] for sign in name) for name in names]


def encoded(values: Any, kind: str) -> bytes:
    if kind in K_FORMATS:
        return quantize_k(kind, torch.from_numpy(values)).tobytes()
    return quantize(values, gguf.GGMLQuantizationType[kind]).tobytes()


def write_ggml(path: Path, model: Any, tokens: list[bytes], kind: str = "F16", version: int = 2) -> None:
    """As whisper.cpp's converter and its ``quantize`` do; ``kind``: of the matrices."""
    config = model.config
    sizes = (
        config.vocab_size, config.max_source_positions, config.d_model, config.encoder_attention_heads,
        config.encoder_layers, config.max_target_positions, config.d_model, config.decoder_attention_heads,
        config.decoder_layers, config.num_mel_bins, version * 1000 + FILE_TYPES[kind],
    )  # fmt: skip
    data = b"lmgg" + struct.pack("<11i", *sizes) + struct.pack("<2i", config.num_mel_bins, 201)
    data += bytes(4 * 201 * config.num_mel_bins) + struct.pack("<i", len(tokens))
    data += b"".join(struct.pack("<i", len(token)) + token for token in tokens)
    for name, values in model.model.state_dict(prefix="model.").items():
        values = values.numpy()
        values = values[:, None] if "conv" in name and values.ndim == 1 else values
        matrix = values.ndim == 2 and "positions" not in name and "conv" not in name
        own = kind if matrix else "F16" if values.ndim == 3 and kind != "F32" else "F32"
        label = openai_name(name).encode()
        data += struct.pack("<3i", values.ndim, len(label), NUMBERS[own]) + struct.pack(
            f"<{values.ndim}i", *reversed(values.shape)
        )
        data += label + encoded(values, own)
    path.write_bytes(data)


def written(place: Path, kind: str = "F16", version: int = 2) -> tuple[Path, Any]:
    """A file, and the model in it."""
    tokens, path = words(), place / "ggml-tiny.bin"
    model = toy(len(tokens) + OTHERS, **SIZES)
    write_ggml(path, model, tokens, kind, version)
    return path, model


def test_a_model_comes_back(tmp_path: Path) -> None:
    path, model = written(tmp_path)
    out = tmp_path / "out"
    done = CliRunner().invoke(app, ["import", "ggml", str(path), str(out), "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout.splitlines()[-1])["folder"] == str(out)
    found = WhisperForConditionalGeneration.from_pretrained(out, dtype=torch.float32)
    for name, value in model.state_dict().items():
        assert torch.equal(found.state_dict()[name], value), name
    for name in (*SIZES, "num_mel_bins", "max_source_positions", "max_target_positions"):
        assert getattr(found.config, name) == getattr(model.config, name)
    settings: Any = found.generation_config
    count = len(words())
    assert (settings.eos_token_id, settings.decoder_start_token_id) == (count, count + 1)
    assert settings.begin_suppress_tokens == [220, count]
    marks = range(count + 101, count + 106)  # translate to nospeech, after 99 languages
    assert settings.suppress_tokens[-6:] == [count + 1, *marks]
    assert settings.alignment_heads == [[1, head] for head in range(4)]
    assert settings.no_timestamps_token_id == count + 106
    noise = np.random.default_rng(0).normal(0, 0.1, 32000).astype(np.float32)
    assert LLM(out, "suffix", compile=False).transcribe(Audio(noise, 16000)).seconds == 2
    again = CliRunner().invoke(app, ["import", "ggml", str(path), str(out)])
    assert again.exit_code == 2 and "is not an empty folder" in again.stderr


def test_the_tokenizer_is_made_of_the_tokens(tmp_path: Path) -> None:
    path, model = written(tmp_path)
    import_whisper(path, tmp_path / "out")
    tokenizer, original = AutoTokenizer.from_pretrained(tmp_path / "out"), tiny_tokenizer()
    count, silent = len(words()), len(words()) + 106
    assert len(tokenizer) == model.config.vocab_size
    names = tokenizer.convert_ids_to_tokens(range(count, len(tokenizer)))
    assert names[:4] == ["<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|zh|>"]
    assert names[-1503:-1499] == ["<|nocaptions|>", "<|notimestamps|>", "<|0.00|>", "<|0.02|>"]
    assert names[-1] == "<|30.00|>"
    for text in TEXTS:
        if "<|" not in text:
            expected = [token - 1 for token in original.encode(text)]
            assert tokenizer.encode(text) == [count + 1, silent, *expected, count], text
            assert tokenizer.decode(expected) == text


def test_tokens_that_no_merges_make(tmp_path: Path) -> None:
    path, tokens = tmp_path / "ggml-tiny.bin", words()
    for wrong in ([*tokens[:-1], b"qzxq"], [*tokens[:-1], tokens[300]], [tokens[-1], *tokens[:-1]]):
        write_ggml(path, toy(len(tokens) + OTHERS), wrong)
        with pytest.raises(LoadError, match="the tokens before it do not make"):
            import_whisper(path, tmp_path / "out")
    write_ggml(path, toy(len(tokens) + OTHERS - 100), tokens)
    with pytest.raises(UnsupportedError, match="one for each of at most 100 languages"):
        import_whisper(path, tmp_path / "out")


@pytest.mark.parametrize("kind", ["F32", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", *K_FORMATS])
def test_rounded_weights_become_what_they_stand_for(kind: str, tmp_path: Path) -> None:
    path, model = written(tmp_path, kind)
    import_whisper(path, tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    for name in ("model.decoder.layers.1.fc1.weight", "model.decoder.embed_tokens.weight"):
        own = model.state_dict()[name].numpy()
        block = np.frombuffer(encoded(own, kind), np.uint8).reshape(len(own), -1)
        expected = dequantize(kind, torch.from_numpy(block.copy())).numpy()
        assert np.array_equal(found[name], expected.astype(np.float16))
        error = np.abs(found[name] - own).max() / np.abs(own).max()
        assert error == 0 if kind == "F32" else 0 < error < 0.15
    for name in ("decoder.layers.1.fc1.bias", "encoder.conv1.weight", "encoder.embed_positions.weight"):
        name = f"model.{name}"
        assert np.array_equal(found[name], model.state_dict()[name].numpy().astype(np.float16))


def test_damaged_and_foreign_files(tmp_path: Path) -> None:
    path, out = tmp_path / "ggml-tiny.bin", tmp_path / "out"
    tokens = words()
    model = toy(len(tokens) + OTHERS, encoder_ffn_dim=64, decoder_ffn_dim=64)
    write_ggml(path, model, tokens)
    data = path.read_bytes()

    def refused(error: type[Exception], match: str, content: bytes) -> None:
        path.write_bytes(content)
        with pytest.raises(error, match=match):
            import_whisper(path, out)
        assert sorted(tmp_path.iterdir()) == [path]

    for size in (0, 3, 20, 1000, 15000, len(data) // 2, len(data) - 1):
        refused(LoadError, "ends too early.*download it again", data[:size])
    last = data.rindex(struct.pack("<3i", 1, len(b"decoder.ln.bias"), 0))
    refused(LoadError, "no tensor 'decoder.ln.bias'", data[:last])
    refused(LoadError, "is there twice", data + data[last:])
    refused(LoadError, "begins with b'GGUF'", b"GGUF" + data[4:])
    llama = struct.pack("<7i", 32000, 4096, 256, 32, 32, 128, 2) + struct.pack("<i", 5) + b"<unk>" + bytes(100)
    refused(UnsupportedError, "another kind of model; expected Whisper", b"lmgg" + llama)
    for place, wrong in ((1, 0), (4, 3), (5, 1 << 30), (10, -1)):  # tokens, heads, layers, mels
        sizes = data[: 4 + 4 * (place - 1)] + struct.pack("<i", wrong) + data[4 + 4 * place :]
        refused(UnsupportedError, "another kind of model; expected Whisper", sizes)
    refused(UnsupportedError, "in the type 99", data[: last + 8] + struct.pack("<i", 99) + data[last + 12 :])
    refused(UnsupportedError, "as I32; expected F32", data[: last + 8] + struct.pack("<i", 26) + data[last + 12 :])
    refused(LoadError, "would have 9 dimensions", data[:last] + struct.pack("<i", 9) + data[last + 4 :])
    refused(LoadError, r"should be \[64, 16\].* has \[48, 16\]", rewritten(path, tokens))
    old = tmp_path / "old"
    old.mkdir()
    with pytest.raises(UnsupportedError, match="version 1 of the quantized types; expected 2"):
        import_whisper(written(old, "Q4_0", 1)[0], out)
    with pytest.raises(LoadError, match="check the path"):
        import_whisper(tmp_path / "none.bin", out)
    assert not out.exists()


def rewritten(path: Path, tokens: list[bytes]) -> bytes:
    """A file whose layers are narrower than four times its width."""
    write_ggml(path, toy(len(tokens) + OTHERS, encoder_ffn_dim=48, decoder_ffn_dim=48), tokens)
    return path.read_bytes()


def test_a_folder_that_cannot_be_written_whole_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = written(tmp_path)
    monkeypatch.setattr("sakiyomi.model_executor.loading.ggml_whisper.dequantize", full)
    with pytest.raises(LoadError, match=r"No space left.*choose another place"):
        import_whisper(path, tmp_path / "out")
    assert sorted(tmp_path.iterdir()) == [path]


def full(kind: str, data: Any) -> Any:
    raise OSError(28, "No space left on device")


@pytest.mark.thorough
def test_a_real_model(tmp_path: Path) -> None:
    """The same folder as that which is imported from CTranslate2."""
    ours, theirs = tmp_path / "ggml", tmp_path / "ct2"
    ct2_whisper.import_whisper(real("whisper-ct2"), theirs)
    model = WhisperForConditionalGeneration.from_pretrained(theirs, dtype=torch.float32)
    vocabulary = read_json(theirs / "tokenizer.json")["model"]["vocab"]
    tokens = sorted((word for word in vocabulary if word != "<|endoftext|>"), key=vocabulary.__getitem__)
    write_ggml(tmp_path / "ggml.bin", model, [bytes(BYTES[sign] for sign in word) for word in tokens])
    import_whisper(tmp_path / "ggml.bin", ours)
    for name in ("config.json", "generation_config.json", "preprocessor_config.json"):
        assert read_json(ours / name) == read_json(theirs / name)
    found, expected = (load_file(folder / "model.safetensors") for folder in (ours, theirs))
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[name], expected[name]) for name in expected)
    one, other = (Tokenizer.from_file(str(folder / "tokenizer.json")) for folder in (ours, theirs))
    for text in (*TEXTS, Path(__file__).read_text(encoding="utf-8"), *map(chr, range(0, 0xD800, 3))):
        assert one.encode(text).ids == other.encode(text).ids
    hum = np.sin(np.arange(48000) / 20).astype(np.float32) / 5
    params = TranscriptionParams(temperatures=(0.0,), no_speech_threshold=None)
    said = [LLM(folder, "none", compile=False).transcribe(Audio(hum, 16000), params) for folder in (ours, theirs)]
    assert said[0] == said[1]

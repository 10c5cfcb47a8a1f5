"""Whisper models of CTranslate2: written here from a tiny model, or as others made them."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoFeatureExtractor, AutoTokenizer, WhisperForConditionalGeneration
from typer.testing import CliRunner

from real_files import real
from sakiyomi import LLM, Audio, LoadError, TranscriptionParams, UnsupportedError
from sakiyomi.cli import app
from sakiyomi.core.ctranslate2 import read_ct2
from sakiyomi.model_executor.loading.ct2_whisper import import_whisper
from toys import tiny_tokenizer
from whisper_toys import toy

TYPES = (np.float32, np.int8, np.int16, np.int32, np.float16)
SPECIAL = (
    "endoftext", "startoftranscript", "en", "de", "translate", "transcribe", "startoflm", "startofprev", "nocaptions",
    "notimestamps",
)  # fmt: skip
TIMES = 51
LAYER = {
    "self_attention/linear_0": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attention/linear_1": ("self_attn.out_proj",),
    "ffn/linear_0": ("fc1",),
    "ffn/linear_1": ("fc2",),
    "self_attention/layer_norm": ("self_attn_layer_norm",),
    "ffn/layer_norm": ("final_layer_norm",),
}
CROSS = {
    "attention/linear_0": ("encoder_attn.q_proj",),
    "attention/linear_1": ("encoder_attn.k_proj", "encoder_attn.v_proj"),
    "attention/linear_2": ("encoder_attn.out_proj",),
    "attention/layer_norm": ("encoder_attn_layer_norm",),
}


def variables(model: Any) -> dict[str, NDArray[Any]]:
    """As CTranslate2's converter names and joins them."""
    weights = {name.removeprefix("model."): value.numpy() for name, value in model.state_dict().items()}
    found: dict[str, NDArray[Any]] = {}
    for side, count, own in (("encoder", 2, LAYER), ("decoder", 3, LAYER | CROSS)):
        for layer in range(count):
            for module, parts in own.items():
                names = ("gamma", "beta") if "norm" in module else ("weight", "bias")
                for name, kind in zip(names, ("weight", "bias"), strict=True):
                    joined = []
                    for part in parts:
                        path = f"{side}.layers.{layer}.{part}"
                        joined.append(weights.get(f"{path}.{kind}", np.zeros(16, np.float32)))  # keys have no bias
                    found[f"{side}/layer_{layer}/{module}/{name}"] = np.concatenate(joined)
        found[f"{side}/layer_norm/gamma"] = weights[f"{side}.layer_norm.weight"]
        found[f"{side}/layer_norm/beta"] = weights[f"{side}.layer_norm.bias"]
        found[f"{side}/position_encodings/encodings"] = weights[f"{side}.embed_positions.weight"]
        heads = getattr(model.config, f"{side}_attention_heads")
        found[f"{side}/num_heads"] = np.array(heads, np.int16)
    for conv in ("conv1", "conv2"):
        for kind in ("weight", "bias"):
            found[f"encoder/{conv}/{kind}"] = weights[f"encoder.{conv}.{kind}"]
    found["decoder/embeddings/weight"] = weights["decoder.embed_tokens.weight"]
    return {name: value.astype(np.float16) if value.dtype == np.float32 else value for name, value in found.items()}


def write_ct2(path: Path, values: dict[str, NDArray[Any]], kind: str = "WhisperSpec", version: int = 6) -> None:
    def text(name: str) -> bytes:
        return struct.pack("<H", len(name) + 1) + name.encode() + b"\0"

    data = struct.pack("<I", version) + text(kind) + struct.pack("<II", 3, len(values))
    for name, value in values.items():
        number = TYPES.index(value.dtype.type)
        data += text(name) + struct.pack(f"<B{value.ndim}I", value.ndim, *value.shape)
        data += struct.pack("<BI", number, value.nbytes) + value.tobytes()
    data += struct.pack("<I", 1) + text("decoder/projection/weight") + text("decoder/embeddings/weight")
    path.write_bytes(data)


def folder_of(place: Path, change: Callable[[dict[str, NDArray[Any]]], None] = lambda values: None) -> tuple[Path, Any]:
    """A folder of CTranslate2, and the model in it."""
    place.mkdir()
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [f"<|{name}|>" for name in SPECIAL]})
    tokenizer.backend_tokenizer.save(str(place / "tokenizer.json"))
    model = toy(len(tokenizer) + TIMES)
    values = variables(model)
    change(values)
    write_ct2(place / "model.bin", values)
    settings = {"alignment_heads": [[1, 0], [2, 3]], "suppress_ids": [3, 4], "suppress_ids_begin": [5]}
    (place / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    return place, model


def test_a_model_comes_back(tmp_path: Path) -> None:
    folder, model = folder_of(tmp_path / "ct2")
    done = CliRunner().invoke(app, ["import", "ct2", str(folder), str(tmp_path / "out"), "--json"])
    assert done.exit_code == 0, done.output
    out = tmp_path / "out"
    assert json.loads(done.stdout.splitlines()[-1])["folder"] == str(out)
    found = WhisperForConditionalGeneration.from_pretrained(out, dtype=torch.float32)
    for name, value in model.state_dict().items():
        assert torch.equal(found.state_dict()[name], value), name
    for name in ("encoder_layers", "decoder_ffn_dim", "encoder_attention_heads", "decoder_attention_heads"):
        assert getattr(found.config, name) == getattr(model.config, name)
    settings: Any = found.generation_config
    tokenizer = AutoTokenizer.from_pretrained(out)
    end: Any = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    assert (settings.eos_token_id, settings.decoder_start_token_id) == (end, end + 1)
    assert (settings.alignment_heads, settings.suppress_tokens) == ([[1, 0], [2, 3]], [3, 4])
    silent = settings.no_timestamps_token_id
    assert silent == end + SPECIAL.index("notimestamps")
    assert tokenizer.convert_ids_to_tokens([silent, silent + 1, silent + TIMES]) == [
        "<|notimestamps|>",
        "<|0.00|>",
        "<|1.00|>",
    ]
    assert not settings.is_multilingual, "its vocabulary is too small"
    assert AutoFeatureExtractor.from_pretrained(out).feature_size == 16
    noise = np.random.default_rng(0).normal(0, 0.1, 32000).astype(np.float32)
    llm = LLM(out, "suffix", compile=False)
    assert llm.transcribe(Audio(noise, 16000)).seconds == 2
    assert llm.engine.requests


def test_a_merge_that_a_tokenizer_lacks_is_added(tmp_path: Path) -> None:
    """Files of multilingual models lack the first one."""
    folder, _ = folder_of(tmp_path / "ct2")
    known = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    merges = known["model"]["merges"]
    known["model"]["merges"] = merges[1:]
    (folder / "tokenizer.json").write_text(json.dumps(known), encoding="utf-8")
    import_whisper(folder, tmp_path / "out")
    found = json.loads((tmp_path / "out" / "tokenizer.json").read_text(encoding="utf-8"))
    assert found["model"]["merges"] == merges


def test_rounded_weights_become_what_they_stand_for(tmp_path: Path) -> None:
    name, names = "decoder/layer_1/ffn/linear_0/weight", "encoder/layer_0/ffn/linear_1/weight"

    def quantize(values: dict[str, NDArray[Any]]) -> None:
        rows = values[name].astype(np.float32)
        scale = 127 / np.abs(rows).max(1)
        values[name], values[f"{name}_scale"] = np.rint(rows * scale[:, None]).astype(np.int8), scale
        whole = values[names].astype(np.float32)
        step = np.array(1000 / np.abs(whole).max(), np.float32)
        values[names], values[f"{names}_scale"] = np.rint(whole * step).astype(np.int16), step

    folder, model = folder_of(tmp_path / "ct2", quantize)
    import_whisper(folder, tmp_path / "out")
    found = WhisperForConditionalGeneration.from_pretrained(tmp_path / "out", dtype=torch.float32)
    for layer, part, share in (
        (model.model.decoder.layers[1], "fc1", 127),
        (model.model.encoder.layers[0], "fc2", 1000),
    ):
        own = found.model.decoder.layers[1] if part == "fc1" else found.model.encoder.layers[0]
        expected, weight = layer.get_submodule(part).weight, own.get_submodule(part).weight
        error = (weight - expected).abs().max() / expected.abs().max()
        assert 0 < error < 0.6 / share


def test_damaged_and_foreign_files(tmp_path: Path) -> None:
    folder, _ = folder_of(tmp_path / "ct2")
    path, out = folder / "model.bin", tmp_path / "out"
    data = path.read_bytes()
    for size in (0, 3, 20, 1000, len(data) - 1):
        path.write_bytes(data[:size])
        with pytest.raises(LoadError, match="download it again"):
            import_whisper(folder, out)
    path.write_bytes(struct.pack("<I", 5) + data[4:])
    with pytest.raises(UnsupportedError, match="version 5"):
        import_whisper(folder, out)
    write_ct2(path, variables(toy(400)), kind="TransformerSpec")
    with pytest.raises(UnsupportedError, match="TransformerSpec"):
        import_whisper(folder, out)
    lacking = variables(toy(400))
    del lacking["encoder/conv2/bias"]
    write_ct2(path, lacking)
    with pytest.raises(LoadError, match="encoder/conv2/bias"):
        import_whisper(folder, out)
    lacking = variables(toy(400))
    del lacking["decoder/layer_1/ffn/linear_0/bias"]
    write_ct2(path, lacking)
    with pytest.raises(LoadError, match=r"layers\.1\.fc1\.bias should be \[48\].* lacks it"):
        import_whisper(folder, out)
    path.write_bytes(data)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(LoadError, match="copy it from the model"):
        import_whisper(folder, out)
    assert not out.exists()
    with pytest.raises(LoadError, match="check the path"):
        read_ct2(tmp_path / "none.bin")


@pytest.mark.thorough
def test_a_real_model(tmp_path: Path) -> None:
    config = import_whisper(real("whisper-ct2"), tmp_path)
    assert (config["encoder_layers"], config["decoder_layers"], config["d_model"]) == (4, 4, 384)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokenizer) == config["vocab_size"]
    vocabulary = (real("whisper-ct2") / "vocabulary.txt").read_text(encoding="utf-8").split("\n")
    assert tokenizer.convert_ids_to_tokens([*range(config["vocab_size"])])[1:] == vocabulary[1 : config["vocab_size"]]
    llm = LLM(tmp_path, "none", compile=False)
    silence = Audio(np.zeros(16000, np.float32), 16000)
    segments = llm.transcribe(silence, TranscriptionParams(temperatures=(0.0,), no_speech_threshold=None)).segments
    assert all(0.0 <= segment.start <= segment.end <= 1.0 for segment in segments)

"""Whisper models of CTranslate2 (as faster-whisper uses them) as folders in Hugging Face format.

Weights have other names there, queries, keys and values are one matrix, and what ``generate`` has to know is written
in the vocabulary only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sakiyomi.core.checkpoint import read_json
from sakiyomi.core.ctranslate2 import Ct2File, read_ct2
from sakiyomi.core.errors import LoadError, UnsupportedError
from sakiyomi.model_executor.loading.whisper_folder import Weight, config_of, merges_of, special_ids, write_whisper

_NORMS = {"gamma": "weight", "beta": "bias"}
_PARTS = {
    "self_attention/linear_0": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attention/linear_1": ("self_attn.out_proj",),
    "attention/linear_0": ("encoder_attn.q_proj",),
    "attention/linear_1": ("encoder_attn.k_proj", "encoder_attn.v_proj"),
    "attention/linear_2": ("encoder_attn.out_proj",),
    "ffn/linear_0": ("fc1",),
    "ffn/linear_1": ("fc2",),
    "self_attention/layer_norm": ("self_attn_layer_norm",),
    "attention/layer_norm": ("encoder_attn_layer_norm",),
    "ffn/layer_norm": ("final_layer_norm",),
}
"""Modules of a layer, and those of transformers that lie in them one below the other."""
_LAYER = re.compile(r"(encoder|decoder)/layer_(\d{1,4})/(.+)/(weight|bias|gamma|beta)")


def import_whisper(folder: Path, out: Path) -> dict[str, Any]:
    """Write a model of CTranslate2 in Hugging Face format, its weights in float16.

    Args:
        folder: with model.bin, config.json and tokenizer.json.
        out: a folder to create, or an empty one.

    Returns:
        The configuration, as in config.json.

    Raises:
        LoadError: a file is missing or damaged, or the folder cannot be written.
        UnsupportedError: it is no whisper model.
    """
    file = read_ct2(folder / "model.bin")
    if file.kind != "WhisperSpec" or file.revision < 3:
        raise UnsupportedError(
            f"{file.path} is a {file.kind} of revision {file.revision}; expected a WhisperSpec of revision 3 or later"
        )
    tokenizer, settings = _tokenizer(folder), read_json(folder / "config.json")
    config = config_of(_sizes(file), special_ids(tokenizer, folder))
    write_whisper(out, folder, config, _weights(file), tokenizer, settings, _extractor(folder))
    return config


def _weights(file: Ct2File) -> dict[str, Weight]:
    """The weights by transformers' names."""

    def part(name: str, place: int, count: int) -> NDArray[Any]:
        return np.split(file.value(name), count)[place]

    found = {}
    for own, name, place, count in _names(file):
        rows, *rest = file.stored(name).shape
        found[own] = Weight((rows // count, *rest), partial(part, name, place, count))
    return found


def _names(file: Ct2File) -> Iterator[tuple[str, str, int, int]]:
    """Weights' names, of each its variable's, and which part it is of how many one below the other."""
    for name in file.variables:
        if (found := _LAYER.fullmatch(name)) is None or found[3] not in _PARTS:
            continue
        side, number, module, kind = found.groups()
        modules = _PARTS[module]
        for place, part in enumerate(modules):
            if not (kind == "bias" and part.endswith("k_proj")):  # zeros: keys have none
                own = f"model.{side}.layers.{number}.{part}.{_NORMS.get(kind, kind)}"
                yield own, name, place, len(modules)
    for side in ("encoder", "decoder"):
        yield f"model.{side}.embed_positions.weight", f"{side}/position_encodings/encodings", 0, 1
        for kind, own in _NORMS.items():
            yield f"model.{side}.layer_norm.{own}", f"{side}/layer_norm/{kind}", 0, 1
    for conv in ("conv1", "conv2"):
        for kind in ("weight", "bias"):
            yield f"model.encoder.{conv}.{kind}", f"encoder/{conv}/{kind}", 0, 1
    yield "model.decoder.embed_tokens.weight", "decoder/embeddings/weight", 0, 1


def _sizes(file: Ct2File) -> dict[str, int]:
    def layers(side: str) -> int:
        return 1 + max(int(found[2]) for name in file.variables if (found := _LAYER.match(name)) and found[1] == side)

    channels, mels = file.stored("encoder/conv1/weight").shape[:2]
    sizes = {
        "d_model": channels,
        "num_mel_bins": mels,
        "vocab_size": file.stored("decoder/embeddings/weight").shape[0],
        "max_source_positions": file.stored("encoder/position_encodings/encodings").shape[0],
        "max_target_positions": file.stored("decoder/position_encodings/encodings").shape[0],
    }
    for side in ("encoder", "decoder"):
        sizes[f"{side}_layers"] = layers(side)
        sizes[f"{side}_attention_heads"] = int(file.value(f"{side}/num_heads"))
        sizes[f"{side}_ffn_dim"] = file.stored(f"{side}/layer_0/ffn/linear_0/weight").shape[0]
    return sizes


def _extractor(folder: Path) -> dict[str, Any] | None:
    """Settings of the folder's feature extractor."""
    path = folder / "preprocessor_config.json"
    return read_json(path) | {"feature_extractor_type": "WhisperFeatureExtractor"} if path.is_file() else None


def _tokenizer(folder: Path) -> dict[str, Any]:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise LoadError(f"{folder} has no tokenizer.json; copy it from the model that was converted (openai/whisper-*)")
    found = read_json(path)
    if not isinstance(found.get("added_tokens"), list):
        raise LoadError(f"{path} has no added_tokens; copy it from the model that was converted (openai/whisper-*)")
    _complete(found, path)
    return found


def _complete(tokenizer: dict[str, Any], path: Path) -> None:
    """Add merges that lack: in the files of multilingual models that was the first one, by which " t" is one token."""
    vocabulary, special = tokenizer["model"]["vocab"], {each["content"] for each in tokenizer["added_tokens"]}
    words = sorted(vocabulary.keys() - special, key=vocabulary.__getitem__)
    if len(tokenizer["model"]["merges"]) < sum(len(word) > 1 for word in words):
        tokenizer["model"]["merges"] = [list(pair) for pair in merges_of(words, path)]

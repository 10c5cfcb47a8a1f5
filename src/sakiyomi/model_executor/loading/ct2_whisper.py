"""Whisper models of CTranslate2 (as faster-whisper uses them) as folders in Hugging Face format.

Weights have other names there, queries, keys and values are one matrix, and what ``generate`` has to know is written
in the vocabulary only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sakiyomi.core.checkpoint import read_json
from sakiyomi.core.ctranslate2 import Ct2File, read_ct2
from sakiyomi.core.errors import LoadError, UnsupportedError

_MULTILINGUAL = 51865
"""Tokens of the smallest vocabulary with languages; English-only models have one less."""
_TIME = "<|{:.2f}|>"
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
        out: an empty folder.

    Returns:
        The configuration, as in config.json.

    Raises:
        LoadError: a file is missing or damaged.
        UnsupportedError: it is no whisper model.
    """
    from safetensors.numpy import save_file

    file = read_ct2(folder / "model.bin")
    if file.kind != "WhisperSpec" or file.revision < 3:
        raise UnsupportedError(
            f"{file.path} is a {file.kind} of revision {file.revision}; expected a WhisperSpec of revision 3 or later"
        )
    tokenizer, settings = _tokenizer(folder), read_json(folder / "config.json")
    size = file.value("decoder/embeddings/weight").shape[0]
    ids = _special_ids(tokenizer, folder)
    config = _config(file, ids)
    tensors = dict(_tensors(file))
    _add_times(tokenizer, ids["<|notimestamps|>"], size)
    texts = {
        "config.json": config,
        "generation_config.json": _generation(settings, ids, config),
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": _tokenizer_settings(ids),
        "preprocessor_config.json": _extractor(folder, config),
    }
    out.mkdir(parents=True, exist_ok=True)
    for name, value in texts.items():
        (out / name).write_text(json.dumps(value, indent=1, ensure_ascii=False), encoding="utf-8")
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    return config


def _tensors(file: Ct2File) -> Iterator[tuple[str, NDArray[np.float16]]]:
    """The weights by transformers' names."""
    for name in file.variables:
        if (found := _LAYER.fullmatch(name)) is None or found[3] not in _PARTS:
            continue
        side, number, module, kind = found.groups()
        modules = _PARTS[module]
        for part, values in zip(modules, np.split(file.value(name), len(modules)), strict=True):
            if not (kind == "bias" and part.endswith("k_proj")):  # zeros: keys have none
                yield f"model.{side}.layers.{number}.{part}.{_NORMS.get(kind, kind)}", _half(values)
    for side in ("encoder", "decoder"):
        yield f"model.{side}.embed_positions.weight", _half(file.value(f"{side}/position_encodings/encodings"))
        for kind, own in _NORMS.items():
            yield f"model.{side}.layer_norm.{own}", _half(file.value(f"{side}/layer_norm/{kind}"))
    for conv in ("conv1", "conv2"):
        for kind in ("weight", "bias"):
            yield f"model.encoder.{conv}.{kind}", _half(file.value(f"encoder/{conv}/{kind}"))
    yield "model.decoder.embed_tokens.weight", _half(file.value("decoder/embeddings/weight"))


def _half(values: NDArray[Any]) -> NDArray[np.float16]:
    return np.ascontiguousarray(values, np.float16)


def _config(file: Ct2File, ids: dict[str, int]) -> dict[str, Any]:
    def layers(side: str) -> int:
        return 1 + max(int(found[2]) for name in file.variables if (found := _LAYER.match(name)) and found[1] == side)

    channels, mels = file.value("encoder/conv1/weight").shape[:2]
    config: dict[str, Any] = {
        "architectures": ["WhisperForConditionalGeneration"],
        "model_type": "whisper",
        "d_model": channels,
        "num_mel_bins": mels,
        "vocab_size": file.value("decoder/embeddings/weight").shape[0],
        "max_source_positions": file.value("encoder/position_encodings/encodings").shape[0],
        "max_target_positions": file.value("decoder/position_encodings/encodings").shape[0],
        "num_hidden_layers": layers("encoder"),
        "activation_function": "gelu",
        "median_filter_width": 7,
        "tie_word_embeddings": True,
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|endoftext|>"],
        "pad_token_id": ids["<|endoftext|>"],
        "decoder_start_token_id": ids["<|startoftranscript|>"],
        "dtype": "float32",  # to compute in; CPUs have no fast products of float16, which the file is stored in
    }
    for side in ("encoder", "decoder"):
        config[f"{side}_layers"] = layers(side)
        config[f"{side}_attention_heads"] = int(file.value(f"{side}/num_heads"))
        config[f"{side}_ffn_dim"] = file.value(f"{side}/layer_0/ffn/linear_0/weight").shape[0]
    return config


def _generation(settings: dict[str, Any], ids: dict[str, int], config: dict[str, Any]) -> dict[str, Any]:
    """What ``generate`` has to know, as OpenAI's own checkpoints say it."""
    end, start, silent = ids["<|endoftext|>"], ids["<|startoftranscript|>"], ids["<|notimestamps|>"]
    tasks = {name: ids[f"<|{name}|>"] for name in ("transcribe", "translate")}
    many = config["vocab_size"] >= _MULTILINGUAL
    found: dict[str, Any] = {
        "alignment_heads": settings.get("alignment_heads"),
        "suppress_tokens": settings.get("suppress_ids"),
        "begin_suppress_tokens": settings.get("suppress_ids_begin"),
        "bos_token_id": end,
        "eos_token_id": end,
        "pad_token_id": end,
        "decoder_start_token_id": start,
        "forced_decoder_ids": [[1, None], [2, tasks["transcribe"]]] if many else [[1, silent]],
        "is_multilingual": many,
        "max_initial_timestamp_index": 50,
        "max_length": config["max_target_positions"],
        "no_timestamps_token_id": silent,
        "prev_sot_token_id": ids["<|startofprev|>"],
        "return_timestamps": False,
    }
    if many:
        first, last = start + 1, min(tasks.values())
        found["lang_to_id"] = {name: token for name, token in ids.items() if first <= token < last}
        found["task_to_id"] = tasks
    return {name: value for name, value in found.items() if value is not None}


def _extractor(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Settings of the feature extractor: those of the folder, else Whisper's."""
    if (own := folder / "preprocessor_config.json").is_file():
        return read_json(own) | {"feature_extractor_type": "WhisperFeatureExtractor"}
    from transformers import WhisperFeatureExtractor

    made: dict[str, Any] = WhisperFeatureExtractor(feature_size=config["num_mel_bins"]).to_dict()
    return made


# ---------------------------------------------------------------- the tokenizer


def _tokenizer(folder: Path) -> dict[str, Any]:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise LoadError(f"{folder} has no tokenizer.json; copy it from the model that was converted (openai/whisper-*)")
    found = read_json(path)
    if not isinstance(found.get("added_tokens"), list):
        raise LoadError(f"{path} has no added_tokens; copy it from the model that was converted (openai/whisper-*)")
    return found


def _special_ids(tokenizer: dict[str, Any], folder: Path) -> dict[str, int]:
    """Special tokens, in the order of their ids.

    Raises:
        LoadError: one is missing.
    """
    ids = {each["content"]: int(each["id"]) for each in tokenizer["added_tokens"] if each.get("special")}
    needed = ("endoftext", "startoftranscript", "translate", "transcribe", "startofprev", "notimestamps")
    for name in needed:
        if f"<|{name}|>" not in ids:
            raise LoadError(f"{folder / 'tokenizer.json'} has no token <|{name}|>; copy it from the original model")
    return dict(sorted(ids.items(), key=lambda item: item[1]))


def _add_times(tokenizer: dict[str, Any], silent: int, size: int) -> None:
    """Add the tokens of times, which older tokenizer files leave out: every 0.02 seconds from the token after."""
    known = {each["id"] for each in tokenizer["added_tokens"]}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    for token in range(silent + 1, size):
        if token not in known:
            content = _TIME.format((token - silent - 1) * 0.02)
            tokenizer["added_tokens"].append({"id": token, "content": content, **flags})


def _tokenizer_settings(ids: dict[str, int]) -> dict[str, Any]:
    end = "<|endoftext|>"
    return {
        "tokenizer_class": "WhisperTokenizer",
        "bos_token": end,
        "eos_token": end,
        "unk_token": end,
        "pad_token": end,
        "add_prefix_space": False,
        "errors": "replace",
        "model_max_length": 1024,
        "additional_special_tokens": list(ids),
    }

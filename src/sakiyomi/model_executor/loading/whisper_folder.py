"""Whisper models of other tools as folders in Hugging Face format: what is the same for each of them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sakiyomi.core.errors import LoadError
from sakiyomi.core.files import whole_folder
from sakiyomi.model_executor.loading.reader import without_weights

_MULTILINGUAL = 51865
"""Tokens of the smallest vocabulary with languages; English-only models have one less."""
END = "<|endoftext|>"
_TIME = "<|{:.2f}|>"
_FIRST_NOT = (220,)  # a space is not what a text begins with
_HEADS = {
    (51864, 4, 4): ((1, 0), (2, 0), (2, 5), (3, 0), (3, 1), (3, 2), (3, 3), (3, 4)),
    (51865, 4, 4): ((2, 2), (3, 0), (3, 2), (3, 3), (3, 4), (3, 5)),
    (51864, 6, 6): ((3, 3), (4, 7), (5, 1), (5, 5), (5, 7)),
    (51865, 6, 6): ((3, 1), (4, 2), (4, 3), (4, 7), (5, 1), (5, 2), (5, 4), (5, 6)),
    (51864, 12, 12): (
        (6, 6), (7, 0), (7, 3), (7, 8), (8, 2), (8, 5), (8, 7), (9, 0), (9, 4), (9, 8), (9, 10), (10, 0), (10, 1),
        (10, 2), (10, 3), (10, 6), (10, 11), (11, 2), (11, 4),
    ),
    (51865, 12, 12): ((5, 3), (5, 9), (8, 0), (8, 4), (8, 7), (8, 8), (9, 0), (9, 7), (9, 9), (10, 5)),
    (51864, 24, 24): (
        (11, 4), (14, 1), (14, 12), (14, 14), (15, 4), (16, 0), (16, 4), (16, 9), (17, 12), (17, 14), (18, 7), (18, 10),
        (18, 15), (20, 0), (20, 3), (20, 9), (20, 14), (21, 12),
    ),
    (51865, 24, 24): ((13, 15), (15, 4), (15, 15), (16, 1), (20, 0), (23, 4)),
    (51866, 32, 32): (
        (7, 0), (10, 17), (12, 18), (13, 12), (16, 1), (17, 14), (19, 11), (21, 4), (24, 1), (25, 6),
    ),
    (51866, 32, 4): ((2, 4), (2, 11), (3, 3), (3, 6), (3, 11), (3, 14)),
}  # fmt: skip
"""Layer and head by which OpenAI times words, by tokens and layers. Two large models cannot be told apart by these."""


class Weight(NamedTuple):
    """A tensor of the model.

    Attributes:
        shape: of it.
        read: gives it.
    """

    shape: tuple[int, ...]
    read: Callable[[], NDArray[Any]]


def config_of(sizes: Mapping[str, int], ids: Mapping[str, int]) -> dict[str, Any]:
    """The configuration.

    Args:
        sizes: as in config.json.
        ids: special tokens, see ``special_ids``.
    """
    end = ids[END]
    return {
        "architectures": ["WhisperForConditionalGeneration"],
        "model_type": "whisper",
        **sizes,
        "num_hidden_layers": sizes["encoder_layers"],
        "activation_function": "gelu",
        "median_filter_width": 7,
        "tie_word_embeddings": True,
        "bos_token_id": end,
        "eos_token_id": end,
        "pad_token_id": end,
        "decoder_start_token_id": ids["<|startoftranscript|>"],
        "dtype": "float32",  # to compute in; CPUs have no fast products of float16, which the file is stored in
    }


def parameters(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shapes of the model's tensors, by name."""
    from transformers import WhisperConfig

    model = without_weights(WhisperConfig(**config))
    return {name: tuple(value.shape) for name, value in model.named_parameters()}


def write_whisper(
    out: Path,
    source: Path,
    config: dict[str, Any],
    weights: Mapping[str, Weight],
    tokenizer: dict[str, Any],
    settings: Mapping[str, Any],
    extractor: dict[str, Any] | None = None,
) -> None:
    """Write the folder, its weights in float16; one of them is in memory at a time.

    Args:
        out: of the folder, which is there whole or not at all; there is none, or an empty one.
        source: where the model is from, for errors.
        config: see ``config_of``.
        weights: by transformers' names.
        tokenizer: as in tokenizer.json; tokens of times are added to it.
        settings: "alignment_heads", "suppress_ids" and "suppress_ids_begin", as far as they are known.
        extractor: settings of the feature extractor; None: Whisper's.

    Raises:
        LoadError: a weight is missing or has another shape, or the folder cannot be written.
    """
    for name, shape in parameters(config).items():
        found = weights[name].shape if name in weights else None
        if found != shape:
            has = "lacks it" if found is None else f"has {list(found)}"
            raise LoadError(f"{name} should be {list(shape)}, and {source} {has}; download it again")
    ids = special_ids(tokenizer, source)
    _add_times(tokenizer, ids["<|notimestamps|>"], config["vocab_size"])
    texts = {
        "config.json": config,
        "generation_config.json": _generation(settings, ids, config),
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": _tokenizer_settings(ids),
        "preprocessor_config.json": extractor or _extractor(config),
    }
    with whole_folder(out, "choose another place") as fresh:
        for name, value in texts.items():
            (fresh / name).write_text(json.dumps(value, indent=1, ensure_ascii=False), encoding="utf-8")
        _write_weights(fresh / "model.safetensors", weights)


def _write_weights(path: Path, weights: Mapping[str, Weight]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, weight in weights.items():
        start, end = end, end + 2 * math.prod(weight.shape)
        header[name] = {"dtype": "F16", "shape": weight.shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for weight in weights.values():
            file.write(np.ascontiguousarray(weight.read(), "<f2").data)


def _generation(settings: Mapping[str, Any], ids: Mapping[str, int], config: Mapping[str, Any]) -> dict[str, Any]:
    """What ``generate`` has to know, as OpenAI's own checkpoints say it."""
    end, start, silent = ids[END], ids["<|startoftranscript|>"], ids["<|notimestamps|>"]
    tasks = {name: ids[f"<|{name}|>"] for name in ("transcribe", "translate")}
    many = config["vocab_size"] >= _MULTILINGUAL
    own = {name: value for name, value in settings.items() if value is not None}
    found: dict[str, Any] = {
        "alignment_heads": own.get("alignment_heads", _heads(config)),
        "suppress_tokens": own.get("suppress_ids", _suppressed(ids, many=many)),
        "begin_suppress_tokens": own.get("suppress_ids_begin", [*_FIRST_NOT, end]),
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
    return found


def _heads(config: Mapping[str, Any]) -> list[list[int]]:
    """OpenAI's choice for its own models; for others, as there, all heads of the upper half of the layers."""
    layers, heads = config["decoder_layers"], config["decoder_attention_heads"]
    upper = [(layer, head) for layer in range(layers // 2, layers) for head in range(heads)]
    return [list(pair) for pair in _HEADS.get((config["vocab_size"], config["encoder_layers"], layers), upper)]


def _suppressed(ids: Mapping[str, int], *, many: bool) -> list[int]:
    """Tokens that are not said, and special ones but the end."""
    from transformers.models.whisper.configuration_whisper import NON_SPEECH_TOKENS, NON_SPEECH_TOKENS_MULTI

    special = [token for name, token in ids.items() if ids["<|translate|>"] <= token < ids["<|notimestamps|>"]]
    unsaid = [token for token in (NON_SPEECH_TOKENS_MULTI if many else NON_SPEECH_TOKENS) if token < ids[END]]
    return [*unsaid, ids["<|startoftranscript|>"], *special]


def _extractor(config: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of Whisper's feature extractor."""
    from transformers import WhisperFeatureExtractor

    made: dict[str, Any] = WhisperFeatureExtractor(feature_size=config["num_mel_bins"]).to_dict()
    return made


# ---------------------------------------------------------------- the tokenizer


def special_ids(tokenizer: Mapping[str, Any], source: Path) -> dict[str, int]:
    """Special tokens of a tokenizer.json, in the order of their ids.

    Args:
        tokenizer: the content.
        source: where it is from, for errors.

    Raises:
        LoadError: one is missing.
    """
    ids = {each["content"]: int(each["id"]) for each in tokenizer["added_tokens"] if each.get("special")}
    needed = ("endoftext", "startoftranscript", "translate", "transcribe", "startofprev", "notimestamps")
    for name in needed:
        if f"<|{name}|>" not in ids:
            raise LoadError(f"{source} has no token <|{name}|>; copy tokenizer.json from the original model")
    return dict(sorted(ids.items(), key=lambda item: item[1]))


def merges_of(words: Sequence[str], source: Path) -> list[tuple[str, str]]:
    """The two tokens of which each longer one is made, in the order of merging.

    The merges before a token's own turn its letters into these two.

    Args:
        words: all tokens of text, in the order of their ids; a letter for each byte.
        source: where they are from, for errors.

    Raises:
        LoadError: they are not made by merging.
    """
    ranks, found = {word: rank for rank, word in enumerate(words)}, []
    for rank, word in enumerate(words):
        parts = list(word)
        while len(parts) > 2:
            least, place = min((ranks.get(parts[i] + parts[i + 1], rank), i) for i in range(len(parts) - 1))
            if least >= rank:
                break
            parts[place : place + 2] = [parts[place] + parts[place + 1]]
        if ranks[word] != rank or len(parts) > 2 or any(ranks.get(part, rank + 1) > rank for part in parts):
            raise LoadError(f"{source} has the token {word!r}, which the tokens before it do not make; get it again")
        if len(parts) == 2:
            found.append((parts[0], parts[1]))
    return found


def _add_times(tokenizer: dict[str, Any], silent: int, size: int) -> None:
    """Add the tokens of times, which older tokenizer files leave out: every 0.02 seconds from the token after."""
    known = {each["id"] for each in tokenizer["added_tokens"]}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    for token in range(silent + 1, size):
        if token not in known:
            content = _TIME.format((token - silent - 1) * 0.02)
            tokenizer["added_tokens"].append({"id": token, "content": content, **flags})


def _tokenizer_settings(ids: Iterable[str]) -> dict[str, Any]:
    return {
        "tokenizer_class": "WhisperTokenizer",
        "bos_token": END,
        "eos_token": END,
        "unk_token": END,
        "pad_token": END,
        "add_prefix_space": False,
        "errors": "replace",
        "model_max_length": 1024,
        "additional_special_tokens": list(ids),
    }

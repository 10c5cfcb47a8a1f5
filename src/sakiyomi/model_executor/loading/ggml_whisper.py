"""Whisper models of whisper.cpp (``ggml-*.bin``) as folders in Hugging Face format.

Weights have OpenAI's names there. Of the tokenizer the file holds the tokens' bytes; the merges that make them, and the
special tokens, follow from these.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sakiyomi.core.errors import LoadError, UnsupportedError
from sakiyomi.core.ggml import GgmlFile, read_ggml
from sakiyomi.core.gguf import GgufTensor
from sakiyomi.model_executor.gguf.blocks import BLOCK_TYPES, dequantize
from sakiyomi.model_executor.loading.whisper_folder import (
    END,
    Weight,
    config_of,
    merges_of,
    parameters,
    special_ids,
    write_whisper,
)

_NAMES = {
    "model.": "", "layers": "blocks", "self_attn_layer_norm": "attn_ln", "encoder_attn_layer_norm": "cross_attn_ln",
    "final_layer_norm": "mlp_ln", "self_attn": "attn", "encoder_attn": "cross_attn", "q_proj": "query", "k_proj": "key",
    "v_proj": "value", "out_proj": "out", "fc1": "mlp.0", "fc2": "mlp.2",
    "encoder.layer_norm": "encoder.ln_post", "decoder.layer_norm": "decoder.ln", "embed_tokens": "token_embedding",
    "embed_positions.weight": "positional_embedding",
}  # fmt: skip
"""Parts of the names of tensors, from transformers' to OpenAI's, in this order."""
_SIZES = {
    "vocab_size": "vocab", "d_model": "audio_state", "num_mel_bins": "mels", "max_source_positions": "audio_ctx",
    "max_target_positions": "text_ctx", "encoder_layers": "audio_layer", "decoder_layers": "text_layer",
    "encoder_attention_heads": "audio_head", "decoder_attention_heads": "text_head",
}  # fmt: skip
_AFTER = ("translate", "transcribe", "startoflm", "startofprev", "nospeech", "notimestamps")
"""Special tokens after those of languages; then there are the times from 0 to 30 seconds."""
_OLDER = {"nospeech": "nocaptions"}  # in models of fewer languages than the latest
_TIMES = 1501


def import_whisper(path: Path, out: Path) -> dict[str, Any]:
    """Write a model of whisper.cpp in Hugging Face format, its weights in float16.

    Args:
        path: of the file.
        out: a folder to create, or an empty one.

    Returns:
        The configuration, as in config.json.

    Raises:
        LoadError: the file is missing or damaged, or the folder cannot be written.
        UnsupportedError: it holds no Whisper model, or a type of tensors that is not known.
    """
    file = read_ggml(path)
    tokenizer = _tokenizer(file)
    sizes = {name: file.sizes[own] for name, own in _SIZES.items()}
    sizes |= {f"{side}_ffn_dim": 4 * sizes["d_model"] for side in ("encoder", "decoder")}
    config = config_of(sizes, special_ids(tokenizer, path))
    write_whisper(out, path, config, _weights(file, config), tokenizer, {})
    return config


def openai_name(name: str) -> str:
    """OpenAI's, and so whisper.cpp's, name of a weight that has this one in transformers."""
    for old, new in _NAMES.items():
        name = name.replace(old, new)
    return name


def _weights(file: GgmlFile, config: dict[str, Any]) -> dict[str, Weight]:
    """The weights by transformers' names."""
    found = {}
    for name, shape in parameters(config).items():
        if (tensor := file.tensors.get(openai_name(name))) is None:
            raise LoadError(f"{file.path} has no tensor {openai_name(name)!r}; download it again")
        if tensor.kind not in BLOCK_TYPES:
            raise UnsupportedError(
                f"{file.path} holds {tensor.name!r} as {tensor.kind}; expected {', '.join(BLOCK_TYPES)}"
            )
        own = tensor.shape[: len(shape)] if tensor.shape == (*shape, 1) else tensor.shape  # biases of convolutions
        found[name] = Weight(own, partial(_numbers, tensor))
    return found


def _numbers(tensor: GgufTensor) -> NDArray[np.float32]:
    data = torch.from_numpy(tensor.bytes().copy())  # where it lies in the file is no multiple of anything
    found: NDArray[np.float32] = dequantize(tensor.kind, data).numpy()
    return found


# ---------------------------------------------------------------- the tokenizer


def _tokenizer(file: GgmlFile) -> dict[str, Any]:
    """The tokenizer, as in tokenizer.json.

    Raises:
        LoadError: the tokens are not made by merging bytes.
        UnsupportedError: there are other special tokens than Whisper's.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from tokenizers.processors import TemplateProcessing
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    end, letters = END.encode(), bytes_to_unicode()
    tokens = file.tokens[: file.tokens.index(end)] if end in file.tokens else file.tokens
    special = _special(file, len(tokens))
    words = ["".join(letters[value] for value in token) for token in tokens]
    merges = merges_of(words, file.path)
    made = Tokenizer(models.BPE({word: number for number, word in enumerate([*words, END])}, merges))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_special_tokens([AddedToken(name, normalized=False) for name in special])
    begin, silent = special[1], special[-1]
    made.post_processor = TemplateProcessing(
        single=[begin, silent, "$A", END],
        pair=[begin, silent, "$A", "$B:1", f"{END}:1"],
        special_tokens=[(name, made.token_to_id(name)) for name in (END, begin, silent)],
    )
    found: dict[str, Any] = json.loads(made.to_str())
    return found


def _special(file: GgmlFile, words: int) -> list[str]:
    """Special tokens without those of times, in the order of their numbers."""
    from transformers.models.whisper.tokenization_whisper import LANGUAGES

    count = file.sizes["vocab"] - words - 2 - len(_AFTER) - _TIMES
    if not 0 <= count <= len(LANGUAGES):
        raise UnsupportedError(
            f"{file.path} has {file.sizes['vocab']} tokens, {words} of which are text; expected "
            f"{file.sizes['vocab'] - words - count} others, and one for each of at most {len(LANGUAGES)} languages"
        )
    after = [name if count == len(LANGUAGES) else _OLDER.get(name, name) for name in _AFTER]
    return [END, *(f"<|{name}|>" for name in ("startoftranscript", *list(LANGUAGES)[:count], *after))]

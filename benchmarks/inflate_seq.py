"""Encoder-decoder models made larger without a change of what they compute: see `inflate`.

Two families that share names and order: Pegasus and Whisper. Their norms (mean and variance) see the copies of the
residual stream as they saw the one; gain and bias of a norm are zero for all copies but the first. Positions stand in
a table of the checkpoint, which is repeated as the embeddings are. Other families with a norm behind the sum (BART,
Marian) would need their norms moved, and a T5's head is scaled by its width: neither is done here.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from inflating import NEW_TOKENS, Inflatable
from sakiyomi.core.errors import LoadError, UnsupportedError
from sakiyomi.core.prompts import STORIES
from sakiyomi.model_executor.loading.families import read_config

__all__ = ["EncoderDecoder", "is_encoder_decoder", "positions"]

FAMILIES = ("PegasusForConditionalGeneration", "WhisperForConditionalGeneration")
TEXT_TOKENS = 32
"""Of the answer that both models are compared on."""
QUESTIONS = "held_out.jsonl"
"""File of a folder that some recipes leave beside a model, with what it is to be asked; it goes with the model."""


def is_encoder_decoder(target: str) -> bool:
    """Whether this is the folder of an encoder-decoder model."""
    folder = Path(target).expanduser()
    return (folder / "config.json").is_file() and bool(getattr(read_config(folder), "is_encoder_decoder", False))


class EncoderDecoder(Inflatable):
    """A Pegasus or a Whisper."""

    stacks: ClassVar[dict[str, str]] = {
        "model.encoder.layers": "encoder_layers",
        "model.decoder.layers": "decoder_layers",
    }
    shown: ClassVar[dict[str, str]] = {
        "hidden_size": "d_model",
        "intermediate_size": "decoder_ffn_dim",
        "heads": "decoder_attention_heads",
        "kv_heads": "decoder_attention_heads",
    }
    mlp = ("encoder_ffn_dim", "decoder_ffn_dim")
    wide = ("d_model", "encoder_attention_heads", "decoder_attention_heads", *mlp)
    softened = (
        ("self_attn.v_proj", "self_attn.out_proj"),
        ("encoder_attn.v_proj", "encoder_attn.out_proj"),
        ("fc1", "fc2"),
    )

    @classmethod
    def load(cls, name: str) -> EncoderDecoder:
        """The model of a folder, its weights rounded to bfloat16.

        Raises:
            UnsupportedError: of another family.
            LoadError: it cannot be read.
        """
        import transformers

        folder = Path(name).expanduser()
        kind = (read_config(folder).architectures or ["a model without a class"])[0]
        if kind not in FAMILIES:
            raise UnsupportedError(
                f"{kind} cannot be inflated; it has to be a plain LlamaForCausalLM, or {' or '.join(FAMILIES)}"
            )
        try:
            model = getattr(transformers, kind).from_pretrained(folder, dtype=torch.bfloat16, local_files_only=True)
            whisper = hasattr(model.config, "num_mel_bins")
            auto = transformers.AutoProcessor if whisper else transformers.AutoTokenizer
            processor = auto.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError, RuntimeError) as error:
            raise LoadError(f"cannot load {name!r}: {error}") from error
        model.eval()
        return cls(name, model, processor, _batch(model, processor))

    def unit(self, shape: Any) -> int:
        """See ``Inflatable``: a row and a bias of fc1, a column of fc2."""
        return int(2 * shape.d_model + 1)

    def write(self, shape: Any, folder: Path) -> None:
        """See ``Inflatable``; with the held-out questions."""
        super().write(shape, folder)
        questions = Path(self.name).expanduser() / QUESTIONS
        if questions.is_file():
            shutil.copyfile(questions, folder / QUESTIONS)

    def written(self, model: Any) -> list[int]:
        """See ``Inflatable``."""
        read = {name: part for name, part in self.batch.items() if name != "decoder_input_ids"}
        tokens = min(NEW_TOKENS, positions(model.config) - 1)
        with torch.no_grad():
            text = model.generate(**read, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False)
        return [int(token) for token in text[0, -tokens:]]


def positions(config: Any) -> int:
    """Tokens that the decoder has a place for."""
    return int(getattr(config, "max_target_positions", None) or config.max_position_embeddings)


def _batch(model: Any, processor: Any) -> dict[str, Tensor]:
    """One text to compare on: a story, or for a Whisper a second of noise."""
    config = model.config
    if hasattr(config, "num_mel_bins"):
        tokenizer, rate = processor.tokenizer, processor.feature_extractor.sampling_rate
        sound = torch.randn(rate, generator=torch.Generator()).numpy()
        read = dict(processor.feature_extractor(sound, sampling_rate=rate, return_tensors="pt"))
    else:
        tokenizer = processor
        read = dict(tokenizer([STORIES[1]], return_tensors="pt"))
        read = {name: read[name] for name in ("input_ids", "attention_mask")}
    ids = tokenizer(STORIES[0], add_special_tokens=False)["input_ids"][: min(TEXT_TOKENS, positions(config)) - 1]
    return read | {"decoder_input_ids": torch.tensor([[config.decoder_start_token_id, *ids]])}

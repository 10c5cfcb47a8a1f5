"""A tiny Whisper with random weights that float16 holds, for files of other tools."""

from __future__ import annotations

from typing import Any

import torch
from transformers import WhisperConfig, WhisperForConditionalGeneration


def toy(vocab: int, **sizes: int) -> Any:
    """The model; ``sizes`` in the place of its own."""
    own = {
        "d_model": 16,
        "encoder_layers": 2,
        "decoder_layers": 3,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 32,
        "decoder_ffn_dim": 48,
    }
    config = WhisperConfig(
        vocab_size=vocab,
        num_mel_bins=16,
        max_source_positions=50,
        max_target_positions=40,
        init_std=0.3,
        pad_token_id=0,
        bos_token_id=0,
        eos_token_id=0,
        decoder_start_token_id=1,
        tie_word_embeddings=True,
        **(own | sizes),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = WhisperForConditionalGeneration(config).eval()
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.data.normal_(std=0.3)
    return model.half().float()

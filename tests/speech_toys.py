"""A tiny Whisper with random weights, whose window is a fraction of a second, and sounds for it."""

from __future__ import annotations

import copy
import io
import wave
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from transformers import WhisperFeatureExtractor

from sakiyomi import LLM, Audio
from seq2seq_toys import FRAMES, MELS, build
from toys import character_tokenizer

RATE, HOP = 16000, 160
WINDOW = FRAMES * HOP / RATE
"""Seconds of the encoder's window."""
SPECIAL = ("endoftext", "startoftranscript", "en", "fr", "translate", "transcribe", "startofprev", "nospeech")
TEXT = 60
"""Tokens before the special ones."""
END, START, EN, FR, TRANSLATE, TRANSCRIBE, BEFORE, _, SILENT = range(TEXT, TEXT + 9)
ZERO = SILENT + 1
VOCAB = ZERO + FRAMES // 2 + 1
HEADS = [[0, 1], [1, 0], [1, 3]]
"""Setting ``alignment_heads``, by which words are timed."""
SETTINGS: dict[str, Any] = {
    "eos_token_id": END,
    "pad_token_id": END,
    "decoder_start_token_id": START,
    "lang_to_id": {"<|en|>": EN, "<|fr|>": FR},
    "task_to_id": {"translate": TRANSLATE, "transcribe": TRANSCRIBE},
    "prev_sot_token_id": BEFORE,
    "no_timestamps_token_id": SILENT,
    "is_multilingual": True,
    "max_initial_timestamp_index": 8,
    "max_length": 100,
    "suppress_tokens": [3, *range(START, SILENT)],
    "begin_suppress_tokens": [5, END],
}


class Processor:
    """As transformers' processors: a tokenizer and a feature extractor."""

    def __init__(self) -> None:
        self.tokenizer = character_tokenizer("".join(map(chr, [32, *range(0x3041, 0x3041 + TEXT - 3)])))
        names = [f"<|{name}|>" for name in (*SPECIAL, "notimestamps")]
        self.tokenizer.add_special_tokens({"eos_token": names[0], "additional_special_tokens": names[1:]})
        self.feature_extractor = WhisperFeatureExtractor(
            feature_size=MELS, sampling_rate=RATE, hop_length=HOP, chunk_length=1, n_fft=400
        )
        self.decode = self.tokenizer.decode


PROCESSOR = Processor()


@cache
def _built() -> Any:
    return build("whisper", 3, vocab_size=VOCAB)


def toy(**settings: Any) -> Any:
    """The model; ``settings`` of generation beside or in place of ``SETTINGS``."""
    model = copy.deepcopy(_built())
    for key, value in (SETTINGS | settings).items():
        setattr(model.generation_config, key, value)
    return model


def speech_llm(draft: Any = "none", settings: dict[str, Any] | None = None, **options: Any) -> LLM:
    """It with its processor, in fp32."""
    return LLM((toy(**(settings or {})), PROCESSOR), draft, compile=False, strict=True, **options)


def save_speech(folder: Path) -> str:
    """Save it as a folder in Hugging Face format."""
    model = toy(alignment_heads=HEADS)
    model.generation_config._from_model_config = False  # or loading makes the settings anew
    for part in (model, PROCESSOR.tokenizer, PROCESSOR.feature_extractor):
        part.save_pretrained(folder)
    return str(folder)


def noise(seconds: float, seed: int = 0) -> Audio:
    """Loud and quiet by turns."""
    generator = np.random.default_rng(seed)
    count = int(seconds * RATE)
    loudness = np.repeat(generator.random(-(-count // 2000)), 2000)[:count]
    return Audio((loudness * generator.normal(0, 0.3, count)).astype(np.float32), RATE)


def wav(audio: Audio) -> bytes:
    """A WAV file of 16 bits."""
    found = io.BytesIO()
    with wave.open(found, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(audio.sampling_rate)
        file.writeframes((audio.samples.clip(-1, 1) * 32767).astype("<i2").tobytes())
    return found.getvalue()

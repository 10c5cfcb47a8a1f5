"""Features of sounds of any length, made in pieces: bit for bit those of transformers' feature extractor."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import WhisperFeatureExtractor

from sakiyomi import Audio
from sakiyomi.engine import sound_features
from sakiyomi.engine.sound_features import PIECE, features_of

RATE, FRAMES = 16000, 3000
WINDOW = FRAMES * 160


def sound(count: int) -> Audio:
    """Noise of changing loudness, with a stretch of silence that lies below the floor of the whole sound."""
    generator = np.random.default_rng(count)
    samples = generator.normal(0, 0.2, count) * np.repeat(generator.random(-(-count // 5000)), 5000)[:count]
    samples[count // 3 : count // 2] = 0
    return Audio(samples, RATE)


def reference(audio: Audio, extractor: Any) -> torch.Tensor:
    fits = len(audio.samples) <= WINDOW
    padding: dict[str, Any] = {"padding": "max_length", "max_length": WINDOW} if fits else {"padding": "longest"}
    made = extractor(audio.samples, sampling_rate=RATE, return_tensors="pt", truncation=False, **padding)
    return torch.as_tensor(made["input_features"])


@pytest.mark.parametrize("mels", [80, 128])
@pytest.mark.parametrize(
    "count", [1, 7 * RATE + 3, WINDOW, WINDOW + 1, WINDOW + 160, WINDOW + 37 * 160, 100 * RATE + 77]
)
def test_features_are_those_of_transformers(count: int, mels: int) -> None:
    extractor, audio = WhisperFeatureExtractor(feature_size=mels), sound(count)
    found, end = features_of(audio, extractor, FRAMES)
    assert torch.equal(found, reference(audio, extractor))
    assert end == max(1, count // 160)


def test_of_a_long_sound_a_piece_is_made_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The spectra of a whole sound take twenty times as much memory as its features."""
    stft, frames = torch.stft, list[int]()

    def counted(*arguments: Any, **options: Any) -> Any:
        made = stft(*arguments, **options)
        frames.append(made.shape[-1])
        return made

    extractor, audio = WhisperFeatureExtractor(), sound(200 * RATE)
    expected = reference(audio, extractor)
    monkeypatch.setattr(sound_features.torch, "stft", counted)
    assert torch.equal(features_of(audio, extractor, FRAMES)[0], expected)
    assert sum(frames) == 20000 and max(frames) < 2 * PIECE < 20000

"""Log-mel features of sounds, as a speech model's encoder takes them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from sakiyomi.core.audio import Audio
from sakiyomi.core.resampling import Samples

PIECE = 1000
"""Frames that are computed at a time, or up to twice as many; the spectrum of a whole hour takes over a gigabyte."""


def features_of(sound: Audio, extractor: Any, frames: int) -> tuple[Tensor, int]:
    """Features of a sound, padded to the encoder's window at least; may be called in any thread.

    They are those of transformers' ``WhisperFeatureExtractor`` to the bit.

    Args:
        sound: of any length.
        extractor: the model's feature extractor.
        frames: of the window.

    Returns:
        (1, mels, frames), and how many of the frames are the sound's.
    """
    hop, dither = int(extractor.hop_length), getattr(extractor, "dither", 0.0)
    samples = sound.resampled(int(extractor.sampling_rate)).samples
    end = max(1, len(samples) // hop)
    if (missing := frames * hop - len(samples)) > 0:
        samples = np.pad(samples, (0, missing), constant_values=extractor.padding_value)
    if dither:
        samples = samples + np.float32(dither) * np.random.default_rng(0).standard_normal(len(samples), np.float32)
    found = torch.empty(1, extractor.mel_filters.shape[1], len(samples) // hop)
    # No piece is short: the product with a single column would be rounded otherwise.
    begin = 0
    for piece in found[0].tensor_split(max(1, found.shape[-1] // PIECE), -1):
        piece.copy_(_log_mel(samples, extractor, begin, begin + piece.shape[-1]))
        begin += piece.shape[-1]
    torch.maximum(found, found.max() - 8.0, out=found)
    return found.add_(4.0).div_(4.0), end


def _log_mel(samples: Samples, extractor: Any, begin: int, end: int) -> Tensor:
    """(mels, end - begin) logarithms of the energies of some frames; the sound is mirrored at its two ends."""
    hop, width = int(extractor.hop_length), int(extractor.n_fft)
    first, last = begin * hop - width // 2, (end - 1) * hop - width // 2 + width
    part = samples[max(0, first) : last]
    part = np.pad(part, (max(0, -first), max(0, last - len(samples))), mode="reflect")
    window = torch.hann_window(width)
    spectrum = torch.stft(torch.from_numpy(part), width, hop, window=window, center=False, return_complex=True)
    energies = torch.from_numpy(extractor.mel_filters).float().T @ (spectrum.abs() ** 2).contiguous()
    return energies.clamp_(min=1e-10).log10_()

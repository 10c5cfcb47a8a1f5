"""The settings of a speech model's feature extractor, without transformers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from sakiyomi.core.errors import UnsupportedError

_FILTERS = "mel_filters"


class RecordedExtractor:
    """Attributes of transformers' ``WhisperFeatureExtractor``; for all else that is read from its file.

    Args:
        known: its attributes that are plain values, and the shape of its filters.
        filters: their float64 values.
        whole: reads transformers' extractor.
    """

    def __init__(self, known: Mapping[str, Any], filters: bytes, whole: Callable[[], Any]) -> None:
        held = np.frombuffer(filters).reshape(known[_FILTERS]).copy()  # which torch may write to
        vars(self).update(known, _whole=functools.cache(whole), **{_FILTERS: held})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_whole" not in vars(self):
            raise AttributeError(name)
        return getattr(vars(self)["_whole"](), name)

    def __call__(self, *args: Any, **how: Any) -> Any:
        """What transformers' extractor makes of samples."""
        return self._whole()(*args, **how)


def recorded_extractor(extractor: Any) -> tuple[dict[str, Any], bytes]:
    """The attributes and filters of a feature extractor, see ``RecordedExtractor``.

    Raises:
        UnsupportedError: it is not that of transformers' Whisper.
    """
    from transformers import WhisperFeatureExtractor

    filters = getattr(extractor, _FILTERS, None)
    if type(extractor) is not WhisperFeatureExtractor or filters is None or filters.dtype != np.float64:
        raise UnsupportedError(f"its feature extractor {type(extractor).__name__} is not Whisper's")
    known = {name: value for name, value in vars(extractor).items() if isinstance(value, bool | int | float | str)}
    return known | {_FILTERS: list(filters.shape)}, np.ascontiguousarray(filters).tobytes()

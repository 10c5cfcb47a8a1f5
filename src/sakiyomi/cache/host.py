"""The interface of the model that a cache belongs to; ``ModelRunner`` implements it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn

from sakiyomi.cache.layout import KVCache
from sakiyomi.kernels.batch import SequenceRows
from sakiyomi.kernels.native import PackedWeights


class ModelHost(Protocol):
    """A model beside its cache."""

    @property
    def module(self) -> nn.Module:
        """The transformers model as it runs."""

    @property
    def cache(self) -> KVCache:
        """The keys and values that its passes write."""

    @property
    def device(self) -> torch.device:
        """Where its inputs go."""

    @property
    def dtype(self) -> torch.dtype:
        """Of its weights, and of the cache."""

    @property
    def vocab_size(self) -> int:
        """Logits in a row."""

    @property
    def max_context(self) -> int:
        """Tokens of the longest text that it serves."""

    @property
    def text(self) -> Sequence[int]:
        """Token ids to measure on; empty where none were given."""

    @property
    def packed_weights(self) -> PackedWeights | None:
        """The compiled kernels' weights, which can take in further linear layers; None where plain torch runs."""


class CacheHost(ModelHost, Protocol):
    """A model that can run passes over its own cache."""

    def score(self, segments: Sequence[SequenceRows], *, last: bool = False) -> object:
        """One pass over these rows."""

    def read_alone(self, slot: int, token: int, position: int) -> None:
        """Write one token into an empty slot as if it stood at this position."""

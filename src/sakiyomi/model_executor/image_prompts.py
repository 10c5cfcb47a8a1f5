"""Prompts with images, read by the model's own forward."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sakiyomi.core.hf_names import cache_argument
from sakiyomi.kernels.batch import BatchPlan, SequenceRows
from sakiyomi.model_executor.runner import ModelRunner
from sakiyomi.model_executor.widened import widened


def read_images(runner: ModelRunner, slot: int, inputs: Mapping[str, Tensor]) -> int:
    """Read a prompt with images into an empty slot, all tokens but the last one, by the model's own forward.

    Rows of an image may attend to each other, and encoders take part. So this is one pass with transformers' own
    attention and cache, whose keys and values are then copied; recurrent layers write our states. Positions behind
    images may differ from places: later rows of the slot are shifted as the model shifts them.

    Args:
        runner: of the model, which is not ``blind``.
        slot: of the request.
        inputs: the output of the model's processor, a batch of one.

    Returns:
        Number of tokens in the slot.

    Raises:
        MemoryLimitError: there is no memory for them.
    """
    count = inputs["input_ids"].shape[1] - 1
    given = {name: part.to(runner.device) for name, part in inputs.items()}
    given = {name: part.to(runner.dtype) if part.is_floating_point() else part for name, part in given.items()}
    runner.cache.reserve(slot, count + 1)
    tokens = inputs["input_ids"][0, :count].tolist() if runner.weights.stateful else []
    rows = [SequenceRows(slot, 0, tokens, prompt=True)] if tokens else []  # recurrent states are written by ours
    pairs = _pairs()
    name = cache_argument(runner.module)
    with torch.no_grad(), runner.lock, widened(runner.device):
        began = time.perf_counter()
        runner.begin(BatchPlan(rows), count + 1)
        runner.module.set_attn_implementation("sdpa")
        try:
            runner.module(**given, **{name: pairs}, use_cache=True)
        finally:
            runner.module.set_attn_implementation(runner.backend.operator)
            runner.cache.begin(None)
        for layer, made in enumerate(layer for layer in pairs.layers if layer.is_initialized):
            runner.cache.keys[layer][slot][:, :count] = made.keys[0, :, :count]
            runner.cache.values[layer][slot][:, :count] = made.values[0, :, :count]
        shift = getattr(runner.module.model, "rope_deltas", None)
        runner.eviction.shifts[slot] = 0 if shift is None else int(shift.flatten()[0])
        runner.forward_seconds += time.perf_counter() - began
    return count


def _pairs() -> Any:
    """A cache of transformers that holds keys and values, and no states: those are ours."""
    from transformers import DynamicCache

    class Pairs(DynamicCache):
        def get_conv_state(self, *_: Any, **__: Any) -> None:
            return None

        def get_recurrent_state(self, *_: Any, **__: Any) -> None:
            return None

        def update_conv_state(self, rows: Tensor, *_: Any, **__: Any) -> Tensor:  # type: ignore[override]
            return rows

        def update_recurrent_state(self, states: Any, *_: Any, **__: Any) -> Any:  # type: ignore[override]
            return states

        def has_previous_state(self, *_: Any, **__: Any) -> bool:
            return False

        def is_recording_past(self, *_: Any, **__: Any) -> bool:
            return False

    return Pairs()

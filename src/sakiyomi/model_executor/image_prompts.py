"""Prompts with images, read by the model's own forward."""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch
from torch import Tensor

from sakiyomi.kernels.batch import BatchPlan
from sakiyomi.model_executor.runner import ModelRunner

__all__ = ["read_images"]


def read_images(runner: ModelRunner, slot: int, inputs: Mapping[str, Tensor]) -> int:
    """Read a prompt with images in an empty slot, all tokens but the last one, by the model's own forward.

    Rows of an image may look at each other, and encoders have a say: so this is one pass with transformers' own
    attention and cache, whose keys and values are then copied. Positions behind the images may be others than
    places: the slot's later rows are shifted as the model does it.

    Args:
        runner: of the model, which is not ``blind``.
        slot: of the request.
        inputs: what the model's processor has made, a batch of one.

    Returns:
        How many tokens lie in the slot.

    Raises:
        MemoryLimitError: there is no room for them.
    """
    from transformers import DynamicCache

    count = inputs["input_ids"].shape[1] - 1
    given = {name: part.to(runner.device) for name, part in inputs.items()}
    given = {name: part.to(runner.dtype) if part.is_floating_point() else part for name, part in given.items()}
    runner.cache.reserve(slot, count + 1)
    with torch.no_grad(), runner.lock:
        began = time.perf_counter()
        runner.begin(BatchPlan([]), count + 1)
        runner.module.set_attn_implementation("sdpa")
        try:
            made = runner.module(**given, past_key_values=DynamicCache(), use_cache=True)
        finally:
            runner.module.set_attn_implementation(runner.backend.operator)
            runner.cache.begin(None)
        for layer, pairs in enumerate(made.past_key_values.layers):
            runner.cache.keys[layer][slot][:, :count] = pairs.keys[0, :, :count]
            runner.cache.values[layer][slot][:, :count] = pairs.values[0, :, :count]
        shift = getattr(runner.module.model, "rope_deltas", None)
        runner.eviction.shifts[slot] = 0 if shift is None else int(shift.flatten()[0])
        runner.forward_seconds += time.perf_counter() - began
    return count

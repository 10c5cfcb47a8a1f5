"""What tokens of a text look at in their source: probabilities of cross-attention."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from sakiyomi.cache.cross_attention import Source
from sakiyomi.kernels.batch import SequenceRows
from sakiyomi.model_executor.recorded_model import RecordedModel
from sakiyomi.model_executor.runner import ModelRunner


@torch.no_grad()
def cross_weights(model: ModelRunner, source: Source, tokens: Sequence[int], heads: Sequence[Sequence[int]]) -> Tensor:
    """Read a text once more, and say what some heads look at.

    Args:
        model: with an encoder.
        source: of the text.
        tokens: of the decoder, from its first one on.
        heads: layer and head of each.

    Returns:
        (heads, tokens, places of the source) float32, each row sums to 1.
    """
    encoder, layers = model.weights.encoder, sorted({layer for layer, _ in heads})
    assert encoder is not None and model.sources is not None, "it has an encoder"
    projections: dict[int, nn.Module] = {layer: encoder.crosses[layer].q for layer in layers}
    if isinstance(model.module, RecordedModel):
        model.module.capture(layers)
        projections = {layer: model.module.outputs[layer] for layer in layers}
    queries: dict[int, Tensor] = {}

    def note(layer: int) -> Any:
        def hook(module: nn.Module, args: Any, projected: Tensor) -> None:
            queries[layer] = encoder.crosses[layer].queries(projected[:, : len(tokens)]).float()

        return hook

    with model.lock, model.cache.lent(len(tokens)) as slot, ExitStack() as hooks:
        model.make_room(slot, len(tokens), source)
        for layer, projection in projections.items():
            hooks.callback(projection.register_forward_hook(note(layer)).remove)
        with model.eagerly():
            model.score([SequenceRows(slot, 0, tokens, prompt=True)])
        found = []
        for layer, head in heads:
            keys = model.sources.keys[layer][slot, head, : source.length].float()
            found.append((queries[layer][head] @ keys.T).softmax(-1))
        return torch.stack(found)

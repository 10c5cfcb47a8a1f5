"""What tokens of a text look at in their source: probabilities of cross-attention."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from sakiyomi.cache.cross_attention import Source
from sakiyomi.kernels.batch import SequenceRows
from sakiyomi.model_executor.encoder_decoder.decoder import CrossAttention
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
    model.unfold()
    crosses = {module.layer_idx: module for module in model.module.modules() if isinstance(module, CrossAttention)}
    queries: dict[int, Tensor] = {}

    def note(cross: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> None:
        assert isinstance(cross, CrossAttention)
        hidden = args[0] if args else given["hidden_states"]
        queries[cross.layer_idx] = cross.queries(hidden[:, : len(tokens)]).float()

    with model.lock, model.cache.lent(len(tokens)) as slot, ExitStack() as hooks:
        model.make_room(slot, len(tokens), source)
        for layer in {layer for layer, _ in heads}:
            hook = crosses[layer].register_forward_pre_hook(note, with_kwargs=True)
            hooks.callback(hook.remove)
        with model.eagerly():
            model.score([SequenceRows(slot, 0, tokens, prompt=True)])
        assert model.sources is not None, "it has an encoder"
        found = []
        for layer, head in heads:
            keys = model.sources.keys[layer][slot, head, : source.length].float()
            found.append((queries[layer][head] @ keys.T).softmax(-1))
        return torch.stack(found)

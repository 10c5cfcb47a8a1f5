"""An EAGLE-3 head as a causal LM of transformers, so that whatever runs draft models runs it too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sakiyomi.drafters.head_model import ROWS, FusedEmbedding, HiddenOutput, make_decoder

__all__ = ["BESIDE", "EagleOptions", "FeatureLayer", "make_first", "make_module"]

BESIDE = ("fc.", "fc_norm.", "input_norm.", "mask_hidden")
"""Beginnings of the names of a head's tensors that are no part of its layers."""


@dataclass(frozen=True, kw_only=True)
class EagleOptions:
    """What heads of this family differ in.

    Attributes:
        layers: decoder layers of the target, counted from 0, whose outputs are read.
        target_size: width of the target's hidden states.
        norm_before_residual: the residual of the first layer is the feature behind its norm, and not before it.
        norm_before_fc: one norm over the hidden states of all layers, side by side.
        fc_norm: a norm for those of each layer.
        norm_output: what is fed back is the output behind the last norm (EAGLE-3.1).
        mask: token that stands for one to be guessed, where several are guessed a pass (P-EAGLE); None: one is.
        first: it reads what the target's head reads, and its logits come from that head (EAGLE-1 and 2).
    """

    layers: tuple[int, ...]
    target_size: int
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    mask: int | None = None
    first: bool = False


class FeatureLayer(nn.Module):
    """The first layer of a head: attention over pairs of a token's embedding and the feature of the token before it.

    Args:
        layer: a decoder layer of transformers, whose queries, keys and values come to read twice the width.
        norm_before_residual: see ``EagleOptions``.

    Attributes:
        given: features of a pass's rows, (ROWS, hidden), to be written before it.
    """

    given: Tensor

    def __init__(self, layer: Any, norm_before_residual: bool) -> None:
        super().__init__()
        attention = self.self_attn = layer.self_attn
        for name in ("q_proj", "k_proj", "v_proj"):
            narrow = getattr(attention, name)
            wide = nn.Linear(2 * narrow.in_features, narrow.out_features, narrow.bias is not None)
            setattr(attention, name, wide)
        self.mlp = layer.mlp
        self.input_layernorm, self.post_attention_layernorm = layer.input_layernorm, layer.post_attention_layernorm
        width = len(layer.input_layernorm.weight)
        self.hidden_norm = type(layer.input_layernorm)(width, layer.input_layernorm.variance_epsilon)
        self._normed = norm_before_residual
        self.register_buffer("given", torch.zeros(ROWS, width), persistent=False)

    def forward(self, hidden_states: Tensor, **more: Any) -> Tensor:
        """(B, N, hidden) embeddings to (B, N, hidden); `more` is what a decoder layer of transformers takes."""
        features = self.given[: hidden_states.shape[1]].expand_as(hidden_states)
        normed = self.hidden_norm(features)
        both = torch.cat([self.input_layernorm(hidden_states), normed], -1)
        hidden = (normed if self._normed else features) + self.self_attn(hidden_states=both, **more)[0]
        given: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return given


def make_module(config: Mapping[str, Any], options: EagleOptions, embedding: Tensor, draft_vocab: int) -> Any:
    """A head whose layers have no weights yet.

    Args:
        config: of its decoder layers, as transformers has it.
        options: of the head.
        embedding: of tokens, (V of the target, hidden).
        draft_vocab: tokens that it can propose.

    Raises:
        LoadError: a kind of layers that no head has, or their sizes make no sense.
    """
    head = nn.Linear(int(config["hidden_size"]), draft_vocab, bias=False)
    module = make_decoder(config, embedding, head)
    module.model.layers[0] = FeatureLayer(module.model.layers[0], options.norm_before_residual)
    return module


def make_first(config: Mapping[str, Any], embedding: Tensor, project: Tensor, bias: Tensor | None) -> Any:
    """The same for EAGLE-1 and 2: the first layer has no norm before it, and none follows the last.

    Args:
        config: of its decoder layers, as transformers has it.
        embedding: of tokens, (V of the target, hidden).
        project, bias: of a token's embedding and a feature to one vector, (hidden, 2 hidden) and (hidden,).

    Raises:
        LoadError: a kind of layers that no head has, or their sizes make no sense.
    """
    module = make_decoder(config, embedding, HiddenOutput(len(embedding)))
    module.model.embed_tokens = FusedEmbedding(embedding, project, bias)
    module.model.layers[0].input_layernorm, module.model.norm = nn.Identity(), nn.Identity()
    return module

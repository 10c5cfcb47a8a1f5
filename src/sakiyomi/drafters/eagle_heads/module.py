"""An EAGLE head as a causal LM of transformers, which runs like any draft model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from sakiyomi.core.errors import LoadError
from sakiyomi.drafters.eagle_heads.formats import EagleFile, EagleOptions
from sakiyomi.drafters.head_files import check_size
from sakiyomi.drafters.head_model import (
    HEAD_WEIGHT,
    ROWS,
    FusedEmbedding,
    HiddenOutput,
    check_tokens,
    fill,
    make_decoder,
    token_embedding,
    with_context,
)
from sakiyomi.model_executor.runner import ModelRunner

__all__ = ["BESIDE", "EagleOptions", "FeatureLayer", "load_module", "make_module"]

BESIDE = ("fc.", "fc_norm.", "input_norm.", "mask_hidden")
"""Prefixes of the names of tensors that do not belong to the head's layers."""


class FeatureLayer(nn.Module):
    """The first layer of a head: attention over pairs of a token's embedding and the feature of the token before it.

    Args:
        layer: a decoder layer of transformers, whose queries, keys and values come to read twice the width.
        norm_before_residual: see ``EagleOptions``.

    Attributes:
        given: features of a pass's rows, (ROWS, hidden); written before the pass.
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


def _make_first(config: Mapping[str, Any], embedding: Tensor, project: Tensor, bias: Tensor | None) -> Any:
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


def load_module(file: EagleFile, target: ModelRunner) -> Any:
    """The head as a model, with the target's embedding where it has none of its own.

    Args:
        file: of the head.
        target: whose hidden states it reads.

    Raises:
        LoadError: tensors are missing, or have other shapes.
        UnsupportedError: it belongs to another model.
    """
    options, tensors = file.options, file.tensors
    read = options.target_size if options.first else tensors["fc.weight"].shape[1]
    embedding = token_embedding(file, target, "head", read)
    check_size(f"the head {file.name} reads hidden states", options.target_size, int(target.config.hidden_size))
    config, weight = with_context(file.config, target.max_context), tensors.get(HEAD_WEIGHT)
    most = min(target.vocab_size, len(embedding))
    if options.first:
        check_tokens(file, target, "head", int(file.config.get("vocab_size") or len(embedding)), most)
        module = _make_first(config, embedding, tensors["fc.weight"], tensors.get("fc.bias"))
        return fill(module, file, (*BESIDE, HEAD_WEIGHT), target)
    if weight is None:
        raise LoadError(f"{file.name} lacks the tensor {HEAD_WEIGHT} of an EAGLE head; get it again")
    known = len(weight) if file.tokens is None else int(file.tokens.max()) + 1
    check_tokens(file, target, "head", max(known, (options.mask or 0) + 1), most)
    return fill(make_module(config, options, embedding, len(weight)), file, BESIDE, target)

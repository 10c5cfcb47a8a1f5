"""An EAGLE-3 head while it learns: run over whole texts, with the target's features and then with its own.

Li et al. 2025, arXiv 2503.01840, section 3.2 (training-time test). In step k every token is read with the feature that
the head itself gave in step k - 1, as the k-th draft token behind one with a feature of the target.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from sakiyomi.drafters.eagle_heads.module import EagleOptions, make_module
from sakiyomi.train.unrolled import Unrolled, attend, behind

__all__ = ["UnrolledHead", "new_head"]


class UnrolledHead(Unrolled):
    """The head's parts in the order in which they work.

    Args:
        module: the head as a causal LM, from `make_module`, with one layer.
        joined: width of the hidden states that it reads, side by side.

    Attributes:
        layers: what joins the target's states to a feature, and the decoder layer.
        head: over the vocabulary.
    """

    def __init__(self, module: Any, joined: int) -> None:
        super().__init__()
        layer, config = module.model.layers[0], module.config
        self.layers = nn.ModuleList([nn.Linear(joined, config.hidden_size, bias=False), layer])
        self.norm, self.head, self.embed = module.model.norm, module.lm_head, module.model.embed_tokens
        self.embed.requires_grad_(False)
        self._rotary = module.model.rotary_emb
        self._dim = layer.self_attn.head_dim

    def forward(self, ids: Tensor, states: Tensor, steps: int) -> Iterator[Tensor]:
        """See `Unrolled`."""
        layer: Any = self.layers[1]
        embedded = layer.input_layernorm(self.embed(ids))
        features = self.layers[0](states.to(self.norm.weight.dtype))
        places = torch.arange(ids.shape[1], device=ids.device)[None]
        turned = self._rotary(embedded, places)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for _ in range(steps):
            read = torch.cat([embedded, layer.hidden_norm(features).to(embedded.dtype)], -1)
            features = features + self._attend(layer.self_attn, read, turned, keys, values)
            features = features + layer.mlp(layer.post_attention_layernorm(features))
            yield self.norm(features)
            features = behind(features, 1)

    def weight(self) -> Tensor:
        """See `Unrolled`."""
        found: Tensor = self.head.weight
        return found

    def _attend(
        self, attention: Any, read: Tensor, turned: tuple[Tensor, Tensor], keys: list[Tensor], values: list[Tensor]
    ) -> Tensor:
        """Attention of a step to tokens with the target's features and, behind them, to the draft tokens so far.

        Args:
            attention: its projections.
            read: (B, T, 2 hidden).
            turned: cosines and sines of the rotary positions.
            keys, values: (B, heads, T, width) of the steps before; those of this step are added.
        """
        shape = (*read.shape[:2], -1, self._dim)
        q, k, v = (
            project(read).view(shape).transpose(1, 2)
            for project in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        q, k = (each.to(v.dtype) for each in apply_rotary_pos_emb(q, k, *turned))
        mixed = attend(q * self._dim**-0.5, k, v, keys, values)
        found: Tensor = attention.o_proj(mixed.transpose(1, 2).flatten(2))
        return found


@torch.no_grad()
def new_head(target: Any, config: dict[str, Any], options: EagleOptions, tokens: Tensor | None) -> UnrolledHead:
    """A head with random weights, which begins with the target's embedding, last norm and head over the vocabulary.

    A layer that begins as the target's last one learnt no faster (benchmarks/log/heads-eagle-block-mtp.md).

    Args:
        target: a causal LM.
        config: from `layer_config`.
        options: of the head.
        tokens: that it proposes; None: all.
    """
    out = target.get_output_embeddings().weight.float()
    embedding = target.get_input_embeddings().weight.detach()
    made = make_module(config, options, embedding, len(out) if tokens is None else len(tokens)).float()
    made.model.embed_tokens = nn.Embedding.from_pretrained(embedding)  # the target's own, in its dtype
    made.lm_head.weight.copy_(out if tokens is None else out[tokens])
    with suppress(AttributeError, RuntimeError):  # of other names, or another kind
        made.model.norm.weight.copy_(target.base_model.norm.weight)
    return UnrolledHead(made, len(options.layers) * config["hidden_size"])

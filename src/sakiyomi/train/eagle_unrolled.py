"""An EAGLE-3 head while it learns: run over whole texts, with the target's features and then with its own.

Li et al. 2025, arXiv 2503.01840, section 3.2 (training-time test). In step k every token is read with the feature that
the head itself gave in step k - 1, as the k-th draft token behind one with a feature of the target.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from sakiyomi.drafters.eagle_heads.module import EagleOptions, make_module
from sakiyomi.drafters.medusa_heads.ranks import Ranks
from sakiyomi.train.acceptance import Continuations
from sakiyomi.train.guesses import DEPTH, rank_of
from sakiyomi.train.target_states import TargetStates

__all__ = ["UnrolledHead", "new_head", "rank_continuations"]


class UnrolledHead(nn.Module):
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
        self._heads, self._kv_heads = config.num_attention_heads, config.num_key_value_heads
        self._dim = layer.self_attn.head_dim

    def forward(self, ids: Tensor, states: Tensor, steps: int) -> Iterator[Tensor]:
        """What the head over the vocabulary reads in every step.

        Args:
            ids: (B, T) tokens.
            states: (B, T, joined) the target's for the token before each.
            steps: at most; row t of step k is that of the token t as k-th draft token: rows before k mean nothing.

        Yields:
            (B, T, hidden) of each step.
        """
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
            features = _behind(features, 1)

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
        times = self._heads // self._kv_heads
        keys.append(k.repeat_interleave(times, 1))
        values.append(v.repeat_interleave(times, 1))
        step, length = len(keys) - 1, q.shape[2]
        q = q * self._dim**-0.5
        # Step k's row t sees tokens up to t - k as the target read them, and t - k + j as the j-th draft token.
        seen = torch.ones(length, length, dtype=torch.bool, device=q.device).tril(-step)
        whole = (q @ keys[0].transpose(2, 3)).float().masked_fill(~seen, -torch.inf)
        own = [(q * _behind(keys[j], step - j)).sum(-1, keepdim=True).float() for j in range(1, step + 1)]
        weights = torch.softmax(torch.cat([whole, *own], -1), -1).to(v.dtype)
        mixed = weights[..., :length] @ values[0]
        for j in range(1, step + 1):
            mixed = mixed + weights[..., length + j - 1, None] * _behind(values[j], step - j)
        found: Tensor = attention.o_proj(mixed.transpose(1, 2).flatten(2))
        return found


def _behind(rows: Tensor, count: int) -> Tensor:
    """Each row's values in the place of the row so many behind it; (..., T, width)."""
    return F.pad(rows, (0, 0, count, 0))[..., : rows.shape[-2], :] if count else rows


@torch.no_grad()
def new_head(target: Any, config: dict[str, Any], options: EagleOptions, tokens: Tensor | None) -> UnrolledHead:
    """A head with random weights, which begins with the target's embedding, last norm and head over the vocabulary.

    A layer that begins as the target's last one learnt no faster (docs/log.md).

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


@torch.inference_mode()
def rank_continuations(head: UnrolledHead, states: TargetStates, tokens: Tensor | None, texts: Continuations) -> Ranks:
    """Where the target's own greedy tokens stand among the head's guesses.

    At a place whose token is committed, the k-th column is the rank of the token k + 1 places on where all tokens
    between are drafted rightly, which is all that counts in greedy text.
    """
    found = []
    training = head.training
    head.eval()
    for prompt, text in zip(texts.prompts, texts.greedy, strict=True):
        if len(text) < 2:
            continue
        ids = torch.tensor([[*prompt, *text]])
        joined, _ = states(ids)
        ranks = np.full((len(text) - 1, DEPTH), -1, np.int16)
        for step, hidden in enumerate(head(ids[:, 1:], joined[:, :-1], DEPTH)):
            # Row r is that of the token r + 1, and foretells the next one.
            rows = hidden[0, len(prompt) - 1 + step : -1]
            if not len(rows):
                break
            ranks[: len(rows), step] = rank_of(head.head(rows), ids[0, len(prompt) + 1 + step :], tokens)
        found.append(ranks)
    head.train(training)
    return Ranks(found)

"""A block drafter as a causal LM of transformers.

Keys and values of the text are projected from the target's hidden states, so committed tokens pass through no layer of
the drafter. The layers are ordinary decoder layers that find these pairs in the cache.

Layers of DFlash2 have convolutions: inputs and outputs of attention and MLP are mixed with the rows before them. The
weights are a learnt kernel plus, for each group of channels, a projection of the row itself. The first row of a block
has no row before it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from sakiyomi.core.errors import LoadError
from sakiyomi.drafters.block_heads.formats import BlockFile, BlockOptions
from sakiyomi.drafters.head_files import check_size
from sakiyomi.drafters.head_model import (
    HEAD_WEIGHT,
    HiddenOutput,
    check_tokens,
    fill,
    make_decoder,
    token_embedding,
    with_context,
)
from sakiyomi.model_executor.runner import ModelRunner

_BESIDE = ("fc.", "hidden_norm.", "markov_head.", "confidence_head.", "candidate_selector.")


class Convolution(nn.Module):
    """The convolutions of the input and of the output of attention or MLP.

    Args:
        options: of the drafter.
        width: of its hidden states.
    """

    def __init__(self, options: BlockOptions, width: int) -> None:
        super().__init__()
        self._taps, self._size = options.kernel, options.size
        self._groups = width // options.group
        self.base_kernel = nn.Parameter(torch.zeros(2, options.kernel, width))
        self.kernel_projection = nn.Linear(width, 2 * options.kernel * self._groups, bias=False)

    def weights(self, rows: Tensor) -> Tensor:
        """(B, N, hidden) rows in front of the part to (B, N, 2, taps, groups, 1): added in front and behind."""
        found: Tensor = self.kernel_projection(rows).view(*rows.shape[:-1], 2, self._taps, self._groups, 1)
        return found

    def forward(self, rows: Tensor, weights: Tensor, side: int) -> Tensor:
        """(B, N, hidden) of whole blocks one after the other, with the weights of side 0, in front, or 1, behind."""
        grouped = rows.unflatten(-1, (self._groups, -1))
        base = self.base_kernel[side].to(rows.dtype).unflatten(-1, (self._groups, -1))
        place = torch.arange(rows.shape[1], device=rows.device) % self._size
        mixed = grouped * (base[0] + weights[:, :, side, 0])
        for tap in range(1, self._taps):
            before = torch.cat([torch.zeros_like(grouped[:, :tap]), grouped[:, :-tap]], 1)[:, : rows.shape[1]]
            there = (place >= tap)[:, None, None]
            mixed = mixed + before * (base[tap] + weights[:, :, side, tap]) * there
        found: Tensor = mixed.flatten(-2)
        return found


class ConvolvedLayer(nn.Module):
    """A decoder layer with convolutions.

    Args:
        layer: of transformers.
        options: of the drafter.
        width: of its hidden states.

    Attributes:
        live: whether the convolutions are computed. They are off while the loader tests the layers, where rows must not
            depend on each other.
    """

    live: Tensor

    def __init__(self, layer: Any, options: BlockOptions, width: int) -> None:
        super().__init__()
        self.self_attn, self.mlp = layer.self_attn, layer.mlp
        self.input_layernorm, self.post_attention_layernorm = layer.input_layernorm, layer.post_attention_layernorm
        self.attention_conv, self.mlp_conv = Convolution(options, width), Convolution(options, width)
        self.register_buffer("live", torch.zeros((), dtype=torch.bool), persistent=False)

    def forward(self, hidden_states: Tensor, **more: Any) -> Tensor:
        """(B, N, hidden) to the same; `more` is what a decoder layer of transformers takes."""
        read = self.input_layernorm(hidden_states)
        weights = self.attention_conv.weights(read)
        out = self.self_attn(hidden_states=self._mixed(self.attention_conv, read, weights, 0), **more)[0]
        hidden = hidden_states + self._mixed(self.attention_conv, out, weights, 1)
        read = self.post_attention_layernorm(hidden)
        weights = self.mlp_conv.weights(read)
        out = self.mlp(self._mixed(self.mlp_conv, read, weights, 0))
        return hidden + self._mixed(self.mlp_conv, out, weights, 1)

    def _mixed(self, convolution: Convolution, rows: Tensor, weights: Tensor, side: int) -> Tensor:
        return torch.where(self.live, convolution(rows, weights, side), rows)


def make_block(file: BlockFile, target: ModelRunner) -> Any:
    """The layers of a block drafter, with the target's embedding where it has none of its own.

    Args:
        file: of the drafter.
        target: whose hidden states it reads.

    Raises:
        LoadError: tensors are missing, or have other shapes.
        UnsupportedError: it belongs to another model.
    """
    options, width, what = file.options, int(target.config.hidden_size), "block drafter"
    embedding = token_embedding(file, target, what, file.tensors["fc.weight"].shape[1])
    head, own = file.tensors.get(HEAD_WEIGHT), int(file.config.get("hidden_size") or 0)
    for other in (embedding.shape[1], width if head is None else own):
        check_size(f"the {what} {file.name} has hidden states", own, other)
    guessed = 0 if head is None else len(head)
    if file.tokens is not None and guessed != len(file.tokens):
        raise LoadError(
            f"{file.name} names {len(file.tokens)} tokens of the target and has a head over {guessed}; get it again"
        )
    known = guessed if file.tokens is None else int(file.tokens.max()) + 1
    check_tokens(file, target, what, known, target.vocab_size)
    check_tokens(file, target, what, options.mask + 1, max(len(embedding), target.vocab_size))
    if options.embedding_scale != 1.0:
        embedding = embedding * options.embedding_scale
    config = with_context(file.config, target.max_context + options.size)
    over = HiddenOutput(len(embedding)) if head is None else nn.Linear(own, guessed, bias=False)
    module = make_decoder(config, embedding, over)
    if options.kernel:
        if own % options.group or options.kernel > options.size:
            raise LoadError(
                f"{file.name} has convolutions of {options.kernel} rows and groups of {options.group} numbers, in "
                f"blocks of {options.size} rows of {own}; get it again"
            )
        module.model.layers = nn.ModuleList([ConvolvedLayer(layer, options, own) for layer in module.model.layers])
    return fill(module, file, _BESIDE, target)

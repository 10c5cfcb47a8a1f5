"""Train an EAGLE-3 head on a frozen target, whose hidden states are computed on the way.

Li et al. 2025, arXiv 2503.01840. The head learns the target's distribution after every token: with the target's
features, and then step by step with its own in their place, as it will draft (`UnrolledHead`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sakiyomi.drafters.eagle_heads.formats import EagleFile, usual_layers, write_eagle
from sakiyomi.drafters.eagle_heads.module import EagleOptions, make_module
from sakiyomi.train.commands import TrainEagle
from sakiyomi.train.draft_vocab import proposing
from sakiyomi.train.head_recipe import STEPS, LayersRecipe, Unrolled, UnrolledRecipe, attend_in_steps, behind
from sakiyomi.train.hidden import begin_as, vocabulary
from sakiyomi.train.loop import Watch
from sakiyomi.train.recipe import train


def train_eagle(config: TrainEagle, command: str = "", watch: Watch | None = None) -> dict[str, Any]:
    """Run `sakiyomi train eagle`, see `recipe.train`."""
    return train(_Eagle(config), command, watch)


class _Eagle(LayersRecipe[TrainEagle], UnrolledRecipe[TrainEagle]):
    """One decoder layer learns to predict the target from its hidden states."""

    kind = "eagle"
    head: UnrolledHead

    def usual_reads(self, layers: int) -> tuple[int, ...]:
        """See `HeadRecipe`."""
        return usual_layers(layers)

    def check_target(self) -> None:
        """See `Taught`."""
        super().check_target()
        self.options = EagleOptions(layers=self.reads, target_size=self.sizes["hidden_size"])

    def new_head(self) -> UnrolledHead:
        """See `HeadRecipe`."""
        head = new_head(self.target, self.sizes, self.options, self.known)
        head.head.requires_grad_(self.config.own_head)
        return head

    def write(self, folder: Path, tensors: Mapping[str, Tensor]) -> tuple[str, Mapping[str, Tensor]]:
        """See `HeadRecipe`."""
        named = {"layers.0.weight": "fc.weight", "norm.weight": "norm.weight", "head.weight": "lm_head.weight"}
        outer = {named[name]: tensor for name, tensor in tensors.items() if name in named}
        prefix = "layers.1."
        layer = {f"layers.0.{n.removeprefix(prefix)}": t for n, t in tensors.items() if n.startswith(prefix)}
        file = EagleFile(self.sizes | {"dtype": "bfloat16"}, self.options, outer | layer, self.known, "")
        write_eagle(folder, file, self.config.target)
        about = f"An EAGLE-3 head for {self.config.target}, which reads its layers {', '.join(map(str, self.reads))}"
        return about + proposing(self.known), file.tensors


# ---------------------------------------------------------------- the head while it learns


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
        attend_in_steps(module)

    def forward(self, ids: Tensor, states: Tensor, steps: int) -> Iterator[Tensor]:
        """See `Unrolled`."""
        layer: Any = self.layers[1]
        embedded = layer.input_layernorm(self.embed(ids))
        features = self.layers[0](states.to(self.norm.weight.dtype))
        places = torch.arange(ids.shape[1], device=ids.device)[None]
        turned = self._rotary(embedded, places)
        setattr(layer.self_attn, STEPS, ([], []))
        for _ in range(steps):
            read = torch.cat([embedded, layer.hidden_norm(features).to(embedded.dtype)], -1)
            mixed, _ = layer.self_attn(hidden_states=read, position_embeddings=turned, attention_mask=None)
            features = features + mixed
            features = features + layer.mlp(layer.post_attention_layernorm(features))
            yield self.norm(features)
            features = behind(features, 1)

    def weight(self) -> Tensor:
        """See `Unrolled`."""
        found: Tensor = self.head.weight
        return found


def new_head(target: Any, config: dict[str, Any], options: EagleOptions, tokens: Tensor | None) -> UnrolledHead:
    """A head with random weights, which begins with the target's embedding, last norm and head over the vocabulary.

    A layer that begins as the target's last one learnt no faster (benchmarks/log/heads-eagle-block-mtp.md).

    Args:
        target: a causal LM.
        config: from `layer_config`.
        options: of the head.
        tokens: that it proposes; None: all.
    """
    embedding = target.get_input_embeddings().weight.detach()
    count = vocabulary(target) if tokens is None else len(tokens)
    made = begin_as(make_module(config, options, embedding, count), target, tokens)
    return UnrolledHead(made, len(options.layers) * config["hidden_size"])

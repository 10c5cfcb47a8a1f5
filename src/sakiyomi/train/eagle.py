"""Train an EAGLE-3 head on a frozen target, whose hidden states are computed on the way.

Li et al. 2025, arXiv 2503.01840. The head learns the target's distribution behind every token: with the target's
features, and then step by step with its own in their place, as it will draft (`eagle_unrolled`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sakiyomi.core.errors import InputError
from sakiyomi.drafters.eagle_heads.formats import EagleFile, usual_layers, write_eagle
from sakiyomi.drafters.eagle_heads.module import EagleOptions
from sakiyomi.train.commands import TrainEagle
from sakiyomi.train.eagle_unrolled import UnrolledHead, new_head
from sakiyomi.train.head_recipe import LayersRecipe
from sakiyomi.train.recipe import train
from sakiyomi.train.unrolled import UnrolledRecipe


def train_eagle(config: TrainEagle, command: str = "") -> dict[str, Any]:
    """Run `sakiyomi train eagle`, see `recipe.train`."""
    return train(_Eagle(config), command)


class _Eagle(LayersRecipe[TrainEagle], UnrolledRecipe[TrainEagle]):
    """One decoder layer learns to foretell the target from its hidden states."""

    kind = "eagle"
    head: UnrolledHead

    def usual_reads(self, layers: int) -> tuple[int, ...]:
        """See `HeadRecipe`."""
        return usual_layers(layers)

    def check_target(self) -> None:
        """See `Taught`."""
        super().check_target()
        config = self.config
        if config.draft_vocab > self.vocab:
            raise InputError(
                f"draft_vocab is {config.draft_vocab}, and {config.target} has {self.vocab} tokens; set --draft-vocab "
                "lower, or 0 for all"
            )
        self.options = EagleOptions(layers=self.reads, target_size=self.sizes["hidden_size"])

    def new_head(self) -> UnrolledHead:
        """See `HeadRecipe`."""
        self.known = _frequent(self.config, self.texts, self.vocab)
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
        if self.known is not None:
            about += f" and proposes {len(self.known)} of its tokens"
        return about, file.tensors


def _frequent(config: TrainEagle, texts: list[list[Any]], vocab: int) -> Tensor | None:
    """The most frequent tokens of the documents, ascending; None: all are proposed."""
    if not config.draft_vocab or config.draft_vocab == vocab:
        return None
    counts = sum(np.bincount(np.concatenate(documents), minlength=vocab) for documents in texts)
    chosen = np.argsort(-np.asarray(counts), kind="stable")[: config.draft_vocab]
    return torch.from_numpy(np.sort(chosen))

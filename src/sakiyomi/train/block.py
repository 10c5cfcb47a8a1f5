"""Train a block drafter on a frozen target, whose hidden states are computed on the way.

DFlash, arXiv 2602.06036. Behind tokens that are drawn anew for every piece of text stand blocks of masks, which learn
the target's distributions there.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sakiyomi.drafters.block_heads.formats import BlockFile, BlockOptions, usual_layers, write_block
from sakiyomi.drafters.medusa_heads.ranks import Ranks
from sakiyomi.train.acceptance import Continuations
from sakiyomi.train.block_head import BlockHead, new_block, rank_blocks
from sakiyomi.train.commands import TrainBlock
from sakiyomi.train.head_recipe import LayersRecipe
from sakiyomi.train.losses import soft_loss
from sakiyomi.train.masks import mask_token
from sakiyomi.train.recipe import train


def train_block(config: TrainBlock, command: str = "") -> dict[str, Any]:
    """Run `sakiyomi train block`, see `recipe.train`."""
    return train(_Block(config), command)


class _Block(LayersRecipe[TrainBlock]):
    """A few decoder layers learn to foretell a block of the target's tokens at once."""

    kind = "block"
    head: BlockHead

    def usual_reads(self, layers: int) -> tuple[int, ...]:
        """See `HeadRecipe`."""
        return usual_layers(layers)

    def check_target(self) -> None:
        """See `Taught`."""
        super().check_target()
        config = self.config
        self.options = BlockOptions(
            layers=self.reads,
            size=config.guesses + (not config.anchored),
            mask=mask_token(config.mask, self.tokenizer, self.vocab),
            anchored=config.anchored,
            causal=config.causal,
            markov="gated" if config.markov else "",
        )
        self.sizes |= {"model_type": "qwen3", "num_hidden_layers": config.layers, "attention_bias": False}
        self.layers, self.positions_ahead = config.layers, config.guesses

    def new_head(self) -> BlockHead:
        """See `HeadRecipe`."""
        return new_block(self.target, self.sizes, self.options, self.config.markov)

    def losses(self, ids: Tensor, step: int) -> Tensor:
        """See `HeadRecipe`."""
        config, head = self.config, self.head
        joined, last = self.states(ids)
        # A block needs a token before it, whose states are known, and the target's word behind all its guesses.
        order = np.random.default_rng((config.loop.seed, step)).permutation(ids.shape[1] - config.guesses)
        anchors = torch.from_numpy(np.sort(order[: config.anchors])) + 1
        hidden = head(ids, joined, anchors)
        found = torch.zeros(config.guesses)
        for row, own, states in zip(ids, hidden, last, strict=True):  # one by one: distributions are wide
            wanted, counts = self.wanted(states)
            each = []
            for ahead in range(config.guesses):
                places, read = anchors + ahead, own[:, ahead]
                added = head.added(read, row[places])
                weights = counts[places].float()
                each.append(soft_loss(read, head.head.weight, wanted, weights, config.loss, places=places, added=added))
            found = found + torch.stack(each) / len(ids)
        return found

    def ranks(self, texts: Continuations) -> Ranks:
        """See `HeadRecipe`."""
        return rank_blocks(self.head, self.states, texts)

    def write(self, folder: Path, tensors: Mapping[str, Tensor]) -> tuple[str, Mapping[str, Tensor]]:
        """See `HeadRecipe`."""
        kept = {}
        for name, tensor in tensors.items():
            part, _, rest = name.partition(".")
            if part == "layers":
                number, _, rest = rest.partition(".")
                name = f"layers.{int(number) - 1}.{rest}" if int(number) else "fc.weight"
            if part not in ("head", "embed"):  # the target's
                kept[name] = tensor
        file = BlockFile(self.sizes | {"dtype": "bfloat16"}, self.options, kept, None, "")
        write_block(folder, file, self.config.target, int(self.target.config.get_text_config().num_hidden_layers))
        about = (
            f"A block drafter of {self.config.layers} layers for {self.config.target}, which reads its layers "
            f"{', '.join(map(str, self.reads))} and guesses {self.options.guesses} tokens a pass"
        )
        return about, kept

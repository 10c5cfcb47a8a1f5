"""LoCoCo: dropped pairs are merged into some that stay (Cai et al. 2024, arXiv 2406.05317).

A merger is combined with a policy (``h2o+lococo:FOLDER``). The policy says which pairs stay. Its last choices, as many
as the convolutions were trained for, become anchors: mixtures of themselves and of dropped pairs. They count in the
budget and keep their column and place in the text.

Keys are merged as they lie in the cache, rotated for the places of their own tokens, as in the paper: a mean of keys is
what answers queries as the mean of their scores does, and turning them to the anchor's place first would have queries
meet every key at a distance that it never had. Where positions move, a mixture moves as its anchor does.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sakiyomi.cache.policies.base import View

if TYPE_CHECKING:
    from sakiyomi.cache.host import CacheHost
    from sakiyomi.cache.policies.merging.convolutions import Convolutions
    from sakiyomi.cache.policies.merging.formats import MergingFile

logger = logging.getLogger("sakiyomi")


@dataclass(eq=False)
class LoCoCo:
    """Merges what a policy drops.

    Args:
        file: folder of the convolutions.
    """

    file: str

    @cached_property
    def _found(self) -> MergingFile:
        from sakiyomi.cache.policies.merging.formats import read_merging

        return read_merging(self.file)

    @property
    def merged(self) -> int:
        """Pairs of each head that it makes, of those that stay.

        Raises:
            LoadError: the folder cannot be read.
        """
        return self._found.convolutions.shape.merged

    def prepare(self, model: CacheHost) -> None:
        """Look whether the convolutions are this model's.

        Raises:
            UnsupportedError: their sizes are not.
        """
        from sakiyomi.cache.policies.retaining.formats import fingerprint

        shapes = model.cache.shapes
        dims, heads = [(shape.key_dim, shape.value_dim) for shape in shapes], [shape.heads for shape in shapes]
        if self._found.check(dims, heads, fingerprint(model.module, None)):
            logger.warning(
                "the convolutions in %s were trained for %s, and this model has other weights: they may merge worse",
                self.file,
                self._found.base or "another model",
            )
        self._convolutions: Convolutions = self._found.convolutions.to(torch.float32).requires_grad_(False)
        for layer, shape in enumerate(shapes):
            self._convolutions.convolutions[layer].to(shape.device)
            self._convolutions.norms[layer].data = self._convolutions.norms[layer].data.to(shape.device)

    def merge(self, view: View, scores: Tensor, best: Tensor) -> Tensor:
        """Write the mixtures over the anchors.

        Args:
            view: at a boundary where pairs are dropped; its keys and values are the cache's own, and are changed.
            scores: (h, n) what the policy says of each pair.
            best: (h, budget) columns that stay, the best first.

        Returns:
            The scores, with those of the mixtures; see ``MergingShape.again``.
        """
        anchors, keys, values = self._convolutions(view.layer, view.keys, view.values, best, view.heads)
        for store, new in ((view.keys, keys), (view.values, values)):
            store.scatter_(1, anchors[..., None].expand(-1, -1, new.shape[2]), new)
        return self._convolutions.scored(scores, anchors)

"""The target's rows for tests: from tables of distributions, and as the clear composition of what a sampler does."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sakiyomi.core.params import SamplingParams
from sakiyomi.core.tree import TokenTree
from sakiyomi.sampling.rows import Row, as_row
from sakiyomi.sampling.sampler import Sampler
from sakiyomi.sampling.verifiers import Rows


class TableRows(Rows):
    """Rows whose distributions are known.

    Args:
        probs: (n + 1, V) float32, rows sum to 1.
        position: of the token that the first row predicts.
    """

    def __init__(self, probs: Tensor | Row, position: int) -> None:
        table = probs if isinstance(probs, Tensor) else torch.from_numpy(probs)
        super().__init__(table, Sampler(SamplingParams(), table.shape[1]), position)
        self._all, self._probs = table, dict(enumerate(as_row(table)))


def to_probs(logits: Tensor, tree: TokenTree, committed: Sequence[int], params: SamplingParams) -> Tensor:
    """Distributions (n + 1, V) of a scoring pass: row 0 follows the committed tokens, row i + 1 the path to node i."""
    sampler = Sampler(params, logits.shape[-1])
    paths = [tree.path_tokens(node) for node in range(-1, len(tree))]
    return sampler.probs(sampler.process(logits, paths, committed))

"""Quality of heads: the rank that each gives to the token that followed, and the tokens per pass of trees.

Ranks are measured on texts that the target generated, so the token that followed is the one that it chooses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sakiyomi.theory import best_tree

LISTED = 16
"""Ranks from this one on are not told apart."""

PLACES = 128  # places whose logits are held at a time
Paths = Sequence[tuple[int, ...]]
"""Nodes of a tree as the ranks on the way to them."""


@dataclass(frozen=True)
class Ranks:
    """Ranks of the tokens that followed, at all positions of some texts.

    Attributes:
        texts: for each text (positions, heads) int16: at a position whose token the target has read, the rank that head
            k gave to the token k + 2 positions later; ``LISTED`` for higher ranks, -1 where the text has ended.
    """

    texts: list[NDArray[np.int16]]

    @property
    def heads(self) -> int:
        """Columns."""
        return int(self.texts[0].shape[1]) if self.texts else 0

    @property
    def places(self) -> int:
        """Rows of all texts."""
        return sum(len(text) for text in self.texts)

    def accuracies(self) -> list[list[float]]:
        """For each head the chance that its first, second, ... guess is right, ``LISTED`` of them."""
        found = []
        for head in range(self.heads):
            ranks = np.concatenate([text[:, head] for text in self.texts])
            ranks = ranks[ranks >= 0]
            found.append((np.bincount(ranks, minlength=LISTED + 1)[:LISTED] / max(len(ranks), 1)).tolist())
        return found

    def replay(self, paths: Paths) -> float:
        """Tokens per target pass of a fixed tree on these texts, counted round by round: the measured tau.

        Args:
            paths: nodes of the tree; ancestors of a node are nodes too.
        """
        return self.places / max(len(self._rounds(paths)), 1)

    def accepted(self, paths: Paths) -> dict[tuple[int, ...], float]:
        """For each node of a fixed tree the share of rounds in which it was accepted, counted as ``replay`` does."""
        rounds = self._rounds(paths)
        counts = Counter(path[: depth + 1] for path in rounds for depth in range(len(path)))
        return {path: counts[path] / max(len(rounds), 1) for path in paths}

    def _rounds(self, paths: Paths) -> list[tuple[int, ...]]:
        """The accepted path of each round."""
        nodes = set(paths)
        deepest = max(map(len, nodes), default=0)
        found = []
        for text in self.texts:
            place = 0
            while place < len(text):
                path = tuple(text[place, :deepest].tolist())
                taken = 0
                while taken < deepest and path[: taken + 1] in nodes:
                    taken += 1
                place += taken + 1
                found.append(path[:taken])
        return found

    def best(self, nodes: int, heads: int | None = None, width: int = LISTED) -> list[tuple[int, ...]]:
        """The tree of so many nodes with the most expected tokens, by products of the heads' accuracies.

        Args:
            nodes: at most.
            heads: levels at most; None: all.
            width: first guesses of each head that may be in it.
        """
        # Chances must not increase with the rank; in a few hundred positions they may seem to.
        levels = [np.minimum.accumulate(chances[:width]).tolist() for chances in self.accuracies()]
        levels = levels[: heads or self.heads]
        return best_tree(levels, nodes, len(levels))


@torch.inference_mode()
def rank_texts(
    hidden_of: Callable[[Sequence[int]], Tensor],
    guess: Callable[[Tensor], Tensor],
    prompts: Sequence[Sequence[int]],
    texts: Sequence[Sequence[int]],
) -> Ranks:
    """Ranks along texts.

    Args:
        hidden_of: from the token ids of a text to the hidden state behind each, (T, hidden).
        guess: from hidden states to the guesses of each head, (heads, rows, V).
        prompts, texts: token ids of each prompt and of what the target wrote behind it.
    """
    found = []
    for prompt, text in zip(prompts, texts, strict=True):
        if len(text) < 2:
            continue
        ids = [*prompt, *text]
        # The first position is the prompt's end: the target chooses the first token, and the heads guess the next ones.
        hidden = hidden_of(ids)[len(prompt) - 1 : len(ids) - 2]
        pieces = [
            _ranked(guess(rows), ids, len(prompt) + 1 + at * PLACES) for at, rows in enumerate(hidden.split(PLACES))
        ]
        found.append(np.concatenate(pieces))
    return Ranks(found)


def _ranked(logits: Tensor, ids: Sequence[int], first: int) -> NDArray[np.int16]:
    """Ranks at the places of these logits, (heads, rows, V); ``first`` is where the token of head 0 at row 0 stands."""
    ranks = np.full((logits.shape[1], logits.shape[0]), -1, np.int16)
    for head, rows in enumerate(logits):
        coming = torch.tensor(ids[first + head : first + head + len(rows)], device=rows.device)
        if len(coming):
            rows = rows[: len(coming)].float()
            chosen = rows.gather(1, coming[:, None])
            # A token that the head does not propose has the logit -inf.
            above = (rows > chosen).sum(1).clamp_max(LISTED).masked_fill(chosen[:, 0] == -torch.inf, LISTED)
            ranks[: len(coming), head] = above.cpu().numpy()
    return ranks

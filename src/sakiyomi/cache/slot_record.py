"""Metadata of one slot's pairs between two eviction boundaries: places, scores and log probabilities."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sakiyomi.cache.layout import LayerShape


@dataclass(eq=False)
class SlotRecord:
    """By layer and head.

    Attributes:
        places: (n,) int64, places in the text of the pairs that stayed at the last boundary.
        scores: (n,) what the policy said of them.
        boundary: tokens of the text at the last boundary.
        neg_log_prob: -log p of every token since then, and of the next one once that is known.
        ahead: (V,) logits of what follows the prompt.
        reread: length of the prompt whose last tokens have already chosen their pairs.
    """

    places: list[list[Tensor]]
    scores: list[list[Tensor]]
    boundary: int = 0
    neg_log_prob: list[float] = field(default_factory=list)
    ahead: Tensor | None = None
    reread: int = 0

    @classmethod
    def empty(cls, shapes: Sequence[LayerShape]) -> SlotRecord:
        """Of a slot without a text."""
        scores = [[torch.zeros(0, device=shape.device) for _ in range(shape.heads)] for shape in shapes]
        return cls([[some.long() for some in layer] for layer in scores], scores)

    def copied(self, length: int) -> SlotRecord:
        """The record of another slot that holds the same pairs of so many tokens."""
        places, scores = ([list(heads) for heads in what] for what in (self.places, self.scores))
        return SlotRecord(places, scores, length, list(self.neg_log_prob))

    def _named(self) -> list[tuple[str, list[Tensor], int]]:
        """Every tensor: its name in a file, the list that holds it and its place there."""
        return [
            (f"{name}.{layer}.{head}", heads, head)
            for name, what in (("places", self.places), ("scores", self.scores))
            for layer, heads in enumerate(what)
            for head in range(len(heads))
        ]

    def snapshot(self) -> dict[str, Tensor]:
        """Copies of all tensors by name."""
        known = {name: heads[head].to("cpu", copy=True) for name, heads, head in self._named()}
        if self.ahead is not None:  # any token may be next
            return known | {"ahead": self.ahead.to("cpu", copy=True)}
        if self.neg_log_prob:
            known["neg_log_prob"] = torch.tensor(self.neg_log_prob, dtype=torch.float64)
        return known

    def restore(self, length: int, known: Mapping[str, Tensor]) -> None:
        """Take over what ``snapshot`` gave at a boundary of so many tokens."""
        for name, heads, head in self._named():
            heads[head] = known[name].to(heads[head].device)
        self.boundary, self.ahead = length, known.get("ahead")
        self.neg_log_prob = known["neg_log_prob"].tolist() if "neg_log_prob" in known else []

    def add_prompt(self, logits: Tensor, ids: Sequence[int], at: int, end: int) -> None:
        """Take -log p of the tokens that a prompt's chunk ids[at:end] has predicted: ids[at + 1 : end + 1].

        Its first token is included if no chunk before has predicted it. Its value comes from the logits of a prefix; at
        the beginning of a text, where nothing predicts it, it is the largest of the chunk.

        Args:
            logits: (end - at, V) of the pass.
            ids: the prompt.
            at, end: the chunk.
        """
        following = ids[at + 1 : end + 1]
        found = neg_log_prob(logits[: len(following)], following)
        if len(self.neg_log_prob) == at - self.boundary:
            first = [max(found, default=0.0)]
            self.neg_log_prob += first if self.ahead is None else neg_log_prob(self.ahead[None], ids[at : at + 1])
        self.neg_log_prob += found
        self.ahead = logits[-1].clone() if end == len(ids) else None


def neg_log_prob(logits: Tensor, tokens: Sequence[int]) -> list[float]:
    """-log p of each token in its row of logits, (rows, V)."""
    chosen = torch.tensor(tokens, device=logits.device, dtype=torch.int64)[:, None]
    return torch.neg(logits.float().log_softmax(-1).gather(1, chosen)[:, 0]).tolist()

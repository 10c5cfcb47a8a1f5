"""Heads of DSpark and DFlash2 that correct a block's guesses by the token before each, and rate their acceptance.

The guesses of a block are independent of each other. DSpark's Markov head (arXiv 2607.05147) adds to a slot's logits a
bias for the token before it, from a table of low rank; its confidence head estimates acceptance. DFlash2's selector
ranks the likeliest tokens of a slot by the token before and the hidden state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sakiyomi.core.errors import LoadError
from sakiyomi.drafters.block_heads.formats import BlockFile
from sakiyomi.kernels.native import PackedWeights
from sakiyomi.kernels.pack import linear_beside

Correct = Callable[[int, Sequence[int], Tensor, Sequence[int]], tuple[Tensor, list[float] | None]]
"""Of one block: from a slot, the candidates before it (-1: the last committed token), their tokens, and the parents of
all candidates, to the slot's logits behind each, (places, V), and how likely its guesses are to be accepted there."""


class Corrections:
    """The Markov head and the confidence head of DSpark.

    Args:
        file: of the drafter.
        known: tokens whose logits are corrected.
        device, dtype: of the weights.

    Raises:
        LoadError: tensors are missing, or have other shapes.
    """

    def __init__(self, file: BlockFile, known: int, device: torch.device, dtype: torch.dtype) -> None:
        self.kind, self._width = file.options.markov, file.tensors["hidden_norm.weight"].shape[0]
        own = {name: tensor.to(device, dtype) for name, tensor in file.tensors.items() if "_head." in name}
        own.pop("lm_head.weight", None)
        self._before = own.pop("markov_head.markov_w1.weight", None)
        self._after = own.pop("markov_head.markov_w2.weight", None)
        self.rank = 0 if self._before is None else self._before.shape[1]
        mix = _linear(own, "markov_head." + {"gated": "gate_proj", "rnn": "joint_proj"}.get(self.kind, "none"))
        confidence = _linear(own, "confidence_head.proj")
        found = (None if self._after is None else self._after.shape[1], _width(mix), _width(confidence))
        others = self._after is not None and len(self._after) != known
        mixed = {"gated": self._width + self.rank, "rnn": self._width + 2 * self.rank}.get(self.kind)
        sure = (self._width, self._width + self.rank) if file.options.confident else (None,)
        if own or others or found[:2] != (self.rank if self.kind else None, mixed) or found[2] not in sure:
            raise LoadError(
                f"the tensors markov_head.* and confidence_head.* of {file.name} do not fit its config.json; get it "
                "again"
            )
        self._mixing, self._rating = mix, confidence
        self.pack(None)

    def pack(self, tables: PackedWeights | None, bits: int = 16) -> None:
        """Pack the layers for these kernels; the one over the vocabulary has so many bits."""
        self._over = None if self._after is None else linear_beside(tables, self._after, None, bits)
        # Of what they read, hidden states are known for all slots at once; tokens and states are not.
        self._mix = _Split.of(self._mixing, self._width, tables, first=self.kind == "gated")
        self._confidence = _Split.of(self._rating, self._width, tables, first=True)

    @property
    def by_rows(self) -> bool:
        """Whether a row's correction depends on its hidden state and the token before it alone, see ``biased``."""
        return self.kind != "rnn" and self._over is not None

    def biased(self, hidden: Tensor, tokens: Tensor) -> tuple[Tensor, ...]:
        """What is added to logits, (n, V), and if there is a confidence head how likely guesses are to be accepted.

        Args:
            hidden: (n, hidden) of the slots.
            tokens: (n,) before them.
        """
        assert self._before is not None and self._over is not None
        embedded = mixed = F.embedding(tokens, self._before)
        if self._mix is not None:
            mixed = torch.sigmoid(self._mix.both(hidden, embedded)) * embedded
        found: Tensor = self._over(mixed)
        if self._confidence is None:
            return (found,)
        return found, torch.sigmoid(self._confidence.both(hidden, embedded).float())

    def begin(self, logits: Tensor, hidden: Tensor) -> Correct:
        """Corrections of one block.

        Args:
            logits: of the slots, (slots, V).
            hidden: that they came from, (slots, hidden).
        """
        behind: dict[int, Tensor] = {}  # states of a recurrent head behind each place
        blank = hidden.new_zeros(self.rank)
        mix = None if self._mix is None else self._mix.over(hidden)
        sure = None if self._confidence is None else self._confidence.over(hidden)

        def mixed(level: int, places: Sequence[int], embedded: Tensor, parents: Sequence[int]) -> Tensor:
            if mix is None:
                return embedded
            if self.kind == "gated":
                return torch.sigmoid(mix(level, embedded)) * embedded
            states = torch.stack([blank if place < 0 else behind[parents[place]] for place in places])
            gate, fresh, found = mix(level, torch.cat([states, embedded], -1)).chunk(3, -1)
            gate = torch.sigmoid(gate)
            behind.update(zip(places, gate * states + (1 - gate) * torch.tanh(fresh), strict=True))
            return torch.tanh(found)

        def slot(
            level: int, places: Sequence[int], tokens: Tensor, parents: Sequence[int]
        ) -> tuple[Tensor, list[float] | None]:
            found, embedded = logits[level].expand(len(places), -1), hidden.new_zeros(len(places), 0)
            if self._before is not None and self._over is not None:
                embedded = self._before[tokens]
                found = logits[level] + self._over(mixed(level, places, embedded, parents))
            chances = None if sure is None else torch.sigmoid(sure(level, embedded).float())[:, 0].tolist()
            return found, chances

        return slot


class _Split(NamedTuple):
    """A linear layer that reads a hidden state and others side by side.

    Attributes:
        hidden, others: its parts that read both; None: it reads no others.
        width: numbers of the others.
    """

    hidden: nn.Module
    others: nn.Module | None
    width: int

    @classmethod
    def of(
        cls, layer: tuple[Tensor, Tensor | None] | None, width: int, tables: PackedWeights | None, *, first: bool
    ) -> _Split | None:
        """Of a layer whose hidden states are so wide, and come before the others or behind them; of none, none."""
        if layer is None:
            return None
        weight, bias = layer
        left = weight.shape[1] - width
        hidden, others = weight.split([width, left] if first else [left, width], 1)[:: 1 if first else -1]
        reads = linear_beside(tables, others.contiguous()) if left else None
        return cls(linear_beside(tables, hidden.contiguous(), bias), reads, left)

    def both(self, hidden: Tensor, others: Tensor) -> Tensor:
        """The layer over (n, hidden) and (n, in or more) of the others to (n, out)."""
        known: Tensor = self.hidden(hidden)
        return known if self.others is None else known + self.others(others[:, : self.width].contiguous())

    def over(self, hidden: Tensor) -> Callable[[int, Tensor], Tensor]:
        """The layer over (slots, hidden): from a slot and (n, in or more) of the others to (n, out)."""
        known, reads = self.hidden(hidden), self.others
        if reads is None:
            return lambda slot, others: known[slot].expand(len(others), -1)
        return lambda slot, others: known[slot] + reads(others[:, : self.width].contiguous())


class Selector:
    """Ranks the likeliest tokens of a slot; all others get -inf.

    Args:
        file: of the drafter.
        device, dtype: of the weights.

    Raises:
        LoadError: tensors are missing, or have other shapes.
    """

    def __init__(self, file: BlockFile, device: torch.device, dtype: torch.dtype) -> None:
        self.count, prefix = file.options.selected, "candidate_selector."
        own = {n.removeprefix(prefix): t.to(device, dtype) for n, t in file.tensors.items() if n.startswith(prefix)}
        names = ("predecessor_codebook", "successor_codebook", "hidden_projection.weight")
        shapes = [tuple(own[name].shape) if name in own else None for name in names]
        width = file.tensors["hidden_norm.weight"].shape[0]
        rank = shapes[0][1] if shapes[0] and len(shapes[0]) == 2 else 0
        fits = rank and shapes[0] == shapes[1] and shapes[2] == (rank, width) and len(own[names[0]]) >= self.count > 0
        if len(own) > len(names) or not fits:
            raise LoadError(
                f"the tensors {prefix}* of {file.name} do not fit its config.json: {', '.join(names)} have the shapes "
                f"{shapes}; get it again"
            )
        self._before, self._after, self._project = (own[name] for name in names)

    def begin(self, logits: Tensor, hidden: Tensor) -> Correct:
        """The ranking of one block, see ``Corrections.begin``."""
        return lambda level, places, tokens, parents: (self.ranked(logits[level], hidden[level], tokens), None)

    def ranked(self, logits: Tensor, hidden: Tensor, tokens: Tensor) -> Tensor:
        """Logits of a slot behind several tokens, (n, V): -inf but for the likeliest of (V,) `logits`."""
        chosen = logits.topk(min(self.count, len(logits))).indices
        scores = (self._before[tokens] * (self._project @ hidden)) @ self._after[chosen].T
        found = logits.new_full((len(tokens), len(logits)), -torch.inf)
        found[:, chosen] = logits[chosen] + scores.to(logits.dtype)
        return found


def _linear(tensors: dict[str, Tensor], name: str) -> tuple[Tensor, Tensor | None] | None:
    weight = tensors.pop(f"{name}.weight", None)
    return None if weight is None else (weight, tensors.pop(f"{name}.bias", None))


def _width(layer: tuple[Tensor, Tensor | None] | None) -> int | None:
    return None if layer is None else layer[0].shape[1]

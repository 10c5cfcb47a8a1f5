"""Captured hidden states of a pass: the input of the head over the vocabulary, and the outputs of layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

HEAD = -1
"""Stands for a layer's number: the input of the head over the vocabulary."""


class PassOutput:
    """The results of one pass.

    Args:
        logits: see ``whole``.
        features: hidden states by decoder layer, counted from 0: its output for each row of the pass, (rows, hidden);
            under ``HEAD`` the input of the head for each row of ``logits``.
        rows: number of rows of the pass; None: as many as ``logits`` has.

    Attributes:
        whole: logits as the pass returns them, (rows, V), or with filler rows (1, rows or more, V).
    """

    __slots__ = ("_rows", "features", "whole")

    def __init__(self, logits: Tensor, features: Mapping[int, Tensor], rows: int | None = None) -> None:
        self.whole, self.features, self._rows = logits, features, rows

    @property
    def logits(self) -> Tensor:
        """(rows, V), or (requests, V) where only the last row of each was asked for."""
        return self.whole if self._rows is None else self.whole[0, : self._rows]

    @classmethod
    def empty(cls, vocab_size: int) -> PassOutput:
        """The output of a pass without rows."""
        return cls(torch.empty(0, vocab_size), {})

    @classmethod
    def joined(cls, parts: Sequence[PassOutput]) -> PassOutput:
        """Several passes as if they were one."""
        features = {layer: torch.cat([part.features[layer] for part in parts]) for layer in parts[0].features}
        return cls(torch.cat([part.logits for part in parts]), features)


def states_by_layer(
    layers: Sequence[int], states: Sequence[Tensor], rows: int, keep: Tensor | None = None
) -> dict[int, Tensor]:
    """Hidden states of a pass by layer, without those of rows that only fill the pass up.

    Args:
        layers: that are captured, and ran.
        states: of each, (1, rows or more, hidden).
        rows: of the pass.
        keep: rows that the head read; None: all.
    """
    found = {layer: state[0, :rows] for layer, state in zip(layers, states, strict=True)}
    if keep is not None and HEAD in found:
        head = states[layers.index(HEAD)][0]
        found[HEAD] = head[keep] if len(keep) != len(head) else head
    return found


class HiddenStateCapture:
    """Captures hidden states of each pass; in recorded passes they are outputs.

    Attributes:
        layers: captured layers, in the order of ``take``.
        wanted: decoder layers that the next ``listen`` captures beside the head's input.
    """

    def __init__(self) -> None:
        self.layers: tuple[int, ...] = ()
        self.wanted: dict[int, nn.Module] = {}
        self._hooks: list[Any] = []
        self._states: dict[int, Tensor] = {}  # by layer

    def listen(self, head: nn.Module) -> None:
        """Capture the input of this head and the outputs of the wanted layers from now on, and nothing else."""
        self.leave()
        layers = self.wanted

        def read(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            self._states[HEAD] = inputs[0]

        def gave(layer: int) -> Any:
            def hook(module: nn.Module, inputs: Any, output: Any) -> None:
                self._states[layer] = output[0] if isinstance(output, tuple) else output

            return hook

        self.layers = (HEAD, *layers)
        self._hooks = [head.register_forward_pre_hook(read)]
        self._hooks += [module.register_forward_hook(gave(layer)) for layer, module in layers.items()]

    def leave(self) -> None:
        """Stop capturing."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self.layers = [], ()
        self._states.clear()

    def begin(self) -> None:
        """Drop the states of the previous pass."""
        self._states.clear()

    def give(self, states: Sequence[Tensor]) -> None:
        """Set the states of a pass that was made of several forwards, in the order of ``take``."""
        self._states = dict(zip(self.layers, states, strict=False))

    def take(self) -> tuple[Tensor, ...]:
        """The states of the pass, (1, rows, hidden) each, without those of layers that did not run."""
        return tuple(self._states[layer] for layer in self.layers if layer in self._states)

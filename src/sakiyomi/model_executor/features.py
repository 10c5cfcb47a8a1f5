"""What a model's head over the vocabulary reads, taken on the way."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["HiddenStateCapture"]


class HiddenStateCapture:
    """Notes the input of a head at each of its calls, in compiled graphs too, where it becomes an output.

    Attributes:
        read: (1, rows, hidden) of the last eager pass; None before, and where nobody listens.
        traced: the same for a pass that is being compiled, in a thread beside those that run.
    """

    def __init__(self) -> None:
        self.read: Tensor | None = None
        self.traced: Tensor | None = None
        self._hook: Any = None

    def listen(self, head: nn.Module) -> None:
        """Listen to this head from now on, and to no other."""
        self.leave()

        def note(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            if torch.compiler.is_dynamo_compiling():
                self.traced = inputs[0]
            else:
                self.read = inputs[0]

        self._hook = head.register_forward_pre_hook(note)

    def leave(self) -> None:
        """Listen no more."""
        if self._hook is not None:
            self._hook.remove()
        self._hook = self.read = self.traced = None

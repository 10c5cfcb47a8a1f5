"""A model that runs from a recording of its passes: its weights and a program, without transformers' class of it.

Recordings are read by `loading/recording.py` and written by `loading/recorder.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from sakiyomi.kernels.native import PackedLayer
from sakiyomi.model_executor.program import Program

__all__ = ["RecordedConfig", "RecordedModel"]


class RecordedConfig(SimpleNamespace):
    """A model's configuration, as it was when its passes were recorded."""

    def get_text_config(self, **_: Any) -> RecordedConfig:
        """Itself: what is recorded are models of text alone."""
        return self

    def to_dict(self) -> dict[str, Any]:
        """As transformers gives it."""
        return dict(vars(self))


class RecordedModel(nn.Module):
    """Stands in for a transformers model: modules with its names that hold its weights. None of them is called.

    Args:
        config, generation_config: of the model.
        graph: TorchScript, from token ids and positions (1, N), the rows to keep (K) and the weights to what the head
            reads, (1, K, hidden).
        tail: the same from what the head gives to logits, as for a soft cap; None: these are the logits.
        weights: what the script reads, by name, in its order.
        embeddings: names of modules that hold rows of which a pass reads a few.
        layers: the packed linear layers, by name.
        head: which of them the head is.
        whole: loads the transformers model with these packed layers in it.

    Attributes:
        program: runs passes.

    Raises:
        UnsupportedError: see ``Program``.
    """

    def __init__(
        self,
        config: RecordedConfig,
        generation_config: RecordedConfig,
        graph: Any,
        tail: Any,
        weights: Mapping[str, Tensor],
        embeddings: Sequence[str],
        layers: Mapping[str, PackedLayer],
        head: str,
        whole: Callable[[RecordedModel], Any],
    ) -> None:
        super().__init__()
        self.config, self.generation_config, self.whole = config, generation_config, whole
        self.layers: dict[str, PackedLayer] = dict(layers)
        self._weights = list(weights.values())
        for name, tensor in weights.items():
            parent, _, own = name.rpartition(".")
            if parent in embeddings:
                self._put(parent, nn.Embedding.from_pretrained(tensor))
            else:
                self._container(parent).register_parameter(own, nn.Parameter(tensor, requires_grad=False))
        for name, layer in layers.items():
            self._put(name, layer)
        self._head = head
        last = self.layers[head]
        rows = [(width, self.dtype) for width in (last.out_features, last.in_features)]
        self.program = Program(graph, self._weights, rows, last, tail)

    def _container(self, name: str) -> nn.Module:
        found: nn.Module = self
        for part in name.split(".") if name else ():
            if part not in found._modules:
                found.add_module(part, nn.Module())
            found = found._modules[part]  # type: ignore[assignment]
        return found

    def _put(self, name: str, module: nn.Module) -> None:
        parent, _, own = name.rpartition(".")
        self._container(parent).add_module(own, module)

    @property
    def dtype(self) -> torch.dtype:
        """Of hidden states."""
        return self._weights[0].dtype

    @property
    def device(self) -> torch.device:
        """The CPU, whose kernels are recorded."""
        return torch.device("cpu")

    def get_output_embeddings(self) -> nn.Module:
        """The head over the vocabulary."""
        return self.layers[self._head]

    def set_attn_implementation(self, name: str) -> None:
        """Nothing: the operator is in the program."""

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention_mask: None = None,
        use_cache: bool = False,
        logits_to_keep: int | Tensor = 0,
    ) -> SimpleNamespace:
        """Token ids and positions (1, N) to an object with logits, (1, N, V), or of the rows to keep, (1, K, V)."""
        keep = logits_to_keep if isinstance(logits_to_keep, Tensor) else None
        return SimpleNamespace(logits=self.program(input_ids, position_ids, keep)[0])

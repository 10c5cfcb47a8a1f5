"""Quantizing a model's linear layers: how many bits each gets, and what that changes on a text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sakiyomi.core.errors import UnsupportedError
from sakiyomi.kernels.native import PackedLayer, PackedWeights
from sakiyomi.kernels.quantization import QuantizationReport, choose_bits, compare, layer_errors
from sakiyomi.model_executor.encoder_decoder.decoder import Encoder


class Quantizing:
    """The quantization that a caller asks for.

    Args:
        kind: "int8" or "int4".

    Attributes:
        kind: the same.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._before: Tensor | None = None

    def choose(self, module: Any, encoder: Encoder | None, text: Sequence[int]) -> dict[int, int]:
        """Measure the linear layers on a text, before they are quantized; its attention is left switched.

        Returns:
            Bits of their weights, by their id.
        """
        if encoder is not None and encoder.judged is not None:
            self._before = encoder.judged.logits
            return encoder.judged.bits
        module.set_attn_implementation("eager")
        errors, self._before = layer_errors(module, {"input_ids": torch.tensor([text])}, {self.kind, "int8"})
        return choose_bits(self.kind, errors, module.get_output_embeddings())

    def report(self, module: Any, after: Tensor) -> QuantizationReport:
        """What quantizing changed, by the logits (tokens, V) on the same text as they are now."""
        assert self._before is not None
        (agreement, divergence), self._before = compare(self._before, after), None
        layers = {name: layer for name, layer in module.named_modules() if isinstance(layer, PackedLayer)}
        kept = tuple(name for name, layer in layers.items() if layer.bits == 16)
        return QuantizationReport(self.kind, len(layers) - len(kept), kept, agreement, divergence, len(after))

    def check(self, module: Any, packed: PackedWeights | None) -> None:
        """Raise where the kernels do not serve the model.

        Raises:
            UnsupportedError: they do not.
        """
        if packed is None:
            raise UnsupportedError(
                f"quantize={self.kind!r}: the compiled CPU kernels do not serve {type(module).__name__}, which keeps "
                "its own attention, or whose weights are not all on the CPU; leave quantize at None"
            )

"""``Prepared``: metadata of a model whose linear layers are packed or quantized already."""

from __future__ import annotations

from dataclasses import dataclass

from sakiyomi.cache.layout import LayerShape
from sakiyomi.kernels.native import PackedWeights
from sakiyomi.kernels.quantization import QuantizationReport


@dataclass(frozen=True)
class Prepared:
    """Metadata of a model whose linear layers are packed or quantized already.

    Attributes:
        native: the kernels' tables with its weights; None: the model has weights of its own.
        shapes: of the cache, one per layer; None: not known yet.
        report: what quantization changed; None where nothing was quantized.
        siblings: names of layers that are computed together.
    """

    native: PackedWeights | None
    shapes: list[LayerShape] | None
    report: QuantizationReport | None
    siblings: list[list[str]]

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
        native: the kernels' tables with its weights; None: the model has its own weights.
        shapes: shapes of the cache, by layer; None: not known yet.
        report: the effect of quantization; None if nothing was quantized.
        siblings: names of the layers of each group that is computed together.
    """

    native: PackedWeights | None
    shapes: list[LayerShape] | None
    report: QuantizationReport | None
    siblings: list[list[str]]

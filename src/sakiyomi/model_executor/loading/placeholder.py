"""Registers packed folders with transformers, whose weight files do not contain the packed layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

METHOD = "sakiyomi"
"""The folder's ``quant_method`` in config.json."""


class _Placeholder(nn.Identity):
    """Replaces a packed layer until it is read. It has an empty weight, which some models initialize at once."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.empty(0, device="cpu")
        self.weight._is_hf_initialized = True  # type: ignore[attr-defined]


def register() -> None:
    """Make ``from_pretrained`` leave packed layers out of a model. Further calls do nothing."""
    from transformers.quantizers.auto import (
        AUTO_QUANTIZATION_CONFIG_MAPPING,
        register_quantization_config,
        register_quantizer,
    )
    from transformers.quantizers.base import HfQuantizer
    from transformers.utils.quantization_config import QuantizationConfigMixin

    if METHOD in AUTO_QUANTIZATION_CONFIG_MAPPING:
        return

    @register_quantization_config(METHOD)
    class PackedConfig(QuantizationConfigMixin):
        def __init__(self, layers: list[str], **_: Any) -> None:
            self.quant_method = METHOD  # type: ignore[assignment]
            self.layers = layers

    @register_quantizer(METHOD)
    class PackedQuantizer(HfQuantizer):
        requires_calibration = True

        def _process_model_before_weight_loading(self, model: Any, **options: Any) -> None:
            layers: list[str] = self.quantization_config.layers  # type: ignore[attr-defined]
            for name in layers:
                parent, _, own = name.rpartition(".")
                place = model.get_submodule(parent)
                delattr(place, own)  # of experts it is a parameter, and a module may not replace one
                setattr(place, own, _Placeholder())
            # A head with tied weights now has its own packed weights.
            model.all_tied_weights_keys = {
                name: source
                for name, source in model.all_tied_weights_keys.items()
                if not {name.rpartition(".")[0], source.rpartition(".")[0]} & set(layers)
            }

        @property
        def is_trainable(self) -> bool:
            return False

        def is_serializable(self) -> bool:
            return False

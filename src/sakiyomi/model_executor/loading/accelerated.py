"""Loads a model that torchao quantizes on a GPU, and measures the effect.

torchao quantizes only weights, each when it is read; activations and the head stay as they are. The model's own logits
are taken before, with its linear layers on disk, so that neither the GPU nor main memory ever holds all of it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from sakiyomi.core.errors import LoadError, UnsupportedError
from sakiyomi.core.prompts import judging_text
from sakiyomi.kernels.pack import is_linear
from sakiyomi.kernels.quantization import QuantizationReport, compare
from sakiyomi.model_executor.loading.reader import Reader


def torchao(kind: str, name: str, dtype: torch.dtype) -> Any:
    """Torchao's configuration for transformers.

    Raises:
        LoadError: torchao is not installed.
        UnsupportedError: its kernel for 4 bits takes bfloat16 only.
    """
    try:
        from torchao.quantization import Int4WeightOnlyConfig, Int8WeightOnlyConfig
    except ImportError as error:
        raise LoadError(f"quantize={kind!r} on a GPU needs torchao; pip install torchao") from error
    from transformers import TorchAoConfig

    if kind == "int8":
        return TorchAoConfig(Int8WeightOnlyConfig(set_inductor_config=False))
    if dtype != torch.bfloat16:
        raise UnsupportedError(
            f"quantize={kind!r} on a GPU needs bfloat16, and {name!r} is in {dtype}; pass dtype='bfloat16'"
        )
    # The tiled layout has a kernel in torch itself; the plain one needs another package.
    config = Int4WeightOnlyConfig(group_size=64, int4_packing_format="tile_packed_to_4d", set_inductor_config=False)
    return TorchAoConfig(config)


def read_quantized(reader: Reader, kind: str, tokenizer: Any, *, layered: bool) -> tuple[Any, QuantizationReport]:
    """A model on the reader's device, quantized by torchao, and the effect of quantization on a text.

    Args:
        reader: of the model.
        kind: "int8" or "int4".
        tokenizer: of the model.
        layered: its linear layers can stay on disk until they are needed (``fit.by_layer``).

    Raises:
        LoadError, UnsupportedError: as ``torchao``, ``Reader.read``.
    """
    settings = torchao(kind, reader.name, reader.dtype)
    model = reader.read_later() if layered else reader.read()
    text = torch.tensor([judging_text(model, tokenizer)])
    before = _own_logits(model.eval(), text, reader.device)
    del model
    quantized = reader.read(settings).eval()
    agreement, divergence = compare(before, _logits(quantized, text.to(reader.device)).cpu())
    linear = {name: layer for name, layer in quantized.named_modules() if is_linear(layer)}
    kept = tuple(name for name, layer in linear.items() if type(layer.weight) is nn.Parameter)
    count = len(linear) - len(kept)
    return quantized, QuantizationReport(kind, count, kept, agreement, divergence, text.shape[1])


def _own_logits(model: Any, text: Tensor, device: torch.device) -> Tensor:
    """Logits of a model in main memory; layers on disk are loaded to the device, and computed there."""
    for layer in model.modules():
        hook = getattr(layer, "_hf_hook", None)
        if hook is not None:
            hook.execution_device, hook.io_same_device = device, True
    return _logits(model, text)


def _logits(model: Any, text: Tensor) -> Tensor:
    """(T, V)."""
    with torch.no_grad():
        found: Tensor = model(input_ids=text, use_cache=False).logits[0]
    return found

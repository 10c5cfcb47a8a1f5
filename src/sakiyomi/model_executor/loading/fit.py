"""Whether a model fits into memory, asked before its weights are read."""

from __future__ import annotations

import copy
from typing import Any

import torch

from sakiyomi.core.checkpoint import Checkpoint
from sakiyomi.core.memory import available_bytes, readable, require_bytes
from sakiyomi.core.process import TORCH_STATE
from sakiyomi.kernels.pack import PACKED
from sakiyomi.model_executor.loading.families import has_experts
from sakiyomi.model_executor.loading.reader import quiet

__all__ = ["by_layer", "check_memory", "rounded_bytes", "without_weights"]

_BITS = {"int8": 8.2, "int4": 4.6}  # of a weight with its scales


def by_layer(config: Any, checkpoint: Checkpoint) -> bool:
    """Whether a model's linear layers can stay on disk until each is rounded.

    Not what has to be unpacked first, nor experts: transformers stacks them, which would write them all to disk again.
    """
    return all(path.suffix == ".safetensors" for path in checkpoint.files) and not has_experts(config)


def check_memory(
    name: str,
    config: Any,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    *,
    quantize: str | None = None,
    trust_remote_code: bool = False,
) -> None:
    """Refuse a model that does not fit, with the numbers and what would.

    Args:
        name: of the model.
        config: its configuration.
        checkpoint: its weights; what is quantized there stays so.
        dtype: they are to have.
        device: where they are to be. They pass through main memory, all at once unless they are rounded.
        quantize: how they are rounded, layer by layer; None: they are not, or all are in memory before.
        trust_remote_code: as in ``load_model``.

    Raises:
        MemoryLimitError: it does not fit.
    """
    quantized = hasattr(config, "quantization_config")

    def needed(how: torch.dtype | str) -> int:
        if quantized:
            return checkpoint.stored_bytes
        if isinstance(how, str):
            return rounded_bytes(config, dtype, how, trust_remote_code)
        return checkpoint.bytes_as(how.itemsize)

    places = ("cpu", str(device)) if quantize is None else (str(device),)
    for place in dict.fromkeys(places):
        room, size = available_bytes(place), needed(quantize or dtype)
        if size <= room:
            continue
        remedy = "choose a smaller model"
        if quantize is None:
            billions = room / dtype.itemsize / 1e9
            remedy = f"the largest model that fits in {_short(dtype)} has {billions:.2g} billion parameters"
        for setting, how in _smaller(dtype, quantize, by_layer(config, checkpoint)) if not quantized else ():
            if needed(how) <= room:
                remedy += f"; with {setting} this one needs about {readable(needed(how))} and fits"
                break
        if quantize is None and by_layer(config, checkpoint):
            remedy += "; with offload='auto' what does not fit stays on disk and is read at every pass"
        require_bytes(size, f"the model {name!r} in {quantize or _short(dtype)}", device=place, remedy=remedy)


def _smaller(dtype: torch.dtype, quantize: str | None, layered: bool) -> list[tuple[str, torch.dtype | str]]:
    """Settings that need less, the least harmful first."""
    settings: list[tuple[str, torch.dtype | str]] = []
    if quantize is None and dtype.itemsize > 2:
        settings.append(("dtype='bfloat16'", torch.bfloat16))
    kinds = list(_BITS)[list(_BITS).index(quantize) + 1 if quantize else 0 :] if layered else []
    return settings + [(f"quantize={kind!r}", kind) for kind in kinds]


def rounded_bytes(config: Any, dtype: torch.dtype, quantize: str, trust_remote_code: bool = False) -> int:
    """Bytes of a model whose linear layers are rounded, and of its largest layer while it is.

    Args:
        config: of the model.
        dtype: of what is not rounded.
        quantize: "int8" or "int4".
        trust_remote_code: as in ``load_model``.
    """
    model = without_weights(config, dtype, trust_remote_code)
    layers: list[int] = [module.weight.numel() for module in model.modules() if type(module) in PACKED]
    # By module: embeddings that the head shares stay as they are beside its rounded copy.
    others: dict[int, int] = {
        id(parameter): parameter.nbytes
        for module in model.modules()
        if type(module) not in PACKED
        for parameter in module.parameters(recurse=False)
    }
    largest = 4 * max(layers, default=0)  # as read, rounded, and in its new order
    return int(sum(layers) * _BITS[quantize] / 8) + sum(others.values()) + largest


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def without_weights(config: Any, dtype: torch.dtype, trust_remote_code: bool) -> Any:
    """A model as a configuration says, whose tensors have sizes and no values."""
    from transformers import AutoModelForCausalLM

    with TORCH_STATE, torch.device("meta"), quiet():
        return AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype, trust_remote_code=trust_remote_code)

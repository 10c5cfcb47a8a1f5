"""Whether a model fits into memory, asked before its weights are read."""

from __future__ import annotations

import torch

from sakiyomi.core.dtypes import dtype_name
from sakiyomi.core.memory import available_bytes, readable, require_bytes
from sakiyomi.kernels.experts import expert_weights, is_experts
from sakiyomi.kernels.pack import is_linear
from sakiyomi.model_executor.loading.families import has_experts
from sakiyomi.model_executor.loading.reader import Reader, without_weights

_BITS = {"int8": 8.2, "int4": 4.6}  # of a weight with its scales


def by_layer(reader: Reader) -> bool:
    """Whether a model's linear layers can stay on disk until each is quantized.

    Files that are unpacked first do not allow it, nor do experts: transformers stacks them, which would write them all
    to disk again.
    """
    return all(path.suffix == ".safetensors" for path in reader.checkpoint.files) and not has_experts(reader.config)


def check_memory(reader: Reader, *, quantize: str | None = None, device: str | None = None) -> None:
    """Refuse a model that does not fit, with its size, the free memory and a remedy.

    Args:
        reader: of the model; what is quantized in its files stays so.
        quantize: how its weights are quantized, layer by layer; None: they are not, or all are in memory before.
        device: where they are to be; None: the reader's. They pass through main memory, all at once unless they are
            quantized.

    Raises:
        MemoryLimitError: it does not fit.
    """
    quantized, dtype = hasattr(reader.config, "quantization_config"), reader.dtype

    def needed(how: torch.dtype | str) -> int:
        if quantized:
            return reader.checkpoint.stored_bytes
        return quantized_bytes(reader, how) if isinstance(how, str) else reader.checkpoint.bytes_as(how.itemsize)

    where = device or str(reader.device)
    for place in dict.fromkeys(("cpu", where) if quantize is None else (where,)):
        room, size = available_bytes(place), needed(quantize or dtype)
        if size <= room:
            continue
        remedy = "choose a smaller model"
        if quantize is None:
            billions = room / dtype.itemsize / 1e9
            remedy = f"the largest model that fits in {dtype_name(dtype)} has {billions:.2g} billion parameters"
        for setting, how in _smaller(dtype, quantize, by_layer(reader)) if not quantized else ():
            if needed(how) <= room:
                remedy += f"; with {setting} this one needs about {readable(needed(how))} and fits"
                break
        if quantize is None and by_layer(reader):
            remedy += "; with offload='auto' what does not fit stays on disk and is read at every pass"
        require_bytes(
            size, f"the model {reader.name!r} in {quantize or dtype_name(dtype)}", device=place, remedy=remedy
        )


def _smaller(dtype: torch.dtype, quantize: str | None, layered: bool) -> list[tuple[str, torch.dtype | str]]:
    """Settings that need less, the least harmful first."""
    settings: list[tuple[str, torch.dtype | str]] = []
    if quantize is None and dtype.itemsize > 2:
        settings.append(("dtype='bfloat16'", torch.bfloat16))
    kinds = list(_BITS)[list(_BITS).index(quantize) + 1 if quantize else 0 :] if layered else []
    return settings + [(f"quantize={kind!r}", kind) for kind in kinds]


def quantized_bytes(reader: Reader, quantize: str) -> int:
    """Bytes of a model whose linear layers are quantized, and of its largest layer while it is."""
    model = without_weights(reader.config, reader.dtype, trust_remote_code=reader.trust_remote_code)
    layers: list[int] = [module.weight.numel() for module in model.modules() if is_linear(module)]
    stacks = [getattr(part, name) for part in model.modules() if is_experts(part) for name in expert_weights(part)]
    layers += [stack.numel() for stack in stacks]
    # By module: embeddings that the head shares stay as they are beside its quantized copy.
    others: dict[int, int] = {
        id(parameter): parameter.nbytes
        for module in model.modules()
        if not is_linear(module)
        for parameter in module.parameters(recurse=False)
        if id(parameter) not in set(map(id, stacks))
    }
    largest = 4 * max(layers, default=0)  # as read, quantized, and in its new order
    return int(sum(layers) * _BITS[quantize] / 8) + sum(others.values()) + largest

"""Whether a model fits into memory, asked before its weights are read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sakiyomi.kernels.pack import PACKED
from sakiyomi.loading.checkpoint import Checkpoint
from sakiyomi.memory import available_bytes, readable, require_bytes

if TYPE_CHECKING:
    import torch

__all__ = ["check_memory", "check_rounded", "rounded_bytes"]

_BITS = {"int8": 8.2, "int4": 4.6}  # of a weight with its scales


def check_memory(
    name: str,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    *,
    quantized: bool,
    quantize: str | None = None,
) -> None:
    """Refuse a model that does not fit as it is, with the numbers and what would.

    Args:
        name: of the model.
        checkpoint: its weights.
        dtype: they are to have.
        device: where they are to be; they pass through main memory.
        quantized: the stored weights are quantized already and stay so.
        quantize: how a GPU's library is to round them.

    Raises:
        MemoryLimitError: it does not fit.
    """

    def needed(itemsize: float) -> int:
        return checkpoint.stored_bytes if quantized else checkpoint.bytes_as(itemsize)

    for where in dict.fromkeys(("cpu", str(device))):
        room = available_bytes(where)
        size = needed(dtype.itemsize if quantize is None or where == "cpu" else _BITS[quantize] / 8)
        remedy = f"the largest model that fits in {str(dtype).removeprefix('torch.')} has "
        remedy += f"{room / dtype.itemsize / 1e9:.2g} billion parameters"
        smaller = [(f"dtype={'bfloat16'!r}", 2.0)] if dtype.itemsize > 2 else []
        smaller += [(f"quantize={kind!r}", bits / 8) for kind, bits in _BITS.items()] if checkpoint.elements else []
        for setting, itemsize in smaller:
            if not quantized and quantize is None and needed(itemsize) <= room:
                remedy += f"; with {setting} this one needs about {readable(needed(itemsize))} and fits"
                break
        what = f"the model {name!r} in {str(dtype).removeprefix('torch.')}"
        require_bytes(size, what, device=where, remedy=remedy)


def rounded_bytes(model: Any, quantize: str) -> int:
    """Bytes of a model whose linear layers are rounded, and of its largest layer while it is."""
    layers: list[torch.Tensor] = [module.weight for module in model.modules() if type(module) in PACKED]
    rounded = {id(weight) for weight in layers}
    others: int = sum(p.numel() * p.dtype.itemsize for p in model.parameters() if id(p) not in rounded)
    most: int = max((weight.numel() * 4 for weight in layers), default=0)  # in float32 while it is rounded
    return int(sum(weight.numel() for weight in layers) * _BITS[quantize] / 8) + others + most


def check_rounded(name: str, model: Any, quantize: str, dtype: torch.dtype) -> None:
    """Refuse a model that does not even fit rounded. Its linear layers are still on disk.

    Raises:
        MemoryLimitError: it does not fit.
    """
    smaller = rounded_bytes(model, "int4")
    remedy = "choose a smaller model"
    if quantize == "int8" and smaller <= available_bytes():
        remedy = f"with quantize='int4' it needs {readable(smaller)} and fits"
    require_bytes(rounded_bytes(model, quantize), f"the model {name!r} in {quantize}", remedy=remedy)

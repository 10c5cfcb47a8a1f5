"""Products of 16-bit tensors in float32, on processors without 16-bit products."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from sakiyomi.kernels.variants import multiplies_bf16

PRODUCTS = frozenset(
    {
        functional.linear,
        functional.conv1d,
        functional.conv2d,
        functional.conv3d,
        torch.matmul,
        torch.bmm,
        Tensor.matmul,
        Tensor.__matmul__,
    }
)
"""Functions that take tensors as positional arguments. Torch's attention is as fast in 16 bits as in 32."""


def widened(device: torch.device) -> AbstractContextManager[Any]:
    """A context in which torch multiplies 16-bit tensors as float32, if that is faster on this device.

    Torch also sums 16-bit products in float32, so results differ only in the order of the sums. On a processor without
    16-bit products torch takes six times as long for them, and fourteen times as long for convolutions.

    Args:
        device: the device that computes.
    """
    return _Widened() if device.type == "cpu" and not multiplies_bf16() else nullcontext()


class _Widened(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        tensors = [part for part in args if isinstance(part, Tensor)] if func in PRODUCTS and not kwargs else []
        if not tensors or not all(map(_is_short, tensors)):
            return func(*args, **(kwargs or {}))
        wide: Tensor = func(*(part.float() if isinstance(part, Tensor) else part for part in args))
        return wide.to(tensors[0].dtype)


def _is_short(part: Tensor) -> bool:
    return type(part) in (Tensor, nn.Parameter) and part.dtype in (torch.bfloat16, torch.float16)

"""Products of weights of 16 bits as float32, on a processor that has none of its own."""

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
"""Functions whose tensors come first, by their places. Torch's attention of 16 bits is as fast as that of 32."""


def widened(device: torch.device) -> AbstractContextManager[Any]:
    """Within it, torch multiplies tensors of 16 bits as float32 where this device is faster so.

    Torch sums products of 16 bits in float32, too, so that results are the same but for the order of the sums. Without
    such products of the processor's own it takes six times as long for them, and for convolutions fourteen times.

    Args:
        device: on which is computed.
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

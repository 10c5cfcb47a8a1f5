"""The compiled operators as torch sees them, and the handle through which Python fills their tables."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from sakiyomi.cache.slots import SlotCache
from sakiyomi.kernels.build import native
from sakiyomi.kernels.plan import Plan

DTYPES = (torch.float32, torch.bfloat16)


def _register_shapes() -> None:
    @torch.library.register_fake("sakiyomi_cpu::linear")  # type: ignore[untyped-decorator]
    def _(x: Tensor, index: int, out: int) -> Tensor:
        return x.new_empty(*x.shape[:-1], out)

    @torch.library.register_fake("sakiyomi_cpu::attend")  # type: ignore[untyped-decorator]
    def _(q: Tensor, k: Tensor, v: Tensor, layer: int, scaling: float, softcap: float, window: int) -> Tensor:
        return q.new_empty(1, q.shape[2], q.shape[1], v.shape[3])


_registered = False


def pack_weight(weight: Tensor) -> Tensor:
    """A weight `(out, in)` in the order in which the kernel reads it: 16 output channels side by side.

    bf16 comes as `(out / 16, in / 2, 16, 2)`, fp32 as `(out / 16, in, 16)`; missing channels are zero.
    """
    out, inner = weight.shape
    blocks = (out + 15) // 16
    weight = nn.functional.pad(weight, (0, 0, 0, blocks * 16 - out))
    if weight.dtype == torch.bfloat16:
        return weight.view(blocks, 16, inner // 2, 2).permute(0, 2, 1, 3).contiguous()
    return weight.view(blocks, 16, inner).permute(0, 2, 1).contiguous()


def pack_bytes(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A weight `(out, in)` in 8 bits: numbers in the kernel's order, the scale and the sum of each output channel.

    A channel's largest weight becomes 127. Numbers come as int8 `(ceil(out / 16), ceil(in / 4), 16, 4)`, scales as
    float32 `(out)`, sums of the channels' int8 numbers as int32 `(out)`.
    """
    out, inner = weight.shape
    wide = weight.float()
    scale = wide.abs().amax(1).clamp_min(1e-12) / 127
    numbers = (wide / scale[:, None]).round().to(torch.int8)
    sums = numbers.sum(1, dtype=torch.int32)
    blocks, fours = (out + 15) // 16, (inner + 3) // 4
    numbers = nn.functional.pad(numbers, (0, fours * 4 - inner, 0, blocks * 16 - out))
    return numbers.view(blocks, 16, fours, 4).permute(0, 2, 1, 3).contiguous(), scale, sums


class PackedLinear(nn.Module):
    """A linear layer whose weight lies in the kernel's table; `index` is its number there, `bytes` what it takes."""

    def __init__(self, index: int, in_features: int, out_features: int, dtype: torch.dtype, bytes: int) -> None:
        super().__init__()
        self.index, self.in_features, self.out_features, self.bytes = index, in_features, out_features, bytes
        # Some models ask a layer's weight for its dtype or device.
        self.weight = torch.empty(0, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) to (..., out)."""
        return torch.ops.sakiyomi_cpu.linear(x, self.index, self.out_features)  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        """For printing the model."""
        return f"{self.in_features}, {self.out_features}, index={self.index}"


class NativeModel:
    """One model's tables in the compiled kernels: packed weights, cache pointers, the plan of the pass.

    Use `NativeModel.create()`, which gives None where the kernels are not available. Tensors that the kernels point
    to are held here.
    """

    attention = "sakiyomi_cpu"

    def __init__(self, library: ctypes.CDLL) -> None:
        global _registered
        if not _registered:
            _register_shapes()
            _registered = True
        self._library = library
        self.number: int = library.sk_model()
        self._held: list[Tensor] = []

    @classmethod
    def create(cls) -> NativeModel | None:
        """Tables for a new model; None where the kernels are not available."""
        library = native()
        return cls(library) if library is not None else None

    def __del__(self) -> None:
        self._library.sk_free(self.number)

    def add_linear(self, weight: Tensor, bias: Tensor | None, *, int8: bool = False) -> PackedLinear:
        """Pack a weight `(out, in)` (fp32 or bf16), with a bias or none; the module computes `x @ weight.T + bias`.

        With `int8` weights and rows are rounded to 8 bits, each output channel and each row with a scale of its own.
        """
        scale = sums = None
        if int8:
            packed, scale, sums = pack_bytes(weight.detach())
        else:
            packed = pack_weight(weight.detach())
        shift = None if bias is None else bias.detach().float().contiguous()
        tensors = (packed, shift, scale, sums)
        held = [tensor for tensor in tensors if tensor is not None]
        self._held.extend(held)
        out, inner = weight.shape
        index = self._library.sk_weight(
            self.number,
            *(None if tensor is None else tensor.data_ptr() for tensor in tensors),
            *(inner, out, int(weight.dtype == torch.bfloat16)),
        )
        return PackedLinear(index, inner, out, weight.dtype, sum(tensor.nbytes for tensor in held))

    def join(self, layers: Sequence[PackedLinear]) -> None:
        """Layers that read the same input in every pass: the first one called computes all of them."""
        indices = (ctypes.c_int64 * len(layers))(*(layer.index for layer in layers))
        self._library.sk_siblings(self.number, len(layers), indices)

    def attach(self, cache: SlotCache) -> None:
        """Point the attention operator at the cache's present tensors."""
        for i, (shape, keys, values) in enumerate(zip(cache.shapes, cache.keys, cache.values, strict=True)):
            self._library.sk_layer(
                *(self.number, i, keys.data_ptr(), values.data_ptr(), shape.heads, cache.room),
                *(shape.key_dim, shape.value_dim, int(cache.dtype == torch.bfloat16)),
            )

    def begin(self, plan: Plan, size: int) -> None:
        """Say what the next pass of this model looks like; `size` counts filler rows too."""
        self._library.sk_begin(self.number, len(plan.parts), size, plan.packed)

    def calls(self) -> int:
        """Attention calls since `begin`."""
        return int(self._library.sk_calls())


def can_pack(shapes: Sequence[int], dtype: torch.dtype) -> bool:
    """Whether a weight `(out, in)` of this shape and dtype fits the kernel."""
    return dtype in DTYPES and shapes[1] % 2 == 0

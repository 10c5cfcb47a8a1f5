"""The compiled operators as torch sees them, and the handle through which Python fills their tables."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from sakiyomi.kernels.batch import BatchPlan
from sakiyomi.kernels.blocks import FORMATS, Blocks
from sakiyomi.kernels.build import native
from sakiyomi.kernels.weight_memory import MappedMemory, WeightMemory

DTYPES = (torch.float32, torch.bfloat16)
HALF = {torch.float32: 0, torch.bfloat16: 1}  # whether numbers are bf16
BLOCK = 32  # output channels side by side, as linear.h reads them
PIECE = 2048  # output channels that are packed at once; a multiple of BLOCK
GROUP = 32  # weights of 4 bits that share a scale
PARTS = ("data", "bias", "scale", "sum", "scales")  # in the order of sk_weight


def pack_weight(weight: Tensor) -> dict[str, Tensor]:
    """A weight `(out, in)` in the order in which the kernel reads it: 32 output channels side by side.

    Returns:
        "data", bf16 `(ceil(out / 32), in / 2, 32, 2)` or fp32 `(ceil(out / 32), in, 32, 1)`; missing channels are zero.
    """
    return {"data": _side_by_side(weight, 2 if weight.dtype == torch.bfloat16 else 1)}


def pack_bytes(weight: Tensor) -> dict[str, Tensor]:
    """A weight `(out, in)` in 8 bits. A channel's largest weight becomes 127.

    Returns:
        "data", int8 `(ceil(out / 32), ceil(in / 4), 32, 4)`; "scale" of each output channel, float32 `(out)`; "sum" of
        each channel's numbers, int32 `(out)`.
    """
    wide = weight.float()
    scale = wide.abs().amax(1).clamp_min(1e-12) / 127
    numbers = wide.div_(scale[:, None]) if wide is not weight else wide / scale[:, None]
    numbers = numbers.round_().to(torch.int8)
    return {"data": _side_by_side(numbers, 4), "scale": scale, "sum": numbers.sum(1, dtype=torch.int32)}


def pack_halves(weight: Tensor) -> dict[str, Tensor]:
    """A weight `(out, in)` in 4 bits, `in` a multiple of 32: 32 neighbours share a scale.

    Of each 32 the largest, whatever its sign, becomes -8 and so is kept exactly (up to the scale's own rounding).

    Returns:
        "data", uint8 `(ceil(out / 32), in / 4, 16, 4)`, two channels a byte; "scales", bf16 `(ceil(out / 32), in / 32,
        32)`.
    """
    numbers, scales = to_halves(weight)
    first, second = _side_by_side(numbers, 4).unflatten(2, (2, 16)).unbind(2)
    return {"data": first | second << 4, "scales": _side_by_side(scales, 1)[..., 0].contiguous()}


def to_halves(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers from 0 to 15, uint8 `(out, in)`, and scales, bf16 `(out, in / 32)`: a weight is (number - 8) * scale."""
    groups = weight.float().unflatten(1, (-1, GROUP))
    largest = groups.gather(2, groups.abs().argmax(2, keepdim=True))
    scales = (largest / -8).to(torch.bfloat16)
    steps = scales.float()
    numbers = (groups / torch.where(steps == 0, 1.0, steps)).round_().add_(8).clamp_(0, 15)
    return numbers.flatten(1).to(torch.uint8), scales[..., 0]


def _side_by_side(weight: Tensor, together: int) -> Tensor:
    """`(out, in)` as `(ceil(out / 32), ceil(in / together), 32, together)`, zeros where there is nothing."""
    out, inner = weight.shape
    blocks, groups = -(-out // BLOCK), -(-inner // together)
    if blocks * BLOCK > out or groups * together > inner:
        weight = nn.functional.pad(weight, (0, groups * together - inner, 0, blocks * BLOCK - out))
    if weight.itemsize * together == 4 and weight.is_contiguous():  # what stays together is moved as one number
        moved = weight.view(torch.int32).view(blocks, BLOCK, groups).transpose(1, 2).contiguous()
        return moved.view(weight.dtype).view(blocks, groups, BLOCK, together)
    return weight.view(blocks, BLOCK, groups, together).permute(0, 2, 1, 3).contiguous()


def packed_tensors(
    weight: Tensor, bias: Tensor | None, bits: int, memory: WeightMemory | MappedMemory | None = None
) -> dict[str, Tensor]:
    """What the kernels read of a layer, by the names in `PARTS`; weights lie in `memory`, if one is given."""
    # In pieces, so that nothing of the size of a large weight is held beside it and its packed form.
    tensors: dict[str, Tensor] = {}
    at: dict[str, int] = {}
    for piece in weight.detach().split(PIECE):
        for name, part in PACKERS[bits](piece).items():
            if name not in tensors:
                count = len(part) if len(piece) == len(weight) else -(-len(weight) * len(part) // PIECE)
                tensors[name], at[name] = _empty((count, *part.shape[1:]), part.dtype, memory), 0
            tensors[name][at[name] : at[name] + len(part)] = part
            at[name] += len(part)
    if bias is not None:
        tensors["bias"] = bias.detach().to(torch.float32, copy=True)
    return tensors


def _empty(shape: Sequence[int], dtype: torch.dtype, memory: WeightMemory | MappedMemory | None) -> Tensor:
    """Room for packed numbers, in `memory`, if one is given."""
    return torch.empty(shape, dtype=dtype) if memory is None else memory.empty(shape, dtype)


PACKERS: dict[int, Callable[[Tensor], dict[str, Tensor]]] = {16: pack_weight, 8: pack_bytes, 4: pack_halves}
"""By bits of a weight; 16 stands for "as it is"."""


class PackedLayer(nn.Module):
    """What lies in the kernel's table: a linear layer, or a stack of them.

    Attributes:
        index: its number there, of a stack that of its first.
        count: of linear layers in a stack; None: it is one.
        bits: of a weight: 16 (as it was), 8 or 4; in a block format those of a code.
        in_features, out_features: its sizes.
        dtype: of rows.
        blocks: the block format; None: it is in none.
        weight: empty; some models ask a layer's weight for its dtype or device.
    """

    weight: Tensor

    def __init__(
        self,
        index: int,
        in_features: int,
        out_features: int,
        dtype: torch.dtype,
        bits: int,
        tensors: dict[str, Tensor],
        count: int | None = None,
        blocks: Blocks | None = None,
    ) -> None:
        super().__init__()
        self.index, self.bits, self.count, self.blocks = index, bits, count, blocks
        self.in_features, self.out_features, self.dtype = in_features, out_features, dtype
        self._set_weight()
        for name, tensor in tensors.items():
            self.register_buffer(f"packed_{name}", tensor, persistent=False)

    def _set_weight(self) -> None:
        self.weight = torch.empty(0, dtype=self.dtype)

    def tensors(self) -> dict[str, Tensor]:
        """What the kernel reads, by the names of `PackedWeights.adopt`."""
        return {name.removeprefix("packed_"): tensor for name, tensor in self.named_buffers(recurse=False)}

    def extra_repr(self) -> str:
        """For printing the model."""
        stack = "" if self.count is None else f", count={self.count}"
        blocks = "" if self.blocks is None else f", blocks={self.blocks.name}"
        return f"{self.in_features}, {self.out_features}, index={self.index}, bits={self.bits}{stack}{blocks}"


class PackedLinear(PackedLayer):
    """A linear layer whose weight lies in the kernel's table."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) to (..., out)."""
        return torch.ops.sakiyomi_cpu.linear(x, self.index, self.out_features)  # type: ignore[no-any-return]


class PackedExperts(PackedLayer):
    """Linear layers of the same shape, one of each expert, of which each row takes some."""

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        """Rows (N, in), or one for each choice (N K, in), and the experts of each (N, K), to (N K, out)."""
        made: Tensor = torch.ops.sakiyomi_cpu.experts(x, chosen, self.index, self.count, self.out_features)
        return made


class PackedEmbedding(PackedLayer):
    """An embedding whose rows are those of a weight in a block format in the kernel's table.

    Attributes:
        scale: by which rows are multiplied.
        num_embeddings, embedding_dim: as of torch's.
    """

    def __init__(
        self,
        index: int,
        in_features: int,
        out_features: int,
        dtype: torch.dtype,
        blocks: Blocks,
        tensors: dict[str, Tensor],
        table: PackedWeights,
        scale: float = 1.0,
    ) -> None:
        super().__init__(index, in_features, out_features, dtype, FORMATS[blocks.name].bits, tensors, blocks=blocks)
        self.num_embeddings, self.embedding_dim, self.scale = out_features, in_features, scale
        self._factor = float(torch.tensor(scale, dtype=dtype))  # as transformers multiplies: by a number of that dtype
        self._table = weakref.ref(table)
        self._numbers: weakref.ref[Tensor] | None = None

    def _set_weight(self) -> None:
        """It is made when it is asked for."""

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """All rows as numbers `(vocabulary, width)`, without the scale: held as long as the caller holds them."""
        found = self._numbers() if self._numbers is not None else None
        if found is None:
            found = self.rows(torch.arange(self.num_embeddings))
            self._numbers = weakref.ref(found)
        return found

    def rows(self, ids: Tensor) -> Tensor:
        """Rows (..., width) of these tokens, int64, without the scale, in a pass or between passes.

        Raises:
            IndexError: one of them is none.
        """
        table, ids = self._table(), ids.contiguous()
        assert table is not None, "a layer's table lives as long as its model"
        made = torch.empty((*ids.shape, self.in_features), dtype=self.dtype)
        if not table.library.sk_look_up(table.number, self.index, ids.data_ptr(), ids.numel(), made.data_ptr()):
            raise IndexError("index out of range in self")  # as torch says it
        return made

    def forward(self, ids: Tensor) -> Tensor:
        """(...) int64 to (..., width)."""
        if torch._C._is_tracing():  # a recorded pass calls the kernel by the layer's number, in the tables of its model
            made: Tensor = torch.ops.sakiyomi_cpu.look_up(ids, self.index, self.in_features)
        else:
            made = self.rows(ids)
        return made if self.scale == 1.0 else made * self._factor


class PackedWeights:
    """One model's table of packed weights in the compiled kernels.

    Use `PackedWeights.create()`, which gives None where the kernels are not available. Tensors that the kernels point
    to are held here; sessions on these weights (`model_executor/attention/cpu.py`) hold this object.

    Attributes:
        library: the loaded kernels.
        number: of the table there.
        experts: all experts of a mixture are in it.
        memory: in which weights are packed.
    """

    experts = False
    memory: WeightMemory | MappedMemory

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        self.number: int = library.sk_weights()
        self._session: int = library.sk_session(self.number)
        self._held: list[Tensor] = []
        self.memory = WeightMemory()

    @classmethod
    def create(cls) -> PackedWeights | None:
        """A table for a new model; None where the kernels are not available."""
        library = native()
        return cls(library) if library is not None else None

    def __del__(self) -> None:
        self.library.sk_free_session(self._session)
        self.library.sk_free_weights(self.number)

    @contextmanager
    def packing_into(self, memory: MappedMemory | None) -> Iterator[None]:
        """A context in which weights are packed into this memory; None: into that of the table, as outside of it."""
        own = self.memory
        self.memory = own if memory is None else memory
        try:
            yield
        finally:
            self.memory = own

    def begin(self, plan: BatchPlan, size: int) -> None:
        """Say what the next pass looks like, where attention is computed elsewhere; `size` counts filler rows too."""
        self.library.sk_begin(self._session, len(plan.parts), size, plan.packed)

    def add_linear(self, weight: Tensor, bias: Tensor | None, *, bits: int = 16) -> PackedLinear:
        """Pack a weight `(out, in)` (fp32 or bf16), with a bias or none; the module computes `x @ weight.T + bias`.

        With 8 or 4 `bits` the weights are rounded (`pack_bytes`, `pack_halves`), and each row to 8 bits with a scale of
        its own.
        """
        out, inner = weight.shape
        return self.adopt(packed_tensors(weight, bias, bits, self.memory), inner, out, weight.dtype, bits)

    def adopt(
        self,
        tensors: dict[str, Tensor],
        in_features: int,
        out_features: int,
        dtype: torch.dtype,
        bits: int,
        blocks: Blocks | None = None,
    ) -> PackedLinear:
        """A layer from tensors that are packed already, named as in `PARTS`, as far as they belong to these bits."""
        index = self._enter(tensors, in_features, out_features, dtype, blocks)
        return PackedLinear(index, in_features, out_features, dtype, bits, tensors, blocks=blocks)

    def adopt_embedding(
        self,
        tensors: dict[str, Tensor],
        in_features: int,
        out_features: int,
        dtype: torch.dtype,
        blocks: Blocks,
        scale: float = 1.0,
    ) -> PackedEmbedding:
        """An embedding from tensors that are packed already, which may be those of a layer, too."""
        index = self._enter({"data": tensors["data"]}, in_features, out_features, dtype, blocks)
        return PackedEmbedding(index, in_features, out_features, dtype, blocks, {"data": tensors["data"]}, self, scale)

    def add_blocks(
        self, data: Tensor, bias: Tensor | None, inputs: int, dtype: torch.dtype, blocks: Blocks
    ) -> PackedLinear:
        """Pack a weight in a block format; no number changes.

        Args:
            data: its rows as in the file, uint8 `(out, bytes)`.
            bias: of the layer, or none.
            inputs: numbers of a row.
            dtype: of the layer's rows.
            blocks: the format.
        """
        tensors = self._arranged(data[None], bias, inputs, blocks)
        return self.adopt(
            tensors | {"data": tensors["data"][0]}, inputs, len(data), dtype, FORMATS[blocks.name].bits, blocks
        )

    def add_block_embedding(
        self, data: Tensor, inputs: int, dtype: torch.dtype, blocks: Blocks, scale: float
    ) -> PackedEmbedding:
        """The same of an embedding, by whose ``scale`` its rows are multiplied."""
        made = self._arranged(data[None], None, inputs, blocks)["data"][0]
        return self.adopt_embedding({"data": made}, inputs, len(data), dtype, blocks, scale)

    def add_block_experts(
        self, data: Tensor, biases: Tensor | None, inputs: int, dtype: torch.dtype, blocks: Blocks
    ) -> PackedExperts:
        """The same of all experts, `data` being `(count, out, bytes)`."""
        tensors = self._arranged(data, biases, inputs, blocks)
        return self.adopt_experts(tensors, inputs, data.shape[1], dtype, FORMATS[blocks.name].bits, blocks)

    def _arranged(self, data: Tensor, bias: Tensor | None, inputs: int, blocks: Blocks) -> dict[str, Tensor]:
        """What the kernels read of weights `(count, out, bytes)`: of each 32 output channels one block after the other,
        a header and the codes of 32 inputs after 32 inputs, see blocks.h.
        """
        form, (count, out, _) = FORMATS[blocks.name], data.shape
        made = self.memory.empty((count, -(-out // BLOCK), form.size(BLOCK, inputs)), torch.uint8)
        for given, to in zip(data.contiguous(), made, strict=True):
            self.library.sk_arrange(form.number, given.data_ptr(), out, inputs, to.data_ptr())
        return {"data": made} | ({} if bias is None else {"bias": bias.detach().to(torch.float32, copy=True)})

    def add_experts(self, weights: Tensor, biases: Tensor | None, *, bits: int = 16) -> PackedExperts:
        """Pack the weights `(count, out, in)` and biases `(count, out)` of all experts, as `add_linear` does one."""
        count, out, inner = weights.shape
        tensors: dict[str, Tensor] = {}
        for i in range(count):
            for name, part in packed_tensors(weights[i], None if biases is None else biases[i], bits).items():
                if name not in tensors:
                    tensors[name] = _empty((count, *part.shape), part.dtype, self.memory)
                tensors[name][i] = part
        return self.adopt_experts(tensors, inner, out, weights.dtype, bits)

    def adopt_experts(
        self,
        tensors: dict[str, Tensor],
        in_features: int,
        out_features: int,
        dtype: torch.dtype,
        bits: int,
        blocks: Blocks | None = None,
    ) -> PackedExperts:
        """The same of tensors that are packed already, whose first dimension is that of the experts."""
        count = len(tensors["data"])
        numbers = [
            self._enter({name: tensor[i] for name, tensor in tensors.items()}, in_features, out_features, dtype, blocks)
            for i in range(count)
        ]
        return PackedExperts(numbers[0], in_features, out_features, dtype, bits, tensors, count, blocks)

    def _enter(
        self,
        tensors: dict[str, Tensor],
        in_features: int,
        out_features: int,
        dtype: torch.dtype,
        blocks: Blocks | None,
    ) -> int:
        """Put the tensors of one linear layer into the table, and give its number."""
        self._held.extend(tensors.values())
        parts = [pointer(tensors.get(name)) for name in PARTS]
        half = int(dtype == torch.bfloat16)
        kind = (-1, 0) if blocks is None else (FORMATS[blocks.name].number, int(blocks.rounded))
        return int(self.library.sk_weight(self.number, *parts, in_features, out_features, half, *kind))

    def join(self, layers: Sequence[PackedLayer]) -> None:
        """Layers that read the same input in every pass: the first one called computes all of them."""
        self.library.sk_siblings(self.number, len(layers), numbers([layer.index for layer in layers]))


def numbers(values: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
    """As the kernels take them."""
    return (ctypes.c_int64 * len(values))(*values)


def pointer(tensor: Tensor | None) -> int | None:
    """Of a tensor's numbers; None where there is none."""
    return tensor.data_ptr() if tensor is not None else None


def can_pack(shape: Sequence[int], dtype: torch.dtype, bits: int = 16) -> bool:
    """Whether a weight `(out, in)` of this shape and dtype fits the kernel."""
    return dtype in DTYPES and shape[1] % (GROUP if bits == 4 else 2) == 0

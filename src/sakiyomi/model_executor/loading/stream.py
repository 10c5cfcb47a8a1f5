"""Weights that stay in files: mapped when accelerate's hooks ask for them, and read ahead by the system.

accelerate maps a tensor's file when its layer is about to run, and the product then waits for one page after the other.
Here a thread has the system read the next tensors while the current layer computes. It copies nothing: reading them as
blocks of our own was slower than accelerate (benchmarks/log/offload.md). The order of tensors is learnt from the
passes. Files stay open: one that is removed meanwhile can still be read.
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sakiyomi.core.checkpoint import Header, read_header
from sakiyomi.core.dtypes import STORED
from sakiyomi.core.errors import LoadError
from sakiyomi.model_executor.loading.read_ahead import ReadAhead, fetch

OPEN = 64  # most files that are kept open
SMALL = 1 << 16  # bytes; a tensor up to this size (a norm, a bias) stays in memory after it was read
DTYPES = {name: getattr(torch, own) for name, own in STORED.items()}


@dataclass(frozen=True)
class Extent:
    """The place of a tensor in a file.

    Attributes:
        path: the file.
        offset: of its first byte there.
        dtype: dtype in the file.
        shape: shape of the tensor.
        wanted: dtype in the model.
    """

    path: Path
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    wanted: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return int(torch.Size(self.shape).numel()) * self.dtype.itemsize


class WeightStream:
    """Tensors of files, mapped as long as they are used.

    Args:
        extents: places of the tensors, by name.
        ahead: most bytes that the system reads ahead; at least one tensor.

    Attributes:
        ahead: reads the next tensors.
        bytes_read: bytes of all tensors that were taken so far.
    """

    def __init__(self, extents: Mapping[str, Extent], *, ahead: int) -> None:
        self.extents = dict(extents)
        self.bytes_read = 0
        sizes = {name: extent.nbytes for name, extent in self.extents.items()}
        self.ahead = ReadAhead(sizes, self._fetch, budget=ahead)
        self._files: OrderedDict[Path, FileIO] = OrderedDict()
        self._opening = threading.Lock()
        self._small: dict[str, Tensor] = {}
        weakref.finalize(self, _close, self._files)

    @property
    def files(self) -> list[Path]:
        """The files that passes read."""
        return sorted({extent.path for extent in self.extents.values()})

    def take(self, name: str) -> Tensor:
        """A tensor. Meanwhile the system reads the tensors that followed it in the previous pass.

        Raises:
            LoadError: its file cannot be read.
        """
        extent = self.extents[name]
        if extent.nbytes <= SMALL:
            if name not in self._small:
                self._small[name] = self._mapped(extent).to(extent.wanted, copy=True)
                self.bytes_read += extent.nbytes
            return self._small[name]
        self.ahead.note(name)
        try:
            tensor = self._mapped(extent)
        except LoadError:
            self.ahead.forget()
            raise
        self.ahead.look(name)
        self.bytes_read += extent.nbytes
        return tensor.to(extent.wanted)

    def rows(self, name: str, numbers: list[int]) -> Tensor:
        """Rows of a matrix, without reading the others.

        Raises:
            LoadError: its file cannot be read.
        """
        extent = self.extents[name]
        found = self._mapped(extent)[numbers]
        self.bytes_read += found.nbytes
        return found.to(extent.wanted)

    def _fetch(self, name: str) -> None:
        extent = self.extents[name]
        fetch(self._open(extent.path).fileno(), extent.offset, extent.nbytes)

    def _mapped(self, extent: Extent) -> Tensor:
        if not extent.nbytes:
            return torch.empty(extent.shape, dtype=extent.dtype)
        start = extent.offset - extent.offset % mmap.ALLOCATIONGRANULARITY
        skipped = extent.offset - start
        try:
            file = self._open(extent.path).fileno()
            size = os.fstat(file).st_size
            if size < extent.offset + extent.nbytes:  # reading beyond it would end the process
                raise EOFError(f"it ends after {size} bytes")
            # A private mapping: nothing is written, but torch needs a writable buffer.
            pages = mmap.mmap(file, skipped + extent.nbytes, access=mmap.ACCESS_COPY, offset=start)
        except (OSError, EOFError) as error:
            raise LoadError(
                f"the offloaded weights in {extent.path} cannot be read any more ({error}); the file has to stay as it "
                "was when the model was loaded: put it back, or load the model again"
            ) from error
        block = torch.frombuffer(pages, dtype=torch.uint8, offset=skipped, count=extent.nbytes)
        return block.view(extent.dtype).view(extent.shape)

    def _open(self, path: Path) -> FileIO:
        with self._opening:
            file = self._files.get(path)
            if file is None:
                if len(self._files) >= OPEN:
                    self._files.popitem(last=False)[1].close()
                file = self._files[path] = path.open("rb", buffering=0)
            self._files.move_to_end(path)
            return file


def _close(files: dict[Path, FileIO]) -> None:
    for file in files.values():
        file.close()


class _Weights(Mapping[str, Tensor]):
    """The mapping of a hook, with tensors in files from a stream."""

    def __init__(self, stream: WeightStream, streamed: Mapping[str, str], others: Mapping[str, Tensor]) -> None:
        self._stream, self._streamed, self._others = stream, streamed, others

    def __getitem__(self, name: str) -> Tensor:
        key = self._streamed.get(name)
        return self._others[name] if key is None else self._stream.take(key)

    def __contains__(self, name: object) -> bool:  # the default would read the tensor
        return name in self._streamed or name in self._others

    def __iter__(self) -> Iterator[str]:
        return iter(self._others)

    def __len__(self) -> int:
        return len(self._others)


def hooks(module: nn.Module) -> Iterator[Any]:
    """Hooks of accelerate on one module that load its weights for a pass and free them after it."""
    hook = getattr(module, "_hf_hook", None)
    for one in getattr(hook, "hooks", (hook,)):
        if getattr(one, "offload", False):
            yield one


def is_offloaded(model: nn.Module) -> bool:
    """Whether hooks load and free weights of a model in its passes."""
    return any(True for module in model.modules() for _ in hooks(module))


def attach(model: nn.Module, layers: int) -> WeightStream | None:
    """Have a model's hooks take tensors in files from a stream; None if no tensor is in a file.

    Args:
        model: with its own hooks, which are changed.
        layers: number of its layers; the size of one is read ahead.
    """
    headers: dict[Path, Header] = {}
    extents: dict[str, Extent] = {}
    found: list[tuple[nn.Module, Any, dict[str, str]]] = []
    for path, module in model.named_modules():
        for hook in hooks(module):
            names = [*dict(module.named_parameters(recurse=False)), *dict(module.named_buffers(recurse=False))]
            places = {name: _locate(hook.weights_map, name, module, headers) for name in names}
            here = {f"{path}.{name}": place for name, place in places.items() if place is not None}
            extents |= here
            if here:
                found.append((module, hook, {key.rpartition(".")[2]: key for key in here}))
    if not found:
        return None
    sizes = [extent.nbytes for extent in extents.values()]
    stream = WeightStream(extents, ahead=max(*sizes, sum(sizes) // layers, 0))
    for module, hook, streamed in found:
        hook.weights_map = _Weights(stream, streamed, hook.weights_map)
        # accelerate recognizes tied weights by their addresses. A mapping may reuse the address of an earlier one, and
        # a layer would then get the weights of another.
        hook.tied_params_map, hook.tied_params_names = None, set()
        if type(module) is nn.Embedding and "weight" in streamed:
            _replace(module, hook, _rows_hook(stream, streamed["weight"], hook.execution_device))
    return stream


def _locate(weights: Any, name: str, module: nn.Module, headers: dict[Path, Header]) -> Extent | None:
    """The place where accelerate would read a tensor; None: in no file, or in a file of another format."""
    from accelerate.utils.offload import OffloadedWeightsLoader, PrefixedDataset

    wanted = getattr(module, name).dtype
    while isinstance(weights, PrefixedDataset):
        name, weights = f"{weights.prefix}{name}", weights.dataset
    if not isinstance(weights, OffloadedWeightsLoader) or name in weights.state_dict:
        return None
    about = weights.index.get(name)
    if about is None:
        return None
    if about.get("safetensors_file") is None:
        dtype = getattr(torch, about["dtype"], None)
        place = Path(weights.save_folder or "") / f"{name}.dat"
        return None if dtype is None else Extent(place, 0, dtype, tuple(about["shape"]), wanted)
    path = Path(about["safetensors_file"])
    if path not in headers:
        headers[path] = read_header(path)
    entries, start = headers[path].entries, headers[path].start
    entry = entries[about.get("weight_name", name)]
    dtype = DTYPES.get(entry["dtype"])
    if dtype is None:
        return None
    return Extent(path, start + entry["data_offsets"][0], dtype, tuple(entry["shape"]), wanted)


def _rows_hook(stream: WeightStream, name: str, device: Any) -> Any:
    """A hook for an embedding that reads only the rows of a pass: the matrix may be as large as a layer."""
    from accelerate.hooks import ModelHook

    class Rows(ModelHook):  # type: ignore[misc]
        offload = True  # as hooks of accelerate
        execution_device = device

        def init_hook(self, module: Any) -> Any:
            module.padding_idx = None  # only for gradients, and may be larger than the rows of a pass
            return module

        def pre_forward(self, module: Any, ids: Tensor) -> tuple[tuple[Tensor], dict[str, Any]]:
            numbers, places = ids.unique(return_inverse=True)
            rows = stream.rows(name, numbers.tolist()).to(device)
            module.weight = nn.Parameter(rows, requires_grad=False)
            return (places.to(device),), {}

        def post_forward(self, module: Any, output: Tensor) -> Tensor:
            extent = stream.extents[name]
            empty = torch.empty(extent.shape, dtype=extent.wanted, device="meta")
            module.weight = nn.Parameter(empty, requires_grad=False)
            return output

    return Rows()


def _replace(module: nn.Module, old: Any, new: Any) -> None:
    """Replace one of a module's hooks."""
    holder: Any = module._hf_hook
    if holder is old:
        module._hf_hook = new
    else:
        holder.hooks = tuple(new if hook is old else hook for hook in holder.hooks)
    new.init_hook(module)

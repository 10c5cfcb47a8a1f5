"""Weights that stay in files: read ahead in the order in which passes use them, and handed to accelerate's hooks.

accelerate maps a tensor's file when its layer is about to run, and the multiplication then waits for one page after the
other. Here a thread reads the coming tensors as whole blocks while the present layer computes. The order
is learnt from the passes themselves.
Files stay open: one that is removed meanwhile can still be read.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sakiyomi.errors import LoadError
from sakiyomi.loading.checkpoint import read_header

__all__ = ["Extent", "WeightStream", "attach", "hooks", "is_offloaded"]

OPEN = 64  # files that are kept open
SMALL = 1 << 16  # bytes of a tensor (a norm, a bias) that stays in memory once it was read
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip


@dataclass(frozen=True)
class Extent:
    """Where a tensor lies.

    Attributes:
        path: the file.
        offset: of its first byte there.
        dtype: as it is stored.
        shape: of the tensor.
        wanted: dtype as which the model uses it.
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
    """Tensors of files, in main memory for as long as somebody holds them.

    Args:
        extents: where the tensors lie, by name.
        ahead: bytes that may wait to be taken; one tensor may always.
        pinned: in memory from which a GPU copies fast.

    Attributes:
        bytes_read: from files, so far.
        cold: what was read is dropped from the system's page cache at once (on Linux), so that it is read from the disk
            the next time; to measure what a model costs for which there is no page cache.
    """

    def __init__(self, extents: Mapping[str, Extent], *, ahead: int, pinned: bool = False) -> None:
        self.extents = dict(extents)
        self.bytes_read = 0
        self.cold = False
        self._budget, self._pinned = ahead, pinned
        self._lock = threading.Lock()
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="sakiyomi-weights")
        self._files: OrderedDict[Path, FileIO] = OrderedDict()
        self._reading = threading.Lock()
        self._coming: OrderedDict[str, Future[Tensor]] = OrderedDict()
        self._small: dict[str, Tensor] = {}
        self._next: dict[str, str] = {}
        self._last: str | None = None
        # Blocks come back by themselves when the last tensor on them is gone, whichever thread that happens in.
        self._free: defaultdict[int, deque[Tensor]] = defaultdict(deque)
        weakref.finalize(self, _close, self._files)

    @property
    def files(self) -> list[Path]:
        """The files that passes read."""
        return sorted({extent.path for extent in self.extents.values()})

    def take(self, name: str) -> Tensor:
        """A tensor, read already if it comes in the order of the pass before; what follows it is read meanwhile.

        Raises:
            LoadError: its file cannot be read.
        """
        if self.extents[name].nbytes <= SMALL:
            if name not in self._small:
                self._small[name] = self._read(name)
            return self._small[name]
        with self._lock:
            coming = self._coming.pop(name, None)
            if coming is None:  # the first pass, or one that took another way
                self._forget()
            if self._last is not None:
                self._next[self._last] = name
            self._last = name
            coming = coming or self._reader.submit(self._read, name)
            self._look_ahead(name)
        try:
            return coming.result()
        except LoadError:
            with self._lock:
                self._forget()
                self._last = None
            raise

    def rows(self, name: str, numbers: list[int]) -> Tensor:
        """Rows of a matrix, without reading the others.

        Raises:
            LoadError: its file cannot be read.
        """
        extent = self.extents[name]
        width = extent.nbytes // extent.shape[0]
        block = torch.empty(len(numbers), width, dtype=torch.uint8)
        for row, number in zip(block.numpy(), numbers, strict=True):
            self._fill(extent, extent.offset + number * width, row.data)
        return block.view(extent.dtype).view(len(numbers), *extent.shape[1:]).to(extent.wanted)

    def _look_ahead(self, name: str) -> None:
        """Have read what followed this tensor the last time."""
        waiting = sum(self.extents[coming].nbytes for coming in self._coming)
        at = self._next.get(next(reversed(self._coming), name))
        while at is not None and at not in self._coming:
            waiting += self.extents[at].nbytes
            if self._coming and waiting > self._budget:
                break
            self._coming[at] = self._reader.submit(self._read, at)
            at = self._next.get(at)

    def _forget(self) -> None:
        for future in self._coming.values():
            future.cancel()
        self._coming.clear()

    def _read(self, name: str) -> Tensor:
        extent = self.extents[name]
        block = self._block(extent.nbytes)
        array = block.numpy()  # an object of its own, which the storage of the tensor below holds
        weakref.finalize(array, self._free[extent.nbytes].append, block)
        self._fill(extent, extent.offset, array.data)
        return torch.from_numpy(array).view(extent.dtype).view(extent.shape).to(extent.wanted)

    def _block(self, size: int) -> Tensor:
        try:
            return self._free[size].pop()
        except IndexError:
            pass
        kept = sum(other * len(blocks) for other, blocks in list(self._free.items()))
        for other, blocks in list(self._free.items()):
            while kept + size > self._budget and blocks:
                blocks.pop()
                kept -= other
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned)

    def _fill(self, extent: Extent, offset: int, into: memoryview[int]) -> None:
        try:
            with self._reading:
                file = self._open(extent.path)
                file.seek(offset)
                done = 0
                while done < len(into):
                    count = file.readinto(into[done:])
                    if not count:
                        raise EOFError(f"it ends after {offset + done} bytes")
                    done += count
                self.bytes_read += done
                if self.cold:
                    os.posix_fadvise(file.fileno(), offset, done, os.POSIX_FADV_DONTNEED)
        except (OSError, EOFError) as error:
            raise LoadError(
                f"the offloaded weights in {extent.path} cannot be read any more ({error}); the file has to stay as it "
                "was when the model was loaded: put it back, or load the model again"
            ) from error

    def _open(self, path: Path) -> FileIO:
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
    """A hook's own mapping, of which those tensors that lie in files come from a stream."""

    def __init__(self, stream: WeightStream, streamed: Mapping[str, str], others: Mapping[str, Tensor]) -> None:
        self._stream, self._streamed, self._others = stream, streamed, others

    def __getitem__(self, name: str) -> Tensor:
        key = self._streamed.get(name)
        return self._others[name] if key is None else self._stream.take(key)

    def __contains__(self, name: object) -> bool:  # else the question would read the tensor
        return name in self._streamed or name in self._others

    def __iter__(self) -> Iterator[str]:
        return iter(self._others)

    def __len__(self) -> int:
        return len(self._others)


def hooks(module: nn.Module) -> Iterator[Any]:
    """Hooks of accelerate on one module which bring weights for a pass and take them away after it."""
    hook = getattr(module, "_hf_hook", None)
    for one in getattr(hook, "hooks", (hook,)):
        if getattr(one, "offload", False):
            yield one


def is_offloaded(model: nn.Module) -> bool:
    """Whether weights of a model come and go with its passes."""
    return any(True for module in model.modules() for _ in hooks(module))


def attach(model: nn.Module, layers: int, device: torch.device) -> WeightStream | None:
    """Have a model's hooks take what lies in files from a stream; None where nothing does.

    Args:
        model: with hooks of its own, which are changed.
        layers: it has so many; as much as one of them takes is read ahead.
        device: where it computes.
    """
    headers: dict[Path, tuple[dict[str, Any], int]] = {}
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
    stream = WeightStream(extents, ahead=max(*sizes, sum(sizes) // layers, 0), pinned=device.type == "cuda")
    for module, hook, streamed in found:
        hook.weights_map = _Weights(stream, streamed, hook.weights_map)
        # accelerate knows tied weights again by their address, and blocks are used again: by an address that another
        # tensor had when the model was loaded, a layer would be given that one's weights.
        hook.tied_params_map, hook.tied_params_names = None, set()
        if type(module) is nn.Embedding and "weight" in streamed:
            _replace(module, hook, _rows_hook(stream, streamed["weight"], hook.execution_device))
    return stream


def _locate(weights: Any, name: str, module: nn.Module, headers: dict[Path, Any]) -> Extent | None:
    """Where accelerate would read a tensor; None if it is not in a file, or not in one that is understood here."""
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
    entries, start = headers[path]
    entry = entries[about.get("weight_name", name)]
    dtype = DTYPES.get(entry["dtype"])
    if dtype is None:
        return None
    return Extent(path, start + entry["data_offsets"][0], dtype, tuple(entry["shape"]), wanted)


def _rows_hook(stream: WeightStream, name: str, device: Any) -> Any:
    """A hook for an embedding: of a matrix that may be as large as a layer a pass needs a few rows."""
    from accelerate.hooks import ModelHook

    class Rows(ModelHook):  # type: ignore[misc]
        offload = True  # as accelerate's own say it
        execution_device = device

        def init_hook(self, module: Any) -> Any:
            module.padding_idx = None  # matters to gradients alone, and may lie beyond the rows of a pass
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
    """One of a module's hooks by another."""
    holder: Any = module._hf_hook
    if holder is old:
        module._hf_hook = new
    else:
        holder.hooks = tuple(new if hook is old else hook for hook in holder.hooks)
    new.init_hook(module)

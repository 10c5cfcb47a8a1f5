"""GPUs that are not there: tensors that say they lie on one and compute on the CPU.

They are refused where a GPU's are: beside tensors of the CPU or of another GPU, in numpy, and by the compiled kernels.
So a test sees whether everything that meets in an operation lies on one device, which on a machine without a GPU
nothing else shows.
"""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache, partialmethod
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import transformers
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map, tree_map_only
from torch.utils.cpp_extension import include_paths

import gpu_stand_ins
from sakiyomi.core.embedded import embedded
from sakiyomi.model_executor import weights
from sakiyomi.model_executor.attention import torch as dense
from sakiyomi.model_executor.attention import triton
from sakiyomi.model_executor.attention.triton import TritonBackend
from sakiyomi.model_executor.loading.reader import Reader

__all__ = ["PLACE", "pretended_gpu"]

PLACE = torch.device("cuda", 0)
aten = torch.ops.aten
ACROSS = {aten.copy_.default, aten._to_copy.default}
"""What takes tensors of two devices."""
INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
"""What takes indices that lie on the CPU."""
ours = torch.ops.sakiyomi
OURS = {ours.attend.default: dense._attend, ours.cross.default: dense._cross, ours.observe.default: dense._observe}


class _There(Tensor):
    """A tensor of a GPU, which is its `place`. Its numbers are in `here`."""

    here: Tensor
    place: torch.device

    @staticmethod
    def __new__(cls, here: Tensor, place: torch.device) -> _There:
        return Tensor._make_wrapper_subclass(  # type: ignore[no-any-return,attr-defined]
            cls, here.shape, strides=here.stride(), storage_offset=here.storage_offset(), dtype=here.dtype,
            device=place, requires_grad=here.requires_grad,
        )  # fmt: skip

    def __init__(self, here: Tensor, place: torch.device) -> None:
        self.here, self.place = here, place

    def __repr__(self, **_: Any) -> str:
        return f"on {self.place}: {self.here!r}"

    def data_ptr(self) -> int:
        return 2**62 + self.here.data_ptr()  # an address that the CPU has nothing at

    def __getitem__(self, index: Any) -> Tensor:
        return super().__getitem__(tree_map_only(list, torch.tensor, index, is_leaf=lambda part: type(part) is list))

    def untyped_storage(self) -> Any:
        return self.here.untyped_storage()

    def tolist(self) -> Any:
        return self.here.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    leaves = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
    there = [leaf for leaf in leaves if isinstance(leaf, _There)]
    apart = [leaf for leaf in leaves if not isinstance(leaf, _There) and leaf.ndim]
    if func in INDEXING:
        apart = [leaf for leaf in apart if leaf.dtype not in (torch.int64, torch.bool)]
    found_at = {str(leaf.place) for leaf in there} | ({"cpu"} if apart else set())
    if len(found_at) > 1 and func not in ACROSS:
        raise RuntimeError(f"Expected all tensors to be on the same device, but {func} found {sorted(found_at)}")
    if func is aten._fused_sdp_choice.default:
        return 0
    if func.namespace == "sakiyomi":  # operators of ours in plain torch: what they call is looked at
        with _Factories():
            return OURS[func](*args)
    device = kwargs.get("device")
    kwargs = {name: value for name, value in kwargs.items() if name != "pin_memory"}
    if device is not None:
        kwargs["device"] = torch.device("cpu")
    place = _place(device) if device is not None else there[0].place if there else None
    if func is aten.copy_.default:
        args[0].here.copy_(_here(args[1])) if there and args[0] is there[0] else args[0].copy_(_here(args[1]))
        return args[0]
    known = {id(leaf.here): leaf for leaf in there}

    def outside(found: Any) -> Any:
        if not isinstance(found, Tensor) or isinstance(found, _There) or place is None:
            return found
        return known[id(found)] if id(found) in known else _There(found, place)

    found = func(*tree_map(_here, args), **tree_map(_here, kwargs))
    if func is aten._to_copy.default and place != (there[0].place if there else None):
        found = found.clone() if any(found is leaf.here for leaf in there) else found
    return tree_map(outside, found)


def _place(device: Any) -> torch.device | None:
    """The GPU that a device is; None: it is the CPU."""
    device = torch.device(device)
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else None


def _here(value: Any) -> Any:
    return value.here if isinstance(value, _There) else value


class _Kernels(gpu_stand_ins.Kernels):
    """In the place of the Triton kernels: all that they are given lies on the GPU."""

    @staticmethod
    def attend(*given: Any) -> Tensor:
        """See ``triton_kernels``."""
        (place,) = {tensor.place for tensor in given[:6]}  # all of them lie on one GPU
        with _disable_current_modes():  # which would look at each of its operations
            found = gpu_stand_ins.attend(*map(_here, given))
        return _There(found, place)

    class Keeper(gpu_stand_ins.Keeper):
        """See ``triton_kernels``."""

        def __init__(self, stores: list[Tensor]) -> None:
            assert all(isinstance(store, _There) for store in stores)
            super().__init__(list(map(_here, stores)))


class _Factories(TorchDispatchMode):
    """What is made on the GPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


@cache
def _guard() -> None:
    """Have torch switch to a device of CUDA as if there were one: builds for the CPU have nothing registered for it."""
    source = (
        "#include <c10/core/impl/DeviceGuardImplInterface.h>\n"
        "namespace c10::impl { C10_REGISTER_GUARD_IMPL(CUDA, NoOpDeviceGuardImpl<DeviceType::CUDA>); }\n"
    )
    flags = [*(f"-I{path}" for path in include_paths()), f"-L{Path(torch.__file__).parent / 'lib'}"]
    with TemporaryDirectory() as folder:
        library = Path(folder) / "guard.so"
        command = ["c++", "-std=c++20", "-shared", "-fPIC", "-x", "c++", "-", *flags, "-lc10", "-o", str(library)]
        subprocess.run(command, input=source, encoding="utf-8", check=True)
        ctypes.CDLL(str(library))


_read = Reader.read


def _read_here(self: Reader, *arguments: Any, **options: Any) -> Any:
    """Files are read by the CPU: transformers' loader has modes of its own."""
    with _disable_current_modes():
        return _read(self, *arguments, **options)


@contextmanager
def pretended_gpu() -> Iterator[None]:
    """Within, ``torch.cuda`` has three devices, and tensors can be moved to them and made there, in this thread.

    Models run there with stand-ins for kernels and captures; see ``gpu_stand_ins``.
    """
    cuda = {
        "_lazy_init": lambda: None, "is_available": lambda: True, "device_count": lambda: 3,
        "get_device_capability": lambda *_: (9, 0), "get_device_name": lambda *_: "pretended",
        "mem_get_info": lambda *_: (2**34, 2**34), "memory_reserved": lambda *_: 0, "memory_allocated": lambda *_: 0,
        "get_device_properties": lambda *_: SimpleNamespace(major=9, minor=0, name="pretended", total_memory=2**34),
        "synchronize": lambda *_: None, "current_device": lambda: 0,
        "Stream": gpu_stand_ins.Anything, "current_stream": gpu_stand_ins.Anything,
        "CUDAGraph": gpu_stand_ins.Anything,
        **dict.fromkeys(("device", "stream", "graph"), lambda *_, **__: nullcontext()),
    }  # fmt: skip
    made = torch.tensor

    def tensor(numbers: Any, *, device: Any = None, pin_memory: bool = False, **options: Any) -> Tensor:
        """``torch.tensor``, which asks no mode."""
        found = made(numbers, **options)
        return found if device is None else found.to(device)

    _guard()
    # At its first load transformers decides for good how buffers are filled, by what it finds then.
    transformers.AutoModelForCausalLM.from_pretrained(embedded("tales-draft"))
    before = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    with ExitStack() as stack:
        stack.callback(torch.__future__.set_overwrite_module_params_on_conversion, before)
        stack.enter_context(mock.patch.object(torch, "tensor", tensor))
        stack.enter_context(mock.patch.multiple(torch.cuda, **cuda))
        stack.enter_context(mock.patch.object(triton, "gpu_kernels", lambda device: _Kernels))
        stack.enter_context(mock.patch.object(weights, "gpu_kernels", lambda device: None))
        recorder = partialmethod(lambda self, forward: gpu_stand_ins.Replayed(forward, self))
        stack.enter_context(mock.patch.object(TritonBackend, "recorder", recorder))
        stack.enter_context(mock.patch.object(Reader, "read", _read_here))
        stack.enter_context(torch.no_grad())
        stack.enter_context(_Factories())
        yield

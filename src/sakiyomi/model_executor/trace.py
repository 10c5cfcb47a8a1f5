"""Traces a pass: runs it once, and notes the operators that torch calls.

What Python decides from a tensor's values would be baked in: tracing such a model is refused, for torch warns of it.
What follows from sizes, settings and weights may be baked in; ``recorded_passes.py`` finds out whether it is right for
other row counts.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.jit._trace import TracerWarning
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from sakiyomi.core.errors import UnsupportedError

_TORCH = str(Path(torch.__file__).parent)
"""Code that decides by sizes, which a comparison finds out."""
_SIZED_BY_VALUES = {"aten::nonzero", "aten::nonzero_numpy", "aten::masked_select", "aten::repeat_interleave"} | {
    "aten::bincount", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive",
}  # fmt: skip
"""Operators whose results have a size that follows from values; so has a tensor that is indexed by truth values."""


def trace(forward: Callable[..., Any], module: nn.Module, *inputs: Tensor) -> Any:
    """A function that runs `module`, as TorchScript.

    Raises:
        UnsupportedError: Python decides something from a tensor's values, which is right for these inputs alone.
    """
    with warnings.catch_warnings(record=True) as told, _detached(module):
        warnings.simplefilter("always")
        with _Origins(told) as origins:
            made = torch.jit.trace(forward, inputs, check_trace=False)
    for place, warning in enumerate(told):
        doubted = issubclass(warning.category, TracerWarning) and place not in origins.harmless
        if doubted and not warning.filename.startswith(_TORCH):
            raise UnsupportedError(f"{warning.filename}:{warning.lineno}: {warning.message}")
    return made


class _Origins(TorchFunctionMode):
    """Finds out, while a model is traced, where the values come from that the trace turns into constants.

    Those that are made of settings, weights and sizes alone may be constants: whether another row count makes something
    else of them, a comparison with an eager pass finds out.

    Args:
        told: the trace's warnings, as they come.

    Attributes:
        harmless: which of them are about such values, by their places.
    """

    def __init__(self, told: Sequence[warnings.WarningMessage]) -> None:
        super().__init__()
        self.harmless: set[int] = set()
        self._told = told
        self._known: set[tuple[int, bool]] = set()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call it; warnings that come of it are about its arguments."""
        before = len(self._told)
        result = func(*args, **(kwargs or {}))
        if len(self._told) > before:
            traced: Any = torch._C
            given = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
            if all(self._fixed(traced._get_value_trace(value)) for value in given):
                self.harmless.update(range(before, len(self._told)))
        return result

    def _fixed(self, value: Any) -> bool:
        """Whether a traced value is made of constants and sizes alone, and these sizes of no values."""
        waiting = [(value, False)]
        while waiting:
            value, size_of = waiting.pop()
            if (value.unique(), size_of) in self._known:  # after the first one that is not the trace is refused
                continue
            self._known.add((value.unique(), size_of))
            node = value.node()
            kind, sources = node.kind(), list(node.inputs())
            if kind == "prim::Param" and not size_of:
                return False
            if size_of and (kind in _SIZED_BY_VALUES or (kind == "aten::index" and _has_mask(sources[1]))):
                return False
            waiting += [(source, size_of or kind == "aten::size") for source in sources]
        return True


def _has_mask(indices: Any) -> bool:
    """Whether a list of indices has one of truth values among them."""
    types = [index.type() for index in indices.node().inputs()]
    return any(isinstance(found, torch._C.TensorType) and found.scalarType() == "Bool" for found in types)


@contextmanager
def _detached(module: nn.Module) -> Iterator[None]:
    """Parameters that require no gradients, as a trace holds them; their tensors are the model's own."""
    swapped = []
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None and parameter.requires_grad:
                swapped.append((part, name, parameter))
                part._parameters[name] = parameter.detach()  # type: ignore[assignment]
    try:
        yield
    finally:
        for part, name, parameter in swapped:
            part._parameters[name] = parameter

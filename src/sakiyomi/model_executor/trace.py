"""Traces a pass: runs it once, and notes the operators that torch calls.

A trace turns the results of Python code into constants. If Python decides something from a tensor's values, torch
warns, and the model is refused. Results that depend on sizes, settings and weights may be constants;
``recorded_passes.py`` checks whether they are right for other row counts.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.jit._trace import TracerWarning
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from sakiyomi.core.errors import UnsupportedError

_TORCH = str(Path(torch.__file__).parent)
"""Folder of torch's own code, which decides by sizes; a comparison checks these."""
_SIZED_BY_VALUES = {"aten::nonzero", "aten::nonzero_numpy", "aten::masked_select", "aten::repeat_interleave"} | {
    "aten::bincount", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive",
}  # fmt: skip
"""Operators whose results have a size that depends on values, as has a tensor that is indexed by truth values."""


def trace(forward: Callable[..., Any], *inputs: Tensor) -> Any:
    """A function as TorchScript. The parameters that it reads must not require gradients, see ``structural_copy``.

    Raises:
        UnsupportedError: Python decides something from a tensor's values, which is only right for these inputs.
    """
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with _Origins(told) as origins:
            made = torch.jit.trace(forward, inputs, check_trace=False)
    for place, warning in enumerate(told):
        doubted = issubclass(warning.category, TracerWarning) and place not in origins.harmless
        if doubted and not warning.filename.startswith(_TORCH):
            raise UnsupportedError(f"{warning.filename}:{warning.lineno}: {warning.message}")
    return made


class _Origins(TorchFunctionMode):
    """Finds the origin of the values that a trace turns into constants.

    Values that are made of settings, weights and sizes alone may be constants: a comparison with an eager pass checks
    other row counts.

    Args:
        told: the warnings of the trace, as they come.

    Attributes:
        harmless: places in ``told`` of the warnings about such values.
    """

    def __init__(self, told: Sequence[warnings.WarningMessage]) -> None:
        super().__init__()
        self.harmless: set[int] = set()
        self._told = told
        self._known: set[tuple[int, bool]] = set()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call the function; warnings during the call are about its arguments."""
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
            if (value.unique(), size_of) in self._known:  # visited: a refused one would have ended the trace
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
    """Whether one of these indices is a tensor of truth values."""
    types = [index.type() for index in indices.node().inputs()]
    return any(isinstance(found, torch._C.TensorType) and found.scalarType() == "Bool" for found in types)

"""Copies of functions with some of their globals replaced; the module of the original is not changed."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any


def global_names(function: Callable[..., Any]) -> frozenset[str]:
    """Names of globals and attributes in the code of a function, which decorators may have wrapped."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return frozenset(code.co_names) if code is not None else frozenset()


def rebound(function: Any, ours: Mapping[str, Callable[..., Any]]) -> Any:
    """A copy of a function in which `ours` replace globals of the same names, within the same decorators."""
    scope, cells, inner = function.__globals__, function.__closure__, getattr(function, "__wrapped__", None)
    if inner is None:
        scope = {**scope, **ours}
    else:
        made = rebound(inner, ours)
        cells = tuple(types.CellType(made) if cell.cell_contents is inner else cell for cell in cells)
    whole: Any = types.FunctionType(function.__code__, scope, function.__name__, function.__defaults__, cells)
    whole.__kwdefaults__ = function.__kwdefaults__
    if inner is not None:
        whole.__wrapped__ = made
    return whole

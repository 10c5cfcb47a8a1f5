"""What every module of a model makes of the rows of a pass."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

__all__ = ["listening"]


@contextmanager
def listening(model: nn.Module) -> Generator[dict[str, Tensor], None, None]:
    """By name of a module, what it gave last, (rows, width); graphs call no modules, and leave nothing."""
    made: dict[str, Tensor] = {}
    hooks: list[Any] = []

    def listen(name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            out = output[0] if isinstance(output, tuple) else output
            if isinstance(out, Tensor) and out.ndim > 1:
                made[name] = out.reshape(-1, out.shape[-1]).clone()  # kernels use their memory again

        return hook

    try:
        for name, module in model.named_modules():
            hooks.append(module.register_forward_hook(listen(name)))
        yield made
    finally:
        for hook in hooks:
            hook.remove()

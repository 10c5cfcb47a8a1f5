"""A model's linear layers into the compiled kernels' tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from sakiyomi.core.hooks import hooks_of
from sakiyomi.kernels.native import PackedLayer, PackedLinear, PackedWeights, can_pack

TURNED = ("transformers.pytorch_utils", "Conv1D")
"""Transformers' linear layer with its weight the other way round."""
_ALIKE = [("transformers.models.falcon.modeling_falcon", "FalconLinear")]
"""Those of its classes that compute what torch's does."""
_ABOUT = {"dtype", "device", "requires_grad"}
"""What a packed layer's weight can be asked for, too."""


def is_linear(module: nn.Module) -> bool:
    """Whether it is exactly torch's linear layer, or one of transformers' own."""
    kind = type(module)
    linear = kind is nn.Linear or (kind.__module__, kind.__name__) in (TURNED, *_ALIKE)
    return linear and replaced_forward(module) is None


def replaced_forward(module: nn.Module) -> Callable[..., Any] | None:
    """What was put in the place of a module's forward, below the hooks of accelerate; None: nothing."""
    own = vars(module).get("_old_forward" if hasattr(module, "_hf_hook") else "forward")
    return None if getattr(own, "__func__", own) is type(module).forward else own


class _Weight(Tensor):
    """A layer's weight as others than the layer see it: whatever they compute with it is noted."""

    note: Callable[[], None]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(getattr(func, "__self__", None), "__name__", "") not in _ABOUT:
            for given in args:
                if isinstance(given, _Weight):
                    given.note()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class Watch:
    """Sees how a model uses its linear layers. Use as a context around one forward of the model.

    Which of them read the same tensor (q, k and v of an attention, gate and up of an MLP) is found in a pass, not by
    names; and so are layers whose weights other modules read.

    Attributes:
        read: ids of the latter.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        # The tensors are held, so that an id means one of them; their versions, since they may change in between.
        self._calls: list[tuple[nn.Module, Tensor, int]] = []
        self._within: nn.Module | None = None  # the layer that runs
        self.read: set[int] = set()

    def __enter__(self) -> Watch:
        def begin(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            self._within = module
            if inputs:
                self._calls.append((module, inputs[0], 0 if inputs[0].is_inference() else inputs[0]._version))

        def end(*_: Any) -> None:
            self._within = None

        self._layers = [(module, type(module)) for module in self._model.modules() if is_linear(module)]
        called = [module for module in self._model.modules() if is_linear(module) or type(module) is PackedLinear]
        self._hooks = [layer.register_forward_pre_hook(begin) for layer in called]
        self._hooks += [layer.register_forward_hook(end) for layer in called]
        watched = {kind: self._watched(kind) for _, kind in self._layers}
        for layer, kind in self._layers:
            layer.__class__ = watched[kind]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()
        for layer, kind in self._layers:
            layer.__class__ = kind

    def _watched(self, kind: type[nn.Module]) -> type[nn.Module]:
        """The class of a layer, which sees who asks for its weight."""
        watch = self

        def ask(layer: nn.Module, name: str) -> Any:
            found = kind.__getattr__(layer, name)
            if name != "weight" or watch._within is layer or type(found) is not nn.Parameter:
                return found
            seen = found.as_subclass(_Weight)
            seen.note = lambda: watch.read.add(id(layer))
            seen._is_param = True
            return seen

        return type(kind.__name__, (kind,), {"__getattr__": ask})

    def siblings(self) -> list[list[nn.Module]]:
        """Groups of two and more layers, each called once."""
        parents = {id(child): id(parent) for parent in self._model.modules() for child in parent.children()}
        times = Counter(id(layer) for layer, *_ in self._calls)
        groups: dict[tuple[int, int, int], list[nn.Module]] = {}
        for layer, read, version in self._calls:
            if times[id(layer)] == 1:
                groups.setdefault((parents[id(layer)], id(read), version), []).append(layer)
        return [group for group in groups.values() if len(group) > 1]


@contextmanager
def present(layer: nn.Module) -> Iterator[None]:
    """A layer with its weights in memory, where accelerate keeps them on disk; nothing changes where they are here."""
    hook = getattr(layer, "_hf_hook", None)
    if hook is None:
        yield
        return
    hook.pre_forward(layer)
    try:
        yield
    finally:
        hook.post_forward(layer, None)


def weight_of(layer: nn.Module) -> Tensor:
    """A linear layer's weight as (out, in)."""
    turned = (type(layer).__module__, type(layer).__name__) == TURNED
    weight: Tensor = layer.weight.T if turned else layer.weight  # type: ignore[assignment]
    return weight


def pack_linears(
    model: nn.Module,
    native: PackedWeights,
    siblings: Sequence[Sequence[nn.Module]] = (),
    *,
    read: Collection[int] = (),
    free: bool = False,
    bits: Mapping[int, int] | None = None,
) -> int:
    """Replace plain linear layers on the CPU by packed ones; the number of layers that were replaced.

    Only the exact classes are taken: a subclass, a layer with hooks or another forward, or quantized or distributed
    weights stay as they are.

    Args:
        model: changed in place.
        native: tables for the weights.
        siblings: layers that are computed together.
        read: ids of layers that stay as they are, since others read their weights (see ``Watch``).
        free: the weights are not used by anybody else: each is freed when it is packed, or read from the disk for it.
        bits: of the weights of each layer by its id, where they are to be rounded (see ``PackedWeights.add_linear``).
    """
    done: dict[int, PackedLinear] = {}
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if id(child) in done:
                setattr(parent, name, done[id(child)])
                continue
            if id(child) in read and free and hasattr(child, "_hf_hook"):
                _load(child)
            if id(child) in read or not is_linear(child) or type(child.weight) is not nn.Parameter:
                continue
            if hooks_of(child) or (hasattr(child, "_hf_hook") and not free):
                continue
            with present(child):
                weight = weight_of(child)
                if weight.device.type != "cpu" or not can_pack(weight.shape, weight.dtype):
                    continue
                width = (bits or {}).get(id(child), 16)
                done[id(child)] = native.add_linear(weight, getattr(child, "bias", None), bits=width)
                setattr(parent, name, done[id(child)])
            if free and not hasattr(child, "_hf_hook") and id(child.weight) not in embeddings:
                # Layer by layer, so that a model is never held twice.
                child.weight.data = child.weight.new_empty(0)
    for group in siblings:
        join_siblings(native, [done[id(layer)] for layer in group if id(layer) in done])
    return len(done)


def _load(layer: nn.Module) -> None:
    """Have a layer's weights lie in memory from now on."""
    from accelerate.hooks import remove_hook_from_module

    layer._hf_hook.pre_forward(layer)  # type: ignore[operator,union-attr]
    remove_hook_from_module(layer)


def linear_beside(
    tables: PackedWeights | None, weight: Tensor, bias: Tensor | None = None, bits: int = 16
) -> nn.Module:
    """A linear layer of its own, (out, in), that runs in a model's passes or beside them: by its kernels where it can.

    Args:
        tables: of the model; None: it has none.
        weight, bias: of the layer.
        bits: see ``PackedWeights.add_linear``.
    """
    if tables is not None and can_pack(weight.shape, weight.dtype, bits):
        return tables.add_linear(weight, bias, bits=bits)
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias, requires_grad=False)
    return layer


def join_siblings(native: PackedWeights, layers: Sequence[PackedLayer]) -> None:
    """Have layers that read the same input computed together, if their rows are of one kind."""
    if len(layers) > 1 and len({(layer.in_features, layer.weight.dtype) for layer in layers}) == 1:
        native.join(layers)

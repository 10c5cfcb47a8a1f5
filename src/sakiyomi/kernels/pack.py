"""A model's linear layers into the compiled kernels' tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

from sakiyomi.kernels.native import PackedLinear, PackedWeights, can_pack

__all__ = ["Watch", "is_linear", "join_siblings", "linear_beside", "pack_linears", "present", "weight_of"]


def is_linear(module: nn.Module) -> bool:
    """Whether it is exactly torch's linear layer, or transformers' one with its weight the other way round."""
    kind = type(module)
    return kind is nn.Linear or (kind.__module__, kind.__name__) == ("transformers.pytorch_utils", "Conv1D")


class ReadLinear(nn.Linear):
    """A linear layer whose weight its parent reads by itself: it is not packed."""


class Watch:
    """Sees which linear layers of a module read the same tensor: q, k and v of an attention, gate and up of an MLP.

    Found in a pass, not by names. Use as a context around one forward of the model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        # The tensors are held, so that an id means one of them; their versions, since they may change in between.
        self._calls: list[tuple[nn.Module, Tensor, int]] = []

    def __enter__(self) -> Watch:
        def note(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            if inputs:
                self._calls.append((module, inputs[0], 0 if inputs[0].is_inference() else inputs[0]._version))

        layers = [module for module in self._model.modules() if is_linear(module)]
        self._hooks = [layer.register_forward_pre_hook(note) for layer in layers]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def leave_unread(self, parents: Sequence[nn.Module]) -> None:
        """Have linear layers of these modules that were never called stay as they are when the others are packed."""
        called = {id(layer) for layer, *_ in self._calls}
        for child in (child for parent in parents for child in parent.children()):
            if type(child) is nn.Linear and id(child) not in called:
                child.__class__ = ReadLinear

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
    weight: Tensor = layer.weight if type(layer) is nn.Linear else layer.weight.T  # type: ignore[assignment]
    return weight


def pack_linears(
    model: nn.Module,
    native: PackedWeights,
    siblings: Sequence[Sequence[nn.Module]] = (),
    *,
    free: bool = False,
    bits: Mapping[int, int] | None = None,
) -> int:
    """Replace plain linear layers on the CPU by packed ones; the number of layers that were replaced.

    Only the exact classes are taken: a subclass, a layer with hooks, or quantized or distributed weights stay as they
    are.

    Args:
        model: changed in place.
        native: tables for the weights.
        siblings: layers that are computed together.
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
            if isinstance(child, ReadLinear) and free and hasattr(child, "_hf_hook"):
                _load(child)
            if not is_linear(child) or type(child.weight) is not nn.Parameter:
                continue
            if child._forward_pre_hooks or child._forward_hooks or (hasattr(child, "_hf_hook") and not free):
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


def join_siblings(native: PackedWeights, layers: Sequence[PackedLinear]) -> None:
    """Have layers that read the same input computed together, if their rows are of one kind."""
    if len(layers) > 1 and len({(layer.in_features, layer.weight.dtype) for layer in layers}) == 1:
        native.join(layers)

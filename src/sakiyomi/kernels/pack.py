"""A model's linear layers into the compiled kernels' tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from types import TracebackType

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from sakiyomi.kernels.native import NativeModel, PackedLinear, can_pack

__all__ = ["PACKED", "Watch", "pack_linears"]

PACKED = (nn.Linear, Conv1D)


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

        layers = [module for module in self._model.modules() if type(module) in PACKED]
        self._hooks = [layer.register_forward_pre_hook(note) for layer in layers]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for hook in self._hooks:
            hook.remove()

    def siblings(self) -> list[list[nn.Module]]:
        """Groups of two and more layers, each called once."""
        parents = {id(child): id(parent) for parent in self._model.modules() for child in parent.children()}
        times = Counter(id(layer) for layer, *_ in self._calls)
        groups: dict[tuple[int, int, int], list[nn.Module]] = {}
        for layer, read, version in self._calls:
            if times[id(layer)] == 1:
                groups.setdefault((parents[id(layer)], id(read), version), []).append(layer)
        return [group for group in groups.values() if len(group) > 1]


def pack_linears(
    model: nn.Module,
    native: NativeModel,
    siblings: Sequence[Sequence[nn.Module]] = (),
    *,
    free: bool = False,
    int8: Collection[int] = (),
) -> int:
    """Replace plain linear layers on the CPU by packed ones; the number of layers that were replaced.

    Only the exact classes are taken: a subclass, a layer with hooks, or quantized or distributed weights stay as they
    are. Siblings are computed together; layers whose id is in `int8` are rounded to 8 bits.
    """
    done: dict[int, PackedLinear] = {}
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if id(child) in done:
                setattr(parent, name, done[id(child)])
                continue
            if type(child) not in PACKED or type(child.weight) is not nn.Parameter:
                continue
            hooked = child._forward_pre_hooks or child._forward_hooks or hasattr(child, "_hf_hook")
            weight = child.weight if type(child) is nn.Linear else child.weight.T
            if hooked or weight.device.type != "cpu" or not can_pack(weight.shape, weight.dtype):
                continue
            done[id(child)] = native.add_linear(weight, getattr(child, "bias", None), int8=id(child) in int8)
            setattr(parent, name, done[id(child)])
            if free and id(child.weight) not in embeddings:
                # Layer by layer, so that a model is never held twice.
                child.weight.data = child.weight.new_empty(0)
    for group in siblings:
        packed = [done[id(layer)] for layer in group if id(layer) in done]
        if len({layer.weight.dtype for layer in packed}) == 1:
            native.join(packed)
    return len(done)

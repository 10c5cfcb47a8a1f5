"""Records the projections of a model's attention layers: queries, keys and values before norms and rotary embedding.

The modules that project are found by the names that transformers' models use, or by a small pass. Listening works on a
model as transformers runs it and on one whose layers are packed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sakiyomi.core.errors import UnsupportedError

Then = Callable[[int, Tensor], None]
"""Told of a layer, counted from 0, and its (rows, width) as soon as they are there: before the layer's attention."""

SPLIT = (("q_proj", "k_proj", "v_proj"), ("Wq", "Wk", "Wv"), ("q_lin", "k_lin", "v_lin"), ("query", "key", "value"))
FUSED = ("qkv_proj", "query_key_value", "c_attn", "Wqkv", "wqkv", "qkv", "in_proj_qkv")


def out_features(layer: nn.Module) -> int:
    """Values that a linear layer gives; 0 for what is none."""
    width = getattr(layer, "out_features", None) or getattr(layer, "nf", 0)  # transformers' Conv1D says nf
    return width if isinstance(width, int) else 0


def find_projections(model: Any) -> list[tuple[str, ...]]:
    """Names of the modules that project queries, keys and values: of each layer three, or one.

    Args:
        model: a causal LM. Where names do not tell, it makes a pass over two tokens.

    Raises:
        UnsupportedError: they are not found in every layer, or the model makes its keys and values otherwise.
    """
    config = model.config.get_text_config()
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedError(f"{type(model).__name__} has an encoder; retaining heads need a decoder-only model")
    layers = int(config.num_hidden_layers)
    found = _named(model) or _watched(model)
    widths = [tuple(out_features(model.get_submodule(name)) for name in names) for names in found]
    if len(found) != layers or not all(map(all, widths)):
        raise UnsupportedError(
            f"{type(model).__name__}: projections of queries, keys and values were found in {len(found)} of {layers} "
            "layers; retaining heads cannot read beside it"
        )
    return found


def _attentions(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules with linear layers among their children, in the order of the layers that they say they belong to."""
    found = [(name, module) for name, module in model.named_modules() if any(map(out_features, module.children()))]
    yield from sorted(found, key=lambda pair: _number(pair[1]) or 0)


def _number(module: nn.Module) -> int | None:
    number = getattr(module, "layer_idx", None)
    return number if isinstance(number, int) else None


def _named(model: nn.Module) -> list[tuple[str, ...]]:
    found = []
    for name, module in _attentions(model):
        has = {child for child, part in module.named_children() if out_features(part)}
        split = next((names for names in SPLIT if has.issuperset(names)), None)
        fused = next((one for one in FUSED if one in has), None)
        if split or fused:
            found.append(tuple(f"{name}.{child}" for child in split or (fused,)))
    return found


@torch.no_grad()
def _watched(model: Any) -> list[tuple[str, ...]]:
    """Linear layers of one parent that read the same tensor, before the parent's last one reads what attention gives.

    Three of them are queries, keys and values if the last two are equally wide and the first is what the last one
    reads; one alone is all together if it has whole heads beyond that.
    """
    heads = getattr(model.config.get_text_config(), "num_attention_heads", None)
    if not isinstance(heads, int):
        return []
    calls: dict[int, list[tuple[nn.Module, Tensor]]] = {}
    parents = {id(child): id(parent) for _, parent in _attentions(model) for child in parent.children()}

    def note(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if inputs:
            calls.setdefault(parents[id(module)], []).append((module, inputs[0]))

    linear = [part for _, parent in _attentions(model) for part in parent.children() if out_features(part)]
    hooks = [part.register_forward_pre_hook(note) for part in linear]
    try:
        model(input_ids=torch.tensor([[1, 2]], device=model.device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    names = {id(module): name for name, module in model.named_modules()}
    found = []
    for _, parent in _attentions(model):
        called = calls.get(id(parent), [])
        if _number(parent) is None or len(called) < 2:
            continue
        first, last = called[0][1], called[-1][1]
        parts = [part for part, read in called if read is first]
        widths = [out_features(part) for part in parts]
        queries = last.shape[-1]
        split = len(parts) == 3 and queries == widths[0] >= widths[1] == widths[2]
        beyond = widths[0] - queries
        fused = len(parts) == 1 and beyond > 0 and beyond % max(2 * (queries // heads), 1) == 0
        if split or fused:
            found.append(tuple(names[id(part)] for part in parts))
    return found


class Raw:
    """Listens to the projections of every attention layer.

    Hooks keep a layer from being packed: listen after packing, with the names that were found before.

    Args:
        model: a causal LM, as transformers has it or with packed layers.
        then: called with each layer's projections; they are not kept in ``read`` then.
        names: what `find_projections` gave for it; None: they are looked for.

    Attributes:
        widths: of each layer: values of queries, keys and values together.
        read: of each layer (rows, width) of the last eager pass; None before.

    Raises:
        UnsupportedError: the model's projections are not known (see `find_projections`).
    """

    def __init__(self, model: Any, then: Then | None = None, names: Sequence[Sequence[str]] | None = None) -> None:
        self.names = [tuple(layer) for layer in names] if names is not None else find_projections(model)
        self._modules = [[model.get_submodule(name) for name in layer] for layer in self.names]
        self.widths = tuple(sum(map(out_features, layer)) for layer in self._modules)
        self._then = then
        self.read: list[Tensor | None] = [None] * len(self.names)
        # What each layer has projected so far in the running pass.
        self._parts: list[list[Tensor | None]] = [[None] * len(layer) for layer in self.names]
        self._hooks: list[Any] = []

    def __enter__(self) -> Raw:
        self.listen()
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    def listen(self) -> None:
        """Put hooks on the projections."""
        self.leave()
        for layer, modules in enumerate(self._modules):
            for place, module in enumerate(modules):
                self._hooks.append(module.register_forward_hook(self._noting(layer, place)))

    def leave(self) -> None:
        """Remove the hooks, and forget what they have seen."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self.read = [None] * len(self.names)
        self._parts = [[None] * len(layer) for layer in self.names]

    def _noting(self, layer: int, place: int) -> Callable[[nn.Module, Any, Tensor], None]:
        def note(module: nn.Module, inputs: Any, given: Tensor) -> None:
            parts = self._parts[layer]
            parts[place] = given.flatten(0, -2)
            there = [part for part in parts if part is not None]
            if len(there) < len(parts):
                return
            whole = there[0] if len(there) == 1 else torch.cat(there, 1)
            self._parts[layer] = [None] * len(parts)
            if self._then is not None:
                self._then(layer, whole)
            else:
                self.read[layer] = whole

        return note

"""A session that runs the first layers of a model, on the same weights, kernels and cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sakiyomi.core.errors import InputError, UnsupportedError
from sakiyomi.model_executor.runner import ModelRunner
from sakiyomi.model_executor.structural_copy import some_layers


class FirstLayers(ModelRunner):
    """A model that ends after some of its layers, followed by its final norm and head.

    Only the modules on the way to the list of layers are copied. A pass writes keys and values of these layers into the
    model's own cache, in the columns of its plan. A pass of the whole model over the same columns overwrites them, and
    columns behind a slot's length are never read. On a GPU these passes run without captured graphs.

    Args:
        whole: the model.
        count: number of layers that run, at least 1 and fewer than the model has.
        records: see ``Session``; None: as the model's.
        chosen: numbers of the layers that run in the place of the first ones, without the head: logits are then hidden
            states.

    Raises:
        InputError: the model does not have that many.
        UnsupportedError: the model's layers are not one list of modules.
    """

    def __init__(
        self, whole: ModelRunner, count: int, *, records: bool | None = None, chosen: Sequence[int] | None = None
    ) -> None:
        layers = int(whole.config.num_hidden_layers)
        if not 1 <= count < layers:
            raise InputError(f"early exit after layer {count}; the model has {layers}: give one of 1 to {layers - 1}")
        if whole.weights.stateful:
            name = type(whole.module).__name__
            raise UnsupportedError(f"early exit: {name} has layers that keep something else than keys and values")
        whole.weights.unfold()
        whole.settle()
        self._whole, self._depth, self._chosen = whole, count, chosen
        super().__init__(
            whole.weights,
            whole.cache,
            module=self._cut(whole.module),
            sources=whole.sources,
            eviction=whole.eviction,
            records=whole.records if records is None else records,
            depth=count,
        )
        self.take_backend()

    def take_backend(self) -> None:
        """Use the whole model's backend, on its modules as they are now."""
        self.module = self._cut(self._whole.module)
        self._adopt(self._whole.backend)

    def _cut(self, module: Any) -> Any:
        """The part of the whole model that runs."""
        chosen, layers = self._chosen or range(self._depth), int(self._whole.config.num_hidden_layers)
        return some_layers(module, chosen, layers, head=self._chosen is None)

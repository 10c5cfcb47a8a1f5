"""A session that runs the first layers of a model, on the same weights, kernels and cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sakiyomi.core.errors import InputError, UnsupportedError
from sakiyomi.model_executor.runner import ModelRunner
from sakiyomi.model_executor.structural_copy import some_layers


class FirstLayers(ModelRunner):
    """The logits that a model would give if it ended after some of its layers: its final norm and head follow them.

    Nothing is copied but the modules that hold the list of layers. A pass writes keys and values of these layers into
    the model's own cache, in the columns that the plan says; a pass of the whole model over the same columns overwrites
    them, and what is behind a slot's length is never read. On a GPU its passes run without captured graphs.

    Args:
        whole: the model.
        count: layers that are run, at least 1 and fewer than there are.
        records: see ``Session``; None: as the model's.
        chosen: numbers of the layers that run in the place of the first ones, without the head: logits are then hidden
            states.

    Raises:
        InputError: there are not so many.
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
        """The model that runs, of the whole one."""
        chosen, layers = self._chosen or range(self._depth), int(self._whole.config.num_hidden_layers)
        return some_layers(module, chosen, layers, head=self._chosen is None)

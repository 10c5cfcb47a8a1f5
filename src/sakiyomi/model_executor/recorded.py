"""A model that runs from a recording of its passes: its weights and a script, without transformers' class of it.

The script (TorchScript) goes from token ids to what the head over the vocabulary reads, by the very operators of the
traced passes; the head is a module of its own, behind which some models have a tail, a second script. Recordings are
read by `loading/recording.py` and written by `loading/recorder.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from sakiyomi.kernels.batch import BatchPlan
from sakiyomi.kernels.native import PackedLayer
from sakiyomi.model_executor.attention.registry import BeginPass, PassForward, PassResult
from sakiyomi.model_executor.program import program_of
from sakiyomi.model_executor.traced import interpreted

__all__ = ["RecordedConfig", "RecordedModel", "RecordedPasses"]


class RecordedConfig(SimpleNamespace):
    """A model's configuration, as it was when its passes were recorded."""

    def get_text_config(self, **_: Any) -> RecordedConfig:
        """Itself: what is recorded are models of text alone."""
        return self

    def to_dict(self) -> dict[str, Any]:
        """As transformers gives it."""
        return dict(vars(self))


class RecordedModel(nn.Module):
    """Stands in for a transformers model: modules with its names that hold its weights. Only the head is called.

    Args:
        config, generation_config: of the model.
        script: from token ids and positions (1, N), the rows to keep (K) and the weights to what the head reads, (1, K,
            hidden).
        tail: from what the head gives to logits, as for a soft cap; None: these are the logits.
        weights: what the script reads, by name, in its order.
        embeddings: names of modules that hold rows of which a pass reads a few.
        layers: the packed linear layers, by name.
        head: which of them the head is.
        whole: loads the transformers model with these packed layers in it.

    Attributes:
        replay: decoding passes, all rows: a program of the kernels, where they have one for the script.
    """

    def __init__(
        self,
        config: RecordedConfig,
        generation_config: RecordedConfig,
        script: torch.jit.ScriptModule,
        tail: Callable[[Tensor], Tensor] | None,
        weights: Mapping[str, Tensor],
        embeddings: Sequence[str],
        layers: Mapping[str, PackedLayer],
        head: str,
        whole: Callable[[RecordedModel], Any],
    ) -> None:
        super().__init__()
        self.config, self.generation_config, self.whole = config, generation_config, whole
        self.layers: dict[str, PackedLayer] = dict(layers)
        self._script, self._tail, self._weights = script, tail, list(weights.values())
        self._all: dict[int, Tensor] = {}
        for name, tensor in weights.items():
            parent, _, own = name.rpartition(".")
            if parent in embeddings:
                self._put(parent, nn.Embedding.from_pretrained(tensor))
            else:
                self._container(parent).register_parameter(own, nn.Parameter(tensor, requires_grad=False))
        for name, layer in layers.items():
            self._put(name, layer)
        self._head = head
        last = self.layers[head]
        rows = [(width, self.dtype) for width in (last.out_features, last.in_features)]
        graph, behind = (None if each is None else cast(Any, each).forward.graph for each in (script, tail))
        program = program_of(graph, self._weights, rows, last, behind)
        self.replay: PassForward = program or self._replay

    def _container(self, name: str) -> nn.Module:
        found: nn.Module = self
        for part in name.split(".") if name else ():
            if part not in found._modules:
                found.add_module(part, nn.Module())
            found = found._modules[part]  # type: ignore[assignment]
        return found

    def _put(self, name: str, module: nn.Module) -> None:
        parent, _, own = name.rpartition(".")
        self._container(parent).add_module(own, module)

    @property
    def dtype(self) -> torch.dtype:
        """Of hidden states."""
        return self._weights[0].dtype

    @property
    def device(self) -> torch.device:
        """The CPU, whose kernels are recorded."""
        return torch.device("cpu")

    def get_output_embeddings(self) -> nn.Module:
        """The head over the vocabulary."""
        return self.layers[self._head]

    def set_attn_implementation(self, name: str) -> None:
        """Nothing: the operator is in the script."""

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention_mask: None = None,
        use_cache: bool = False,
        logits_to_keep: int | Tensor = 0,
    ) -> SimpleNamespace:
        """Token ids and positions (1, N) to an object with logits, (1, N, V), or of the rows to keep, (1, K, V)."""
        keep = logits_to_keep if isinstance(logits_to_keep, Tensor) else self._every(input_ids.shape[1])
        with interpreted():
            logits = self.layers[self._head](self._script(input_ids, position_ids, keep, *self._weights))
            return SimpleNamespace(logits=logits if self._tail is None else self._tail(logits))

    def _replay(self, ids: Tensor, positions: Tensor) -> PassResult:
        """Logits (1, N, V) of all rows, and what the head reads: ``forward`` without what modules do around it.

        Within ``interpreted``.
        """
        states = self._script.forward(ids, positions, self._every(ids.shape[1]), *self._weights)
        logits = self.layers[self._head].forward(states)
        return logits if self._tail is None else self._tail(logits), (states,)

    def _every(self, rows: int) -> Tensor:
        if rows not in self._all:
            self._all[rows] = torch.arange(rows)
        return self._all[rows]


class RecordedPasses:
    """Passes of a recorded model: see ``PassRecorder``. All of them are recorded.

    Args:
        model: runs them.
        sizes: row counts that come again.
    """

    mode: ClassVar[str] = "traced"
    fresh = False

    def __init__(self, model: RecordedModel, sizes: Sequence[int]) -> None:
        self._model = model
        self.ready: dict[int, PassForward] = dict.fromkeys(sizes, model.replay)

    def has(self, rows: int) -> bool:
        """Always."""
        return True

    def run(self, begin: BeginPass, plan: BatchPlan, ids: Tensor, positions: Tensor) -> PassResult:
        """The pass that `begin` described."""
        with interpreted():
            return self._model.replay(ids, positions)

    def record(self, begin: BeginPass, rows: int) -> None:
        """Nothing is left to be recorded."""

    def clear(self) -> None:
        """Nothing: a recording does not know where the cache lies."""

"""Attention backends: what they are, and which one serves a model.

A backend computes attention of a pass's packed rows over the slots of a cache. A new one is a file with a subclass
of ``AttentionBackend``, and a line in ``BACKENDS``; the first in that list that serves a model gets it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from sakiyomi.cache.cross_attention import SourceCache
from sakiyomi.cache.policies.sparse import Sparse
from sakiyomi.cache.slots import SlotCache
from sakiyomi.kernels.batch import BatchPlan
from sakiyomi.kernels.native import PackedWeights

PassResult = tuple[Tensor, tuple[Tensor, ...]]
"""Logits (1, N, V), and the captured hidden states, (1, N, hidden) each (see ``features.py``)."""
PassForward = Callable[[Tensor, Tensor], PassResult]
"""From token ids and positions, (1, N) each."""
BeginPass = Callable[[BatchPlan, int], None]
"""Describes a session's next pass: its plan, and its number of rows with filler rows."""


@dataclass(frozen=True)
class BackendNeeds:
    """The properties of a model that decide which attention backend serves it.

    Attributes:
        device: of the weights; layers may lie on several.
        one_device: all layers lie on it.
        packed: the model's linear layers in the compiled kernels; None: torch computes them.
        exact: rows must not depend on the other rows of a pass.
        evicts: a policy drops, quantizes or observes pairs (see ``cache/eviction.py``).
        offloaded: hooks load and free the weights of each layer during a pass.
        encoder: layers also attend to a source.
        distances: (heads, n) added to scores by distance; None: nothing is added.
        sparse: which columns the rows of prompts see; None: all before them.
        plain: all layers are plain, see ``LayerShape.plain``.
    """

    device: torch.device
    one_device: bool = True
    packed: PackedWeights | None = None
    exact: bool = False
    evicts: bool = False
    offloaded: bool = False
    encoder: bool = False
    distances: Tensor | None = None
    sparse: Sparse | None = None
    plain: bool = True


class PassRecorder(Protocol):
    """Decoding passes recorded once and replayed, by their number of rows.

    Attributes:
        mode: how recorded passes run, in one word.
        fresh: the last pass was recorded before it ran, so its time does not predict the next ones.
    """

    mode: ClassVar[str]
    fresh: bool

    @property
    def ready(self) -> Mapping[int, PassForward]:
        """By row count: replays a described pass; empty if only ``run`` replays.

        Only ``RecordedPasses`` compares passes with eager ones.
        """
        ...

    def has(self, rows: int) -> bool:
        """Whether a pass of so many rows is replayed now, or is recorded when it first comes."""
        ...

    def run(
        self, begin: BeginPass, plan: BatchPlan, ids: Tensor, positions: Tensor, keep: Tensor | None
    ) -> PassResult | None:
        """Run the pass that `begin` has described; None: it is not recorded, run it eagerly.

        Args:
            begin: describes it again.
            plan: of the pass.
            ids, positions: (1, N), filler rows included.
            keep: (K,) numbers of the rows whose logits (1, K, V) are wanted; None: all.
        """
        ...

    def record(self, begin: BeginPass) -> None:
        """Record passes now, if that is possible before they come."""
        ...

    def clear(self) -> None:
        """Drop what depends on the addresses of the cache: it has new tensors."""
        ...


class AttentionBackend(ABC):
    """Attention of one session: a model's passes on one cache. Optional methods have a default here.

    Args:
        needs: of the model.
        cache: keys and values of the session's requests.
        sources: what cross-attention reads; None: there is no encoder.

    Attributes:
        operator: name under which transformers knows the attention function.
        library: namespace of ``torch.ops`` with the operators ``attend`` and ``cross``.
        runs_packed: its `begin` also describes the pass to linear layers in the compiled kernels.
        spare: extra columns of every slot, which filler rows write to.
        session: its number in the compiled kernels, if these can describe a pass; None: they cannot.
        keeps: whether the kernels can also move the pairs of a tree's accepted path together.
    """

    operator: ClassVar[str]
    library: ClassVar[str] = "sakiyomi"
    runs_packed: ClassVar[bool] = False
    spare: ClassVar[int] = 0
    keeps: ClassVar[bool] = False
    session: int | None = None

    @abstractmethod
    def __init__(self, needs: BackendNeeds, cache: SlotCache, sources: SourceCache | None = None) -> None: ...

    @classmethod
    @abstractmethod
    def serves(cls, needs: BackendNeeds) -> bool:
        """Whether this backend can serve such a model."""

    @classmethod
    def attend(cls, q: Tensor, k: Tensor, v: Tensor, layer: int, scaling: float, softcap: float, window: int) -> Tensor:
        """Called by a layer: queries (1, H, N, D), keys and values (1, H_kv, N, D) of the pass's rows to (1, N, H, D).

        Writes keys and values into the cache, as the plan of the pass says.
        """
        found: Tensor = getattr(torch.ops, cls.library).attend(q, k, v, layer, scaling, softcap, window)
        return found

    @classmethod
    def cross(cls, q: Tensor, layer: int, scaling: float) -> Tensor:
        """Cross-attention over the requests' sources: (1, H, N, D) to (1, N, H, D). Never called without an encoder."""
        found: Tensor = getattr(torch.ops, cls.library).cross(q, layer, scaling)
        return found

    def recorder(self, forward: PassForward) -> PassRecorder | None:
        """Captures this backend's passes on its device; None: passes are recorded by a trace, or eager."""
        return None

    def attach(self, cache: SlotCache) -> None:  # noqa: B027
        """Called when the cache has new tensors. Does nothing by default: a backend may look them up in every pass."""

    def attach_sources(self, sources: SourceCache) -> None:  # noqa: B027
        """Called when cross-attention has new tensors to read. Does nothing by default."""

    @abstractmethod
    def begin(self, plan: BatchPlan, size: int) -> None:
        """Describe this thread's next pass; `size` includes filler rows."""

    def want(self, rows: Tensor, layers: int) -> None:  # noqa: B027
        """Restrict the pass that `begin` described to the results of these rows, (K,) int64, ascending.

        Keys and values of all rows are written. For the other rows a backend may skip the last of so many attention
        layers and everything after it; their results are then undefined. By default all rows are computed.
        """

    @abstractmethod
    def calls(self) -> int:
        """Layers that have called attention since `begin`."""

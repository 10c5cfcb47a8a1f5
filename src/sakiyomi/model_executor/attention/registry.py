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
"""Describes a session's next pass: its plan, and its rows with those that only fill it up."""


@dataclass(frozen=True)
class BackendNeeds:
    """What an attention backend is asked to serve.

    Attributes:
        device: of the weights; layers may lie on several.
        one_device: all layers lie on it.
        packed: the model's linear layers in the compiled kernels; None: they are torch's own.
        exact: rows must not depend on the other rows of a pass.
        evicts: pairs are dropped, quantized or observed (see ``cache/eviction.py``).
        offloaded: weights come and go by hooks between layers.
        encoder: layers attend to a source, too.
        distances: (heads, n) added to scores by distance; None: nothing is.
        sparse: which columns rows of prompts look at; None: at all.
        plain: see ``LayerShape.plain``; all layers are.
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
        fresh: the last pass was recorded first, so that its time says nothing of the next ones.
    """

    mode: ClassVar[str]
    fresh: bool

    @property
    def ready(self) -> Mapping[int, PassForward]:
        """By row count what replays a described pass, once it is known to be right; nothing where only ``run`` does."""
        ...

    def has(self, rows: int) -> bool:
        """Whether a pass of so many rows is replayed, or will be when it comes."""
        ...

    def run(
        self, begin: BeginPass, plan: BatchPlan, ids: Tensor, positions: Tensor, keep: Tensor | None
    ) -> PassResult | None:
        """The pass that `begin` has described; None: it is not recorded, run it eagerly.

        Args:
            begin: describes it once more.
            plan: of the pass.
            ids, positions: (1, N), rows that only fill it up included.
            keep: (K,) numbers of the rows whose logits are wanted, so that there are (1, K, V) of them; None: all.
        """
        ...

    def record(self, begin: BeginPass) -> None:
        """Record passes now, if they can be recorded before they come."""
        ...

    def clear(self) -> None:
        """Forget what depends on where the cache lies: its tensors are new ones."""
        ...


class AttentionBackend(ABC):
    """Attention of one session: a model's passes on one cache. What a subclass leaves out has a default here.

    Args:
        needs: of the model.
        cache: keys and values of the session's requests.
        sources: what cross-attention reads; None: there is no encoder.

    Attributes:
        operator: name under which transformers knows the attention function.
        library: of torch, that has the operators ``attend`` and ``cross``.
        runs_packed: its `begin` describes the pass to linear layers in the compiled kernels, too.
        spare: columns of every slot that filler rows write to, beyond those of tokens.
        session: its number in the compiled kernels, where these can describe a pass; None: they cannot.
        keeps: whether they can also move the pairs that a tree's accepted path leaves apart.
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
        """What a layer calls: queries (1, H, N, D), keys and values (1, H_kv, N, D) of the pass's rows to (1, N, H, D).

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
        """What captures this backend's passes on its device; None: they are recorded by a trace, or eager."""
        return None

    def attach(self, cache: SlotCache) -> None:  # noqa: B027
        """The cache's tensors are new ones. By default nothing is done: a backend may look them up in every pass."""

    def attach_sources(self, sources: SourceCache) -> None:  # noqa: B027
        """The tensors that cross-attention reads are new ones; likewise."""

    @abstractmethod
    def begin(self, plan: BatchPlan, size: int) -> None:
        """Describe this thread's next pass; `size` counts filler rows too."""

    def want(self, rows: Tensor, layers: int) -> None:  # noqa: B027
        """Restrict the pass that `begin` described to the results of these rows, (K,) int64, ascending.

        Keys and values are those of all rows. A backend may leave out what the last of so many attention layers and
        what comes behind it make of the others: they are then any numbers. By default all are computed.
        """

    @abstractmethod
    def calls(self) -> int:
        """Layers that have called attention since `begin`."""

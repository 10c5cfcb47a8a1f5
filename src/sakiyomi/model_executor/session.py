"""A session of a model: its weights on one cache, the attention backend between them, and recorded passes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from sakiyomi.cache.cross_attention import SourceCache
from sakiyomi.cache.eviction import ManagedCache, QueryTrackingCache
from sakiyomi.cache.eviction_plan import ENDLESS, EvictionPlan
from sakiyomi.cache.policies import Policy
from sakiyomi.cache.policies.looking import scaled_queries
from sakiyomi.cache.slots import SlotCache
from sakiyomi.core.errors import UnsupportedError
from sakiyomi.core.hooks import hooks_of
from sakiyomi.core.process import share_processors
from sakiyomi.kernels.batch import BatchPlan
from sakiyomi.kernels.build import native, native_at_hand
from sakiyomi.kernels.native import PackedWeights
from sakiyomi.model_executor.attention import choose_backend, op
from sakiyomi.model_executor.attention.registry import AttentionBackend, PassRecorder, PassResult
from sakiyomi.model_executor.attention.torch import TorchBackend
from sakiyomi.model_executor.features import HEAD
from sakiyomi.model_executor.pass_clock import PassClock
from sakiyomi.model_executor.recorded_model import RecordedModel
from sakiyomi.model_executor.recorded_passes import RecordedPasses
from sakiyomi.model_executor.weights import ModelWeights, on_cpu

SIZES = (1, 4, 8, 16, 32, 64)
# For recordings from files, which are not compared at each size: at most a fifth of a pass is filler rows.
ALL_SIZES = tuple(sorted({rows << twice for rows in range(1, 9) for twice in range(5)}))


class Session:
    """The state of a model's passes on one cache; `ModelRunner` (runner.py) runs the passes.

    Args:
        weights: of the model.
        cache: keys and values of the session's requests.
        module: replaces the module of the weights, for an early exit.
        sources: read by cross-attention; None: there is no encoder.
        eviction: decides what stays in the cache; None: everything stays.
        observer: a policy with hooks on the model's modules, which observes each layer's queries; None: there is none.
        records: frequent passes are recorded; False: all passes are eager.
        exact: every pass has a row count at which a self-test found each row independent of the others.
        sizes: row counts of decoding passes, ascending.
        evicts: a policy drops, quantizes or observes pairs.
        depth: number of layers that run; None: all.

    Attributes:
        backend: computes attention.
        recorder: replays passes; None: all are eager.
        eviction: decides what stays in the cache, for the engine.
        records: as given.
        max_context: most tokens of a text, prompt included.
        forward_seconds: seconds in passes so far.
        watchers: called after every pass with its plan and its seconds.
    """

    def __init__(
        self,
        weights: ModelWeights,
        cache: SlotCache,
        *,
        module: Any = None,
        sources: SourceCache | None = None,
        eviction: ManagedCache | None = None,
        observer: Policy | None = None,
        records: bool = True,
        exact: bool = False,
        sizes: Sequence[int] = SIZES,
        evicts: bool = False,
        depth: int | None = None,
    ) -> None:
        self.weights, self.cache, self.sources = weights, cache, sources
        self.module: Any = weights.module if module is None else module
        self.eviction: ManagedCache = ManagedCache(cache) if eviction is None else eviction
        self.exact, self.sizes = exact, tuple(sizes)
        self.max_context = weights.max_context
        self.forward_seconds = 0.0
        self.watchers: list[Callable[[BatchPlan, float], None]] = []
        self._observer, self._evicts = observer, evicts
        self._note: op.Note | None = None if observer is None else observer.observe
        self.records = records
        self._depth = depth or len(cache.shapes)
        self._buffers: dict[int, tuple[NDArray[np.int64], Tensor, Tensor]] = {}
        self._prompts: TorchBackend | None = None  # reads prompts whose rows see only some columns
        self._proven = False
        self._reassigned = False
        self.backend: AttentionBackend
        self.recorder: PassRecorder | None = None
        self.clock = PassClock(self._replays, offloaded=weights.offloaded)
        self._generation = -1

    # ------------------------------------------------------------ what the model is

    @property
    def config(self) -> Any:
        """The configuration of the model's text part."""
        return self.weights.config

    @property
    def vocab_size(self) -> int:
        """Width of a row of logits."""
        return self.weights.vocab_size

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of hidden states, logits, keys and values."""
        return self.weights.dtype

    @property
    def device(self) -> torch.device:
        """The device of token ids and logits."""
        return self.weights.device

    @property
    def lock(self) -> Any:
        """Held during a pass; sessions on the same weights share it."""
        return self.weights.lock

    @property
    def head(self) -> nn.Module:
        """The head over the vocabulary, as it runs here: (..., hidden) to (..., V)."""
        return self.weights.head

    @property
    def packed_weights(self) -> PackedWeights | None:
        """The compiled kernels' weights, which can take in further linear layers; None where plain torch runs."""
        return self.weights.packed

    @property
    def offloaded(self) -> bool:
        """Whether every pass reads weights from disk or another device, at the same cost for any number of rows."""
        return self.weights.offloaded

    @property
    def text(self) -> list[int]:
        """Token ids to measure on; empty where none were given."""
        return self.weights.text

    # ------------------------------------------------------------ attention, and recorded passes

    def settle(self) -> None:
        """Swap in kernels that were being built when the model was loaded. Only while no request runs.

        Raises:
            UnsupportedError: the user's model is another one by now.
        """
        weights = self.weights
        if changed := weights.changed():
            raise UnsupportedError(
                f"{type(self.module).__name__}: {changed} changed since it was packed, and what runs is the model as "
                "it was; make a new LLM of the changed model"
            )
        if weights.unsettled and native_at_hand():
            weights.unsettled = False
            share_processors(False)
            with weights.lock:
                weights.capture.leave()  # a layer with hooks is not packed
                if self._observer is not None:
                    self._observer.leave()
                weights.pack()
        if self._generation != weights.generation:
            self.take_backend()

    def take_backend(self) -> None:
        """Choose the attention backend for the weights as they are now, and drop recordings made with another one."""
        self.module = self.weights.module
        needs = self.weights.needs(exact=self.exact, evicts=self._evicts)
        kind = choose_backend(needs)
        if not isinstance(self.module, RecordedModel):
            op.register(kind.operator, kind.attend, kind.cross)
        self.module.set_attn_implementation(kind.operator)
        self._listen()
        self._adopt(kind(needs, self.cache, self.sources))

    def _adopt(self, backend: AttentionBackend, recorder: PassRecorder | None = None) -> None:
        """Switch to this backend, with these recordings or with new ones."""
        self.backend = backend
        self._generation = self.weights.generation
        self.clock = PassClock(self._replays, offloaded=self.weights.offloaded)
        self.recorder = recorder or self._make_recorder()

    def _listen(self) -> None:
        """Put hooks on the model's modules for hidden states, queries and projections."""
        if self.weights.encoder is None or isinstance(self.module, RecordedModel):
            self.weights.capture.listen(self.weights.head)
        if self._observer is not None:
            self._observer.listen(self)
        if self._note is not None:
            for module in self.module.modules():
                if hasattr(module, "layer_idx"):
                    setattr(module, op.NOTE, self._note)

    def _make_recorder(self) -> PassRecorder | None:
        weights = self.weights
        if not self.records or weights.offloaded or weights.unsettled:
            return None
        found = self.backend.recorder(self.forward) if self.module is weights.module else None
        if found is not None or not on_cpu(weights) or native() is None:
            return found
        return RecordedPasses(self.forward, self.module, self.sizes)

    def record(self) -> None:
        """Record passes now, if that is possible before they come."""
        with self.lock, torch.no_grad():
            if self.recorder is not None:
                self.recorder.record(self.begin)
            self.cache.begin(None)

    @contextmanager
    def eagerly(self) -> Iterator[None]:
        """A context in which passes run on the modules and call their hooks; a recorded model calls its head's."""
        recorder, self.recorder = self.recorder, None
        try:
            yield
        finally:
            self.recorder = recorder

    def recorded(self, rows: int | None = None) -> bool:
        """Whether passes over so many rows are replayed; None: the smallest ones."""
        return self._replays(self.sizes[0] if rows is None else self.padded(rows))

    def padded(self, rows: int) -> int:
        """The size of a decoding pass over so many rows: passes come in few sizes and are filled up."""
        most = self.sizes[-1]
        return self.sizes[bisect_left(self.sizes, rows)] if rows <= most else -(-rows // most) * most

    def _replays(self, size: int) -> bool:
        return self.recorder is not None and self.recorder.has(size)

    def capture(self, layers: Sequence[int]) -> None:
        """Also capture the outputs of these decoder layers in every pass (see ``ModelWeights.capture_layers``)."""
        if further := [layer for layer in layers if layer != HEAD]:
            self.weights.capture_layers(further)
            self.settle()

    def unfold(self) -> None:
        """Run the transformers model where a recording of it runs, for callers that read its modules."""
        self.weights.unfold()
        self.settle()

    @property
    def mode(self) -> str:
        """How decoding passes run now: "eager", "recorded" or "captured"."""
        return self.recorder.mode if self.recorder is not None and self.recorded() else "eager"

    def begin(self, plan: BatchPlan, size: int) -> None:
        """Describe this thread's next pass of the session; `size` includes filler rows. The pass may run twice."""
        self.cache.begin(plan)
        if self.weights.packed is not None and not self.backend.runs_packed:
            self.weights.packed.begin(plan, size)
        self.backend.begin(plan, size)

    def want(self, rows: Tensor) -> None:
        """Have the pass that was begun compute the last layer for these rows only.

        Ignored if something reads the other rows: a policy, a hook of a module, or a recurrent state.
        """
        weights = self.weights
        if self._observer is not None or weights.stateful or weights.encoder is not None:
            return
        if self.backend.session is None:  # it computes all rows
            return
        if all(part is self.module or part is weights.head for part in self.module.modules() if hooks_of(part)):
            self.backend.want(rows, self._depth)

    def moved(self, cache: SlotCache) -> None:
        """Called when the cache has new tensors."""
        self.backend.attach(cache)
        if self.recorder is not None:
            self.recorder.clear()

    def forward(self, ids: Tensor, positions: Tensor) -> PassResult:
        """The forward over all rows, which is traced for a recording."""
        self.weights.capture.begin()
        logits: Tensor = self.module(input_ids=ids, position_ids=positions, attention_mask=None, use_cache=False).logits
        return logits, self.weights.capture.take()

    # ------------------------------------------------------------ what stays of the cache

    def evict_by(self, plan: EvictionPlan, eviction: ManagedCache) -> None:
        """Have this policy manage the cache from now on; the self-tests before it saw all pairs."""
        self.eviction = eviction
        self._reassigned = plan.reassigned
        if plan.sparse is not None:
            needs = replace(self.weights.needs(exact=False, evicts=True), distances=None, sparse=plan.sparse)
            self._prompts = TorchBackend(needs, self.cache)
        if plan.reassigned:
            self.max_context = ENDLESS

    def track_queries(self) -> QueryTrackingCache:
        """Keep the queries of each slot's last row from now on.

        Running requests continue; the queries of their slots are kept from the next text on. Passes are recorded again.

        Raises:
            UnsupportedError: the cache does not hold all keys and values, or the model keeps its own.
        """
        with self.lock:
            tracked = self.eviction.tracking_queries()
            apart = self.weights.own_attention or self.sources is not None or self.weights.stateful
            if tracked is None or apart or not all(shape.plain for shape in self.weights.shapes):
                raise UnsupportedError(
                    f"the cache of {type(self.module).__name__} does not hold all keys and values that the model "
                    "attends to, or the model keeps them itself, or also attends to something else; use cache='full'"
                )
            if tracked is self.eviction:
                return tracked
            self.weights.unfold()
            self.settle()
            self.eviction = tracked
            self._note, self._evicts = scaled_queries, True
            if self.device.type == "cpu":  # the backend stays: an early exit may share it
                self._listen()
                self._adopt(self.backend)
            else:
                self.take_backend()
            return tracked

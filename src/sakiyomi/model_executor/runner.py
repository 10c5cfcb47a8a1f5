"""A Hugging Face causal language model as the engine runs it: packed rows, our cache, our attention, its own weights.

A `ModelRunner` is a session: a model's weights on one cache. Target and draft model are both one of these. It knows
rows, slots and logits; it knows no drafts and no sampling.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from sakiyomi.cache.cross_attention import Source, SourceCache
from sakiyomi.cache.eviction import FullCache, ManagedCache, QueryTrackingCache
from sakiyomi.cache.eviction_plan import ENDLESS, EvictionPlan
from sakiyomi.cache.policies import Policy
from sakiyomi.cache.policies.looking import scaled_queries
from sakiyomi.cache.slots import SlotCache
from sakiyomi.core.errors import UnsupportedError
from sakiyomi.kernels.batch import BatchPlan, SequenceRows
from sakiyomi.kernels.build import native_at_hand
from sakiyomi.kernels.native import PackedWeights
from sakiyomi.model_executor.attention import choose_backend, observe, op
from sakiyomi.model_executor.attention.registry import AttentionBackend, PassRecorder, PassResult
from sakiyomi.model_executor.attention.torch import TorchBackend, take_over
from sakiyomi.model_executor.compiled import CompiledPasses
from sakiyomi.model_executor.features import HEAD, PassOutput
from sakiyomi.model_executor.pass_clock import PassClock
from sakiyomi.model_executor.traced import TracedPasses
from sakiyomi.model_executor.weights import ModelWeights

__all__ = ["DRAFT_SIZES", "SIZES", "TARGET_SIZES", "ModelRunner"]

logger = logging.getLogger("sakiyomi")
SIZES = (1, 4, 8, 16, 32, 64)
# What one request needs, the likeliest first; the others are recorded when they come.
TARGET_SIZES, DRAFT_SIZES = (8, 1), (1, 4)


class ModelRunner:
    """Scores packed rows of several requests in one pass. `build_runner` (build.py) makes one of a model.

    Of an encoder-decoder model the decoder is what runs; `make_room` has the encoder read a request's source, and its
    keys and values for cross-attention stay beside the request's own.

    Args:
        weights: of the model.
        cache: keys and values of the session's requests.
        module: in the place of the weights' own, with the same layers: an early exit.
        sources: what cross-attention reads; None: there is no encoder.
        eviction: what stays of the cache; None: all of it.
        note: of each layer's queries, what a pass leaves for `eviction`; None: nothing.
        noted: a policy that listens to the model's modules; None: none does.
        compile: "auto": passes that come often are traced; True: they are compiled before the first one; False: all
            are eager.
        exact: every pass has a row count at which a self-test found each row independent of the others.
        sizes: row counts of decoding passes, ascending.
        first_sizes: those that any request needs.
        evicts: pairs are dropped, quantized or observed.
        depth: layers that run; None: all.

    Attributes:
        backend: computes attention.
        recorder: replays passes; None: all are eager.
        eviction: what stays of the cache, for the engine.
        compile: as given.
        max_context: tokens that a text may have, prompt included.
        forward_seconds: spent in passes so far.
        watchers: told of every pass when it is done: its plan, and its seconds.
    """

    def __init__(
        self,
        weights: ModelWeights,
        cache: SlotCache,
        *,
        module: Any = None,
        sources: SourceCache | None = None,
        eviction: ManagedCache | None = None,
        note: op.Note | None = None,
        noted: Policy | None = None,
        compile: bool | str = "auto",
        exact: bool = False,
        sizes: Sequence[int] = SIZES,
        first_sizes: Sequence[int] = TARGET_SIZES,
        evicts: bool = False,
        depth: int | None = None,
    ) -> None:
        self.weights, self.cache, self.sources = weights, cache, sources
        self.module: Any = weights.module if module is None else module
        self.eviction: ManagedCache = FullCache(cache) if eviction is None else eviction
        self.exact, self.sizes, self.first_sizes = exact, tuple(sizes), tuple(first_sizes)
        self.max_context = weights.max_context
        self.forward_seconds = 0.0
        self.watchers: list[Callable[[BatchPlan, float], None]] = []
        self.layers: tuple[int, ...] = ()
        self._note, self._evicts = note, evicts
        self.compile = compile
        self._depth = depth or len(cache.shapes)
        self._noted = noted
        self._buffers: dict[int, tuple[NDArray[np.int64], Tensor, Tensor]] = {}
        self._prompts: TorchBackend | None = None  # reads prompts where only some columns are looked at
        self._proven = False
        self._reassigned = False
        self.backend: AttentionBackend
        self.recorder: PassRecorder | None = None
        self.clock = PassClock(self._replays, offloaded=weights.offloaded)
        self._generation = -1

    # ------------------------------------------------------------ what the model is

    @property
    def config(self) -> Any:
        """Of the model's text part."""
        return self.weights.config

    @property
    def vocab_size(self) -> int:
        """Width of a row of logits."""
        return self.weights.vocab_size

    @property
    def dtype(self) -> torch.dtype:
        """Of hidden states, logits, keys and values."""
        return self.weights.dtype

    @property
    def device(self) -> torch.device:
        """Where ids go in and logits come out."""
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
        """Whether weights come from elsewhere in every pass, which then costs the same whatever its rows."""
        return self.weights.offloaded

    @property
    def text(self) -> list[int]:
        """Token ids to measure on; empty where none were given."""
        return self.weights.text

    # ------------------------------------------------------------ attention, and recorded passes

    def settle(self) -> None:
        """Take kernels into use that were being built when the model was loaded. Only while no request runs."""
        weights = self.weights
        if weights.unsettled and native_at_hand():
            weights.unsettled = False
            with weights.lock:
                weights.capture.leave()  # a layer with hooks is not packed
                if self._noted is not None:
                    self._noted.leave()
                weights.pack()
        if self._generation != weights.generation:
            self.take_backend()

    def take_backend(self) -> None:
        """Choose the attention backend for the weights as they are now, and forget what was recorded on another."""
        needs = self.weights.needs(exact=self.exact, evicts=self._evicts)
        kind = choose_backend(needs)
        self.module.set_attn_implementation(kind.operator)
        self._listen()
        self._adopt(kind(needs, self.cache, self.sources))

    def _adopt(self, backend: AttentionBackend, recorder: PassRecorder | None = None) -> None:
        """Run on this backend from now on, with these recorded passes, or with new ones."""
        self.backend = backend
        self._generation = self.weights.generation
        self.clock = PassClock(self._replays, offloaded=self.weights.offloaded)
        self.recorder = recorder or self._make_recorder()
        if self.compile is True:
            self.record(self.sizes)

    def _listen(self) -> None:
        """Have the model's modules note what the session wants of a pass: hidden states, queries, raw rows."""
        if self.weights.encoder is None:
            listed = self._layer_modules() if self.layers else {}
            self.weights.capture.listen(self.head, listed)
        if self._noted is not None:
            self._noted.listen(self)
        if self._note is not None:
            for module in self.module.modules():
                if hasattr(module, "layer_idx"):
                    setattr(module, op.NOTE, self._note)

    def _make_recorder(self) -> PassRecorder | None:
        weights = self.weights
        if not self.compile or weights.offloaded or weights.unsettled:
            return None
        found = self.backend.recorder(self.forward) if self.module is weights.module else None
        if found is not None or self.device.type != "cpu" or weights.own_attention:
            return found
        if self.compile is True:
            return CompiledPasses(self.forward, self.device, self.sizes)
        return TracedPasses(self.forward, self.module, self.sizes)

    def record(self, sizes: Sequence[int]) -> None:
        """Record passes of these sizes now, where they can be recorded before they come."""
        with self.lock, torch.no_grad():
            for size in sizes if self.recorder is not None else ():
                assert self.recorder is not None
                self.recorder.record(self.backend, size)

    @contextmanager
    def eagerly(self) -> Iterator[None]:
        """Passes within run on the modules themselves, whose hooks then hear of them."""
        recorder, self.recorder = self.recorder, None
        try:
            yield
        finally:
            self.recorder = recorder

    def recorded(self, rows: int | None = None) -> bool:
        """Whether passes over so many rows are replayed; None: those that any request needs."""
        return all(map(self._replays, self.first_sizes if rows is None else (self.padded(rows),)))

    def _replays(self, size: int) -> bool:
        return self.recorder is not None and self.recorder.has(size)

    def moved(self, cache: SlotCache) -> None:
        """The cache's tensors are new ones."""
        self.backend.attach(cache)
        if self.recorder is not None:
            self.recorder.clear()

    def sources_moved(self, sources: SourceCache) -> None:
        """The tensors that cross-attention reads are new ones."""
        self.backend.attach_sources(sources)

    def capture(self, layers: Sequence[int]) -> None:
        """Have every pass give what these decoder layers give, too (see ``PassOutput``). Only while no request runs.

        Args:
            layers: counted from 0.

        Raises:
            UnsupportedError: the model has an encoder, no such layers, or none that can be found.
        """
        wanted = tuple(sorted({*self.layers, *layers} - {HEAD}))
        if wanted == self.layers:
            return
        if self.weights.encoder is not None:
            raise UnsupportedError(f"{type(self.module).__name__} has an encoder: its hidden states are not captured")
        if wanted[-1] >= len(self.weights.shapes):
            raise UnsupportedError(
                f"hidden states of layer {wanted[-1]} are wanted, and the model has {len(self.weights.shapes)} layers, "
                "counted from 0: name others"
            )
        with self.lock:
            self.layers = wanted
            self.take_backend()

    def _layer_modules(self) -> Mapping[int, nn.Module]:
        count = len(self.weights.shapes)
        lists = [m for m in self.weights.module.modules() if isinstance(m, nn.ModuleList) and len(m) == count]
        if len(lists) != 1:
            raise UnsupportedError(
                f"{type(self.module).__name__} has {len(lists)} lists of {count} layers where one is expected: hidden "
                "states of its layers cannot be captured"
            )
        return {layer: lists[0][layer] for layer in self.layers}

    # ------------------------------------------------------------ rooms and sources

    def takes(self, source: Source | None) -> bool:
        """Whether the encoder has so many places; without a source there is nothing to be read."""
        limit = self.weights.encoder.limit if self.weights.encoder is not None else None
        return source is None or limit is None or source.length <= limit

    def make_room(self, slot: int, columns: int, source: Source | None = None) -> None:
        """Room for so many tokens in a slot; the request's source is read, if that was not done.

        Args:
            slot: the request's.
            columns: its tokens.
            source: what its rows attend to beside their own text; None: nothing.

        Raises:
            MemoryLimitError: there is no memory for it.
        """
        self.cache.reserve(slot, columns)
        encoder = self.weights.encoder
        if source is None or self.sources is None or encoder is None or self.sources.holds(slot, source):
            return
        with torch.no_grad(), self.lock:
            began = time.perf_counter()
            self.sources.reserve(slot, source.length)
            hidden = encoder.read(source)
            self.backend.begin(BatchPlan([]), hidden.shape[1])
            self.sources.fill(slot, source, encoder.pairs(hidden))
            self.forward_seconds += time.perf_counter() - began

    # ------------------------------------------------------------ passes

    def score(self, segments: Sequence[SequenceRows], *, last: bool = False) -> PassOutput:
        """One pass over the rows of these segments.

        The rows' keys and values are written behind each slot's pairs (`SlotCache.commit` decides which stay); slots
        must have room.

        Args:
            segments: of different slots.
            last: only the last row of each segment is wanted.

        Returns:
            Logits of each row of the segments in order, or of each segment with `last`, and hidden states.
        """
        if self.exact and len(segments) > 1 and sum(len(segment.tokens) for segment in segments) > self.sizes[-1]:
            # Beyond the largest size a pass would have another number of rows, and round otherwise.
            half = len(segments) // 2
            return PassOutput.joined([self.score(part, last=last) for part in (segments[:half], segments[half:])])
        plan = BatchPlan(segments)
        rows = plan.rows
        if last and any(segment.prompt for segment in segments):
            ends = torch.tensor([first + count - 1 for _, first, count, _, _ in plan.table], device=self.device)
            if not self._replays_prompt(rows):
                return self.run(plan, rows, keep=ends)
            output = self.run(plan, self.padded(rows))
            features = {layer: states[ends] if layer == HEAD else states for layer, states in output.features.items()}
            return PassOutput(output.logits[ends], features)
        return self.run(plan, rows if self.weights.offloaded and not self.exact else self.padded(rows))

    def _replays_prompt(self, rows: int) -> bool:
        """Whether a chunk of a prompt may be a recorded decoding pass, which computes the logits of all its rows."""
        if self.exact or rows > self.sizes[-1] or not self.weights.small_head:
            return False
        return self._replays(self.padded(rows))

    def run(self, plan: BatchPlan, size: int, *, keep: Tensor | None = None) -> PassOutput:
        """The pass of a plan, filled up to `size` rows; logits of its own rows, or of those in `keep`."""
        with self.lock, torch.no_grad():
            ids, positions = self._inputs(plan, size)
            self.backend.begin(plan, size)
            self.cache.begin(plan)
            prompts = self._prompts if plan.prompts else None
            take_over(prompts, plan, size)
            observe.listen(self.eviction.observations, plan)
            began = time.perf_counter()
            found = None
            if self.recorder is not None and keep is None and prompts is None:
                found = self.recorder.run(self.backend, plan, ids, positions)
            replayed = found is not None
            if found is None:
                wanted = {} if keep is None or not self.weights.keeps_logits else {"logits_to_keep": keep}
                arguments = {"attention_mask": None, "use_cache": False} | self.backend.inputs(size) | wanted
                self.weights.capture.begin()
                logits = self.module(input_ids=ids, position_ids=positions, **arguments).logits
                found = logits if keep is None or wanted else logits[:, keep], self.weights.capture.take()
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            spent = time.perf_counter() - began
            self.cache.begin(None)
            if keep is None and not (self.recorder is not None and self.recorder.fresh):
                self.clock.add(self.padded(size), replayed, spent)
            self.forward_seconds += spent
            for watcher in self.watchers:
                watcher(plan, spent)
            if not self._proven and plan.rows:
                self._prove(prompts or self.backend)
            return self._output(found, plan.rows, keep)

    def forward(self, ids: Tensor, positions: Tensor) -> PassResult:
        """The model's own forward over all rows, as it is recorded."""
        self.weights.capture.begin()
        logits: Tensor = self.module(input_ids=ids, position_ids=positions, attention_mask=None, use_cache=False).logits
        return logits, self.weights.capture.take()

    def _output(self, found: PassResult, rows: int, keep: Tensor | None) -> PassOutput:
        """Without the rows that only filled the pass up."""
        logits, states = found
        reached = [layer for layer in self.weights.capture.layers if layer < self._depth]
        features = {}
        for layer, state in zip(reached, states, strict=True):
            kept = layer == HEAD and keep is not None
            if kept and len(keep) != state.shape[1]:  # type: ignore[arg-type]
                features[layer] = state[0, keep]
            else:
                features[layer] = state[0] if kept else state[0, :rows]
        return PassOutput(logits[0] if keep is not None else logits[0, :rows], features)

    def _inputs(self, plan: BatchPlan, size: int) -> tuple[Tensor, Tensor]:
        """Token ids and positions of a pass, (1, size) each; rows that only fill it up are zeros."""
        buffer = self._buffers.get(size)
        if buffer is None:
            both = torch.zeros(2, size, dtype=torch.int64)
            buffer = both.numpy(), both[:1], both[1:]
            if size <= SIZES[-1]:  # a chunk of a prompt may have any length
                self._buffers[size] = buffer
        rows, (numbers, ids, positions) = plan.rows, buffer
        numbers[0, :rows] = plan.tokens
        numbers[1, :rows] = plan.positions
        if self._reassigned:
            for slot, first, count, _, _ in plan.table:
                numbers[1, first : first + count] -= self.cache.least(slot)
        numbers[:, rows:] = 0
        return (ids, positions) if self.device.type == "cpu" else (ids.to(self.device), positions.to(self.device))

    def _prove(self, backend: AttentionBackend) -> None:
        """After the first pass: every layer must have come to our cache, or the logits are not to be trusted."""
        calls, layers = backend.calls(), self._depth
        if calls != layers:
            raise UnsupportedError(
                f"{type(self.module).__name__}: {calls} of {layers} attention layers reached the cache; "
                "it is not supported"
            )
        self._proven = True

    def first_logits(self, source: Source, tokens: Sequence[int]) -> Tensor:
        """Logits (V,) of what follows these tokens where nothing was written yet."""
        with self.lock, self.cache.lent(len(tokens)) as slot:
            self.make_room(slot, len(tokens), source)
            return self.score([SequenceRows(slot, 0, tokens, prompt=True)], last=True).logits[0]

    def read_alone(self, slot: int, token: int, position: int) -> None:
        """Read one token in an empty slot as if it stood at this position."""
        plan = BatchPlan([SequenceRows(slot, 0, [token])])
        plan.positions = [position]
        self.run(plan, self.padded(1))

    def evict_by(self, plan: EvictionPlan, eviction: ManagedCache) -> None:
        """Have the cache managed by this from now on; what was tried out before saw everything."""
        self.eviction = eviction
        self._reassigned = plan.reassigned
        if plan.sparse is not None:
            needs = replace(self.weights.needs(exact=False, evicts=True), distances=None, sparse=plan.sparse)
            self._prompts = TorchBackend(needs, self.cache)
        if plan.reassigned:
            self.max_context = ENDLESS

    def track_queries(self) -> QueryTrackingCache:
        """Keep the queries of each slot's last row from now on, if that is not done already.

        Running requests go on; their slots' queries are kept from the next text on. Passes are recorded anew.

        Raises:
            UnsupportedError: the cache does not hold all keys and values, or the model keeps its own.
        """
        with self.lock:
            tracked = self.eviction.tracking_queries()
            apart = self.weights.own_attention or self.sources is not None or self.weights.stateful
            if tracked is None or apart:
                raise UnsupportedError(
                    f"the cache of {type(self.module).__name__} does not hold all keys and values that the model "
                    "attends to, or the model keeps them itself; use cache='full'"
                )
            if tracked is self.eviction:
                return tracked
            self.eviction = tracked
            self._note, self._evicts = scaled_queries, True
            if self.device.type == "cpu":  # the backend stays: an early exit may share it
                self._listen()
                self._adopt(self.backend)
            else:
                self.take_backend()
            return tracked

    # ------------------------------------------------------------ what passes cost

    def pass_seconds(self, rows: int) -> float:
        """What a decoding pass over so many rows costs now: a running mean, or a trial pass if none was made yet."""
        return self.clock.seconds(self.padded(rows), self.sizes, self._trial)

    def _trial(self, size: int) -> None:
        if self.backend.spare:
            self.cache.reserve(0, 1)  # else there is nothing to capture
        self.run(BatchPlan([]), size)  # without requests nothing is written

    def known_seconds(self, rows: int) -> float | None:
        """`pass_seconds` if a pass of this size was made before; makes none."""
        return self.clock.known(self.padded(rows))

    def padded(self, rows: int) -> int:
        """Rows that a decoding pass over so many really has: passes come in few sizes."""
        most = self.sizes[-1]
        return self.sizes[bisect_left(self.sizes, rows)] if rows <= most else -(-rows // most) * most

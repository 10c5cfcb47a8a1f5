"""A Hugging Face causal language model as the engine runs it: packed rows, our cache, our attention, its own weights.

A `ModelRunner` is a session: a model's weights on one cache. Target and draft model are both one of these. It knows
rows, slots and logits; it knows no drafts and no sampling.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sakiyomi.cache.cross_attention import Source
from sakiyomi.core.errors import UnsupportedError
from sakiyomi.kernels.batch import BatchPlan, SequenceRows
from sakiyomi.model_executor.attention import observe
from sakiyomi.model_executor.attention.registry import AttentionBackend, PassResult
from sakiyomi.model_executor.attention.torch import take_over
from sakiyomi.model_executor.features import HEAD, PassOutput, PassStates
from sakiyomi.model_executor.session import SIZES, Session
from sakiyomi.model_executor.traced import interpreted

__all__ = ["ModelRunner"]


class ModelRunner(Session):
    """Scores packed rows of several requests in one pass. `build_runner` (build.py) makes one of a model.

    Of an encoder-decoder model the decoder is what runs; `make_room` has the encoder read a request's source, and its
    keys and values for cross-attention stay beside the request's own.
    """

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
            self.begin(BatchPlan([]), hidden.shape[1])
            self.sources.fill(slot, source, encoder.pairs(hidden))
            self.forward_seconds += time.perf_counter() - began

    @property
    def blind(self) -> str | None:
        """Why the model reads no images; None: it does."""
        if not self.weights.multimodal:
            return "it is a model of text"
        if self.eviction.chunked or self.cache.dropped is not None:
            return "its cache evicts or quantizes; use cache='full'"
        if self.weights.stateful or self.weights.own_attention or self.weights.offloaded:
            return "it has recurrent layers, attention of its own, or weights that are offloaded"
        return None

    def read_images(self, slot: int, inputs: Mapping[str, Tensor]) -> int:
        """Read a prompt with images in an empty slot, all tokens but the last one, by the model's own forward.

        Rows of an image may look at each other, and encoders have a say: so this is one pass with transformers' own
        attention and cache, whose keys and values are then copied. Positions behind the images may be others than
        places: the slot's later rows are shifted as the model does it.

        Args:
            slot: of the request.
            inputs: what the model's processor has made, a batch of one.

        Returns:
            How many tokens lie in the slot.

        Raises:
            MemoryLimitError: there is no room for them.
        """
        from transformers import DynamicCache

        count = inputs["input_ids"].shape[1] - 1
        given = {name: part.to(self.device) for name, part in inputs.items()}
        given = {name: part.to(self.dtype) if part.is_floating_point() else part for name, part in given.items()}
        self.cache.reserve(slot, count + 1)
        with torch.no_grad(), self.lock:
            began = time.perf_counter()
            self.begin(BatchPlan([]), count + 1)
            self.module.set_attn_implementation("sdpa")
            try:
                made = self.module(**given, past_key_values=DynamicCache(), use_cache=True)
            finally:
                self.module.set_attn_implementation(self.backend.operator)
                self.cache.begin(None)
            for layer, pairs in enumerate(made.past_key_values.layers):
                self.cache.keys[layer][slot][:, :count] = pairs.keys[0, :, :count]
                self.cache.values[layer][slot][:, :count] = pairs.values[0, :, :count]
            shift = getattr(self.module.model, "rope_deltas", None)
            self.eviction.shifts[slot] = 0 if shift is None else int(shift.flatten()[0])
            self.forward_seconds += time.perf_counter() - began
        return count

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
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self.run(plan, size, keep=keep)
        with self.lock:
            ids, positions = self._inputs(plan, size)
            self.begin(plan, size)
            prompts = self._prompts if plan.prompts else None
            take_over(prompts)
            if prompts is not None:
                prompts.begin(plan, size)
            elif keep is not None:
                self.want(keep)
            observe.listen(self.eviction.observations, plan)
            began = time.perf_counter()
            found = None
            if self.recorder is not None and keep is None and prompts is None:
                found = self.recorder.run(self.begin, plan, ids, positions)
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
            if keep is None:
                fresh = self.recorder is not None and self.recorder.fresh
                self.clock.add(self.padded(size), replayed, spent, fresh=fresh)
            self.forward_seconds += spent
            for watcher in self.watchers:
                watcher(plan, spent)
            if not self._proven and plan.rows:
                self._prove(prompts or self.backend)
            return self._output(found, plan.rows, keep)

    def _output(self, found: PassResult, rows: int, keep: Tensor | None) -> PassOutput:
        """Without the rows that only filled the pass up."""
        logits, states = found
        reached = (layer for layer in self.weights.capture.layers if layer < self._depth)

        def own(layer: int, state: Tensor) -> Tensor:
            if layer == HEAD and keep is not None:
                return state[keep] if len(keep) != len(state) else state
            return state[:rows]

        features = PassStates(dict(zip(reached, states, strict=True)), own)
        return PassOutput(logits, features, rows if keep is None else logits.shape[1])

    def _inputs(self, plan: BatchPlan, size: int) -> tuple[Tensor, Tensor]:
        """Token ids and positions of a pass, (1, size) each; rows that only fill it up are zeros."""
        buffer = self._buffers.get(size)
        if buffer is None:
            both = torch.zeros(2, size, dtype=torch.int64)
            buffer = both.numpy(), both[:1], both[1:]
            if size <= SIZES[-1]:  # a chunk of a prompt may have any length
                self._buffers[size] = buffer
        rows, (numbers, ids, positions) = plan.rows, buffer
        numbers[:, :rows] = plan.tokens, plan.positions
        if self._reassigned:
            for slot, first, count, _, _ in plan.table:
                numbers[1, first : first + count] -= self.cache.least(slot)
        for slot, first, count, _, _ in plan.table if self.eviction.shifts else ():
            numbers[1, first : first + count] += self.eviction.shifts.get(slot, 0)
        if rows < size:
            numbers[:, rows:] = 0
        if not rows and self.weights.has_experts:  # a trial of what a pass costs: other tokens choose other experts
            numbers[0] = np.arange(size) * 97 % self.vocab_size
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

    # ------------------------------------------------------------ passes that compiled code describes

    def native_passes(self, rows: int) -> tuple[int, tuple[int, ...]] | None:
        """The kernels' number of this session, and the row counts of passes, if they may describe those themselves.

        That is so where decoding passes of so many rows are replayed, and nobody listens to them: see ``replay``.
        """
        session, recorder = self.backend.session, self.recorder
        if session is None or recorder is None or not self._proven or rows > self.sizes[-1]:
            return None
        simple = not (
            self.watchers
            or self.eviction.shifts
            or self._reassigned
            or self.cache.states.stores
            or self.sources is not None
        )
        if not simple or self._note is not None or self.eviction.observations is not None:
            return None
        for size in self.sizes[: bisect_left(self.sizes, rows) + 1]:
            if recorder.pass_of(size) is None and recorder.has(size) and (self.cache.free or self.cache.extra):
                with self.cache.lent(size) as slot:  # its first pass is compared with an eager one
                    self.score([SequenceRows(slot, 0, [0] * size)])
        # A size that was not compared yet, for want of a slot, is passed over: the next larger one is taken.
        sizes = tuple([size for size in self.sizes if recorder.pass_of(size) is not None])
        return (session, sizes) if sizes and sizes[-1] >= rows else None

    def pass_buffers(self, sizes: Sequence[int]) -> list[NDArray[np.int64]]:
        """Of each row count the token ids and positions, (2, rows), that a pass reads."""
        for size in sizes:
            self._inputs(BatchPlan([]), size)
        return [self._buffers[size][0] for size in sizes]

    def replay(self, size: int, take: Callable[[Tensor], int]) -> tuple[int, int]:
        """Run passes that the kernels have described, and whose inputs they have written to ``pass_buffers``.

        Args:
            size: rows of the first one.
            take: takes the logits of each, (1, rows, V), and says how many rows the next has; not positive: no more.

        Returns:
            Passes that were run, and what `take` said last.
        """
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self.replay(size, take)
        assert self.recorder is not None
        passes = 0
        with self.lock, interpreted():
            take_over(None)
            observe.listen(None, None)
            while size > 0:
                replay = self.recorder.pass_of(size)
                assert replay is not None, "native_passes has asked for it"
                _, ids, positions = self._buffers[size]
                began = time.perf_counter()
                logits, _ = replay(ids, positions)
                spent = time.perf_counter() - began
                self.clock.add(size, True, spent)
                self.forward_seconds += spent
                passes += 1
                size = take(logits)
        return passes, size

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

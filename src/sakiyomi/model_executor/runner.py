"""A Hugging Face causal language model as the engine runs it: packed rows, our cache, our attention, its own weights.

A `ModelRunner` is a session: a model's weights on one cache. Target and draft model each have one. It deals with rows,
slots and logits, not with drafts and sampling.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from sakiyomi.cache.cross_attention import Source
from sakiyomi.core.errors import UnsupportedError
from sakiyomi.kernels.batch import BatchPlan, SequenceRows
from sakiyomi.model_executor.attention.registry import AttentionBackend, PassForward, PassResult
from sakiyomi.model_executor.attention.torch import set_pass
from sakiyomi.model_executor.features import HEAD, PassOutput, states_by_layer
from sakiyomi.model_executor.session import Session

logger = logging.getLogger("sakiyomi")


class ModelRunner(Session):
    """Scores packed rows of several requests in one pass. `build_runner` (build.py) makes it from a model.

    Of an encoder-decoder model it runs the decoder. `make_room` has the encoder read a request's source, and keeps the
    keys and values for cross-attention beside the request's own.
    """

    # ------------------------------------------------------------ rooms and sources

    def takes(self, source: Source | None) -> bool:
        """Whether the source fits into the encoder; None, no source, always fits."""
        limit = self.weights.encoder.limit if self.weights.encoder is not None else None
        return source is None or limit is None or source.length <= limit

    def make_room(self, slot: int, columns: int, source: Source | None = None) -> None:
        """Reserve room for so many tokens in a slot, and read the request's source if it was not read yet.

        Args:
            slot: the request's.
            columns: number of tokens.
            source: attended to beside the text; None: there is none.

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
            self.begin(BatchPlan([]), 0)
            self.sources.fill(slot, source, encoder.pairs(encoder.read(source)))
            self.forward_seconds += time.perf_counter() - began

    @property
    def blind(self) -> str | None:
        """Why the model reads no images; None: it does."""
        if not self.weights.multimodal:
            return "it is a model of text"
        if self.eviction.chunked or self.cache.dropped is not None:
            return "its cache evicts or quantizes; use cache='full'"
        if self.weights.own_attention or self.weights.offloaded:
            return "it has attention of its own, or weights that are offloaded"
        return None

    # ------------------------------------------------------------ passes

    def score(self, segments: Sequence[SequenceRows], *, last: bool = False) -> PassOutput:
        """Run one pass over the rows of these segments.

        Keys and values of the rows are written behind each slot's pairs. The verdict decides which of them stay,
        and `SlotCache.commit` moves these together.
        The slots must have room.

        Args:
            segments: of different slots.
            last: only the last row of each segment is wanted.

        Returns:
            Logits of each row of the segments in order, or of each segment with `last`, and hidden states.
        """
        if self.exact and len(segments) > 1 and sum(len(segment.tokens) for segment in segments) > self.sizes[-1]:
            # A pass beyond the largest size would round differently, so it is split.
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
            return PassOutput(output.logits[ends.to(output.logits.device)], features)
        return self.run(plan, rows if self.weights.offloaded and not self.exact else self.padded(rows))

    def _replays_prompt(self, rows: int) -> bool:
        """Whether a chunk of a prompt runs as a recorded decoding pass, which computes logits of all its rows."""
        launched = self.device.type == "cuda" and self.backend.session is not None  # launches cost more than products
        if self.exact or rows > self.sizes[-1] or not (self.weights.small_head or launched):
            return False
        return self._replays(self.padded(rows))

    @torch.no_grad()
    def run(self, plan: BatchPlan, size: int, *, keep: Tensor | None = None) -> PassOutput:
        """Run the pass of a plan, filled up to `size` rows; logits of its own rows, or of those in `keep`."""
        with self.lock:
            ids, positions = self._inputs(plan, size)
            self.begin(plan, size)
            prompts = self._prompts if plan.prompts else None
            if prompts is not None:
                prompts.begin(plan, size)
            elif keep is not None:
                self.want(keep)
            set_pass(over=prompts is not None, notes=self.eviction.observations, plan=plan)
            began = time.perf_counter()
            try:
                found = None
                if self.recorder is not None and prompts is None:
                    found = self.recorder.run(self.begin, plan, ids, positions, keep)
                replayed = found is not None
                if found is None:
                    wanted = {} if keep is None or not self.weights.keeps_logits else {"logits_to_keep": keep}
                    ids, positions = ids.to(self.device), positions.to(self.device)
                    self.weights.capture.begin()
                    given = {"input_ids": ids, "position_ids": positions, "attention_mask": None, "use_cache": False}
                    logits = self.module(**given, **wanted).logits
                    found = logits if keep is None or wanted else logits[:, keep], self.weights.capture.take()
                if self.device.type == "cuda":
                    torch.cuda.synchronize(self.device)
            finally:
                spent = time.perf_counter() - began
                set_pass()
            self.cache.begin(None)
            if keep is None:
                self.clock.add(
                    self.padded(size), replayed, spent, fresh=self.recorder is not None and self.recorder.fresh
                )
            self.forward_seconds += spent
            for watcher in self.watchers:
                watcher(plan, spent)
            if not self._proven and plan.rows:
                self._check_layers(prompts or self.backend)
            return self._output(found, plan.rows, keep)

    def _output(self, found: PassResult, rows: int, keep: Tensor | None) -> PassOutput:
        """The output of a pass without its filler rows."""
        logits, states = found
        features = states_by_layer(self.weights.capture.layers[: len(states)], states, rows, keep)
        return PassOutput(logits, features, rows if keep is None else logits.shape[1])

    def _inputs(self, plan: BatchPlan, size: int) -> tuple[Tensor, Tensor]:
        """Token ids and positions of a pass on the host, (1, size) each; zeros for filler rows."""
        buffer = self._buffers.get(size)
        if buffer is None:
            kept = size in self.sizes  # a chunk of a prompt may have any length
            both = torch.zeros(2, size, dtype=torch.int64, pin_memory=kept and self.device.type == "cuda")
            buffer = both.numpy(), both[:1], both[1:]
            if kept:
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
        if not rows and self.weights.has_experts:  # a trial pass: different tokens choose different experts
            numbers[0] = np.arange(size) * 97 % self.vocab_size
        return ids, positions

    def _check_layers(self, backend: AttentionBackend) -> None:
        """After the first pass: refuse a model if a layer did not use our cache, since its logits would be wrong."""
        calls, layers = backend.calls(), self._depth
        if calls != layers:
            raise UnsupportedError(
                f"{type(self.module).__name__}: {calls} of {layers} attention layers reached the cache; "
                "it is not supported"
            )
        self._proven = True

    def read_alone(self, slot: int, token: int, position: int) -> None:
        """Read one token into an empty slot as if it were at this position."""
        plan = BatchPlan([SequenceRows(slot, 0, [token])])
        plan.positions = [position]
        self.run(plan, self.padded(1))

    # ------------------------------------------------------------ passes that the kernels describe

    def describable(self) -> bool:
        """Whether the kernels may describe passes: passes are replayed, and no callback reads their plans."""
        eviction = self.eviction
        return not (
            self.backend.session is None
            or self.recorder is None
            or not self._proven
            or self.watchers
            or eviction.shifts
            or self._reassigned
            or self.cache.states.stores
            or (self.sources is not None and not self.backend.keeps)
            or self._note is not None
            or eviction.observations is not None
        )

    def replayed(self, size: int) -> tuple[PassForward, Tensor, Tensor]:
        """The recording of a described pass of so many rows, and its inputs: token ids, and positions behind them."""
        assert self.recorder is not None
        buffer = self._buffers.get(size) or self._inputs(BatchPlan([]), size)
        return self.recorder.ready[size], *buffer[-2:]

    # ------------------------------------------------------------ what passes cost

    def pass_seconds(self, rows: int) -> float:
        """Seconds of a decoding pass over so many rows: a running mean, or a trial pass if there was none yet."""
        return self.clock.seconds(self.padded(rows), self.sizes, self._trial)

    def _trial(self, size: int) -> None:
        if self.backend.spare:
            self.cache.reserve(0, 1)  # a capture needs a cache
        self.run(BatchPlan([]), size)  # without requests nothing is written

    def known_seconds(self, rows: int) -> float | None:
        """`pass_seconds` without a trial; None: no pass of this size was made."""
        return self.clock.known(self.padded(rows))


def first_logits(model: ModelRunner, source: Source | None, tokens: Sequence[int]) -> Tensor:
    """Logits (V,) of the token that follows these tokens, read into an empty slot."""
    with model.lock, model.cache.lent(len(tokens)) as slot:
        model.make_room(slot, len(tokens), source)
        return model.score([SequenceRows(slot, 0, tokens, prompt=True)], last=True).logits[0]

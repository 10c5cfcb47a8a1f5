"""Reads prompts in chunks: which chunks come next, and what is done with the output of their pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from sakiyomi.core.errors import MemoryLimitError
from sakiyomi.core.memory import no_memory
from sakiyomi.core.outputs import Step
from sakiyomi.core.tree import Draft
from sakiyomi.engine.batch import Part
from sakiyomi.engine.request import Request
from sakiyomi.engine.slots import SlotManager
from sakiyomi.kernels.batch import SequenceRows
from sakiyomi.model_executor.features import HEAD, PassOutput
from sakiyomi.model_executor.image_prompts import read_images
from sakiyomi.model_executor.runner import ModelRunner


@dataclass(frozen=True, eq=False)
class Prefill:
    """Takes prompts through the target in chunks, between the rounds of other requests.

    Args:
        target: reads them.
        slots: of the requests; a prompt waits for what another request is about to read of it.
        chunk_size: prompt tokens in one pass.
        evict: called for a request whose chunk was read.
        give_states: called with the hidden states of a chunk: the request, the pass, its first token's place, its rows.
        exact: one prompt a pass.
    """

    target: ModelRunner
    slots: SlotManager
    chunk_size: int
    evict: Callable[[Request], None]
    give_states: Callable[[Request, PassOutput, int, slice], None]
    exact: bool

    def next_chunk(self, running: Sequence[Request], steps: list[Step]) -> list[Part]:
        """The next chunks of prompts that share a pass.

        Args:
            running: requests with a slot, in the order of their turns.
            steps: get the last steps of requests for which there is no memory.
        """
        parts: list[Part] = []
        budget = self.chunk_size
        for request in running:
            if request.prefilled or request.over or self.slots.waits(request):
                continue
            source = request.context.source
            try:
                if source is not None and self.target.weights.encoder is None and not request.cached:
                    # The images, and all tokens but the last.
                    request.cached = read_images(self.target, request.seat, source.inputs)
                count = min(self.chunk_size, min(request.prompt_tokens, request.boundary) - request.cached)
                if parts and (count > budget or self.exact):
                    break
                self.target.make_room(request.seat, request.cached + count, source)
            except MemoryLimitError as error:
                steps.append(request.fail(error))
                continue
            tokens = request.tokens[request.cached : request.cached + count]
            rows = SequenceRows(request.seat, request.cached, tokens, prompt=True)
            parts.append(Part(request, Draft.empty(), rows))
            budget -= count
        return parts

    def needs_all_rows(self, parts: Sequence[Part]) -> bool:
        """Whether logits of all rows of these chunks are wanted, and not of the last ones alone."""
        requests = [part.request for part in parts]
        wanted = any(r.wants_prompt_logprobs or r.states is not None for r in requests)
        return wanted or self.target.eviction.needs_log_probs

    def take(
        self,
        parts: Sequence[Part],
        output: PassOutput,
        running: list[Request],
        steps: list[Step],
        began: float,
        *,
        whole: bool,
    ) -> tuple[list[Part], PassOutput]:
        """Count what was read, and give the prompts that are read to their end, with the logits behind them.

        Args:
            parts: what was read.
            output: of the pass, of the last row of each request or of all.
            running: all requests; one with more of its prompt to read moves behind the others.
            steps: get the last steps of requests for which there is no memory.
            began: seconds that the target had spent before.
            whole: the output is of all rows.
        """
        spent = self.target.forward_seconds - began
        for request in running:  # the others wait meanwhile
            request.stats.prefill_seconds += spent
        eviction = self.target.eviction
        if whole:
            output = self._learn(parts, output, steps)
        complete, ends, last, row = [], [], [], 0
        for i, part in enumerate(parts):
            request, _, rows = part
            at = slice(row, row + len(rows.tokens))
            row = at.stop
            if request.over:
                continue
            self.give_states(request, output, rows.length, at)
            request.cached += len(rows.tokens)
            if request.place is None or not request.place.beginning:
                request.cached = eviction.reread_from(request.seat, request.prompt_tokens, request.cached)
            if request.prefilled:
                complete.append(part)
                ends.append(i)
                last.append(at.stop - 1)
                continue
            self.evict(request)
            self.slots.keep_border(request)
            running.remove(request)  # so that a long prompt does not hold up short ones
            running.append(request)
        self.slots.share()
        features = {layer: states[ends if layer == HEAD else last] for layer, states in output.features.items()}
        return complete, PassOutput(output.logits[ends], features)

    def _learn(self, parts: Sequence[Part], output: PassOutput, steps: list[Step]) -> PassOutput:
        """Tell requests and eviction policy how likely the prompts' tokens were; what is left are the last rows."""
        ends, first = [], 0
        for request, _, rows in parts:
            count, at = len(rows.tokens), rows.length
            logits = output.logits[first : first + count]
            try:
                if request.wants_prompt_logprobs:
                    request.add_prompt_logprobs(logits, at)
                if request.states is not None:
                    request.states.append(output.features[HEAD][first : first + count].float().sum(0))
                if self.target.eviction.needs_log_probs:
                    self.target.eviction.add_prompt_log_probs(request.seat, logits, request.tokens, at, at + count)
            except Exception as error:
                reason = no_memory(error)
                if reason is None:
                    raise
                steps.append(request.fail(reason))
            first += count
            ends.append(first - 1)
        last = torch.tensor(ends, dtype=torch.int64)
        features = {layer: states[last] if layer == HEAD else states for layer, states in output.features.items()}
        return PassOutput(output.logits[last], features)

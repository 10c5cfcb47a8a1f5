"""Reads prompts in chunks: which chunks come next, and what is done with the output of their pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from sakiyomi.core.errors import MemoryLimitError
from sakiyomi.core.memory import no_memory
from sakiyomi.core.outputs import Step
from sakiyomi.core.tree import Draft
from sakiyomi.engine.batch import Part, score_alone
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

    def run(self, running: list[Request], steps: list[Step]) -> tuple[list[Part], PassOutput]:
        """Read the next chunks of prompts in one pass.

        Args:
            running: requests with a slot, the next one first; one with more of its prompt to read moves to the end.
            steps: get the last steps of requests for which there is no memory.

        Returns:
            The prompts that are read to their end, and the logits behind them.
        """
        chunk, began, eviction = self._next_chunk(running, steps), self.target.forward_seconds, self.target.eviction
        if not chunk:
            return [], PassOutput.empty(self.target.vocab_size)
        asking = any(part.request.wants_prompt_logprobs or part.request.options.states is not None for part in chunk)
        whole = asking or eviction.needs_log_probs  # logits of all rows are wanted, not of the last ones alone
        try:
            parts, output = chunk, self.target.score([part.rows for part in chunk], last=not whole)
        except Exception as error:
            parts, output = score_alone(self.target, chunk, error, steps, last=not whole)
        spent = self.target.forward_seconds - began
        for request in running:  # the others wait meanwhile
            request.stats.prefill_seconds += spent
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
            place = request.options.place
            if place is None or not place.beginning:
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

    def _next_chunk(self, running: Sequence[Request], steps: list[Step]) -> list[Part]:
        """The next chunks of prompts that share a pass; arguments as of ``run``."""
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

    def _learn(self, parts: Sequence[Part], output: PassOutput, steps: list[Step]) -> PassOutput:
        """Tell requests and eviction policy how likely the prompts' tokens were; what is left are the last rows."""
        ends, first = [], 0
        for request, _, rows in parts:
            count, at = len(rows.tokens), rows.length
            logits = output.logits[first : first + count]
            try:
                if request.wants_prompt_logprobs:
                    request.add_prompt_logprobs(logits, at)
                if (states := request.options.states) is not None:
                    states.append(output.features[HEAD][first : first + count].float().sum(0))
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

"""The loop: draft, score, verify, commit. All running requests share its passes; they come and go between rounds.

`Engine` knows no file and no prompt text format beyond its tokenizer; `LLM` (llm.py) is thin on top of it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Unpack

import torch

from sakiyomi.cache.prefix import Prefix
from sakiyomi.cache.slot_record import neg_log_prob
from sakiyomi.core.errors import InputError, MemoryLimitError, RemovedError, UnsupportedError
from sakiyomi.core.outputs import Generation, Step
from sakiyomi.core.params import SamplingParams, as_params
from sakiyomi.core.threads import govern_threads
from sakiyomi.core.tree import Draft, Verdict
from sakiyomi.drafters.adapter import Proposer, as_drafter
from sakiyomi.drafters.base import Drafter
from sakiyomi.engine.batch import Part, cases, drafted_part, make_room, score_alone
from sakiyomi.engine.inputs import InputProcessor, TextInputProcessor, TokenizedPrompt
from sakiyomi.engine.native_rounds import NativeRounds
from sakiyomi.engine.pace import BRIEF
from sakiyomi.engine.prefill import Prefill
from sakiyomi.engine.request import Request, RetainedSlot
from sakiyomi.engine.request_factory import RequestFactory, SubmitOptions
from sakiyomi.engine.slots import SlotManager
from sakiyomi.engine.speculation import RoundClock, SpeculationController, verifier_for
from sakiyomi.model_executor.features import PassOutput
from sakiyomi.model_executor.runner import ModelRunner
from sakiyomi.model_executor.weights import is_shared
from sakiyomi.sampling.verifiers import Rows
from sakiyomi.sampling.verifiers.native import verify_all

logger = logging.getLogger("sakiyomi")
CHUNK = 512  # prompt tokens a pass


class _NoGradients:
    """As ``torch.no_grad``, in a fifth of its time: it is entered in every round."""

    def __enter__(self) -> None:
        self._before = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)

    def __exit__(self, *raised: object) -> None:
        torch._C._set_grad_enabled(self._before)


class Engine:
    """Runs requests on a target and a drafter, one round at a time.

    Args:
        target: the packed target.
        drafter: proposes draft tokens; None: every round is a plain step.
        tokenizer: of the target.
        inputs: makes token ids of a prompt; None: prompts are texts of the tokenizer, or token ids.
        stop_ids: the model's end tokens.
        max_context: most tokens of prompt and output together.
        chunk_size: prompt tokens in one pass. Long prompts are read in chunks, so that running requests have a decoding
            round after each, and an eviction policy keeps its budget.
        exact: prompts are computed alone, so that a request's numbers do not depend on its company.
        strict: a drafter that raises or returns an invalid draft ends the request, which else continues without drafts.
        settle: called while no request is running; swaps in faster passes that have finished building.
        depth: chain length where gamma, tree and nodes are "auto"; None: one is chosen every round, by measured costs.

    Attributes:
        requests: number of requests so far.
    """

    def __init__(
        self,
        target: ModelRunner,
        drafter: Drafter | Proposer | None,
        tokenizer: Any,
        *,
        inputs: InputProcessor | None = None,
        stop_ids: Sequence[int] = (),
        max_context: int,
        chunk_size: int = CHUNK,
        exact: bool = False,
        strict: bool = False,
        settle: Callable[[], None] = lambda: None,
        depth: int | None = None,
    ) -> None:
        drafter = as_drafter(drafter) if drafter is not None else None
        self.target, self.drafter, self.tokenizer = target, drafter, tokenizer
        self.stop_ids = frozenset(stop_ids)
        self.max_context, self.chunk_size, self.exact = max_context, chunk_size, exact
        self._settle, self.requests = settle, 0
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._slots = SlotManager(target, drafter, chunk_size, exact)
        self._lock = threading.RLock()
        self._speculation = SpeculationController(target, drafter, exact=exact, strict=strict)
        self._native = NativeRounds(target, drafter, self._speculation)
        self._requests = RequestFactory(
            inputs or TextInputProcessor(tokenizer, target.vocab_size, max_context),
            partial(verifier_for, drafter),
            tokenizer,
            vocab_size=target.vocab_size,
            stop_ids=self.stop_ids,
            max_context=max_context,
            exact=exact,
            depth=depth,
            shared=is_shared(target.module),
        )
        self._prefill = Prefill(target, self._slots, chunk_size, self._evict, self._speculation.give_all_states, exact)

    @property
    def busy(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self._waiting or self._running)

    @property
    def cache_usage(self) -> float:
        """Share of the target's cache that running requests and retained slots hold; 1 if all slots were full."""
        cache = self.target.cache
        return min(1.0, self._slots.held_bytes / cache.capacity(cache.max_slots, self.max_context))

    def add(self, prompt: Any, params: SamplingParams | None = None, **options: Any) -> int:
        """Queue a request as ``submit`` does, and give its id, as in ``Step.request``."""
        if (n := as_params(params).n) > 1:
            raise InputError(f"n={n} samples are {n} requests; add each of them, with a key of its own")
        return self.submit(prompt, params, **options).id

    def process(self, prompt: Any, params: SamplingParams | None = None) -> TokenizedPrompt:
        """What ``submit`` makes of a prompt, which may be given to it instead; in any thread.

        Raises:
            InputError: it is none.
        """
        return self._requests.process(prompt, as_params(params))

    def submit(self, prompt: Any, params: SamplingParams | None = None, **options: Unpack[SubmitOptions]) -> Request:
        """Queue a request and give its state, which stays readable when it is over.

        Args:
            prompt: text, or token ids, which are used as they are; what else the input processor takes; or what it
                would make of it, which is not checked.
            params: None for the defaults, or where the prompt has its own.
            **options: see ``SubmitOptions``.

        Raises:
            InputError: the prompt is empty, has unknown tokens or is too long, an option cannot be met, or the
                conversation has a request under way.
            MemoryLimitError: its keys and values would not fit.
        """
        request = self._requests.make(prompt, params, **options)
        with self._lock:
            others = [*self._running, *self._waiting]
            place = request.options.place
            if place is not None and any(other.options.place is place for other in others):
                raise InputError("the conversation has a request under way; wait for its end, or leave its stream")
            self._slots.check_memory([*others, request])
            self._waiting.append(request)
            self.requests += 1
        return request

    def step(self, patience: float = 0.0) -> list[Step]:
        """One chunk of the prompts that are not read yet; then draft, score, verify, commit for those that are.

        Args:
            patience: seconds in which the kernels may begin further rounds, where nobody waits.

        Returns:
            What was committed, a step for each round; a request's last step has its ``finish_reason``, or the ``error``
            that ended it.
        """
        with self._lock, _NoGradients():
            govern_threads()
            self.settle()
            steps = self._admit()
            reading = any(r.cached < r.prompt_tokens for r in self._running)
            if reading:
                complete, output = self._prefill.run(self._running, steps)
                steps += self._decide(complete, output)

            going = [r for r in self._running if r.finish_reason is None and r.error is None]
            requests = [r for r in going if r.cached >= r.prompt_tokens] if reading else going
            if steps:
                fresh = {step.request for step in steps}
                requests = [r for r in requests if r.id not in fresh]
            if requests:
                clock = RoundClock(self.target)
                depths, known = self._speculation.depths(requests), self._speculation.known_drafts(requests)
                patience = 0.0 if reading or self._waiting else patience
                native = self._native.run(requests, depths, known, clock, patience)  # all of it in the kernels
                if native is None:
                    drafted = self._speculation.propose(requests, depths, known)  # draft
                    native = self._native.score(requests, drafted, clock)  # the rest in the kernels
                if native is not None:
                    self._retire()
                    return steps + native
                # The kernels do not take this round: score, verify and commit here.
                parts = [drafted_part(*each) for each in zip(requests, drafted.drafts, strict=True)]
                parts = make_room(parts, self.target.cache, steps)
                try:
                    output = self.target.score([part.rows for part in parts])  # score
                except Exception as error:
                    parts, output = score_alone(self.target, parts, error, steps)
                requests = [part.request for part in parts]
                clock.scored(requests, drafted)
                lengths = [len(request.tokens) for request in requests]
                steps += self._decide(parts, output)  # verify, commit
                kept = [len(r.tokens) - n - 1 for r, n in zip(requests, lengths, strict=True)]
                depths = [part.draft.tree.depth for part in parts]
                rows = sum([len(part.rows.tokens) for part in parts])
                self._speculation.observe(requests, depths, kept, rows, clock.timed())

            self._retire()
            return steps

    def complete(self, requests: Iterable[Request]) -> list[Generation]:
        """Run rounds until these requests are over. Requests that an error leaves unfinished are removed.

        Args:
            requests: as ``submit`` gives them; they may be submitted while this is iterated over.

        Raises:
            Exception: what submitting them raises, or what ended one of them instead of its text.
        """
        taken: list[Request] = []
        try:
            taken.extend(requests)
            while not all(request.over for request in taken):
                self.step(BRIEF)
        finally:
            for request in taken:
                self.remove(request.id)
        return [request.generation() for request in taken]

    def remove(self, request: int) -> Request | None:
        """End a waiting or running request and free its slot; None if there is no such request (any more)."""
        with self._lock:
            found = self.find(request)
            if found is not None:
                (self._running if found in self._running else self._waiting).remove(found)
                self._native.end(request)
                self._slots.free(found)
                if not found.over:
                    found.fail(RemovedError(f"request {request} was removed before its end"))
            return found

    def release(self, place: RetainedSlot) -> None:
        """Free what a conversation keeps; a request of it that is under way ends."""
        with self._lock:
            for request in [r for r in (*self._waiting, *self._running) if r.options.place is place]:
                self.remove(request.id)
            self._slots.release(place)

    def snapshot(self, place: RetainedSlot, text: str, recipe: dict[str, str]) -> Prefix:
        """A copy of what a conversation holds between two of its requests, of all tokens that were read."""
        with self._lock:
            assert place.slot is not None, "the place holds nothing"
            tensors = self.target.eviction.snapshot(place.slot, len(place.held))
            return Prefix(place.held, text, recipe, tensors)

    def reusable(self) -> list[tuple[object, Sequence[int], int]]:
        """Texts that a new request can continue: the holder of each, its tokens, and how many of them are in the cache.

        Raises:
            UnsupportedError: pairs are evicted: what stays of a text depends on its end.
        """
        if self.target.eviction.chunked:
            raise UnsupportedError("the cache evicts or quantizes pairs, so that prefixes are there at few places only")
        with self._lock:
            return list(self._slots.reusable())

    def find(self, request: int) -> Request | None:
        """The state of a request that is waiting or running."""
        return next((r for r in (*self._running, *self._waiting) if r.id == request), None)

    def settle(self) -> None:
        """Swap in what has finished building in the background; does nothing while requests run."""
        with self._lock:
            if not self._running:
                self._settle()

    # ------------------------------------------------------------ one round

    def _decide(self, parts: Sequence[Part], output: PassOutput) -> list[Step]:
        """Verify each request's draft, an empty one where its prompt has been read, and commit what was accepted. An
        error of its own options ends a request alone.
        """
        steps, judged, begun = list[Step](), cases(parts), None
        try:
            for (request, _, _), case, verdict in zip(parts, judged, verify_all(judged, output.whole), strict=True):
                begun, draft = request, case.draft
                try:
                    here = slice(case.row, case.row + len(draft.tree.tokens) + 1)
                    rows = Rows(output.whole, case.sampler, case.position, draft.tree, request.tokens, here)
                    verdict = verdict or request.verifier.verify(draft, rows, case.noise)
                    self._speculation.give_states(request, output, case.row, verdict.path)
                    self._speculation.give_ranks(request, draft, output, case.row)
                    self._keep(request, draft, verdict, rows)
                    steps.append(request.commit(draft, verdict, rows))
                    self._evict(request)
                except Exception as error:
                    steps.append(request.fail(error))
        except BaseException:
            # Ctrl-C between cache and tokens: what they hold may no longer belong together, and a prompt's row is lost.
            for request, _, _ in parts[len(steps) :]:
                if request is begun or not request.decoding:
                    request.fail(RemovedError(f"request {request.id} was interrupted in the middle of a round"))
            raise
        return steps

    def _keep(self, request: Request, draft: Draft, verdict: Verdict, rows: Rows) -> None:
        """Of the pass keep the last token's pair and those of the accepted path."""
        eviction = self.target.eviction
        nodes = (0, *(node + 1 for node in verdict.path))
        if request.decoding:  # else the rows are the prompt's, kept already
            eviction.commit(request.seat, request.cached, nodes)
            request.cached += len(nodes)
        if eviction.needs_log_probs:
            tokens = [*(draft.tree.tokens[node] for node in verdict.path), verdict.token]
            eviction.add_log_probs(request.seat, neg_log_prob(rows.raw[list(nodes)], tokens))

    def _evict(self, request: Request) -> None:
        """At an eviction boundary, drop what the policy evicts; set the request's next boundary."""
        eviction = self.target.eviction
        eviction.evict(request.seat, request.prompt_tokens, request.cached)
        request.boundary = eviction.boundary(request.seat, request.prompt_tokens)

    # ------------------------------------------------------------ coming and going

    def _admit(self) -> list[Step]:
        """Give slots to waiting requests. Returns the last steps of those for which there is no memory."""
        steps: list[Step] = []
        while self._waiting and len(self._running) < self.target.cache.max_slots:
            request = self._waiting.popleft()
            request.began = time.perf_counter()  # waiting does not count
            try:
                self._slots.seat(request)
            except MemoryLimitError as error:  # of a prefix; others would be refused before
                steps.append(request.fail(error))
                self._slots.free(request)
                continue
            self._evict(request)
            self._running.append(request)
        return steps

    def _retire(self) -> None:
        """Free the slots of requests that are over."""
        for request in [r for r in self._running if r.finish_reason is not None or r.error is not None]:
            self._running.remove(request)
            self._native.end(request.id)
            self._slots.free(request)

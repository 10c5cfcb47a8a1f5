"""The loop: draft, score, verify, commit. All running requests share its passes; they come and go between rounds.

`Engine` knows no file and no prompt text format beyond its tokenizer; `LLM` (llm.py) is thin on top of it.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sakiyomi.cache.eviction import neg_log_prob
from sakiyomi.cache.prefix import Prefix
from sakiyomi.core.errors import DraftError, InputError, LoadError, MemoryLimitError, RemovedError, SakiyomiError
from sakiyomi.core.memory import no_memory
from sakiyomi.core.outputs import Generation, Step
from sakiyomi.core.params import SamplingParams, as_params
from sakiyomi.core.text import TextStream
from sakiyomi.core.tree import Draft
from sakiyomi.drafters.base import Context, Drafter
from sakiyomi.drafters.draft_length import NO_DRAFT, make_policy
from sakiyomi.engine.inputs import InputProcessor, TextInputProcessor, TokenizedPrompt
from sakiyomi.engine.request import Request, RetainedSlot
from sakiyomi.engine.slots import SlotManager
from sakiyomi.engine.speculation import SpeculationController
from sakiyomi.kernels.batch import SequenceRows
from sakiyomi.sampling.rng import RequestNoise
from sakiyomi.sampling.sampler import Sampler
from sakiyomi.sampling.verifiers import Rows

if TYPE_CHECKING:
    from sakiyomi.model_executor.runner import ModelRunner

__all__ = ["Engine"]

logger = logging.getLogger("sakiyomi")
CHUNK = 512  # prompt tokens a pass


class Engine:
    """Runs requests on a target and a drafter, one round at a time.

    Args:
        target: the packed target.
        drafter: reads ahead; None: every round is a plain step.
        tokenizer: of the target.
        intake: makes of a prompt what the target goes on from; None: prompts are texts of its tokenizer, or token ids.
        stop_ids: the model's end tokens.
        max_context: most tokens of prompt and output together.
        chunk_size: prompt tokens in one pass; long prompts are taken in chunks between rounds.
        exact: prompts are computed alone, so that a request's numbers do not depend on its company.
        strict: a drafter that raises or proposes nonsense ends the request; else the request goes on without it.
        settle: called when no request runs: the time to take something faster into use.
        depth: length of the chains that are drafted where a request leaves gamma, tree and nodes to "auto"; None: what
            pays is weighed anew in every round.
    """

    def __init__(
        self,
        target: ModelRunner,
        drafter: Drafter | None,
        tokenizer: Any,
        *,
        intake: InputProcessor | None = None,
        stop_ids: Sequence[int] = (),
        max_context: int,
        chunk_size: int = CHUNK,
        exact: bool = False,
        strict: bool = False,
        settle: Callable[[], None] = lambda: None,
        depth: int | None = None,
    ) -> None:
        self.target, self.drafter, self.tokenizer = target, drafter, tokenizer
        self.stop_ids = frozenset(stop_ids)
        self.max_context, self.chunk_size, self.exact = max_context, chunk_size, exact
        self._intake = intake or TextInputProcessor(tokenizer, target.vocab_size, max_context)
        self._settle, self._depth = settle, depth
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._places = SlotManager(target.cache, target.eviction, drafter, chunk_size, exact)
        self._ids = itertools.count()
        self._lock = threading.RLock()
        self._drafting = SpeculationController(target, drafter, exact=exact, strict=strict)

    @property
    def busy(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self._waiting or self._running)

    @property
    def cache_usage(self) -> float:
        """Share of the target's cache that running requests and retained slots hold; 1 if all slots were full."""
        return min(1.0, self._places.held_bytes / self.target.cache.capacity(self.max_context))

    def add(self, prompt: Any, params: SamplingParams | None = None, **options: Any) -> int:
        """Queue a request; the work is done by ``step``. Takes and raises what ``submit`` does.

        Returns:
            The request's id, as in ``Step.request``.
        """
        if (n := as_params(params).n) > 1:
            raise InputError(f"n={n} samples are {n} requests; add each of them, with a key of its own")
        return self.submit(prompt, params, **options).id

    def submit(
        self,
        prompt: Any,
        params: SamplingParams | None = None,
        *,
        key: tuple[int, ...] = (0,),
        rounds_trace: bool = False,
        live: bool = True,
        outbox: deque[Step] | None = None,
        place: RetainedSlot | None = None,
        shares: bool = True,
        drafted: bool = True,
        keep_logits: bool = False,
    ) -> Request:
        """Queue a request and give its state, which stays readable when it is over.

        Args:
            prompt: text, or token ids, which are used as they are; what else the intake takes; or what it would make
                of it, which is not checked.
            params: None for the defaults, or where the prompt has its own.
            key: with ``params.seed`` the key of its randomness: the index in a list of requests, and of the sample.
            rounds_trace: keep every round's tree.
            live: text is wanted with every step, not only with the last one.
            outbox: gets the request's steps too.
            place: of the conversation that it belongs to: what an earlier request left there is not computed again.
            shares: what other requests read of the same beginning is copied, and not computed again.
            drafted: False: nothing is read ahead for it, whatever the others do.
            keep_logits: keep the target's raw logits of every new token.

        Raises:
            InputError: the prompt is empty, has unknown tokens or is too long, an option cannot be met, or the
                conversation has a request under way.
            MemoryLimitError: its keys and values would not fit.
        """
        asked = prompt if isinstance(prompt, TokenizedPrompt) else self._intake(prompt, as_params(params))
        tokens, params = asked.tokens, asked.params
        depth = self._depth if params.gamma == params.tree == params.nodes == "auto" else None
        if depth is not None:
            params = replace(params, tree="chain")
        verifier = self._drafting.verifier(params)
        rule = verifier.rule
        seed = secrets.randbits(63) if params.seed is None else params.seed
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.stop_ids)
        noise = RequestNoise(seed, *key)
        context = Context(
            *(next(self._ids), tokens, params, rule, noise, stop_ids),
            shares=shares and not self.exact,
            source=asked.source,
        )
        last = min(len(tokens) + params.max_new_tokens, self.max_context)
        request = Request(
            context,
            len(tokens),
            Sampler(params, self.target.vocab_size),
            verifier,
            make_policy(params, depth) if drafted else NO_DRAFT,
            TextStream(self.tokenizer, params.stop),
            last,
            keep_rounds=rounds_trace,
            keep_logits=keep_logits,
            live=live or bool(params.stop),
            outbox=outbox,
            place=place,
            shares=shares,
        )
        with self._lock:
            others = [*self._running, *self._waiting]
            if place is not None and any(other.place is place for other in others):
                raise InputError("the conversation has a request under way; wait for its end, or leave its stream")
            self._places.check_memory([*others, request])
            self._waiting.append(request)
        return request

    def step(self) -> list[Step]:
        """One round: a chunk of the prompts that are not done, then draft, score, verify, commit for those that are.

        Returns:
            What was committed, one step a request at most; a request's last step has its ``finish_reason``, or the
            ``error`` that ended it.
        """
        with self._lock, torch.no_grad():
            self.settle()
            steps = self._admit()
            steps += self._prefill([r for r in self._running if not r.prefilled and not r.over])
            fresh = {step.request for step in steps}
            decoding = [r for r in self._running if r.prefilled and not r.over and r.id not in fresh]
            for graphs in dict.fromkeys(r.graphs for r in decoding):  # a request keeps the path that it began with
                steps += self._round([r for r in decoding if r.graphs == graphs], graphs)
            for request in [r for r in self._running if r.over]:
                self._running.remove(request)
                self._drafting.forget(request.id)
                self._places.free(request)
            return steps

    def complete(self, requests: Iterable[Request]) -> list[Generation]:
        """Run rounds until these requests are over; what is not by then, because of an error, is removed.

        Args:
            requests: as ``submit`` gives them; they may be submitted while this is iterated over.

        Raises:
            Exception: what submitting them raises, or what ended one of them instead of its text.
        """
        taken: list[Request] = []
        try:
            taken.extend(requests)
            while not all(request.over for request in taken):
                self.step()
        finally:
            for request in taken:
                self.remove(request.id)
        return [request.generation() for request in taken]

    def remove(self, request: int) -> Request | None:
        """End a request, whatever its state, and free its place at once; None if it is not known (any more)."""
        with self._lock:
            for queue in (self._waiting, self._running):
                for candidate in list(queue):
                    if candidate.id == request:
                        queue.remove(candidate)
                        self._drafting.forget(request)
                        self._places.free(candidate)
                        if not candidate.over:
                            candidate.fail(RemovedError(f"request {request} was removed before its end"))
                        return candidate
            return None

    def release(self, place: RetainedSlot) -> None:
        """Free what a conversation keeps; a request of it that is under way ends."""
        with self._lock:
            for request in [r for r in (*self._waiting, *self._running) if r.place is place]:
                self.remove(request.id)
            self._places.release(place)

    def snapshot(self, place: RetainedSlot, text: str, recipe: dict[str, str]) -> Prefix:
        """A copy of what a conversation holds between two of its requests, of all tokens that were read."""
        with self._lock:
            assert place.slot is not None, "the place holds nothing"
            return Prefix.of_slot(place.held, text, recipe, self.target, place.slot)

    def find(self, request: int) -> Request | None:
        """The state of a request that is waiting or running."""
        return next((r for r in (*self._running, *self._waiting) if r.id == request), None)

    def settle(self) -> None:
        """Take into use what has become ready in the background; does nothing while requests run."""
        with self._lock:
            if not self._running:
                self._settle()

    # ------------------------------------------------------------ one round

    def _round(self, requests: list[Request], graphs: frozenset[int]) -> list[Step]:
        began, scoring = time.perf_counter(), self.target.forward_seconds
        drafted = self._drafting.propose(requests, graphs)
        drafts = drafted.drafts
        steps = self._make_room(requests, drafts)
        if not requests:
            return steps
        logits = self._score(requests, drafts, graphs, steps)
        if not requests:
            return steps
        scoring = self.target.forward_seconds - scoring
        hidden = self.target.hidden
        row = 0
        kept: list[int] = []
        for request, draft in zip(requests, drafts, strict=True):
            here = slice(row, row + len(draft) + 1)
            row = here.stop
            rows = request.rows(logits[here], draft)
            request.stats.prefill_seconds += drafted.catching_up
            request.stats.draft_seconds += drafted.seconds
            request.stats.score_seconds += scoring
            before = len(request.tokens)
            steps += self._decide(request, draft, rows, None if hidden is None else hidden[here])
            kept.append(len(request.tokens) - before - 1)
        seconds = time.perf_counter() - began - drafted.catching_up
        self._drafting.observe(requests, drafted, kept, seconds, scoring, graphs)
        return steps

    def _decide(self, request: Request, draft: Draft, rows: Rows, hidden: Tensor | None) -> list[Step]:
        """Verify and commit for one request; what its own options break ends it alone."""
        try:
            verdict = request.verifier.verify(draft, rows, request.context.noise)
            if hidden is not None:  # row i + 1 is node i's
                request.context.hidden = hidden[verdict.path[-1] + 1 if verdict.path else 0]
            if len(request.tokens) > request.prompt_tokens:  # else the rows are the prompt's, kept already
                self._keep(request, verdict.path)
            if self.target.eviction.needs_log_probs:
                assert request.slot is not None
                nodes = [0, *(node + 1 for node in verdict.path)]
                tokens = [*(draft.tree.tokens[node] for node in verdict.path), verdict.token]
                self.target.eviction.learn(request.slot, neg_log_prob(rows.raw[nodes], tokens))
            step = request.commit(draft, verdict, rows)
            self._settle_cache(request)
            return [step]
        except Exception as error:
            return [request.fail(error)]
        except BaseException:
            # Ctrl-C between cache and tokens: what they hold may no longer belong together.
            request.fail(RemovedError(f"request {request.id} was interrupted in the middle of a round"))
            raise

    def _make_room(self, requests: list[Request], drafts: list[Draft]) -> list[Step]:
        """Room in the cache for a round; a request for which there is none, or no right draft, leaves both lists."""
        steps = []
        for i in reversed(range(len(requests))):
            request = requests[i]
            assert request.slot is not None
            try:
                self._drafting.check(request)
                self.target.cache.reserve(request.slot, request.cached + len(drafts[i]) + 1)
            except (DraftError, MemoryLimitError) as error:
                steps.append(request.fail(error))
                del requests[i], drafts[i]
        return steps

    def _score(self, requests: list[Request], drafts: list[Draft], graphs: frozenset[int], steps: list[Step]) -> Tensor:
        """One target pass over every request's last token and tree: (all rows, V) logits. A request that it ends leaves
        both lists, with a step.
        """
        segments = []
        for request, draft in zip(requests, drafts, strict=True):
            assert request.slot is not None
            tree = draft.tree
            chain = all(parent == i - 1 for i, parent in enumerate(tree.parents))
            parents = None if chain else (-1, *(parent + 1 for parent in tree.parents))
            segments.append(SequenceRows(request.slot, request.cached, (request.tokens[-1], *tree.tokens), parents))

        def score(some: Sequence[Request], parts: Sequence[SequenceRows]) -> Tensor:
            return self.target.score(parts, graphs=graphs)

        logits = self._shared(requests, segments, score, steps)
        for i in reversed(range(len(requests))):
            if requests[i].over:
                del requests[i], drafts[i]
        return logits

    def _shared(
        self,
        requests: Sequence[Request],
        segments: Sequence[SequenceRows],
        score: Callable[[Sequence[Request], Sequence[SequenceRows]], Tensor],
        steps: list[Step],
    ) -> Tensor:
        """A pass for all of them. Where there is no memory for it, one for each by itself; who has none alone ends, as
        all do when weights cannot be read. The logits are of those that go on.
        """
        reason: SakiyomiError | None
        try:
            return score(requests, segments)
        except LoadError as error:
            reason = error
        except Exception as error:
            reason = no_memory(error)
            if reason is None:
                raise
        if len(requests) == 1 or isinstance(reason, LoadError):
            steps += [request.fail(reason) for request in requests]
            return torch.empty(0, self.target.vocab_size)
        found: list[tuple[Tensor, Tensor | None]] = []
        for request, segment in zip(requests, segments, strict=True):
            logits = self._shared([request], [segment], score, steps)
            if not request.over:
                found.append((logits, self.target.hidden))
        hidden = [read for _, read in found if read is not None]
        self.target.hidden = torch.cat(hidden) if hidden else None
        return torch.cat([logits for logits, _ in found]) if found else torch.empty(0, self.target.vocab_size)

    def _keep(self, request: Request, path: Sequence[int]) -> None:
        """Of the pass keep the last token's pair and those of the accepted path."""
        assert request.slot is not None
        self.target.eviction.keep(request.slot, request.cached, (0, *(node + 1 for node in path)))
        request.cached += 1 + len(path)

    def _settle_cache(self, request: Request) -> None:
        """Where this is a border, drop what the cache is not to hold; say where the next one is."""
        assert request.slot is not None
        eviction = self.target.eviction
        eviction.settle(request.slot, request.prompt_tokens, request.cached)
        request.border = eviction.border(request.slot, request.prompt_tokens)

    # ------------------------------------------------------------ coming and going

    def _admit(self) -> list[Step]:
        """Seat who waits; steps of those for whom there is no memory."""
        steps: list[Step] = []
        while self._waiting and len(self._running) < self.target.cache.max_slots:
            request = self._waiting.popleft()
            request.began = time.perf_counter()  # waiting is not its time
            try:
                self._places.seat(request)
            except MemoryLimitError as error:  # of a prefix; others would be refused before
                steps.append(request.fail(error))
                self._places.free(request)
                continue
            self._settle_cache(request)
            request.graphs = self.target.ready
            self._running.append(request)
        return steps

    def _prefill(self, requests: list[Request]) -> list[Step]:
        """One chunk of prompts; the first token of every request whose prompt is complete after it. Who waits for what
        another one reads is left out.
        """
        segments: list[SequenceRows] = []
        taken: list[Request] = []
        steps: list[Step] = []
        budget = self.chunk_size
        before = self.target.forward_seconds
        for request in requests:
            if self._places.waits(request):
                continue
            count = min(self.chunk_size, request.prompt_tokens - request.cached, request.border - request.cached)
            if taken and (count > budget or self.exact):
                break
            assert request.slot is not None
            try:
                self.target.make_room(request.slot, request.cached + count, request.context.source)
            except MemoryLimitError as error:
                steps.append(request.fail(error))
                continue
            chunk = request.tokens[request.cached : request.cached + count]
            segments.append(SequenceRows(request.slot, request.cached, chunk, prompt=True))
            taken.append(request)
            budget -= count
        if not taken:
            return steps
        graphs = frozenset.intersection(*(request.graphs for request in taken))

        def score(some: Sequence[Request], parts: Sequence[SequenceRows]) -> Tensor:
            return self._score_prompts(some, parts, graphs)

        logits = self._shared(taken, segments, score, steps)
        pairs = [pair for pair in zip(taken, segments, strict=True) if not pair[0].over]
        spent = self.target.forward_seconds - before
        for request in self._running:  # the others stand still meanwhile
            request.stats.prefill_seconds += spent
        hidden = self.target.hidden
        for i, (request, segment) in enumerate(pairs):
            assert request.slot is not None
            request.cached += len(segment.tokens)
            if request.place is None or not request.place.beginning:
                request.cached = self.target.eviction.go_on(request.slot, request.prompt_tokens, request.cached)
            if not request.prefilled:
                self._settle_cache(request)
                self._running.remove(request)  # the others' turn, so that a long prompt does not hold up short ones
                self._running.append(request)
            else:
                draft = Draft.empty()
                here = slice(i, i + 1)
                steps += self._decide(
                    request, draft, request.rows(logits[here], draft), None if hidden is None else hidden[here]
                )
        self._places.share()
        return steps

    def _score_prompts(
        self, requests: Sequence[Request], segments: Sequence[SequenceRows], graphs: frozenset[int]
    ) -> Tensor:
        """One target pass over chunks of prompts: (requests, V) logits of their last rows."""
        eviction = self.target.eviction
        if not eviction.needs_log_probs:
            return self.target.score(segments, last=True, graphs=graphs)
        logits = self.target.score(segments, graphs=frozenset())
        ends, first = [], 0
        for request, segment in zip(requests, segments, strict=True):
            count = len(segment.tokens)
            assert request.slot is not None
            at = segment.length
            eviction.learn_prompt(request.slot, logits[first : first + count], request.tokens, at, at + count)
            first += count
            ends.append(first - 1)
        if self.target.hidden is not None:
            self.target.hidden = self.target.hidden[ends]
        return logits[ends]

"""Rounds that the compiled kernels run: draft, score, verify, commit. Python reads what was committed.

Used where no Python callback runs between the passes. Drafts of a draft model grow there too, those of text drafters
are found there, and those of others are given. All other requests, and all in a round with them, have the round of
``Engine``, which gives the same.
`kernels/round.h` keeps a request from round to round. If something else happened to it in between, its length shows it.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Sequence
from typing import Any

import torch

from sakiyomi.cache.eviction import ManagedCache
from sakiyomi.core.errors import RemovedError
from sakiyomi.core.outputs import Step
from sakiyomi.core.tree import Draft, Verdict
from sakiyomi.drafters.base import Context, Drafter
from sakiyomi.drafters.merged import MergedDrafter
from sakiyomi.drafters.model import ModelDrafter
from sakiyomi.drafters.native_texts import LONG, NativeTexts
from sakiyomi.drafters.native_trees import TreeSize, seat_tree
from sakiyomi.drafters.text_base import TextDrafter
from sakiyomi.engine.native_turns import PassTables, Turn, judged, pack_draft, size_of, watched
from sakiyomi.engine.request import Request
from sakiyomi.engine.speculation import DraftBatch, RoundClock, SpeculationController
from sakiyomi.kernels.native import numbers
from sakiyomi.model_executor.features import PassOutput
from sakiyomi.model_executor.kernel_rounds import Committed, Drafting, KernelRounds, Places
from sakiyomi.model_executor.runner import ModelRunner
from sakiyomi.sampling.verifiers import Rows

logger = logging.getLogger("sakiyomi")
_NO_LOGITS = torch.empty(0)


class NativeRounds:
    """Runs rounds of an engine's requests.

    Args:
        target: scores drafts.
        drafter: of the engine.
        speculation: learns from the rounds.
    """

    def __init__(self, target: ModelRunner, drafter: Drafter | None, speculation: SpeculationController) -> None:
        self._target, self._speculation = target, speculation
        self._drafter = drafter if type(drafter) is ModelDrafter and drafter.native else None
        self._given = drafter is not None and self._drafter is None  # drafts are given, or found in texts
        self._looking = drafter if isinstance(drafter, TextDrafter | MergedDrafter) else None
        self._texts: NativeTexts | None = None  # where the drafts of this round are found
        self._reads = drafter is not None and drafter.leading > 0  # the drafter is told what rows rank first
        self._wants_states = drafter is not None and drafter.hidden_states is not None
        model = self._drafter.model if self._drafter is not None else None
        self._rounds = KernelRounds(model, target, target.vocab_size, states=self._wants_states)
        self._least = [1] * len(self._rounds.models)
        self._turns: dict[int, Turn] = {}
        self._generation = 0  # of the rounds that know the turns
        self._tables = PassTables()
        self._costs: tuple[Any, Any] = None, None  # of this round

    def end(self, request: int) -> None:
        """The kernels no longer run a request's rounds: it is over, or has changed, or its next round is Python's."""
        turn = self._turns.pop(request, None)
        if turn is not None and turn.number >= 0 and self._generation == self._rounds.generation:
            self._rounds.kernels.sk_leave(self._rounds.number, turn.number)

    def run(self, requests: Sequence[Request], depths: Sequence[int], clock: RoundClock) -> list[Step] | None:
        """A round of these requests, whose drafts grow or are found in the kernels.

        Args:
            requests: with their prompts read.
            depths: of their drafts.
            clock: of the round.

        Returns:
            What was committed; None: nothing was done, drafts are Python's.
        """
        self._texts = self._texts_of(requests)
        return None if self._given and self._texts is None else self._run(requests, depths, None, clock)

    def score(self, requests: Sequence[Request], drafted: DraftBatch, clock: RoundClock) -> list[Step] | None:
        """Score, verify and commit these drafts of Python.

        Returns:
            What was committed; None: nothing was done, the round is Python's.
        """
        if not self._given or any(request.fault is not None for request in requests):
            return None
        self._texts = None
        return self._run(requests, [0] * len(requests), drafted, clock)

    def _run(
        self, requests: Sequence[Request], depths: Sequence[int], drafted: DraftBatch | None, clock: RoundClock
    ) -> list[Step] | None:
        try:
            return self._round(requests, depths, drafted, clock)
        except BaseException:
            # Ctrl-C: the kernels may have committed a round that the requests do not have.
            for request in requests:
                self.end(request.id)
            raise

    def _round(
        self, requests: Sequence[Request], depths: Sequence[int], drafted: DraftBatch | None, clock: RoundClock
    ) -> list[Step] | None:
        drafter, texts = self._drafter, self._texts
        reads = self._looking if texts is not None else drafter
        before = reads.prefill_seconds if reads is not None else 0.0
        done: Drafting | None = None
        try:
            asked = self._begin(requests, depths, drafted.drafts if drafted is not None else None)
            if asked is not None:
                done = self._rounds.run(len(requests), asked, *self._costs)
        except Exception as error:
            logger.debug("a round in the kernels failed: %r", error)
        catching_up = reads.prefill_seconds - before if reads is not None else 0.0
        if done is None:  # no request knows of it
            for request in requests:
                request.stats.prefill_seconds += catching_up
                self.end(request.id)
            return None
        if done.passes and drafter is not None:
            drafter.reader.passes += done.passes
            drafter.reader.took(done.passes, done.besides)
        committed = self._rounds.committed(len(requests))
        if texts is not None and any(depths):
            texts.spent(done.besides + catching_up)
            own = DraftBatch([], done.besides, catching_up, max(found.depth for found in committed), asked=True)
        else:
            own = DraftBatch([], done.seconds, catching_up, done.passes, asked=done.passes > 0)
        clock.scored(requests, drafted or own)
        return self._take(requests, committed, drafted, clock)

    # ------------------------------------------------------------ before the passes

    def _begin(
        self, requests: Sequence[Request], depths: Sequence[int], drafts: Sequence[Draft] | None
    ) -> bytes | None:
        """What to ask of the kernels; None: they cannot.

        Args:
            requests: of the round.
            depths: of drafts that grow there.
            drafts: that are given; None: they grow there.

        Raises:
            MemoryLimitError: there is no room for it.
        """
        target, rounds = self._target, self._rounds
        draft = rounds.models[0]  # the target itself, where there is none

        def places() -> Places:
            behind: list[tuple[int | None, int]] = [(requests[0].slot, len(requests[0].context.tokens) - 1)]
            return behind if self._drafter is None else [self._drafter.place(requests[0].context), *behind]

        able = type(target.eviction) is ManagedCache and rounds.ready(self._least, places)
        if self._generation != rounds.generation:
            self._turns.clear()
            self._generation = rounds.generation
        if not able:
            return None
        turns: list[Turn] = []
        lacking: list[tuple[Context, Turn]] = []
        for request, depth in zip(requests, depths, strict=True):
            length = len(request.context.tokens)
            turn = self._turns.get(request.context.id)
            if turn is None or turn.length != length:
                turn = self._enter(request)
                if turn is None:
                    return None
            turns.append(turn)
            if depth and (turn.seat is None or length - len(turn.seat.held) > LONG):
                lacking.append((request.context, turn))
        if lacking and self._drafter is not None:
            self._seat(self._drafter, lacking)
        if drafts is not None and not self._give(requests, turns, drafts):
            return None
        if self._texts is not None:
            sizes = [
                self._found(self._texts, *each, len(requests)) for each in zip(requests, turns, depths, strict=True)
            ]
        else:
            sizes = [size_of(*each, self._drafter) for each in zip(requests, turns, depths, strict=True)]
        missing = width = 0
        for turn, size in zip(turns, sizes, strict=True):
            if size.depth and turn.seat is not None:
                missing, width = missing + turn.length - len(turn.seat.held), width + size.width
        rows = len(requests) + sum([size.nodes for size in sizes])
        wanted = [max(missing, width), rows][-len(rounds.models) :]
        if not rounds.holds(wanted):  # a new object, which knows no request
            return self._begin(requests, depths, drafts) if rounds.ready(wanted, places) else None
        moved = target.cache.moved or draft.cache.moved
        for request, turn in zip(requests, turns, strict=True):
            turn.reserve(request, target, draft, moved)
        self._costs = (self._texts.prices, None) if self._texts is not None else self._tables.of(sizes, self._drafter)
        return b"".join([size.asked for size in sizes])

    def _enter(self, request: Request) -> Turn | None:
        """Give the kernels a request as it is now; None: they do not run its rounds."""
        self.end(request.id)
        case, context = judged(request, self._drafter, self._target), request.context
        if not case or request.repeats:
            return None
        stops = struct.pack(f"={len(context.stop_ids)}q", *context.stop_ids)
        at = self._rounds.number, case, request.slot, len(context.tokens), request.last, context.tokens[-1]
        number = self._rounds.kernels.sk_enter(*at, len(context.stop_ids), stops)
        turn = self._turns[request.id] = Turn(number, len(context.tokens))
        return turn

    def _texts_of(self, requests: Sequence[Request]) -> NativeTexts | None:
        """Where the drafts of these requests are found; None: not in the kernels, or what they write is known."""
        looking = self._looking
        able = self._target.describable() and self._target.backend.keeps  # merged chains branch, too
        if looking is None or not able or looking.texts is None:
            return None
        kind = looking.texts.kind
        for request in requests:
            known = request.repeats or request.sampler.forced is not None or request.fault is not None
            if known or kind not in request.verifier.takes or watched(request):
                return None
        return looking.texts

    def _found(self, texts: NativeTexts, request: Request, turn: Turn, gamma: int, batch: int) -> TreeSize:
        """How large a request's draft may become that is found in its text; its turn has it too."""
        context = request.context
        text = texts.read(context) if gamma else None
        if text is None:
            if turn.size.depth or not turn.size.asked:
                turn.size = TreeSize.none(turn.number)
            return turn.size
        if turn.text is not text:
            tail = numbers(context.tokens[-LONG:])
            self._rounds.kernels.sk_look_up_in(self._rounds.number, turn.number, text.number, len(tail), tail)
            turn.text = text
        turn.size = TreeSize.found(turn.number, texts.wanted(context, gamma, self._target.sizes[-1] // batch - 1))
        return turn.size

    def _seat(self, drafter: ModelDrafter, lacking: Sequence[tuple[Context, Turn]]) -> None:
        """Have the draft model follow these requests, whose texts it has not read."""
        for (context, turn), seat in zip(lacking, drafter.seats([each for each, _ in lacking]), strict=True):
            turn.seat, turn.seat_room = seat, 0
            if seat is not None:
                state = drafter.tree(context, seat)
                turn.stream = context.noise.fork(drafter.name) if state.drawn else None
                seat_tree(self._rounds, turn.number, state)

    def _give(self, requests: Sequence[Request], turns: Sequence[Turn], drafts: Sequence[Draft]) -> bool:
        """Give the kernels the drafts of a round; False: they do not take one of them."""
        for request, turn, draft in zip(requests, turns, drafts, strict=True):
            if not draft.tree.tokens:  # none was left there: nothing to give
                if turn.size.nodes or not turn.size.asked:
                    turn.size = TreeSize.none(turn.number)
                continue
            numbers: list[int] = []
            packed = pack_draft(request, draft, self._target.vocab_size, numbers)
            if not packed or not (self._target.backend.keeps or draft.tree.is_chain):
                return False
            given = packed, struct.pack(f"={len(numbers)}q", *numbers)
            self._rounds.kernels.sk_draft(self._rounds.number, turn.number, *given)
            turn.size = TreeSize.none(turn.number, len(draft.tree.tokens))
        return True

    # ------------------------------------------------------------ after the passes

    def _take(
        self, requests: Sequence[Request], committed: Sequence[Committed], drafted: DraftBatch | None, clock: RoundClock
    ) -> list[Step]:
        """Take over what a round has committed."""
        steps, rows = [], 0
        features = self._rounds.features(self._target.sizes[-1]) if self._wants_states else None
        drafts = drafted.drafts if drafted is not None else None
        ranked: PassOutput | None = None
        if self._reads and drafted is not None and drafted.asked:
            ranked = PassOutput(self._rounds.logits(), {}, self._target.sizes[-1])
        for i, (request, found) in enumerate(zip(requests, committed, strict=True)):
            try:
                if features is not None:
                    self._speculation.give_states(request, PassOutput(_NO_LOGITS, features), rows, found.path)
                if ranked is not None and drafts is not None:
                    self._speculation.give_ranks(request, drafts[i], ranked, rows)
                steps.append(self._commit(request, found, drafts[i] if drafts is not None else None))
            except Exception as error:
                steps.append(request.fail(error))
            except BaseException:
                # Ctrl-C between cache and tokens: what they hold may no longer belong together.
                request.fail(RemovedError(f"request {request.id} was interrupted in the middle of a round"))
                raise
            rows += 1 + found.nodes
        kept = [len(step.token_ids) - 1 for step in steps]
        self._speculation.observe(requests, [found.depth for found in committed], kept, rows, clock)
        return steps

    def _commit(self, request: Request, found: Committed, draft: Draft | None) -> Step:
        """Take over what was committed of a request.

        Args:
            request: whose it is.
            found: as the kernels left it.
            draft: that was given, perhaps an empty one; None: it grew there.
        """
        turn, drafter = self._turns[request.context.id], self._drafter
        request.cached += len(found.tokens)
        turn.length += len(found.tokens)
        request.context.noise.counter = found.stream % 2**64
        if draft is not None and draft.tree.tokens:
            verdict = Verdict(
                tuple(found.path), found.tokens[-1], found.kind, tuple(found.refused), tuple(found.chances)
            )
            rows = Rows(_NO_LOGITS, request.sampler, len(request.tokens))  # nobody reads them, see `judged`
            return request.commit(draft, verdict, rows)
        if self._texts is not None:
            members = self._texts.members
            return request.commit_round(found, [members[which].name for which, _ in found.places])
        step = request.commit_round(found, [drafter.name] * len(found.path) if drafter is not None else ())
        if found.places and drafter is not None:
            seat = turn.seat
            assert seat is not None
            if turn.stream is not None:
                turn.stream.counter = found.drawn % 2**64
            seat.held += request.context.tokens[len(seat.held) : found.held]
            seat.sure = len(seat.held)
            if step.finish_reason is None:
                learn = drafter.reader.confidence[request.context.rule].learn
                for rank, scores in found.places:
                    learn(scores, rank if rank >= 0 else None)
        return step

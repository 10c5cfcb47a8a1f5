"""Rounds that the compiled kernels run: draft, score, verify, commit. Python reads what was committed.

Drafts of draft models and of heads grow there, too, those of text drafters are found there, merged ones are both, and
those of others are given. Processors are called back for each row. Requests that want Python between the passes, and
all in a round with them, have the round of ``Engine``, which gives the same.
`kernels/round.h` keeps a request from round to round. If something else happened to it in between, its length shows it.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from sakiyomi.cache.eviction import ManagedCache
from sakiyomi.core.outputs import Step
from sakiyomi.core.tree import Draft
from sakiyomi.drafters.base import Drafter
from sakiyomi.drafters.merged import MergedDrafter
from sakiyomi.drafters.native_texts import LONG, NativeTexts
from sakiyomi.drafters.native_trees import TreeSize
from sakiyomi.drafters.text_base import TextDrafter
from sakiyomi.drafters.tree_reader import GrowingDrafter
from sakiyomi.engine.native_commits import CommittedRounds
from sakiyomi.engine.native_seats import NativeSeats
from sakiyomi.engine.native_turns import (
    FURTHER_COLUMNS,
    NONE,
    AskedRound,
    PassTables,
    Turn,
    judged,
    pack_draft,
    watched,
)
from sakiyomi.engine.request import Request
from sakiyomi.engine.speculation import DraftBatch, RoundClock, SpeculationController
from sakiyomi.kernels.native import numbers
from sakiyomi.model_executor.kernel_rounds import ALONE, MOST_ROUNDS, NOTHING, Further, KernelRounds, Places, Span
from sakiyomi.model_executor.runner import ModelRunner

logger = logging.getLogger("sakiyomi")


class NativeRounds:
    """Runs rounds of an engine's requests.

    Args:
        target: scores drafts.
        drafter: of the engine.
        speculation: learns from the rounds.
    """

    def __init__(self, target: ModelRunner, drafter: Drafter | None, speculation: SpeculationController) -> None:
        self._target, self._speculation = target, speculation
        self._drafter, self._looking = drafter, drafter if isinstance(drafter, TextDrafter | MergedDrafter) else None
        self._wants_states = drafter is not None and drafter.hidden_states is not None
        self._turns: dict[int, Turn] = {}
        self._tables = PassTables()
        self._costs: tuple[Any, Any] = None, None  # of this round
        self._made_for: Any = None
        self._make()

    def _make(self) -> None:
        """Find out what the kernels do of a draft: as long as they are not there, nothing."""
        drafter, target = self._drafter, self._target
        self._made_for = self._backend()
        grower = drafter.grower if isinstance(drafter, MergedDrafter) else drafter
        grower = grower if isinstance(grower, GrowingDrafter) and grower.native else None
        model, around = (grower.model, grower.around) if grower is not None else (None, NOTHING)
        self._rounds = KernelRounds(model, target, target.vocab_size, around=around, leaving=self._leave_all)
        self._seats = NativeSeats(grower, self._rounds) if grower is not None else None
        self._committed = CommittedRounds(self._rounds, self._turns, self._seats, drafter, self._speculation)
        self._least, self._generation = [1] * len(self._rounds.models), 0  # the latter: of rounds that know the turns

    def _backend(self) -> Any:
        """That of the target, if the kernels may run its passes; None: they may not."""
        return self._target.backend if self._target.describable() else None

    def end(self, request: int) -> None:
        """The kernels no longer run a request's rounds: it is over, or has changed, or its next round is Python's."""
        turn = self._turns.pop(request, None)
        if turn is not None and self._generation == self._rounds.generation:
            try:
                if self._seats is not None:
                    self._seats.hand_back(turn)
            finally:
                self._rounds.kernels.sk_leave(self._rounds.number, turn.number)

    def _leave_all(self) -> None:
        """The kernels are going to lose all requests."""
        for request in list(self._turns):
            self.end(request)

    def run(
        self,
        requests: Sequence[Request],
        depths: Sequence[int],
        known: Mapping[int, Draft],
        clock: RoundClock,
        patience: float = 0.0,
    ) -> list[Step] | None:
        """A round of these requests, whose drafts grow or are found in the kernels, and perhaps some more.

        Args:
            requests: with their prompts read.
            depths: of their drafts.
            known: drafts that are known, by their requests' places: see ``SpeculationController.known_drafts``.
            clock: of the round.
            patience: see ``Engine.step``.

        Returns:
            What was committed; None: nothing was done, drafts are Python's.
        """
        if self._made_for is not self._backend():
            self._leave_all()
            self._make()
        texts, seats = self._texts_of(requests), self._seats
        alone = seats is not None and seats.grower is self._drafter
        able = self._drafter is None or alone or texts is not None
        edited = any(request.sampler.edits for request in requests)
        if not able or (seats is not None and not seats.fits(depths, edited=edited)):
            for request in requests if seats is not None else ():
                self.end(request.id)  # its drafter is asked in Python
            return None
        further = self._further(requests, depths) if patience and not known and not edited else 0
        return self._run(AskedRound(requests, depths, known, None, clock, texts, further, patience))

    def score(self, requests: Sequence[Request], drafted: DraftBatch, clock: RoundClock) -> list[Step] | None:
        """Score, verify and commit these drafts of Python.

        Returns:
            What was committed; None: nothing was done, the round is Python's.
        """
        if self._drafter is None or any(request.fault is not None for request in requests):
            return None
        return self._run(AskedRound(requests, [0] * len(requests), dict(enumerate(drafted.drafts)), drafted, clock))

    def _run(self, asked: AskedRound) -> list[Step] | None:
        try:
            return self._round(asked)
        except BaseException:
            # Ctrl-C: the kernels may have committed a round that the requests do not have.
            for request in asked.requests:
                self.end(request.id)
                if asked.texts is not None:
                    asked.texts.forget(request.context)
            raise

    def _round(self, round_: AskedRound) -> list[Step] | None:
        requests, texts, grower = round_.requests, round_.texts, self._seats.grower if self._seats is not None else None
        reads = self._looking if texts is not None else grower
        before = reads.prefill_seconds if reads is not None else 0.0
        read = texts.members[0].prefill_seconds if texts is not None else 0.0
        spans: list[Span] = []
        try:
            asked = self._begin(round_)
            if asked is not None:
                states = self._wants_states and any(self._turns[request.id].seat is None for request in requests)
                further = ALONE if states else self._until(round_)
                spans = self._rounds.run(len(requests), asked, *self._costs, states=states, further=further)
        except Exception as error:
            logger.debug("a round in the kernels failed: %r", error)
        catching_up = reads.prefill_seconds - before if reads is not None else 0.0
        if not spans:  # no request knows of it
            for request in requests:
                if request.sampler.edits:
                    request.sampler.native_edits.raise_interrupt()
                request.stats.prefill_seconds += catching_up
                self.end(request.id)
            return None
        drafting = [span for span in spans if span.passes]
        if drafting and grower is not None:
            seconds, besides = sum([span.seconds for span in drafting]), sum([span.besides for span in drafting])
            grower.ran(sum([span.passes for span in drafting]), seconds, besides)
        if texts is not None and any(round_.depths):
            texts.spent(sum([span.besides for span in spans]) + texts.members[0].prefill_seconds - read)
        return self._committed.take(round_, spans, catching_up)

    # ------------------------------------------------------------ before the passes

    def _begin(self, round_: AskedRound) -> bytes | None:
        """What to ask of the kernels; None: they cannot.

        Raises:
            MemoryLimitError: there is no room for it.
        """
        requests, depths, drafts, texts = round_.requests, round_.depths, round_.drafts, round_.texts
        target, rounds, seats = self._target, self._rounds, self._seats
        draft = rounds.models[0]  # the target itself, where there is none

        def places() -> Places:
            behind: list[tuple[int | None, int]] = [(requests[0].slot, len(requests[0].context.tokens) - 1)]
            one = seats is None or len(rounds.models) == 1
            return behind if one or seats is None else [seats.grower.place(requests[0].context), *behind]

        able = type(target.eviction) is ManagedCache and rounds.ready(self._least, places)
        if self._generation != rounds.generation:
            self._turns.clear()
            self._generation = rounds.generation
        if not able:
            return None
        turns: list[Turn] = []
        for request in requests:
            turn = self._turns.get(request.context.id)
            if turn is None or turn.length != len(request.context.tokens):
                turn = self._enter(request)
                if turn is None:
                    return None
            if request.sampler.edits:
                request.sampler.native_edits.follow(request.context.tokens)
            turns.append(turn)
        if seats is not None and len(drafts) < len(requests):
            asking = [i for i, depth in enumerate(depths) if depth and i not in drafts]
            seats.follow([turns[i] for i in asking if self._asks(turns[i], texts)], max(depths))
        for i, (request, turn, depth) in enumerate(zip(requests, turns, depths, strict=True)):
            if i not in drafts:
                self._size(turn, depth, len(requests), texts)
            elif not self._give(request, turn, drafts[i]):
                return None
        rows = len(requests) + sum([turn.size.nodes for turn in turns])
        wanted = [seats.rows(turns) if seats is not None else 0, rows][-len(rounds.models) :]
        if not rounds.holds(wanted):  # a new object, which knows no request
            return self._begin(round_) if rounds.ready(wanted, places) else None
        moved, more = target.cache.moved or draft.cache.moved, FURTHER_COLUMNS if round_.further else 0
        for request, turn in zip(requests, turns, strict=True):
            turn.reserve(request, target, draft, self._ahead(), moved, more)
        self._costs = self._tables.of([turn.size for turn in turns], seats.grower if seats is not None else None)
        return b"".join([turn.size.asked(turn.number) for turn in turns])

    def _ahead(self) -> int:
        return self._seats.grower.ahead if self._seats is not None else 0

    def _further(self, requests: Sequence[Request], depths: Sequence[int]) -> int:
        """How many rounds like the next one may follow it before anybody looks at what was committed."""
        for request, depth in zip(requests, depths, strict=True):
            params = request.context.params
            learns = self._seats is not None and depth and params.builder != "chain" and not request.policy.adapts
            # What stops a text, and how its next tree looks, is found out in between; others want each step at once.
            if params.stop or learns or request.options.outbox is not None:
                return 0
        return self._speculation.unchanged(requests, MOST_ROUNDS - 1)

    def _until(self, round_: AskedRound) -> Further:
        """How many rounds follow, and how long each text may be before one."""
        if not round_.further:
            return ALONE
        turns = [self._turns[request.id] for request in round_.requests]
        if any(depth and self._lacks(turn, round_.texts) for turn, depth in zip(turns, round_.depths, strict=True)):
            return ALONE
        draft, ahead = self._rounds.models[0], self._ahead()
        ends = [turn.until(request, draft, ahead) for turn, request in zip(turns, round_.requests, strict=True)]
        return Further(round_.further, round_.patience, numbers(ends))

    def _lacks(self, turn: Turn, texts: NativeTexts | None) -> bool:
        """Whether a request that is to draft does not do so yet, because its drafter is still reading its text."""
        return turn.size == NONE or (self._asks(turn, texts) and (turn.seat is None or turn.waits))

    def _enter(self, request: Request) -> Turn | None:
        """Give the kernels a request as it is now; None: they do not run its rounds."""
        self.end(request.id)
        grower = self._seats.grower if self._seats is not None else None
        case, context = judged(request, grower, self._target), request.context
        if not case or request.repeats:
            return None
        stops = struct.pack(f"={len(context.stop_ids)}q", *context.stop_ids)
        at = self._rounds.number, case, request.slot, len(context.tokens), request.last, context.tokens[-1]
        number = self._rounds.kernels.sk_enter(*at, len(context.stop_ids), stops)
        turn = self._turns[request.id] = Turn(context, number, len(context.tokens))
        return turn

    def _texts_of(self, requests: Sequence[Request]) -> NativeTexts | None:
        """Where the drafts of these requests are found; None: not in the kernels, or what they write is known."""
        looking = self._looking
        able = self._target.describable() and self._target.backend.keeps  # merged chains branch, too
        if looking is None or not able or looking.texts is None:
            return None
        kind = looking.texts.kind
        for request in requests:
            if request.fault is not None or kind not in request.verifier.takes or watched(request):
                return None
        return looking.texts

    def _asks(self, turn: Turn, texts: NativeTexts | None) -> bool:
        """Whether a request takes drafts of the member that grows trees."""
        asks, seats = turn.context.asks, self._seats
        return seats is not None and (asks is None or texts is None or seats.grower.name in asks)

    def _size(self, turn: Turn, gamma: int, batch: int, texts: NativeTexts | None) -> None:
        """Decide how large a request's draft may become."""
        context, seats = turn.context, self._seats
        turn.size = seats.size(turn, gamma) if seats is not None and self._asks(turn, texts) else NONE
        text = texts.read(context) if gamma and texts is not None else None
        if text is None or texts is None:
            if texts is not None:  # a merged draft has nothing of the others
                turn.size = NONE
            return
        if turn.text is not text:
            tail = numbers(context.tokens[-LONG:])
            self._rounds.kernels.sk_look_up_in(self._rounds.number, turn.number, text.number, len(tail), tail)
            turn.text = text
        wanted = texts.wanted(context, gamma, self._target.sizes[-1] // batch - 1)
        turn.size = turn.size.finding(wanted)

    def _give(self, request: Request, turn: Turn, draft: Draft) -> bool:
        """Give the kernels a request's draft; False: they do not take it."""
        turn.size = TreeSize.none(len(draft.tree.tokens))
        if not draft.tree.tokens:  # none was left there: nothing to give
            return True
        numbers: list[int] = []
        packed = pack_draft(request, draft, self._target.vocab_size, numbers)
        if not packed or not (self._target.backend.keeps or draft.tree.is_chain):
            return False
        given = packed, struct.pack(f"={len(numbers)}q", *numbers)
        self._rounds.kernels.sk_draft(self._rounds.number, turn.number, *given)
        return True

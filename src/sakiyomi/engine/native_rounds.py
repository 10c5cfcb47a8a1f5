"""Rounds that the compiled kernels run: draft, score, verify, commit. Python reads what was committed.

Used for requests that draft chains or trees with a draft model, or nothing, where no Python callback runs between the
passes. All others, and all requests in a round with them, have the round of ``Engine``, which gives the same.
`kernels/round.h` keeps a request from round to round. If something else happened to it in between, its length shows it.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Sequence
from typing import Any

from sakiyomi.cache.eviction import FullCache
from sakiyomi.core.errors import RemovedError
from sakiyomi.core.outputs import FinishReason, Step
from sakiyomi.drafters.base import Drafter
from sakiyomi.drafters.model import LONG, ModelDrafter
from sakiyomi.drafters.native_trees import seat_tree
from sakiyomi.engine.native_turns import PassTables, Turn, judged, size_of
from sakiyomi.engine.request import Request, RoundVerdict
from sakiyomi.engine.speculation import DraftBatch, RoundClock, SpeculationController
from sakiyomi.model_executor.kernel_rounds import Drafting, KernelRounds, Places
from sakiyomi.model_executor.runner import ModelRunner
from sakiyomi.sampling.verifiers.native import KINDS

logger = logging.getLogger("sakiyomi")
_HEAD = 10  # numbers before the tokens of a request, see Rounds::write in round.h
_REASONS: tuple[FinishReason | None, ...] = (None, "stop", "length")


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
        self._able = drafter is None or self._drafter is not None
        model = self._drafter.model if self._drafter is not None else None
        self._rounds = KernelRounds(model, target, target.vocab_size)
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
        """A round of these requests.

        Args:
            requests: with their prompts read.
            depths: of their drafts.
            clock: of the round.

        Returns:
            What was committed; None: nothing was done, the round is Python's.
        """
        if not self._able:
            return None
        drafter = self._drafter
        before = drafter.prefill_seconds if drafter is not None else 0.0
        done: Drafting | None = None
        try:
            asked = self._begin(requests, depths)
            if asked is not None:
                done = self._rounds.run(len(requests), asked, *self._costs)
        except Exception as error:
            logger.debug("a round in the kernels failed: %r", error)
        catching_up = drafter.prefill_seconds - before if drafter is not None else 0.0
        if done is None:  # no request knows of it
            for request in requests:
                request.stats.prefill_seconds += catching_up
                self.end(request.id)
            return None
        if done.passes and drafter is not None:
            drafter.reader.passes += done.passes
            drafter.reader.took(done.passes, done.besides)
        clock.scored(requests, DraftBatch([], done.seconds, catching_up, done.passes, done.passes > 0))
        return self._take(requests, clock)

    def _take(self, requests: Sequence[Request], clock: RoundClock) -> list[Step]:
        """Read what a round has committed."""
        whole, real = self._rounds.whole, self._rounds.real
        steps, levels, kept, rows = [], [], [], 0
        at = done = 0
        for request in requests:
            accepted, began, first = whole[at + 4], at, done
            end, middle = at + _HEAD + accepted + 1, done + accepted + 1
            at, done = end + 1 + 2 * whole[end], middle + accepted
            places = []
            for i in range(end + 1, at, 2):
                rank, listed = whole[i : i + 2]
                scores = real[done : done + listed] if listed > 1 else ()
                places.append((rank, scores))
                done += len(scores)
            step = self._commit(request, whole[began:end], real[first:middle], real[middle : middle + accepted], places)
            steps.append(step)
            rows += 1 + whole[began + 2]
            levels.append(whole[began + 3])
            kept.append(len(step.token_ids) - 1)
        self._speculation.observe(requests, levels, kept, rows, clock)
        return steps

    # ------------------------------------------------------------ before the passes

    def _begin(self, requests: Sequence[Request], depths: Sequence[int]) -> bytes | None:
        """What to ask of the kernels; None: they cannot.

        Raises:
            MemoryLimitError: there is no room for it.
        """
        target, rounds = self._target, self._rounds
        draft = rounds.models[0]  # the target itself, where there is none

        def places() -> Places:
            behind: list[tuple[int | None, int]] = [(requests[0].slot, len(requests[0].context.tokens) - 1)]
            return behind if self._drafter is None else [self._drafter.place(requests[0].context), *behind]

        able = type(target.eviction) is FullCache and rounds.ready([1] * len(rounds.models), places)
        if self._generation != rounds.generation:
            self._turns.clear()
            self._generation = rounds.generation
        if not able:
            return None
        turns, lacking = [], False
        for request, depth in zip(requests, depths, strict=True):
            length = len(request.context.tokens)
            turn = self._turns.get(request.context.id)
            if turn is None or turn.length != length:
                turn = self._enter(request)
                if turn is None:
                    return None
            turns.append(turn)
            if depth and (turn.seat is None or length - len(turn.seat.held) > LONG):
                lacking = True
        if lacking:
            self._seat(requests, turns, depths)
        sizes = [size_of(*each, self._drafter) for each in zip(requests, turns, depths, strict=True)]
        missing = width = 0
        for turn, size in zip(turns, sizes, strict=True):
            if size.depth:
                assert turn.seat is not None
                missing, width = missing + turn.length - len(turn.seat.held), width + size.width
        rows = len(requests) + sum([size.nodes for size in sizes])
        if not rounds.ready([max(missing, width), rows][-len(rounds.models) :], places):
            return None
        if self._generation != rounds.generation:  # made anew: it knows none of them
            return self._begin(requests, depths)
        moved = target.cache.moved or draft.cache.moved
        for request, turn in zip(requests, turns, strict=True):
            turn.reserve(request, target, draft, moved)
        self._costs = self._tables.of(sizes, self._drafter)
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

    def _seat(self, requests: Sequence[Request], turns: Sequence[Turn], depths: Sequence[int]) -> None:
        """Have the draft model follow those that draft and whose text it has not read."""
        drafter, lacking = self._drafter, []
        for request, turn, depth in zip(requests, turns, depths, strict=True):
            if depth and (turn.seat is None or turn.length - len(turn.seat.held) > LONG):
                lacking.append((request.context, turn))
        if not lacking or drafter is None:
            return
        for (context, turn), seat in zip(lacking, drafter.seats([each for each, _ in lacking]), strict=True):
            turn.seat, turn.seat_room = seat, 0
            if seat is not None:
                state = drafter.tree(context, seat)
                turn.stream = context.noise.fork(drafter.name) if state.drawn else None
                seat_tree(self._rounds, turn.number, state)

    # ------------------------------------------------------------ what comes of them

    def _commit(
        self,
        request: Request,
        whole: list[int],
        chances: list[float],
        probs: list[float],
        places: Sequence[tuple[int, Sequence[float]]],
    ) -> Step:
        """Take what the kernels have committed of a request.

        Args:
            request: whose it is.
            whole: numbers, and behind them the tokens.
            chances: of the tokens.
            probs: what the draft gave those of its own.
            places: where the target came to in the tree: which of the candidates it chose (-1: none), and their scores.
        """
        used, ended, nodes, _, accepted, refused, kind, held, stream, drawn = whole[:_HEAD]
        verdict = RoundVerdict(
            whole[_HEAD:], used, _REASONS[ended], nodes, accepted, refused, KINDS[kind], chances, probs
        )
        turn, drafter = self._turns[request.context.id], self._drafter
        try:
            request.cached += accepted + 1
            turn.length += accepted + 1
            request.context.noise.counter = stream % 2**64
            step = request.commit_round(verdict, drafter.name if drafter is not None else "")
            if places and drafter is not None:
                seat = turn.seat
                assert seat is not None
                if turn.stream is not None:
                    turn.stream.counter = drawn % 2**64
                seat.held += request.context.tokens[len(seat.held) : held]
                seat.sure = len(seat.held)
                if step.finish_reason is None:
                    learn = drafter.reader.confidence[request.context.rule].learn
                    for rank, scores in places:
                        learn(scores, rank if rank >= 0 else None)
            return step
        except Exception as error:
            return request.fail(error)
        except BaseException:
            # Ctrl-C between cache and tokens: what they hold may no longer belong together.
            request.fail(RemovedError(f"request {request.id} was interrupted in the middle of a round"))
            raise

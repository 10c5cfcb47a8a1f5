"""Rounds that the compiled kernels run: draft, score, verify, commit. Python runs the passes that the kernels have no
program for (`model_executor/program.py`), and reads what came of it.

That is so for requests that draft chains or trees with a draft model of their own, or nothing, where no code of Python
has a say between the passes. All others, and any in a round with them, have the round of ``Engine``, which
gives the same.
`kernels/round.h` keeps a request from round to round; whatever else happens to it in between shows in its length.
"""

from __future__ import annotations

import ctypes
import logging
import struct
import time
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from sakiyomi.cache.eviction import FullCache
from sakiyomi.core.errors import RemovedError, UnsupportedError
from sakiyomi.core.outputs import FinishReason, Step
from sakiyomi.drafters.base import Drafter
from sakiyomi.drafters.model import LONG, ModelDrafter
from sakiyomi.drafters.native_trees import pack_ask
from sakiyomi.engine.native_turns import PassTables, Turn, judged, size_of
from sakiyomi.engine.request import Request, RoundVerdict
from sakiyomi.engine.speculation import DraftBatch, RoundClock, SpeculationController
from sakiyomi.kernels.build import loaded
from sakiyomi.kernels.native import numbers
from sakiyomi.model_executor.attention.registry import PassForward
from sakiyomi.model_executor.program import Program
from sakiyomi.model_executor.runner import ModelRunner
from sakiyomi.sampling.verifiers.native import HALF, KINDS

logger = logging.getLogger("sakiyomi")
OFTEN = 8  # rounds after which passes' clocks are read again
_PASSES = 256  # as most_passes in round.h
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
        self._models = [self._drafter.model, target] if self._drafter is not None else [target]
        self._turns: dict[int, Turn] = {}
        self._kernels: Any = None
        self._rounds = 0  # in the kernels
        self._made_for: list[Any] = []
        self._rows = [0] * len(self._models)  # passes up to so many were proven right
        self._passes: dict[int, tuple[PassForward, Tensor, Tensor]] = {}  # as the kernels name them
        self._checked: set[int] = set()
        self._found: tuple[Any, Any, Any] = (), (), ()
        self._since = 0
        self._tables = PassTables()
        self._costs: tuple[Any, Any] = None, None  # of this round

    def __del__(self) -> None:
        if self._rounds:
            self._kernels.sk_free_rounds(self._rounds)

    def end(self, request: int) -> None:
        """The kernels no longer run a request's rounds: it is over, or has changed, or its next round is Python's."""
        turn = self._turns.pop(request, None)
        if turn is not None and turn.number >= 0:
            self._kernels.sk_leave(self._rounds, turn.number)

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
        asked: bytes | None = None
        times: list[tuple[int, float]] | None = None
        try:
            asked = self._begin(requests, depths)
            times = self._replay(len(requests), asked) if asked else None
        except Exception as error:
            logger.debug("a round in the kernels failed: %r", error)
        catching_up = drafter.prefill_seconds - before if drafter is not None else 0.0
        if asked is None or times is None:  # no request knows of it
            for request in requests:
                request.stats.prefill_seconds += catching_up
                self.end(request.id)
            return None
        seconds = self._count(times)
        drafted = DraftBatch([], seconds, catching_up, len(times) - 1, len(times) > 1)
        clock.scored(requests, drafted)
        ints, doubles, _ = self._found
        whole, real = ints[: ints[0]], doubles[: ints[1]]
        steps, levels, kept, rows = [], [], [], 0
        at, done = 2, 0
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
        target, draft = self._target, self._models[0]  # the target itself, where there is none
        if type(target.eviction) is not FullCache or not target.describable():
            return None
        if draft is not target and not draft.describable():
            return None
        made_for = self._made_for
        same = made_for and made_for[0] is draft.recorder and made_for[-1] is target.recorder
        if not same and not self._make([1] * len(self._models), requests[0]):
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
        if rows > self._rows[-1] or max(missing, width) > self._rows[0]:
            wanted = [max(missing, width, self._rows[0]), max(rows, self._rows[-1])][-len(self._models) :]
            return self._begin(requests, depths) if self._make(wanted, requests[0]) else None
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
        at = self._rounds, case, request.slot, len(context.tokens), request.last, context.tokens[-1]
        number = self._kernels.sk_enter(*at, len(context.stop_ids), stops)
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
                tokens: list[int] = []
                state = drafter.tree(context, seat)
                shape = state.builder.shape(1, 1)
                assert shape is not None
                ask = pack_ask(state, shape, None, None, tokens)
                turn.stream = context.noise.fork(drafter.name) if state.drawn else None
                self._kernels.sk_seat(self._rounds, turn.number, ask, struct.pack(f"={len(tokens)}q", *tokens))

    def _make(self, rows: Sequence[int], request: Request) -> bool:
        """Rounds with passes of up to so many rows of each model; whether these are replayed.

        Args:
            rows: by model.
            request: one of the round, in whose slots passes may be compared.
        """
        kernels = loaded()
        behind: list[tuple[int | None, int]] = [(request.slot, len(request.context.tokens) - 1)]
        if self._drafter is not None:
            behind.insert(0, self._drafter.place(request.context))
        asked = zip(self._models, rows, behind, strict=True)
        found = [model.native_passes(count, *place) for model, count, place in asked]
        dtypes = [model.dtype in HALF for model in self._models]
        if kernels is None or None in found or not all(dtypes):
            return False
        self.__del__()
        self._rounds, self._made_for = 0, []  # if what follows is interrupted, nothing refers to them
        self._turns.clear()
        self._passes.clear()
        self._checked.clear()
        tables = []
        for i, (model, known) in enumerate(zip(self._models, found, strict=True)):
            assert known is not None
            passes = {size: model.replayed(size) for size in known[1]}
            tables.append(_described(model, known[0], passes))
            which = i + 2 - len(self._models)  # 1: the target
            self._passes |= {2 * size + which: found for size, found in passes.items()}
        self._found = _results(self._target.sizes[-1])
        if len(tables) == 1:
            tables.insert(0, numbers([0] * 4))
        self._kernels = kernels
        self._rounds = kernels.sk_rounds(tables[1], tables[0], *self._found)
        self._rows = [_compared(model, count) for model, count in zip(self._models, rows, strict=True)]
        self._made_for = [model.recorder for model in self._models]
        return True

    # ------------------------------------------------------------ the passes, and what comes of them

    def _replay(self, count: int, asked: bytes) -> list[tuple[int, float]] | None:
        """Run the passes of a round: which, and the seconds of each; None: a row holds no numbers."""
        kernels, rounds, passes, now = self._kernels, self._rounds, self._passes, time.perf_counter
        held: list[Tensor] = []
        with self._models[0].lock, self._target.lock:
            code = kernels.sk_round(rounds, count, asked, *self._costs)
            while code > 0:
                replay, ids, positions = passes[code]
                began = now()
                logits = replay(ids, positions)[0]
                spent = now() - began
                held.append(logits)  # the kernels may look at it again
                if code not in self._checked and not _readable(logits, self._target if code % 2 else self._models[0]):
                    self._able = False
                    raise UnsupportedError(f"logits {logits.dtype} of width {logits.shape[-1]}")
                self._checked.add(code)
                code = kernels.sk_pass(rounds, code, logits.data_ptr(), spent)
        if code:
            return None
        times, drafting = _times(self._found[2])
        if len(times) > 1 and self._drafter is not None:
            self._drafter.reader.took(len(times) - 1, drafting - sum([spent for _, spent in times[:-1]]))
        return times

    def _count(self, times: Sequence[tuple[int, float]]) -> float:
        """Add up what passes took, and give the seconds of the draft model's."""
        seconds = 0.0
        for _, spent in times[:-1]:
            seconds += spent
        target, scoring = times[-1]
        self._target.forward_seconds += scoring
        self._since += 1
        if self._since <= OFTEN or not self._since % OFTEN:  # a clock is read now and then: its mean hardly moves
            self._target.clock.add(target // 2, True, scoring)
            by_rows = dict(times[:-1])
            for code, spent in by_rows.items():
                self._models[0].clock.add(code // 2, True, spent)
        if self._drafter is not None:
            self._models[0].forward_seconds += seconds
            self._drafter.reader.passes += len(times) - 1
        return seconds

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


def _times(found: Sequence[float]) -> tuple[list[tuple[int, float]], float]:
    """Which passes a round has run, with the seconds of each; and those up to the last one's beginning."""
    ran = found[2 : 2 + 2 * int(found[0])]
    return [(int(which), spent) for which, spent in zip(ran[::2], ran[1::2], strict=True)], found[1]


def _results(rows: int) -> tuple[Any, Any, Any]:
    """Where the kernels write what came of a round of so many rows, and the clocks of its passes: each row has a token,
    and may be a place with no more candidates than there are rows.
    """
    doubles = [(ctypes.c_double * count)() for count in ((2 + rows) * rows, 2 + 2 * _PASSES)]
    return numbers([0] * ((_HEAD + 4) * rows)), doubles[0], doubles[1]


def _described(model: ModelRunner, session: int, passes: Mapping[int, tuple[PassForward, Tensor, Tensor]]) -> Any:
    """A model and its passes by size, as the kernels take them (sk_rounds in `round.h`)."""
    places = [ids.data_ptr() for _, ids, _ in passes.values()]
    programs = [_program(each, model) for each, _, _ in passes.values()]
    return numbers([session, model.vocab_size, HALF[model.dtype], len(passes), *passes, *places, *programs])


def _compared(model: ModelRunner, rows: int) -> int:
    """Rows up to which passes of all sizes are as right as they get: at least so many, which were asked for."""
    assert model.recorder is not None
    most, recorder = model.padded(rows), model.recorder
    for size in model.sizes:
        if size > most and recorder.has(size) and size not in recorder.ready:
            break
        most = max(most, size)
    return most


def _readable(logits: Tensor, model: ModelRunner) -> bool:
    """Whether logits are as the kernels read them."""
    return logits.dtype == model.dtype and logits.is_contiguous() and logits.shape[-1] == model.vocab_size


def _program(replay: PassForward, model: ModelRunner) -> int:
    """The number of a program that gives logits as the kernels read them; 0: Python runs these passes."""
    if isinstance(replay, Program) and replay.gives(model.vocab_size, model.dtype):
        return replay.number
    return 0

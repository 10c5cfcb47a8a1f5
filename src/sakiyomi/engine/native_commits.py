"""What rounds in the kernels have committed, taken over by requests and drafter, and learned from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from sakiyomi.core.errors import RemovedError
from sakiyomi.core.outputs import Step
from sakiyomi.core.running_mean import running_mean
from sakiyomi.core.tree import Draft, Verdict
from sakiyomi.drafters.base import Drafter
from sakiyomi.engine.native_seats import NativeSeats
from sakiyomi.engine.native_turns import AskedRound, Turn
from sakiyomi.engine.request import Request
from sakiyomi.engine.speculation import DraftBatch, SpeculationController, Timed
from sakiyomi.model_executor.features import PassOutput
from sakiyomi.model_executor.kernel_rounds import Committed, KernelRounds, Span
from sakiyomi.sampling.verifiers import Rows

_NO_LOGITS = torch.empty(0)


class CommittedRounds:
    """Takes over what rounds have committed.

    Args:
        rounds: of the kernels.
        turns: what they know of each request, by its number.
        seats: of a drafter whose trees grow there.
        drafter: of the engine.
        speculation: learns from the rounds.
    """

    def __init__(
        self,
        rounds: KernelRounds,
        turns: Mapping[int, Turn],
        seats: NativeSeats | None,
        drafter: Drafter | None,
        speculation: SpeculationController,
    ) -> None:
        self._rounds, self._turns, self._seats, self._speculation = rounds, turns, seats, speculation
        self._outside: dict[int, float] = {}  # mean seconds of a round outside of the kernels, by number of requests
        self._made = 0  # passes that were recorded or compared so far
        self._reads = drafter is not None and drafter.leading > 0  # the drafter is told what rows rank first
        self._names = [part.name for part in drafter.members or [drafter]] if drafter is not None else []

    def take(self, round_: AskedRound, spans: Sequence[Span], catching_up: float) -> list[Step]:
        """Take over what rounds have committed, and learn from them. Returns their steps.

        Args:
            round_: the first one.
            spans: of each.
            catching_up: seconds before the first one, of the drafter's passes over prompts.
        """
        requests, steps, count = round_.requests, list[Step](), len(round_.requests)
        committed = self._rounds.committed(count, len(spans))
        rounds = [committed[i : i + count] for i in range(0, len(committed), count)]
        drafted = [self._drafted(round_, span, found) for span, found in zip(spans, rounds, strict=True)]
        drafted[0] = drafted[0]._replace(catching_up=drafted[0].catching_up + catching_up)
        clock = round_.clock
        clock.scored(requests, drafted[0]._replace(seconds=sum([part.seconds for part in drafted])))
        kept = [self._take_round(round_, found, steps) for found in rounds]
        outside = clock.timed().seconds - sum([span.whole for span in spans])
        shares = self._shares(outside, count, len(spans)) if round_.patience else [outside]
        for span, found, part, each, share in zip(spans, rounds, drafted, kept, shares, strict=True):
            rows = sum([1 + own.nodes for own in found])
            took = Timed(span.whole + share, span.scoring, part)
            self._speculation.observe(requests, [own.depth for own in found], each, rows, took)
        if len(spans) > 1:
            self._speculation.skip(len(spans) - 1)
        return steps

    def _shares(self, seconds: float, requests: int, rounds: int) -> list[float]:
        """What each round of a call has of the seconds outside of the kernels: the mean of the last calls. One alone in
        its call takes more of them than others, and rounds with drafts are compared with rounds without.

        Where passes were recorded or compared, all of that is the first round's, which is known to be no measure.
        """
        made, self._made = self._made, sum([model.clock.made for model in self._rounds.models])
        known = self._outside.get(requests)
        if made != self._made:
            return [seconds, *[known or 0.0] * (rounds - 1)]
        mean = self._outside[requests] = running_mean(known, seconds / rounds)
        return [mean] * rounds

    def _drafted(self, round_: AskedRound, span: Span, found: Sequence[Committed]) -> DraftBatch:
        """What a round drafted."""
        if round_.drafted is not None:
            return round_.drafted
        if round_.texts is not None and any(round_.depths) and not span.passes:
            own = DraftBatch([], span.besides, 0.0, max([each.depth for each in found]), asked=True)
        else:
            own = DraftBatch([], span.seconds, 0.0, span.passes, asked=span.passes > 0)
        return own._replace(repeats=True) if round_.drafts else own

    def _take_round(self, round_: AskedRound, committed: Sequence[Committed], steps: list[Step]) -> list[int]:
        """Take over what a round has committed, and append its steps. Returns how many draft tokens of each request."""
        requests, drafts, drafted = round_.requests, round_.drafts, round_.drafted
        kept, rows = [], 0
        most = self._speculation.target.sizes[-1]  # rows of a pass
        features = self._rounds.features(most)
        ranked: PassOutput | None = None
        if self._reads and drafted is not None and drafted.asked:
            ranked = PassOutput(self._rounds.logits(), {}, most)
        for i, (request, found) in enumerate(zip(requests, committed, strict=True)):
            if request.over:  # it has failed in the round before
                kept.append(0)
                continue
            try:
                if features and self._turns[request.id].seat is None:
                    self._speculation.give_states(request, PassOutput(_NO_LOGITS, features), rows, found.path)
                if ranked is not None:
                    self._speculation.give_ranks(request, drafts[i], ranked, rows)
                step = self._commit(request, found, drafts.get(i), found_there=round_.texts is not None)
            except Exception as error:
                step = request.fail(error)
            except BaseException:
                # Ctrl-C between cache and tokens: what they hold may no longer belong together.
                request.fail(RemovedError(f"request {request.id} was interrupted in the middle of a round"))
                raise
            steps.append(step)
            kept.append(len(step.token_ids) - 1)
            rows += 1 + found.nodes
        return kept

    def _commit(self, request: Request, found: Committed, draft: Draft | None, *, found_there: bool) -> Step:
        """Take over what was committed of a request.

        Args:
            request: whose it is.
            found: as the kernels left it.
            draft: that was given, perhaps an empty one; None: it grew there.
            found_there: it was perhaps found in the request's text.
        """
        turn, seats = self._turns[request.context.id], self._seats
        request.cached += len(found.tokens)
        turn.length += len(found.tokens)
        request.context.noise.counter = found.stream % 2**64
        if draft is not None and draft.tree.tokens:
            verdict = Verdict(
                tuple(found.path), found.tokens[-1], found.kind, tuple(found.refused), tuple(found.chances)
            )
            rows = Rows(_NO_LOGITS, request.sampler, len(request.tokens))  # nobody reads them, see `judged`
            step = request.commit(draft, verdict, rows)
        elif found_there:
            step = request.commit_round(found, [self._names[which] for which in found.members])
        else:
            step = request.commit_round(found, [seats.grower.name] * len(found.path) if seats is not None else ())
        if seats is not None:
            seats.took(turn, found, over=step.finish_reason is not None)
        return step

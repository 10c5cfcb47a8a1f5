"""Decides with each request's policy how deep to draft, asks the drafter for drafts, checks them, and times them.

Drafters are untrusted plug-ins. If ``propose`` raises, all requests of that call continue without the drafter. If one
draft is invalid, only its request does. The output has the target's distribution with every drafter whose ``probs`` are
those that its tokens were drawn from; greedy and coupled text is the same for all of them.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from sakiyomi.core.errors import DraftError, InputError
from sakiyomi.core.params import SamplingParams
from sakiyomi.core.running_mean import running_mean
from sakiyomi.core.tree import Draft
from sakiyomi.drafters.base import Drafter, tell
from sakiyomi.drafters.draft_length import FAR, FAR_NODES, MOST, MOST_NODES, Costs
from sakiyomi.engine.pace import Pace
from sakiyomi.engine.request import GIVEN, Request
from sakiyomi.model_executor.features import HEAD, PassOutput
from sakiyomi.model_executor.runner import ModelRunner
from sakiyomi.sampling.probs import leading
from sakiyomi.sampling.verifiers import Verifier, check_fits, choose_verifier

logger = logging.getLogger("sakiyomi")
FORCED = 15  # most tokens that a grammar forces are drafted at a time: a model may spell the text otherwise
MANY, TRIED = 8, 4  # of so many one in TRIED drafts (at least TRIED do), as long as it is not known whether that pays
SUDDEN = 1.5  # a round that takes this many times the one before is compared with what its passes usually take


class DraftBatch(NamedTuple):
    """What a round drafted, and what that took.

    Attributes:
        drafts: one for each request, empty where nothing was proposed.
        seconds: inside the drafter's forwards.
        catching_up: seconds inside those over prompts, which are not counted above.
        passes: draft passes.
        asked: the drafter was asked, even if it proposed nothing.
        repeats: what requests write was known, so that the round says nothing about the drafter.
    """

    drafts: list[Draft]
    seconds: float = 0.0
    catching_up: float = 0.0
    passes: int = 0
    asked: bool = False
    repeats: bool = False


class Timed(NamedTuple):
    """What a round took.

    Attributes:
        seconds: all of it, without those that drafters spent on prompts.
        scoring: inside the target's forward.
        drafted: what its drafts took.
    """

    seconds: float
    scoring: float
    drafted: DraftBatch


class RoundClock:
    """Wall-clock timings of one round.

    Args:
        target: scores its drafts.

    Attributes:
        scoring: seconds inside the target's forward.
        drafted: the drafts that it scored.
    """

    __slots__ = ("_before", "_began", "_target", "drafted", "scoring")

    def __init__(self, target: ModelRunner) -> None:
        self._target = target
        self._began, self._before = time.perf_counter(), target.forward_seconds
        self.scoring, self.drafted = 0.0, DraftBatch([])

    def scored(self, requests: Sequence[Request], drafted: DraftBatch) -> None:
        """Add the seconds of drafting and scoring to each request's statistics."""
        self.scoring = scoring = self._target.forward_seconds - self._before
        self.drafted = drafted
        for request in requests:
            stats = request.stats
            stats.prefill_seconds += drafted.catching_up
            stats.draft_seconds += drafted.seconds
            stats.score_seconds += scoring

    def timed(self) -> Timed:
        """What it took so far."""
        seconds = time.perf_counter() - self._began - self.drafted.catching_up
        return Timed(seconds, self.scoring, self.drafted)


class SpeculationController:
    """The drafter of an engine, what speculation costs, and the requests that run without it.

    Args:
        target: scores the drafts; its passes are what they cost.
        drafter: None: rounds are plain.
        exact: drafts stay small enough for one pass of a row count that was tested.
        strict: a drafter's fault ends the request.

    Attributes:
        broken: requests that continue without the drafter after it failed.
    """

    def __init__(self, target: ModelRunner, drafter: Drafter | None, *, exact: bool, strict: bool) -> None:
        drafters = () if drafter is None else (drafter, *drafter.members)
        self._models = [target, *(each.model for each in drafters if each.model is not None)]
        self._wanted = drafter.hidden_states if drafter is not None else None
        if drafter is not None and self._wanted is not None:
            if self._wanted.rows == "all" and HEAD in self._wanted.layers:
                raise InputError(
                    f"drafter {drafter.name} asks for all rows of what the head reads; ask for the outputs of decoder "
                    "layers, or for the last row"
                )
            target.capture(self._wanted.layers)
            for model in self._models[1:]:  # some run layers of the target
                model.settle()
        self.target, self.drafter, self.broken = target, drafter, 0
        self._exact, self._strict = exact, strict
        self._paces: dict[int, Pace] = {}  # by requests, the same for all that make a pass of the same rows
        self._timed: set[int] = set()
        self._overhead, self._step = 1e-4, 0.0
        self._scores: tuple[int, Callable[[int], float]] | None = None  # version of the clock, and seconds by rows
        self._reading = 0.0  # seconds that it takes for a token of such a text
        self._made = sum(model.clock.made for model in self._models)
        self._tried: list[Request] = []  # which of this round's requests try drafts for all; empty: each for itself
        self._deciding: list[Request] = []  # whose policies have decided about this round

    def depths(self, requests: Sequence[Request]) -> list[int]:
        """Depth of each request's draft; 0 without a drafter, where drafting is not faster, or at the text's end."""
        drafter, self._deciding = self.drafter, []
        if drafter is None:
            return [0] * len(requests)
        asking = [request for request in requests if not (request.context.given and request.repeats)]
        pace = self._pace(len(asking))
        # The first round is plain and measures what a pass costs: a trial pass would commit nothing.
        unknown = bool(asking) and not pace.plain and self.target.known_seconds(len(asking)) is None
        few, self._tried = 0, []
        adapting = all(request.policy.adapts for request in asking)
        if adapting and len(asking) >= MANY and not pace.rate:
            unknown |= not pace.plain  # what a trial costs is told by the difference
            few = self.target.padded(len(asking) + 2) - len(asking)  # rows that a pass of the next size has for drafts
            self._tried = _trying(asking)[: max(1, few // 2)]
        if (unknown or pace.undrafted) and adapting:
            return [0] * len(requests)
        costs = functools.cache(lambda: self._costs(len(asking)))  # the same for all, and not always asked for
        depths = []
        for request in requests:
            context, depth = request.context, 0
            room = _room(request)
            waits = bool(self._tried) and request not in self._tried
            if room > 0 and not waits and not request.undrafted and not (context.given and request.repeats):
                depth, nodes, worth = request.policy.next(costs)
                self._deciding.append(request)
                left = request.last - len(request.tokens) - 1  # of the text; `room` ends at the next eviction
                if depth and request.policy.adapts and not self._worth_reading(request, left, len(asking)):
                    depth = 0
                if depth and self._tried:  # trials take no larger pass
                    nodes = min(nodes, max(1, few // len(self._tried)))
                    depth = min(depth, max(1, nodes // max(1, len(drafter.parts)) if worth is None else nodes - 1))
                if depth:
                    context.slot, context.nodes = request.seat, nodes
                    context.worth = worth.within(room) if worth is not None else None
            depths.append(min(depth, room) if depth else 0)
        return depths

    def unchanged(self, requests: Sequence[Request], most: int) -> int:
        """For how many rounds after the next one, of so many, ``depths`` would say the same, by what is known now."""
        if self.drafter is not None and all(request.policy.adapts for request in requests):
            pace = self._pace(len(requests))
            trying = len(requests) >= MANY and not pace.rate and not pace.undrafted
            most = pace.unchanged(most) if pace.plain and not trying and not self._tried else 0
        return min([request.policy.unchanged(most) for request in self._deciding], default=most)

    def skip(self, rounds: int) -> None:
        """Count rounds that were run like the last one, without ``depths``."""
        for request in self._deciding:
            request.policy.skip(rounds)

    def _worth_reading(self, request: Request, room: int, batch: int) -> bool:
        """Whether drafts of `room` further tokens save more time than the drafter needs to read the text.

        All requests of the round wait for that.
        """
        if request.followed or not self._reading:
            return True
        pace = self._pace(batch)
        if pace.rate * pace.plain <= 1:  # whether to draft at all is not decided here
            return True
        return batch * len(request.tokens) * self._reading < room * (pace.plain - 1 / pace.rate)

    def known_drafts(self, requests: Sequence[Request]) -> dict[int, Draft]:
        """Drafts of requests whose next tokens are known without a drafter, by their places: of a given text, as many
        as the largest size of a tested pass has rows for, or forced by a grammar.
        """
        found = {}
        for i, request in enumerate(requests):
            forced, given = request.sampler.forced, request.context.given
            repeats = bool(given) and request.repeats
            if forced is None and not repeats:
                continue
            most = max(0, min(_room(request), self.target.sizes[-1] - 1))
            if repeats:
                found[i] = Draft.chain(given[len(request.output) :][:most], GIVEN)
            elif tokens := forced(request.tokens)[: min(most, FORCED)] if forced is not None else ():
                with suppress(InputError):  # the acceptance rule takes other drafts only
                    found[i] = self._checked(Draft.chain(tokens, "grammar"), request)
        return found

    def propose(self, requests: Sequence[Request], depths: Sequence[int], known: Mapping[int, Draft]) -> DraftBatch:
        """Drafts for a round.

        Args:
            requests: of the round.
            depths: see ``depths``.
            known: see ``known_drafts``: for these the drafter is not asked.
        """
        drafter, drafted = self.drafter, DraftBatch([Draft.empty()] * len(requests))
        depths = [0 if i in known else depth for i, depth in enumerate(depths)]
        if drafter is not None and any(depths):
            seconds, catching_up, passes = drafter.forward_seconds, drafter.prefill_seconds, drafter.passes
            drafts = self._propose(drafter, requests, depths)
            passes = drafter.passes - passes or max((draft.tree.depth for draft in drafts), default=0)
            catching_up = drafter.prefill_seconds - catching_up
            seconds = drafter.forward_seconds - seconds - catching_up
            drafted = DraftBatch(drafts, seconds, catching_up, passes, asked=True)
        if not known:
            return drafted
        return drafted._replace(drafts=[known.get(i, draft) for i, draft in enumerate(drafted.drafts)], repeats=True)

    def give_states(self, request: Request, output: PassOutput, first: int, path: Sequence[int]) -> None:
        """Give the drafter the hidden states that it asked for, of the tokens that a pass has committed.

        Args:
            request: whose draft was verified, its tokens not committed yet.
            output: of the pass.
            first: the request's first row; row i + 1 behind it is node i's.
            path: accepted nodes.
        """
        wanted = self._wanted
        if wanted is None or not output.features:
            return
        rows = [first, *(first + node + 1 for node in path)]
        if wanted.rows == "last":
            request.context.states = {layer: output.features[layer][rows[-1]] for layer in wanted.layers}
        elif request.decoding:  # those of the prompt were given as it was read
            self.give_all_states(request, output, request.cached, rows)

    def give_ranks(self, request: Request, draft: Draft, output: PassOutput, first: int) -> None:
        """Give the drafter the likeliest tokens of a request's rows, if it reads them; nothing is committed yet.

        Args:
            request: whose rows they are.
            draft: that was scored.
            output: of the pass.
            first: the request's first row.
        """
        drafter = self.drafter
        if drafter is None or not drafter.leading or request.undrafted:
            return
        rows = output.logits[first : first + len(draft.tree.tokens) + 1]
        with suppress(InputError):  # a row of a refused node is not a number
            tell(drafter, "rank", request.context, draft.tree, leading(rows, drafter.leading))

    def give_all_states(self, request: Request, output: PassOutput, first: int, rows: slice | list[int]) -> None:
        """Give a drafter that wants all hidden states those in these rows of a pass: of the tokens from `first` on."""
        if self._wanted is not None and self._wanted.rows == "all":
            if not isinstance(rows, slice) and rows[-1] - rows[0] == len(rows) - 1:
                rows = slice(rows[0], rows[-1] + 1)  # to gather rows takes longer
            states = {layer: output.features[layer][rows] for layer in self._wanted.layers}
            tell(self.drafter, "observe", request.context, first, states)

    def observe(
        self, requests: Sequence[Request], depths: Sequence[int], kept: Sequence[int], rows: int, timed: Timed
    ) -> None:
        """Learn from a round: update each request's policy, and the mean seconds of a draft pass and of the rest.

        Args:
            requests: that had the round.
            depths: of their drafts.
            kept: accepted draft tokens of each.
            rows: of the target's pass.
            timed: what the round took.
        """
        made, self._made = self._made, sum([model.clock.made for model in self._models])
        seconds, scoring, drafted = timed
        if not kept or drafted.repeats:
            return
        first = self._made != made  # passes were recorded or compared on the way
        overhead = max(0.0, seconds - drafted.seconds - scoring)
        pace = self._pace(len(kept))
        if first or seconds > SUDDEN * pace.last:
            known = self.target.known_seconds(rows)
            if known is not None:  # the first pass of its size, or other work, is no cost of speculation
                usual = known + drafted.passes * self._step + self._overhead
                seconds = min(seconds, usual if first else 2 * usual)
            elif first and not drafted.asked:
                return  # the next round is timed
        pace.last = seconds
        if not drafted.asked:
            pace.add_plain(seconds)
            return
        if self._tried:
            seconds = pace.reckoned(seconds, len(kept) / len(self._tried))
        unread = 0
        for request, depth, accepted in zip(requests, depths, kept, strict=True):
            request.policy.observe(depth, accepted, seconds)
            if (depth or drafted.catching_up) and not request.followed:
                request.followed = True
                unread += len(request.context.tokens)
        if unread:
            self._reading = running_mean(self._reading or None, drafted.catching_up / unread)
        pace.add_drafted(1 + sum(kept) / (len(self._tried) or len(kept)), seconds)
        if first:
            return
        if drafted.passes:
            self._step = running_mean(self._step or None, drafted.seconds / drafted.passes)
        self._overhead += 0.1 * (overhead - self._overhead)

    # ------------------------------------------------------------ one round

    def _propose(self, drafter: Drafter, requests: Sequence[Request], depths: Sequence[int]) -> list[Draft]:
        drafts = [Draft.empty()] * len(requests)
        wanted = [(i, depth) for i, depth in enumerate(depths) if depth]
        try:
            proposed = drafter.propose([requests[i].context for i, _ in wanted], [gamma for _, gamma in wanted])
            if len(proposed) != len(wanted):
                raise ValueError(f"{len(proposed)} drafts for {len(wanted)} requests; give one for each, in order")
        except Exception as error:
            for i, _ in wanted:
                self._leave_out(drafter, requests[i], error)
            return drafts
        for (i, _), draft in zip(wanted, proposed, strict=True):
            try:
                drafts[i] = self._checked(draft, requests[i])
            except Exception as error:
                self._leave_out(drafter, requests[i], error)
        return drafts

    def _costs(self, batch: int) -> Costs:
        if self._scores is None or self._scores[0] != self.target.clock.version:
            self._scores = self.target.clock.version, functools.cache(self.target.pass_seconds)
        score = self._scores[1]
        if self.target.offloaded:
            depth, nodes = FAR, FAR_NODES
        else:
            # No further than the largest size, which all share: beyond it a row costs more than it can bring, and even
            # to try out what such a pass costs would hold up everybody.
            nodes = min(MOST_NODES, max(1, self.target.sizes[-1] // batch - 1))
            depth = min(MOST, nodes)
        if batch not in self._timed:  # now, and not while a drafter's own time is taken
            self._timed.add(batch)
            for count in range(batch * nodes + 1):
                score(batch + count)
        pace, one_pass = self._pace(batch), self.drafter is not None and self.drafter.one_pass
        return Costs(score, self._step, self._overhead, batch, pace.rate, depth, nodes, pace.plain, one_pass)

    def _pace(self, batch: int) -> Pace:
        """The pace of rounds with about as many requests."""
        pace = self._paces.get(batch)
        if pace is None:
            size = self.target.padded(batch)
            pace = self._paces[batch] = self._paces.setdefault(size, Pace(size))
        return pace

    def _checked(self, draft: Draft, request: Request) -> Draft:
        """The draft, cut to the room that is left; raises what is wrong with it."""
        if not isinstance(draft, Draft):
            raise TypeError(f"a {type(draft).__name__} in place of a Draft")
        if not draft.sound:
            draft.validate(self.target.vocab_size)
        if draft.kind not in request.verifier.takes:
            check_fits(draft.judged_as, request.verifier)
        if len(draft.tree.tokens) > (room := _room(request)):
            draft = draft.cut(room)
        # With exact no larger than a pass that was tested. Draws are counted, not nodes: how many of a level's draws
        # fell together depends on their own values.
        while self._exact and len(draft.draws) >= self.target.sizes[-1]:
            draft = draft.cut(draft.tree.depth - 1)
        return draft

    def _leave_out(self, drafter: Drafter, request: Request, error: Exception) -> None:
        """Continue a request without the drafter, or end it with ``strict``. The first failure is logged."""
        text = f"drafter {drafter.name} failed: {type(error).__name__}: {error}"
        if self._strict:
            request.fault = DraftError(f"{text}; strict=False continues without drafts")
            request.fault.__cause__ = error
        elif not self.broken:
            logger.warning("%s; the request continues without drafts; later failures are not logged", text)
        request.undrafted = True
        self.broken += 1


def _trying(requests: Sequence[Request]) -> list[Request]:
    """Those of many requests that try drafts for all: whose texts the drafter has read, or has the least to read of."""
    able = [request for request in requests if not request.undrafted]
    able.sort(key=lambda request: (not request.followed, len(request.tokens)))
    return able[: max(TRIED, len(requests) // TRIED)]


def verifier_for(drafter: Drafter | None, params: SamplingParams) -> Verifier:
    """The acceptance rule for a request.

    Raises:
        InputError: the rule that was asked for does not take what the drafter proposes.
    """
    if drafter is None:
        return choose_verifier(params, None)
    kind = drafter.kind_for(params)
    return choose_verifier(params, kind, branches=drafter.prefers_coupled and kind != "chain")


def _room(request: Request) -> int:
    """Draft tokens that may still be committed, besides the target's own token, which is in no cache yet."""
    length = len(request.tokens)
    return min(request.last - length - 1, request.boundary - length)

"""Simulates many replicas under load by discrete events, with the costs of rounds measured on one replica.

A replica works in rounds as the engine does: a chunk of prompts, then a pass for all requests whose prompts are
prefilled. Conversations stay cached in its slots between their requests; the least recently used slot is reused first.
Requests are routed by ``routing``, as are those of the real replicas in ``measured.py``.
"""

from __future__ import annotations

import heapq
import random
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol

from sakiyomi.core.checks import at_least
from sakiyomi.core.errors import InputError
from sakiyomi.scale.routing import ranked

CHUNK = 512
"""Prompt tokens of a pass, as in the engine."""
MOST = 4096  # replicas at most


@dataclass(frozen=True)
class Costs:
    """Measured costs of a replica.

    Attributes:
        batches: numbers of requests at once, ascending.
        plain: seconds of a round for each of them, without drafts.
        drafted: the same with drafts as the engine chooses them; empty: no draft.
        tokens: mean tokens per request in such a round.
        prompts: numbers of prompt tokens of a pass, ascending.
        prompt: seconds of each such pass, in the middle of a conversation.
        catching_up: seconds per prompt token for the draft, in a request's first round.
        slots: conversations that the cache holds, running or waiting for their next request.
    """

    batches: tuple[int, ...]
    plain: tuple[float, ...]
    drafted: tuple[float, ...]
    tokens: tuple[float, ...]
    prompts: tuple[int, ...]
    prompt: tuple[float, ...]
    catching_up: float
    slots: int

    def round(self, requests: int) -> tuple[float, float]:
        """Seconds of a round for so many requests, and its tokens per request."""
        if not self.drafted:
            return _between(self.batches, self.plain, requests), 1.0
        return _between(self.batches, self.drafted, requests), _between(self.batches, self.tokens, requests)

    def reading(self, tokens: int) -> float:
        """Seconds of a pass over so many prompt tokens."""
        return _between(self.prompts, self.prompt, tokens) if tokens > self.prompts[0] else self.prompt[0]


def _between(places: Sequence[int], values: Sequence[float], at: int) -> float:
    """Linear interpolation; beyond the last place, extrapolation."""
    if len(places) == 1:
        return values[0]
    i = min(max(bisect_right(places, at), 1), len(places) - 1)
    (x0, x1), (y0, y1) = places[i - 1 : i + 1], values[i - 1 : i + 1]
    return y0 + (y1 - y0) * (at - x0) / (x1 - x0)


@dataclass(frozen=True)
class Load:
    """Conversations that begin at random, and their later requests.

    Attributes:
        rate: conversations that begin in a second.
        seconds: that are simulated.
        turns: requests of each conversation.
        groups: different system prompts, of which some are asked for more often.
        system: tokens of a system prompt.
        user: tokens of what a user says.
        new: tokens of a reply.
        think: mean seconds between a reply and the next request.
        seed: of the conversations.
    """

    rate: float = 2.0
    seconds: float = 60.0
    turns: int = 4
    groups: int = 4
    system: int = 200
    user: int = 40
    new: int = 64
    think: float = 2.0
    seed: int = 1

    def __post_init__(self) -> None:
        at_least(self, turns=1, groups=1, system=1, user=1, new=2, think=0)
        for name in ("rate", "seconds"):
            if not 0 < getattr(self, name) < 1e6:
                raise InputError(f"{name} is {getattr(self, name):g}; expected a number above 0")

    def first(self) -> Iterator[Request]:
        """First requests of all conversations."""
        rng, when = random.Random(self.seed), 0.0
        for session in range(MOST * MOST):
            when += rng.expovariate(self.rate)
            if when > self.seconds:
                return
            group = min(self.groups - 1, int(rng.expovariate(1.0)))
            yield Request(session, group, self.system + self.user, self.new, arrived=when)

    def next(self, request: Request, now: float) -> Request | None:
        """The next request of a conversation; its pause depends on the seed and the conversation alone."""
        if request.turn == self.turns:
            return None
        prompt = request.prompt + request.new + self.user
        rng = random.Random(f"{self.seed} {request.session} {request.turn}")
        arrived = now + rng.expovariate(1 / self.think) if self.think else now
        return Request(request.session, request.group, prompt, request.new, arrived, request.turn + 1)


@dataclass(eq=False)
class Request:
    """One of a conversation.

    Attributes:
        session, group: number of the conversation, and of its system prompt.
        prompt, new: tokens.
        arrived, first, ended: seconds.
        turn: from 1.
        reused: prompt tokens that were in the cache.
        read, done: prompt tokens that were prefilled, and new tokens.
        lost: when its replica was lost.
        gap: seconds until the next token after that.
    """

    session: int
    group: int
    prompt: int
    new: int
    arrived: float
    turn: int = 1
    first: float = 0.0
    ended: float = 0.0
    reused: int = 0
    read: int = 0
    done: float = 0.0
    lost: float = 0.0
    gap: float = 0.0


class Replica(Protocol):
    """A replica, simulated or real."""

    requests: list[Request]

    def add(self, request: Request) -> None:
        """Add a request."""

    def round(self) -> tuple[float, list[Request]]:
        """Run a round; its seconds, and the requests that ended in it."""


@dataclass(eq=False)
class SimulatedReplica:
    """See ``Replica``."""

    costs: Costs
    system: int
    rng: random.Random
    requests: list[Request] = field(default_factory=list)
    running: list[Request] = field(default_factory=list)
    held: OrderedDict[int, tuple[int, int]] = field(default_factory=OrderedDict)  # of a session: group, tokens

    def add(self, request: Request) -> None:
        """See ``Replica``."""
        self.requests.append(request)

    def round(self) -> tuple[float, list[Request]]:
        """See ``Replica``."""
        self._seat()
        seconds, room, complete = 0.0, CHUNK, []
        there = {request.group for request in self.running if request.read >= self.system}
        coming: set[int] = set()  # groups whose system prompt another request prefills now: others wait for it
        for request in self.running:
            if request.read < self.system:
                if request.group in coming:
                    continue
                if request.group in there:
                    request.reused += self.system - request.read
                    request.read = self.system
                else:
                    coming.add(request.group)
            part = min(room, request.prompt - request.read)
            if part > 0:
                request.read += part
                room -= part
                complete += [request] * (request.read == request.prompt)
        if room < CHUNK:
            seconds += self.costs.reading(CHUNK - room)
        writing = [r for r in self.running if r.read >= r.prompt and r not in complete]
        for request in complete:
            request.done += 1
        if writing:
            spent, tokens = self.costs.round(len(writing))
            seconds += spent
            if tokens > 1:
                seconds += self.costs.catching_up * sum(r.prompt - r.reused for r in writing if r.done == 1)
            for request in writing:
                request.done += int(tokens) + (self.rng.random() < tokens % 1)
        ended = [r for r in self.running if r.done >= r.new]
        for request in ended:
            self.running.remove(request)
            self.requests.remove(request)
            self.held[request.session] = request.group, request.prompt + request.new - 1
        return seconds, ended

    def _seat(self) -> None:
        for request in self.requests:
            if len(self.running) == self.costs.slots:
                return
            if request in self.running:
                continue
            _, count = self.held.pop(request.session, (0, 0))
            near = [*self.held.values(), *((r.group, r.read) for r in self.running)]
            if any(group == request.group and tokens >= self.system for group, tokens in near):
                count = max(count, self.system)
            request.reused = request.read = min(count, request.prompt - 1)
            self.running.append(request)
            while len(self.held) + len(self.running) > self.costs.slots:
                self.held.popitem(last=False)


# ---------------------------------------------------------------- routing

Choose = Callable[[Request, dict[str, int], int], str]
"""Chooses a replica for a request, given the loads by name and the number of requests so far."""


def _in_turn(request: Request, loads: dict[str, int], number: int) -> str:
    return list(loads)[number % len(loads)]


def _least_loaded(request: Request, loads: dict[str, int], number: int) -> str:
    least = min(loads.values())
    free = [name for name, load in loads.items() if load == least]
    return free[number % len(free)]


def _hashed(request: Request, loads: dict[str, int], number: int) -> str:
    return ranked(str(request.session), loads)[0]


POLICIES: dict[str, Choose] = {"in turn": _in_turn, "least loaded": _least_loaded, "hash with slack": _hashed}


# ---------------------------------------------------------------- events


@dataclass(frozen=True)
class Outcome:
    """The result of a simulation.

    Attributes:
        replicas: at the beginning.
        tokens_per_second: of all replicas, in the simulated time.
        first_p50, first_p95, whole_p95: seconds to the first token and to the last one.
        cached: share of prompt tokens that were cached.
        busy, busiest: share of the time that replicas worked: the mean, and the largest.
        moved: requests whose replica was lost.
        gap_p50, gap_max: seconds that those waited for their next token.
    """

    replicas: int
    tokens_per_second: float
    first_p50: float
    first_p95: float
    whole_p95: float
    cached: float
    busy: float
    busiest: float
    moved: int
    gap_p50: float
    gap_max: float


def run(replicas: Sequence[Replica], load: Load, policy: str, *, loss: float | None = None) -> Outcome:
    """Run a load on replicas.

    Args:
        replicas: simulated or real; each has a clock of its own, which advances by the seconds of its rounds.
        load: of requests.
        policy: name in ``POLICIES``.
        loss: when the replica with most requests is lost, in seconds; other replicas continue those, as longer prompts.
    """
    alive = {f"replica {number}": replica for number, replica in enumerate(replicas)}
    names, count = {id(replica): name for name, replica in alive.items()}, 0
    worked, ready = dict.fromkeys(alive, 0.0), dict.fromkeys(alive, 0.0)
    ended: list[Request] = []
    moved: list[Request] = []
    events: list[tuple[float, int, Any]] = [(r.arrived, i, r) for i, r in enumerate(load.first())]
    number = len(events)
    if loss is not None:
        events.append((loss, -1, None))
    heapq.heapify(events)

    def push(when: float, what: Any) -> None:
        nonlocal number
        number += 1
        heapq.heappush(events, (when, number, what))

    while events:
        now, _, what = heapq.heappop(events)
        if now > load.seconds:
            break
        if what is None:
            gone = max(alive, key=lambda name: len(alive[name].requests))
            for request in alive.pop(gone).requests:
                request.lost = now
                # The new replica prefills the written tokens as part of the prompt.
                written = int(request.done)
                request.prompt, request.new = request.prompt + written, max(request.new - written, 1)
                request.read, request.done = 0, 0.0
                moved.append(request)
                push(now, request)
        elif isinstance(what, Request):
            name = POLICIES[policy](what, {name: len(replica.requests) for name, replica in alive.items()}, count)
            count += 1
            replica = alive[name]
            if not replica.requests and ready[name] <= now:
                push(now, replica)
            replica.add(what)
        elif (name := names[id(what)]) in alive and what.requests:
            own = list(what.requests)
            seconds, over = what.round()
            now += seconds
            worked[name] += seconds
            ready[name] = now
            for request in own:
                if request.done and request.lost and not request.gap:
                    request.gap = now - request.lost
                if request.done and not request.first:
                    request.first = now
            for request in over:
                request.ended = now
                ended.append(request)
                if (following := load.next(request, now)) is not None:
                    push(following.arrived, following)
            push(now, what)
    return _outcome(len(replicas), load, ended, moved, list(worked.values()))


def _outcome(
    count: int, load: Load, ended: Sequence[Request], moved: Sequence[Request], worked: list[float]
) -> Outcome:
    firsts = [r.first - r.arrived for r in ended]
    wholes = [r.ended - r.arrived for r in ended]
    gaps = [r.gap for r in moved if r.gap]
    asked = sum(r.prompt for r in ended)
    return Outcome(
        replicas=count,
        tokens_per_second=sum(r.new for r in ended) / load.seconds,
        first_p50=_share(firsts, 0.5),
        first_p95=_share(firsts, 0.95),
        whole_p95=_share(wholes, 0.95),
        cached=sum(r.reused for r in ended) / max(asked, 1),
        busy=sum(worked) / len(worked) / load.seconds,
        busiest=max(worked) / load.seconds,
        moved=len(moved),
        gap_p50=_share(gaps, 0.5),
        gap_max=max(gaps, default=0.0),
    )


def _share(values: Sequence[float], share: float) -> float:
    """A quantile; 0 without values."""
    return sorted(values)[min(int(share * len(values)), len(values) - 1)] if values else 0.0


def simulate(count: int, costs: Costs, load: Load, policy: str, *, loss: float | None = None) -> Outcome:
    """A load on so many replicas; see ``run``."""
    rng = random.Random(load.seed)
    replicas = [SimulatedReplica(costs, load.system, random.Random(rng.random())) for _ in range(count)]
    return run(replicas, load, policy, loss=loss)


def fewest(costs: Costs, load: Load, policy: str, first: float, pace: float) -> Outcome | None:
    """The fewest replicas that meet the latency targets.

    Args:
        costs: of a replica.
        load: of requests.
        policy: name in ``POLICIES``.
        first: seconds to the first token, for 95 % of the requests.
        pace: further seconds per token, for 95 % of the requests.

    Returns:
        None if `MOST` replicas do not meet them.
    """

    @cache
    def outcome(count: int) -> Outcome:
        return simulate(count, costs, load, policy)

    def enough(count: int) -> bool:
        found = outcome(count)
        return found.first_p95 <= first and found.whole_p95 <= first + pace * load.new

    high = next((2**i for i in range(MOST.bit_length()) if enough(2**i)), None)
    return None if high is None else outcome(bisect_left(range(high), True, high // 2 + 1, key=enough))

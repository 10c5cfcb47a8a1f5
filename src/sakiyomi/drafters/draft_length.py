"""How many tokens to draft in a round, from the acceptance in the last rounds and from measured costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from heapq import heapify, heappop, heappush
from typing import ClassVar, NamedTuple

from sakiyomi.core.params import SamplingParams
from sakiyomi.theory import marginal_gamma

MOST = 16  # deepest draft that "auto" considers
MOST_NODES = 31  # largest tree that it considers: with the last token a pass of 32 rows
# The same for a target whose weights are read from disk in every pass, where further rows cost almost nothing.
FAR, FAR_NODES = 32, 127
BEARABLE = 1.5  # longest round with drafts of a fixed size, in undrafted rounds, where other requests share it
PATIENCE = 6  # drafting rounds that are measured before a loss stops drafting
LOSS = 0.98  # drafting below this speed, relative to plain decoding, is a loss
CLEAR = 0.9  # the same where only other requests were measured, whose texts may be harder
PROBE_EVERY, PROBE_LATEST = 12, 384  # rounds of the first rest and of the longest: each failed probe doubles it
PROBE_AGAIN = 96  # least rounds of a rest that begins because other requests lost time
WEIGHT = 4.0  # weight of the initial acceptance, in rounds
MEMORY = 0.97  # share of its weight that a round keeps with every later one: with less, tokens of few rounds decide
PROBE, PROBE_ROUNDS = 2, 3  # least depth of a probe, and its rounds
ANEW, KEPT = 0.1, 0.3  # shares of their weight that measured speed and acceptance keep when a rest is over


@dataclass(frozen=True, slots=True)
class Costs:
    """What a round costs on this machine now, in seconds.

    Attributes:
        score: time of a target pass over so many rows.
        draft: time of one draft pass of the whole batch.
        overhead: time a round spends outside forwards.
        batch: requests that share the passes.
        rate: tokens a second that a request committed lately in drafting rounds; 0: not measured yet.
        depth, nodes: deepest draft and largest tree that are considered.
        undrafted: time of a round that drafts nothing; 0: not measured yet.
        one_pass: a draft of any depth is one pass; else each of its tokens is.
    """

    score: Callable[[int], float]
    draft: float
    overhead: float
    batch: int = 1
    rate: float = 0.0
    depth: int = MOST
    nodes: int = MOST_NODES
    undrafted: float = 0.0
    one_pass: bool = False

    @property
    def plain(self) -> float:
        """A round that drafts nothing."""
        return self.undrafted or self.score(self.batch) + self.overhead

    def bearable(self) -> int:
        """Longest chain of each request with which a round takes at most ``BEARABLE`` times an undrafted one."""
        most = BEARABLE * self.plain

        def seconds(count: int) -> float:
            passes = 1 if self.one_pass else count
            return self.score(self.batch * (count + 1)) + passes * self.draft + self.overhead

        return next((count - 1 for count in range(1, self.depth + 1) if seconds(count) > most), self.depth)


@dataclass(frozen=True, slots=True)
class TokenValue:
    """Value of a draft's tokens against the time that they take.

    A request that commits ``rate`` tokens a second loses rate x t tokens in t seconds of drafting. A draft makes it
    faster if its expected accepted tokens are more than that: the largest ratio of tokens to time is where
    tokens - rate x time is largest (Dinkelbach 1967, doi 10.1287/mnsc.13.7.492).

    Attributes:
        rate: tokens a second that the request commits now.
        costs: of a round.
        depth: deepest draft that is considered.
    """

    rate: float
    costs: Costs
    depth: int = MOST

    def pays(self, tokens: float, seconds: float) -> bool:
        """Whether so many expected tokens are worth so much time."""
        return tokens > self.rate * seconds

    def price(self, nodes: int) -> float:
        """Cost of a node in a tree of so many: its share of the pass, in tokens."""
        score, batch = self.costs.score, self.costs.batch
        return self.rate * max(0.0, score(batch * (nodes + 1)) - score(batch)) / nodes

    def floor(self, nodes: int) -> float:
        """Least value of a node that is kept: half its cost, since several row counts cost the same."""
        return self.price(nodes) / 2

    def within(self, depth: int) -> TokenValue:
        """The same for drafts that are no deeper."""
        return self if self.depth <= depth else replace(self, depth=depth)

    def size(self, values: Sequence[float]) -> int:
        """How many nodes to score.

        Args:
            values: chances of the nodes with all above them, the largest first.
        """
        best, most, expected = 0, -self.rate * self.costs.score(self.costs.batch), 0.0
        for count, value in enumerate(values, start=1):
            expected += value
            gain = expected - self.rate * self.costs.score(self.costs.batch * (count + 1))
            if gain > most:
                best, most = count, gain
        return best


def shares(worths: Sequence[TokenValue], values: Sequence[Sequence[float]], others: int = 0) -> list[int]:
    """How many nodes to score of each of several drafts that share a pass: the most valuable nodes of all, as long as
    their rows are worth the time.

    Args:
        worths: what a token of each draft's request is worth; all requests of the round wait for the pass.
        values: of each, chances of the nodes with all above them, in the order in which they may be taken.
        others: further nodes in the pass.
    """
    costs, rate = worths[0].costs, 0.0
    for worth in worths:
        rate += worth.rate
    rate = rate / len(worths) * costs.batch
    counts, rows = [0] * len(values), costs.batch + others
    best, most, expected = counts.copy(), -rate * costs.score(rows), 0.0
    waiting = [(-own[0], i) for i, own in enumerate(values) if own]
    heapify(waiting)
    while waiting:
        value, i = heappop(waiting)
        expected, rows = expected - value, rows + 1
        counts[i] += 1
        gain = expected - rate * costs.score(rows)
        if gain > most:
            best, most = counts.copy(), gain
        if counts[i] < len(values[i]):
            heappush(waiting, (-values[i][counts[i]], i))
    return best


class Size(NamedTuple):
    """What to ask a drafter for.

    Attributes:
        depth: draft tokens, or levels of a tree; 0: nothing.
        nodes: most nodes of the tree; as many as levels: a chain.
        worth: what a token is worth, for drafters that weigh it: they may then stop earlier, or go deeper.
    """

    depth: int
    nodes: int
    worth: TokenValue | None = None


@dataclass(slots=True)
class Heuristic:
    """Two more tokens after a fully accepted draft, else one less, at least one.

    Transformers' schedule "heuristic" if requests share one, "heuristic_transient" if each has its own.
    """

    number: int = 5

    def observe(self, drafted: int, accepted: int) -> None:
        """A round proposed ``drafted`` tokens on its longest path and accepted ``accepted``."""
        if drafted:
            self.number = self.number + 2 if accepted == drafted else max(1, self.number - 1)


class FixedSize:
    """Depth and nodes as the request says: a number, a schedule, or as many as are worth their time.

    Args:
        depth: levels, 0 to draft nothing; None: as many as are worth their time.
        nodes: of the tree; None: likewise.
        chain: the draft is one path, so there are as many nodes as levels.
        bounded: sizes are limited where other requests share the round, see ``Costs.bearable``.

    Attributes:
        adapts: it weighs costs by itself; the engine may then skip drafting in a round without asking it.
    """

    adapts: ClassVar[bool] = False

    def __init__(
        self, depth: int | Heuristic | None, nodes: int | Heuristic | None, *, chain: bool, bounded: bool = False
    ) -> None:
        self.depth, self.nodes, self.chain, self.bounded = depth, nodes, chain, bounded
        self._gain = Throughput()

    def next(self, costs: Callable[[], Costs]) -> Size:
        """What to draft in the next round. ``costs`` is called only where they are weighed."""
        size = self._size(costs)
        if not self.bounded:
            return size
        now = costs()
        depth, nodes = (now.depth, now.nodes) if now.batch == 1 else (now.bearable(),) * 2
        return Size(min(size.depth, depth), min(size.nodes, nodes), size.worth)

    def _size(self, costs: Callable[[], Costs]) -> Size:
        if self.chain or (self.depth is not None and self.nodes is not None):
            depth = _number(self.depth, MOST)
            nodes = depth if self.chain else _number(self.nodes, MOST_NODES)
            return Size(min(depth, nodes), nodes)
        now = costs()
        depth, nodes = _number(self.depth, now.depth), _number(self.nodes, now.nodes)
        return Size(depth, nodes, TokenValue(self._gain.expected(now), now, depth))

    def unchanged(self, most: int) -> int:
        """How many rounds after the last one, of so many, are decided like it, by what is known now."""
        return 0 if isinstance(self.depth, Heuristic) or isinstance(self.nodes, Heuristic) else most

    def skip(self, rounds: int) -> None:
        """Count rounds that were run like the last one, without ``next``."""

    def observe(self, drafted: int, accepted: int, seconds: float) -> None:
        """A round proposed ``drafted`` tokens on its longest path, accepted ``accepted`` and took ``seconds``."""
        self._gain.add(accepted + 1, seconds)
        for dial in (self.depth, self.nodes):
            if isinstance(dial, Heuristic):
                dial.observe(drafted, accepted)


class Phase(Enum):
    """What "auto" does with a request in a round."""

    NEW = "new"
    """No round of the request has been decided yet."""
    TRYING = "trying"
    """Drafts unless a loss is predicted; fewer than ``PATIENCE`` drafting rounds were measured."""
    DRAFTING = "drafting"
    """Drafts; ``PATIENCE`` rounds were measured and show no loss: at least ``LOSS`` times the plain speed."""
    RESTING = "resting"
    """Drafts nothing for a number of rounds: a loss was measured or predicted, or the best chain has length 0."""
    PROBING = "probing"
    """Drafts for a few rounds after a rest, whatever is predicted: the text may have become easier."""


def next_phase(phase: Phase, left: int, *, measured: bool, pays: bool) -> Phase:
    """The phase of a request's coming round. ``AutoSize._enter`` sets how long it lasts.

    Not called in the middle of a rest.

    ::

        NEW, TRYING, DRAFTING --- no loss -----------------> TRYING, or DRAFTING once enough is measured
        NEW, TRYING, DRAFTING --- a loss ------------------> RESTING
        RESTING ----------------- the rest is over --------> PROBING
        PROBING ----------------- the probe is over -------> as from TRYING

    Args:
        phase: of the round before.
        left: further rounds for which RESTING and PROBING have to stay; 0 for the others.
        measured: enough drafting rounds were measured to judge by them.
        pays: no loss (see ``Phase``), and a draft of at least one token is predicted to be the fastest.
    """
    if left:
        return phase
    if phase is Phase.RESTING:
        return Phase.PROBING
    if not pays:
        return Phase.RESTING
    return Phase.DRAFTING if measured else Phase.TRYING


class AutoSize:
    """Chooses the size that is predicted to be the fastest on this machine, and drafts nothing after a loss.

    With ``trees`` the drafter gets a ``TokenValue`` and weighs every level and node of its tree. Without, it is asked
    for the chain with the largest predicted speed-up. The acceptance of each place in the draft is
    estimated from the rounds that verified it; older rounds count less, and a place that was never verified is assumed
    to be like the one before. Costs are measured on the machine while it works.

    If the measured tokens per second fall below ``LOSS`` times those of plain decoding, the request stops drafting for
    a while and then probes again, because the text may have changed. See ``Phase`` and ``next_phase``.

    Args:
        trees: whether the drafter may branch: the request's tree is not a chain, see ``make_policy``.
        depth: length of the chains, where it was tuned; None: the largest predicted speed-up decides.
        start: initial acceptance.

    Attributes:
        phase: what was decided for the last round.
    """

    adapts: ClassVar[bool] = True

    def __init__(self, trees: bool = False, depth: int | None = None, start: float = 0.75) -> None:
        self._trees, self._fixed, self._start = trees, depth, start
        self._kept: list[float] = []
        self._tried: list[float] = []
        self._gain = Throughput()
        self.phase = Phase.NEW
        self._left = 0  # further rounds of this phase
        self._rest = PROBE_EVERY  # rounds of the next rest

    def alphas(self) -> list[float]:
        """Estimated acceptance by place."""
        alphas, prior = [], self._start
        for kept, tried in zip(self._kept, self._tried, strict=True):
            prior = (kept + prior * WEIGHT) / (tried + WEIGHT)
            alphas.append(prior)
        return alphas or [self._start]

    def next(self, costs: Callable[[], Costs]) -> Size:
        """See ``FixedSize.next``."""
        if self.phase is Phase.RESTING and self._left:  # without asking for costs: that takes time too
            self._left -= 1
            return Size(0, 0)
        now = costs()
        measured = self._gain.rounds >= PATIENCE
        # Until enough is measured, losses of other requests count; their gains do not excuse a bad first round.
        others = not measured and 0 < now.rate * now.plain < CLEAR
        losing = (measured or others) and self._gain.expected(now) * now.plain < LOSS
        depth = 0 if losing else self._depth(now)
        self._enter(next_phase(self.phase, self._left, measured=measured, pays=depth > 0), others)
        if self.phase is Phase.RESTING:
            return Size(0, 0)
        if self.phase is Phase.PROBING:
            depth = max(PROBE, self._depth(now))
        if not self._trees:
            return Size(depth, depth)
        return Size(depth, now.nodes, TokenValue(self._gain.expected(now), now, now.depth))

    def unchanged(self, most: int) -> int:
        """See ``FixedSize.unchanged``. What drafts are worth changes little from one round to the next."""
        if self.phase is Phase.RESTING:
            return min(self._left, most)
        return most if self.phase is Phase.DRAFTING else 0

    def skip(self, rounds: int) -> None:
        """See ``FixedSize.skip``."""
        if self.phase is Phase.RESTING:
            self._left -= rounds

    def _enter(self, phase: Phase, others: bool) -> None:
        """Enter the phase of a round: set how long it and the next rest last, and what is forgotten.

        A rest after a predicted loss is as short as one after a measured loss: the costs of passes are guesses while a
        process is young.
        """
        if phase is self.phase:
            self._left = max(0, self._left - 1)
        elif phase is Phase.RESTING:
            self._left = (max(self._rest, PROBE_AGAIN) if others else self._rest) - 1
        elif phase is Phase.PROBING:
            self._left, self._rest = PROBE_ROUNDS - 1, min(2 * self._rest, PROBE_LATEST)
            self._gain.fade(ANEW)
            self._kept, self._tried = ([KEPT * each for each in part] for part in (self._kept, self._tried))
        elif phase is Phase.DRAFTING:
            self._rest = PROBE_EVERY
        self.phase = phase

    def _depth(self, now: Costs) -> int:
        """Length of the chain with the largest predicted speed-up; for trees at least ``PROBE``."""
        if self._fixed is not None:
            return self._fixed
        plain = now.undrafted or now.score(now.batch)
        step, fixed = (0.0, now.draft + now.overhead) if now.one_pass else (now.draft, now.overhead)
        depth, _ = marginal_gamma(
            self.alphas(), step / plain, lambda rows: now.score(now.batch * rows) / plain, fixed / plain, now.depth
        )
        return max(depth, PROBE) if self._trees else depth

    def observe(self, drafted: int, accepted: int, seconds: float) -> None:
        """See ``FixedSize.observe``."""
        if self.phase in (Phase.TRYING, Phase.DRAFTING, Phase.PROBING):  # rounds with empty drafts take time too
            self._gain.add(accepted + 1, seconds)
        places = min(drafted, accepted + 1)
        while len(self._tried) < places:
            self._kept.append(0.0)
            self._tried.append(0.0)
        for i in range(places):
            self._kept[i] = self._kept[i] * MEMORY + (i < accepted)
            self._tried[i] = self._tried[i] * MEMORY + 1.0


class Throughput:
    """Tokens per second of drafting rounds, older ones counting less."""

    __slots__ = ("_seconds", "_tokens", "rounds")

    def __init__(self) -> None:
        self.rounds = 0
        self._tokens = self._seconds = 0.0

    @property
    def rate(self) -> float:
        """Tokens a second; 0 before the first round."""
        return self._tokens / self._seconds if self._seconds else 0.0

    def expected(self, costs: Costs) -> float:
        """Expected tokens a second: measured ones, with a prior from other requests or from plain decoding."""
        weight = PATIENCE * costs.plain
        return (self._tokens + weight * (costs.rate or 1.0 / costs.plain)) / (self._seconds + weight)

    def add(self, tokens: float, seconds: float) -> None:
        """A round committed so many tokens in so many seconds."""
        self._tokens = MEMORY * self._tokens + tokens
        self._seconds = MEMORY * self._seconds + seconds
        self.rounds += 1

    def fade(self, share: float) -> None:
        """Let what was seen so far count less."""
        self._tokens *= share
        self._seconds *= share


DraftLengthPolicy = FixedSize | AutoSize
"""Decides how much to draft for one request."""


def _number(dial: int | Heuristic | None, most: int) -> int:
    if dial is None:
        return most
    return dial if isinstance(dial, int) else dial.number


def _dial(value: int | str, kept: Heuristic | None) -> int | Heuristic | None:
    if isinstance(value, int):
        return value
    if value == "heuristic-kept":
        return kept or Heuristic()
    return Heuristic() if value == "heuristic" else None


def make_policy(
    params: SamplingParams,
    depth: int | None = None,
    *,
    bounded: bool = False,
    kept: Mapping[str, Heuristic] | None = None,
) -> DraftLengthPolicy:
    """The policy that ``gamma``, ``nodes`` and ``tree`` name; values were checked there.

    Args:
        params: of the request.
        depth: a tuned one.
        bounded: fixed sizes are limited where other requests share the round; "auto" weighs costs by itself.
        kept: schedules of gamma and nodes that the engine's requests share; None: the request has its own.
    """
    if params.gamma == "auto" and params.tree in ("auto", "chain") and params.nodes == "auto" and not params.choices:
        return AutoSize(params.builder != "chain", depth)
    if params.choices:
        paths = params.choices
        return FixedSize(max(map(len, paths)), len(paths), chain=False, bounded=bounded)
    gamma, nodes = (
        _dial(value, (kept or {}).get(name)) for name, value in (("gamma", params.gamma), ("nodes", params.nodes))
    )
    return FixedSize(gamma, nodes, chain=params.builder == "chain", bounded=bounded)

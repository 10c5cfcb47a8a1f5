"""How long a draft should be, and how wide: from what the last rounds accepted and from measured costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Protocol

from sakiyomi.theory import marginal_gamma

if TYPE_CHECKING:
    from sakiyomi.core.params import SamplingParams

__all__ = [
    "NO_DRAFT",
    "AutoSize",
    "Costs",
    "DraftLengthPolicy",
    "FixedSize",
    "Heuristic",
    "Size",
    "Throughput",
    "TokenValue",
    "make_policy",
]

MOST = 16  # deepest draft that "auto" considers
MOST_NODES = 31  # largest tree that it considers: with the last token a pass of 32 rows
# The same where every pass has to fetch the weights: all rows but the first cost next to nothing.
FAR, FAR_NODES = 32, 127
PATIENCE = 6  # rounds before a measured loss switches speculation off
LOSS = 0.98  # measured gain below which it is a loss
PROBE_EVERY, PROBE_LATEST = 24, 384  # rounds without speculation until the next probe: doubled after one in vain
PROBE_AGAIN = 96  # the same for a request that begins while others were losing
PROBE, PROBE_ROUNDS = 2, 3  # least depth, and number of rounds, of a probe


@dataclass(frozen=True, slots=True)
class Costs:
    """What a round costs on this machine now, in seconds.

    Attributes:
        score: time of a target pass over so many rows.
        draft: time of one draft step of the whole batch.
        overhead: time a round spends outside forwards.
        batch: requests that share the passes.
        rate: tokens a second that a request committed lately in rounds with drafts; 0: not known yet.
        depth, nodes: deepest draft and largest tree that are considered.
    """

    score: Callable[[int], float]
    draft: float
    overhead: float
    batch: int = 1
    rate: float = 0.0
    depth: int = MOST
    nodes: int = MOST_NODES

    @property
    def plain(self) -> float:
        """A round that drafts nothing."""
        return self.score(self.batch) + self.overhead


@dataclass(frozen=True, slots=True)
class TokenValue:
    """Weighs the tokens of a draft against the time that they take.

    A request that commits ``rate`` tokens a second gives up rate x t tokens for t seconds of drafting. Only what is
    expected to bring more than that makes it faster: the ratio of tokens to time is largest where tokens - rate x time
    is (Dinkelbach 1967, doi 10.1287/mnsc.13.7.492).

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
        """Cost of one node in a tree of so many: its share of the pass, in tokens."""
        score, batch = self.costs.score, self.costs.batch
        return self.rate * max(0.0, score(batch * (nodes + 1)) - score(batch)) / nodes

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


@dataclass(frozen=True, slots=True)
class Size:
    """What to ask a drafter for.

    Attributes:
        depth: draft tokens, or levels of a tree; 0: nothing.
        nodes: most nodes of the tree; if it equals the depth, a chain.
        worth: for drafters that weigh their tokens against the time: they may then stop earlier, or go deeper.
    """

    depth: int
    nodes: int
    worth: TokenValue | None = None


class DraftLengthPolicy(Protocol):
    """Decides for one request."""

    def next(self, costs: Callable[[], Costs]) -> Size:
        """What to draft in the next round. ``costs`` takes time, and is called only by policies that weigh costs."""
        ...

    def observe(self, drafted: int, accepted: int, seconds: float) -> None:
        """A round proposed ``drafted`` tokens on its longest path, accepted ``accepted`` and took ``seconds``."""
        ...


@dataclass(slots=True)
class Heuristic:
    """Two more after a draft that was accepted in full, else one less, at least one (``transformers``' "heuristic")."""

    number: int = 5

    def observe(self, drafted: int, accepted: int) -> None:
        """A round proposed ``drafted`` tokens on its longest path and accepted ``accepted``."""
        if drafted:
            self.number = self.number + 2 if accepted == drafted else max(1, self.number - 1)


class NoDraft:
    """Nothing is drafted."""

    def next(self, costs: Callable[[], Costs]) -> Size:
        """See ``DraftLengthPolicy.next``."""
        return Size(0, 0)

    def observe(self, drafted: int, accepted: int, seconds: float) -> None:
        """See ``DraftLengthPolicy.observe``."""


NO_DRAFT = NoDraft()


class FixedSize:
    """Depth and nodes as requested: a number, a schedule, or as many as pay.

    Args:
        depth: levels; None: as many as pay.
        nodes: of the tree; None: as many as pay.
        chain: the draft is one path, with as many nodes as levels.
    """

    def __init__(self, depth: int | Heuristic | None, nodes: int | Heuristic | None, *, chain: bool) -> None:
        self.depth, self.nodes, self.chain = depth, nodes, chain
        self._gain = Throughput()

    def next(self, costs: Callable[[], Costs]) -> Size:
        """See ``DraftLengthPolicy.next``."""
        if self.chain:
            depth = _number(self.depth, MOST)
            return Size(depth, depth)
        if self.depth is not None and self.nodes is not None:
            depth, nodes = _number(self.depth, MOST), _number(self.nodes, MOST_NODES)
            return Size(min(depth, nodes), nodes)
        now = costs()
        depth, nodes = _number(self.depth, now.depth), _number(self.nodes, now.nodes)
        return Size(depth, nodes, TokenValue(self._gain.expected(now), now, depth))

    def observe(self, drafted: int, accepted: int, seconds: float) -> None:
        """See ``DraftLengthPolicy.observe``."""
        self._gain.add(accepted + 1, seconds)
        for dial in (self.depth, self.nodes):
            if isinstance(dial, Heuristic):
                dial.observe(drafted, accepted)


class Phase(Enum):
    """Whether a request with an "auto" size drafts."""

    UNDECIDED = "no round was weighed yet"
    DRAFTING = "drafts pay; every round is weighed"
    RESTING = "drafts do not pay: nothing is drafted, and nothing weighed, for a number of rounds"
    PROBING = "after a rest, drafts are tried for a few rounds whatever they brought before"


class AutoSize:
    """The size that pays on this machine now; nothing where plain decoding is as fast.

    A drafter that knows its own chances is given the value of a token, and weighs every level and node of its tree. The
    others are asked for the chain with the largest predicted speed-up: the acceptance of each position in the draft is
    estimated from the rounds that reached it, older ones counting less; a position that was never reached is taken to
    be as the one before. Costs are measured on this machine while it works.

    Whatever was predicted: where the measured tokens per second fall below those of plain decoding, the request rests,
    and drafts are tried again now and then, since texts change; see ``Phase``.

    Args:
        trees: whether the drafter may branch.
        depth: length of the chains, where it was tuned; None: the largest predicted speed-up decides.
    """

    def __init__(
        self,
        trees: bool = False,
        depth: int | None = None,
        start: float = 0.75,
        weight: float = 4.0,
        memory: float = 0.97,
    ) -> None:
        self._trees, self._fixed, self._start, self._memory, self._weight = trees, depth, start, memory, weight
        self._kept: list[float] = []
        self._tried: list[float] = []
        self._gain = Throughput()
        self._phase, self._left = Phase.UNDECIDED, 0  # rounds left of a rest or a probe
        self._wait = PROBE_EVERY  # rounds of the next rest

    def alphas(self) -> list[float]:
        """Estimated acceptance by position in the draft."""
        alphas, prior = [], self._start
        for kept, tried in zip(self._kept, self._tried, strict=True):
            prior = (kept + prior * self._weight) / (tried + self._weight)
            alphas.append(prior)
        return alphas or [self._start]

    def next(self, costs: Callable[[], Costs]) -> Size:
        """See ``DraftLengthPolicy.next``."""
        if self._phase is Phase.RESTING:
            if self._left:
                self._left -= 1
                return Size(0, 0)
            self._phase, self._left = Phase.PROBING, PROBE_ROUNDS
            self._wait = min(2 * self._wait, PROBE_LATEST)
            self._forget(0.3)
        now = costs()
        if self._phase is Phase.PROBING and self._left:
            self._left -= 1
            return self._size(max(PROBE, self._depth(now)), now)
        return self._weigh(now)

    def _weigh(self, now: Costs) -> Size:
        """Draft if that pays, else rest."""
        known = self._gain.rounds >= PATIENCE
        # What other requests lost counts from the first round on.
        losing = (known or now.rate > 0) and self._gain.expected(now) * now.plain < LOSS
        depth = 0 if losing else self._depth(now)
        if not depth:
            rest = self._wait if known else max(self._wait, PROBE_AGAIN)
            self._phase, self._left = Phase.RESTING, rest - 1  # this round is the first of them
            return Size(0, 0)
        self._phase = Phase.DRAFTING
        if known:
            self._wait = PROBE_EVERY
        return self._size(depth, now)

    def _forget(self, share: float) -> None:
        """Have what was measured so far count less."""
        self._gain.fade(share)
        self._kept = [kept * share for kept in self._kept]
        self._tried = [tried * share for tried in self._tried]

    def _size(self, depth: int, now: Costs) -> Size:
        if not self._trees:
            return Size(depth, depth)
        return Size(depth, now.nodes, TokenValue(self._gain.expected(now), now, now.depth))

    def _depth(self, now: Costs) -> int:
        """Length of the chain with the largest predicted speed-up; where none pays, a tree may."""
        if self._fixed is not None:
            return self._fixed
        plain = now.score(now.batch)
        depth, _ = marginal_gamma(
            self.alphas(),
            now.draft / plain,
            lambda rows: now.score(now.batch * rows) / plain,
            now.overhead / plain,
            now.depth,
        )
        return max(depth, PROBE) if self._trees else depth

    def observe(self, drafted: int, accepted: int, seconds: float) -> None:
        """See ``DraftLengthPolicy.observe``."""
        if self._phase in (Phase.DRAFTING, Phase.PROBING):  # also if nothing was proposed: asking takes time too
            self._gain.add(accepted + 1, seconds)
        places = min(drafted, accepted + 1)
        while len(self._tried) < places:
            self._kept.append(0.0)
            self._tried.append(0.0)
        for i in range(places):
            self._kept[i] = self._kept[i] * self._memory + (i < accepted)
            self._tried[i] = self._tried[i] * self._memory + 1.0


class Throughput:
    """Tokens per second of the rounds with drafts, older ones counting less."""

    __slots__ = ("_seconds", "_tokens", "rounds")

    def __init__(self) -> None:
        self.rounds = 0
        self._tokens = self._seconds = 0.0

    @property
    def rate(self) -> float:
        """Tokens a second; 0 before the first round."""
        return self._tokens / self._seconds if self._seconds else 0.0

    def expected(self, costs: Costs) -> float:
        """Tokens a second to expect: as measured, and before that as other requests had, or as plain decoding has."""
        weight = PATIENCE * costs.plain
        return (self._tokens + weight * (costs.rate or 1.0 / costs.plain)) / (self._seconds + weight)

    def add(self, tokens: float, seconds: float) -> None:
        """Count a round that committed so many tokens in so many seconds."""
        self.fade(0.92)
        self._tokens += tokens
        self._seconds += seconds
        self.rounds += 1

    def fade(self, share: float) -> None:
        """Have what was measured so far count less."""
        self._tokens *= share
        self._seconds *= share


def _number(dial: int | Heuristic | None, most: int) -> int:
    if dial is None:
        return most
    return dial if isinstance(dial, int) else dial.number


def _dial(value: int | str) -> int | Heuristic | None:
    if isinstance(value, int):
        return value
    return Heuristic() if value == "heuristic" else None


def make_policy(params: SamplingParams, depth: int | None = None) -> DraftLengthPolicy:
    """The policy that ``gamma``, ``nodes`` and ``tree`` name; values were checked there. ``depth``: a tuned one."""
    if params.choices:
        return FixedSize(max(map(len, params.choices)), len(params.choices), chain=False)
    if params.gamma == "auto" and params.tree in ("auto", "chain") and params.nodes == "auto":
        return AutoSize(params.builder != "chain", depth)
    return FixedSize(_dial(params.gamma), _dial(params.nodes), chain=params.builder == "chain")

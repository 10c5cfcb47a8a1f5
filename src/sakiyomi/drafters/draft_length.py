"""How far and how wide to read ahead, from what the last rounds brought and from measured costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
# The same where every pass has to fetch the weights: the rows beside the first cost next to nothing.
FAR, FAR_NODES = 32, 127
PATIENCE = 6  # rounds before a measured loss switches speculation off
LOSS = 0.98  # measured gain below which it is a loss
PROBE_EVERY, PROBE_LATEST = 24, 384  # rounds without speculation until it is tried again: doubled each time in vain
PROBE_AGAIN = 96  # the same for a request that begins when others were losing
PROBE, PROBE_ROUNDS = 2, 3


@dataclass(frozen=True, slots=True)
class Costs:
    """What a round costs on this machine now, in seconds.

    Attributes:
        score: time of a target pass over so many rows.
        draft: time of one draft step of the whole batch.
        overhead: time a round spends outside forwards.
        batch: requests that share the passes.
        rate: tokens a second that a request committed lately in rounds that read ahead; 0: nobody knows yet.
        depth, nodes: deepest draft and largest tree that are worth a thought.
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
    """What a draft's tokens are worth against the time that they take.

    A request that commits ``rate`` tokens a second gives up rate x t tokens for t seconds of reading ahead. Whatever is
    expected to bring more than that makes the whole faster, and nothing else does: the largest ratio of tokens to time
    is where tokens - rate x time is largest (Dinkelbach 1967, doi 10.1287/mnsc.13.7.492).

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
        """What a node costs on the way to a tree of so many: its share of the pass, in tokens."""
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
        nodes: most nodes of the tree; as many as levels: a chain.
        worth: for drafters that can weigh what a token is worth: they may then stop before, or go deeper.
    """

    depth: int
    nodes: int
    worth: TokenValue | None = None


class DraftLengthPolicy(Protocol):
    """Decides for one request."""

    def next(self, costs: Callable[[], Costs]) -> Size:
        """What to draft in the next round. ``costs`` is only asked by those who weigh them."""
        ...

    def observe(self, drafted: int, accepted: int, seconds: float) -> None:
        """A round proposed ``drafted`` tokens on its longest path, kept ``accepted`` and took ``seconds``."""
        ...


@dataclass(slots=True)
class Heuristic:
    """Two more after a wholly accepted draft, else one less, at least one (transformers' "heuristic" schedule)."""

    number: int = 5

    def observe(self, drafted: int, accepted: int) -> None:
        """A round proposed ``drafted`` tokens on its longest path and kept ``accepted``."""
        if drafted:
            self.number = self.number + 2 if accepted == drafted else max(1, self.number - 1)


class NoDraft:
    """Nothing is read ahead."""

    def next(self, costs: Callable[[], Costs]) -> Size:
        """See ``DraftLengthPolicy.next``."""
        return Size(0, 0)

    def observe(self, drafted: int, accepted: int, seconds: float) -> None:
        """See ``DraftLengthPolicy.observe``."""


NO_DRAFT = NoDraft()


class FixedSize:
    """Depth and nodes as they were asked for: a number, a schedule, or what pays.

    Args:
        depth: levels; None: as many as pay.
        nodes: of the tree; None: as many as pay.
        chain: the draft is one path, so that there are as many nodes as levels.
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


class AutoSize:
    """What pays on this machine now; nothing where plain decoding is as fast.

    A drafter that knows its own chances is told what a token is worth, and weighs every level and node of its tree. The
    others are asked for the chain with the largest predicted speed-up: the acceptance of each place in the draft is
    estimated from the rounds that reached it, older ones counting less; a place never reached is taken to be as the one
    before. Costs are the machine's own, measured while it works.

    However it was predicted: where the measured tokens per second fall below those of plain decoding, speculation is
    switched off for the request, and tried again now and then: text changes.

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
        self._quiet, self._wait = 0, PROBE_EVERY
        self._asked, self._grace = False, 0

    def alphas(self) -> list[float]:
        """Estimated acceptance by place."""
        alphas, prior = [], self._start
        for kept, tried in zip(self._kept, self._tried, strict=True):
            prior = (kept + prior * self._weight) / (tried + self._weight)
            alphas.append(prior)
        return alphas or [self._start]

    def next(self, costs: Callable[[], Costs]) -> Size:
        """See ``DraftLengthPolicy.next``."""
        if self._quiet > 1:  # nothing is weighed meanwhile: that takes time too
            self._quiet -= 1
            return Size(0, 0)
        now = costs()
        if self._quiet:
            self._quiet, self._wait = 0, min(2 * self._wait, PROBE_LATEST)
            self._forget(0.3)
            self._grace = PROBE_ROUNDS
        if self._grace:
            self._grace -= 1
            return self._asking(max(PROBE, self._depth(now)), now)
        # What other requests lost counts from the first round on.
        settled = self._gain.rounds >= PATIENCE
        losing = (settled or now.rate > 0) and self._gain.expected(now) * now.plain < LOSS
        depth = 0 if losing else self._depth(now)
        if not depth:
            self._asked = False
            self._quiet = self._wait if settled else max(self._wait, PROBE_AGAIN)
            return Size(0, 0)
        if settled:
            self._wait = PROBE_EVERY
        return self._asking(depth, now)

    def _forget(self, share: float) -> None:
        """Let what was seen so far count less."""
        self._gain.fade(share)
        self._kept = [kept * share for kept in self._kept]
        self._tried = [tried * share for tried in self._tried]

    def _asking(self, depth: int, now: Costs) -> Size:
        self._asked = True
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
        if self._asked:  # to no avail, perhaps: that takes time too
            self._gain.add(accepted + 1, seconds)
        places = min(drafted, accepted + 1)
        while len(self._tried) < places:
            self._kept.append(0.0)
            self._tried.append(0.0)
        for i in range(places):
            self._kept[i] = self._kept[i] * self._memory + (i < accepted)
            self._tried[i] = self._tried[i] * self._memory + 1.0


class Throughput:
    """Tokens per second of the rounds that read ahead, older ones counting less."""

    __slots__ = ("_seconds", "_tokens", "rounds")

    def __init__(self) -> None:
        self.rounds = 0
        self._tokens = self._seconds = 0.0

    @property
    def rate(self) -> float:
        """Tokens a second; 0 before the first round."""
        return self._tokens / self._seconds if self._seconds else 0.0

    def expected(self, costs: Costs) -> float:
        """Tokens a second to expect: what was seen, and before that what other requests had, or plain decoding has."""
        weight = PATIENCE * costs.plain
        return (self._tokens + weight * (costs.rate or 1.0 / costs.plain)) / (self._seconds + weight)

    def add(self, tokens: float, seconds: float) -> None:
        """A round committed so many tokens in so many seconds."""
        self.fade(0.92)
        self._tokens += tokens
        self._seconds += seconds
        self.rounds += 1

    def fade(self, share: float) -> None:
        """Let what was seen so far count less."""
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

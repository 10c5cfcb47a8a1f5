"""What rounds really bring, drafted and plain, so that nothing is drafted where plain decoding is faster.

Predictions weigh passes; a round of many requests spends much of its time outside of them. So rounds are timed as a
whole, by how many requests they have, across requests: what the last request has shown, the next one starts from.
"""

from __future__ import annotations

from sakiyomi.core.running_mean import running_mean
from sakiyomi.drafters.draft_length import LOSS, Throughput

__all__ = ["Pace"]

SETTLED = 16  # rounds with drafts, after which they are compared
LOOK_EVERY = 128  # rounds with drafts, after which one is plain, to be measured
REST, REST_LATEST = 128, 2048  # rounds of the first rest and of the longest: each trial in vain doubles it
TRIAL = 3  # rounds with drafts behind a rest, after which they are compared again


class Pace:
    """Of rounds with about as many requests.

    Args:
        alone: it is one request, whose own policy decides when to rest: the next one's text may be easier. What rounds
            with drafts brought is forgotten after many without, so that short requests try anew.

    Attributes:
        drafted: tokens a second of a request in rounds with drafts.
        plain: seconds of a round without; 0: none was measured.
        last: seconds of the last round.
    """

    def __init__(self, *, alone: bool = False) -> None:
        self._alone = alone
        self.drafted = Throughput()
        self.plain = self.last = 0.0
        self._enough = SETTLED  # rounds with drafts, until the next comparison
        self._since = 0  # rounds with drafts since the last plain one
        self._left, self._rest = 0, REST
        self._idle = 0  # rounds since the last one with drafts

    @property
    def rate(self) -> float:
        """Tokens a second to be expected of rounds with drafts; 0: too few were measured."""
        return self.drafted.rate if self.drafted.rounds >= SETTLED else 0.0

    @property
    def undrafted(self) -> bool:
        """Whether the next round is to be plain: drafting has lost, or plain rounds are to be measured."""
        return self._left > 0 or self._since >= (LOOK_EVERY if self.plain else SETTLED)

    def add_plain(self, seconds: float) -> None:
        """A round without drafts took so long."""
        self.plain = running_mean(self.plain or None, seconds)
        self._since = 0
        self._idle += 1
        if self._alone and self._idle >= self._rest:
            self.drafted, self._idle, self._rest = Throughput(), 0, min(2 * self._rest, REST_LATEST)
        if self._left:
            self._left -= 1
            if not self._left:  # tried anew
                self.drafted.fade(0.3)
                self._enough = self.drafted.rounds + TRIAL

    def add_drafted(self, tokens: float, seconds: float) -> None:
        """A round with drafts brought each request so many tokens on average."""
        self.drafted.add(tokens, seconds)
        self._since += 1
        self._idle = 0
        if self.drafted.rounds < self._enough or not self.plain:
            return
        if self.drafted.rate * self.plain >= LOSS:
            self._rest = REST
        elif not self._alone:
            self._left, self._rest = self._rest, min(2 * self._rest, REST_LATEST)

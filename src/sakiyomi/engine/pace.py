"""Measured speed of rounds with and without drafts, so that nothing is drafted where plain decoding is faster.

Predictions cover passes only, and a round of many requests spends much of its time outside of them. So whole rounds are
timed, by the number of their requests. The measurements are kept when requests end: the next request starts from them.
"""

from __future__ import annotations

from collections import deque
from statistics import median

from sakiyomi.drafters.draft_length import ANEW, LOSS, Throughput

BRIEF = 0.01  # seconds of a step after which no further round begins in the kernels
SETTLED, FEWEST = 16, 3  # rounds of one request with drafts, after which they are compared; least of many requests
LOOK_EVERY = 128  # rounds with drafts, after which one is plain, to be measured
NEAR, NEAR_EVERY = 1.5, 24  # the same where drafting is less than NEAR times as fast as plain decoding
FIRST_LOOKS, READINGS = 3, 5  # plain rounds of the first look; readings whose median counts
REST, REST_LATEST = 128, 2048  # rounds of the first rest and of the longest: each trial in vain doubles it
TRIAL = 3  # rounds with drafts behind a rest, after which they are compared again
CLOSE, DOUBTS = 0.9, 3  # a loss no larger than this may be due to few rounds: DOUBTS more are waited for


class Pace:
    """Measurements of rounds with about the same number of requests.

    Args:
        requests: how many. For a single request ``AutoSize`` decides when to rest. Here the measurements of rounds with
            drafts are then only dropped after many plain rounds, so that the next request tries drafts again: its text
            may be easier.

    Attributes:
        drafted: tokens a second of a request in rounds with drafts.
        plain: seconds of a round without; 0: none was measured.
        last: seconds of the last round.
        settled: number of rounds with drafts before they are compared with plain rounds.
    """

    def __init__(self, requests: int) -> None:
        self._alone = requests == 1
        self.settled = max(FEWEST, round(SETTLED / requests**0.5))  # a mean of more requests is sooner known
        self.drafted = Throughput()
        self.plain = self.last = 0.0
        self._readings: deque[float] = deque(maxlen=READINGS)  # seconds of plain rounds
        self._enough = self.settled  # rounds with drafts, until the next comparison
        self._look = self.settled  # rounds with drafts, until the next plain one
        self._since = 0  # rounds with drafts since the last plain one
        self._left, self._rest = 0, REST
        self._doubts = DOUBTS  # rounds that a close loss is still looked at
        self._idle = 0  # rounds since the last one with drafts

    @property
    def rate(self) -> float:
        """Tokens a second to be expected of rounds with drafts; 0: too few were measured, or in doubt."""
        return self.drafted.rate if self.drafted.rounds >= self._enough else 0.0

    @property
    def undrafted(self) -> bool:
        """Whether the next round is to be plain: drafting has lost, or plain rounds are to be measured."""
        return self._left > 0 or self._since >= self._look

    def unchanged(self, most: int) -> int:
        """How many rounds after the next one, of so many, have drafts if it has some, by what is known now."""
        return min(most, max(0, self._left - 1 if self._left else self._look - self._since - 1))

    def reckoned(self, seconds: float, share: float) -> float:
        """What a round would have taken in which all had drafted, of whom one in `share` did."""
        return self.plain + max(0.0, seconds - self.plain) * share

    def add_plain(self, seconds: float) -> None:
        """Add a round without drafts."""
        self._readings.append(seconds)
        self.plain = median(self._readings)
        if len(self._readings) >= FIRST_LOOKS:
            self._since = 0
        self._idle += 1
        if self._alone and self._idle >= self._rest:
            self.drafted, self._idle, self._rest = Throughput(), 0, min(2 * self._rest, REST_LATEST)
        if self._left:
            self._left -= 1
            if not self._left:  # tried anew
                self.drafted.fade(ANEW)
                self._enough = self.drafted.rounds + TRIAL

    def add_drafted(self, tokens: float, seconds: float) -> None:
        """Add a round with drafts: mean tokens of a request, and its seconds."""
        self.drafted.add(tokens, seconds)
        self._since += 1
        self._idle = 0
        if self.drafted.rounds < self._enough or not self.plain:
            return
        gain = self.drafted.rate * self.plain
        self._look = NEAR_EVERY if gain < NEAR else LOOK_EVERY  # a look costs the less, the less drafting brings
        if gain >= (LOSS if self._alone else 1.0):  # of many requests drafts that bring nothing only hold up the others
            self._rest, self._doubts = REST, DOUBTS
        elif gain > CLOSE and self._doubts and not self._alone:
            self._doubts -= 1
            self._enough = self.drafted.rounds + 1  # nothing is expected of them yet
        elif not self._alone:
            self._left, self._rest = self._rest, min(2 * self._rest, REST_LATEST)
            self._doubts = DOUBTS

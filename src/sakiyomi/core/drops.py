"""Detects that a draft is accepted less often than when it was chosen. Knows neither drafts nor models."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

FELL = 0.1
"""A loss of this share of tau is reported."""
SURE = 3.0  # standard errors
WINDOW = 2048


def ratio_error(pairs: Sequence[tuple[float, float]]) -> float:
    """Relative standard error of the ratio sum of the first / sum of the second, for randomly drawn pairs.

    Cochran, Sampling Techniques (1977), equation 6.13. 0 for a single pair, whose spread is unknown.
    """
    if len(pairs) < 2:
        return 0.0
    first, second = (math.fsum(part) for part in zip(*pairs, strict=True))
    left = math.fsum((a - first / second * b) ** 2 for a, b in pairs)
    return math.sqrt(len(pairs) * left / (len(pairs) - 1)) / first


@dataclass(frozen=True)
class Tau:
    """Tokens committed per target pass, as measured on some texts.

    Attributes:
        value: tau itself.
        error: its standard error, as a share of it.
    """

    value: float
    error: float = 0.0

    @classmethod
    def of(cls, texts: Sequence[tuple[float, float]]) -> Tau:
        """From tokens and passes of each text; 0 where there is no pass."""
        tokens, passes = (math.fsum(part) for part in zip(*texts, strict=True)) if texts else (0.0, 0.0)
        return cls(tokens / passes, ratio_error(texts)) if passes else cls(0.0)


def change(now: Tau, then: Tau) -> float:
    """Relative change of tau since then; negative: it fell."""
    return now.value / then.value - 1 if then.value else 0.0


def fallen(now: Tau, then: Tau) -> bool:
    """Whether tau is lower by more than ``FELL``, and by more than chance explains."""
    lost = -change(now, then)
    return lost > FELL and lost > SURE * math.hypot(now.error, then.error)


class TauWatch:
    """Compares tau of an engine's last rounds with tau when its draft was chosen.

    Args:
        chosen: tau then.
        window: number of last rounds that count.

    Attributes:
        fell: whether tau has fallen; updated every half window.
    """

    def __init__(self, chosen: Tau, window: int = WINDOW) -> None:
        self.chosen, self.fell = chosen, False
        self._rounds: deque[int] = deque(maxlen=window)
        self._fresh = 0

    @property
    def recent(self) -> Tau:
        """Of the last rounds."""
        return Tau.of([(count, 1.0) for count in self._rounds])

    def add(self, tokens: int) -> bool:
        """Count a round that committed `tokens`. Returns whether ``fell`` has changed."""
        self._rounds.append(tokens)
        self._fresh += 1
        window = self._rounds.maxlen
        assert window is not None
        if len(self._rounds) < window or self._fresh < window // 2:
            return False
        self._fresh, before = 0, self.fell
        self.fell = fallen(self.recent, self.chosen)
        return self.fell != before

"""State functions: what transformers' modules call to go from token to token, and what stands in their place here."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from sakiyomi.cache.recurrent import Recurrence, Site


class Run(Protocol):
    """Computes the outputs of a pass's rows on the states of their requests."""

    def __call__(self, rows: Sequence[Tensor], fixed: Sequence[Tensor] = (), around: int = 0) -> Tensor:
        """Rows (1, N, ...) each, what is the same for all of them, and what else is computed (``Around``), to what is
        shaped like the first of the rows.
        """


class StateFunction(Recurrence):
    """A recurrence with the arguments and the result of the function that transformers has for whole texts.

    The modules call it without a cache, with the N rows of a pass as a text of N tokens. What it does before and behind
    the recurrence is done there, too (``Around``), since every further operator takes as long as a layer's recurrence.
    """

    @abstractmethod
    def call(self, run: Run, *args: Any, **kwargs: Any) -> Any:
        """What the function gives, computed by `run`."""


class LinearAttention(StateFunction):
    """States of (heads, key width, value width), which queries are multiplied with.

    Of a row's tensors the first are values (N, heads, value width), the second keys (N, groups, key width), the third
    decays (N, heads) or (N, heads, key width), and the last queries like keys. What is kept of a row is what it adds to
    the state, in the place of its values, its keys and its decays.
    """

    kept, kernel = 3, 1

    def shape(self, rows: Sequence[Tensor], fixed: Sequence[Tensor]) -> tuple[int, ...]:
        """See ``Recurrence``."""
        values, keys = rows[:2]
        return values.shape[2], keys.shape[3], values.shape[3]

    def kernel_shape(self, site: Site) -> tuple[int, int, int, int]:
        """See ``Recurrence``."""
        return site.state[0], site.rows[1][0], site.state[1], site.state[2]

    def advance(self, states: Tensor, rows: Sequence[Tensor], fixed: Sequence[Tensor]) -> Tensor:
        """See ``Recurrence``."""
        change, keys, decays = rows
        return decayed(states, decays) + spread(keys, states)[..., None] * change[..., None, :]

    def read(self, states: Tensor, rows: Sequence[Tensor], fixed: Sequence[Tensor]) -> Tensor:
        """See ``Recurrence``."""
        return (states * spread(rows[-1], states)[..., None]).sum(-2)


def decayed(states: Tensor, decays: Tensor) -> Tensor:
    """States (N, heads, key width, value width) times decays (N, heads) or (N, heads, key width)."""
    return states * (decays if decays.ndim == 3 else decays[..., None])[..., None]


def spread(rows: Tensor, states: Tensor) -> Tensor:
    """(N, groups, width) to (N, heads, width): as many heads in a row share a group."""
    return rows.repeat_interleave(states.shape[1] // rows.shape[1], 1)

"""State functions, which transformers' modules call to go from token to token, and their replacements."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from sakiyomi.cache.recurrent import Recurrence, Site


class Run(Protocol):
    """Computes the outputs of a pass's rows on the states of their requests."""

    def __call__(self, rows: Sequence[Tensor], fixed: Sequence[Tensor] = (), around: int = 0) -> Tensor:
        """Rows (1, N, ...) each, tensors that are the same for all rows, and further work (``Around``), to a tensor
        shaped like the first of the rows.
        """


class StateFunction(Recurrence):
    """A recurrence with the arguments and the result of transformers' function for whole texts.

    The modules call it without a cache, with the N rows of a pass as a text of N tokens. It also does the work before
    and after the recurrence (``Around``), since every further operator takes as long as a layer's recurrence.
    """

    @abstractmethod
    def call(self, run: Run, *args: Any, **kwargs: Any) -> Any:
        """The result of the function, computed by `run`."""


class LinearAttention(StateFunction):
    """States of (heads, key width, value width) that are multiplied by queries.

    The tensors of a row are values (N, heads, value width), keys (N, groups, key width), decays (N, heads) or
    (N, heads, key width), and last queries like keys. Of a row are kept its change of the state (instead of its
    values), its keys and its decays.
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

"""The interface of verifiers, and the target's rows, which become distributions when they are read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from sakiyomi.core.errors import InputError
from sakiyomi.core.params import SamplingParams
from sakiyomi.core.tree import DRAFT_KINDS, Draft, DraftKind, Draw, Rule, TokenTree, Verdict, VerdictKind
from sakiyomi.sampling.probs import best, chance, require_number
from sakiyomi.sampling.rng import RequestNoise
from sakiyomi.sampling.rows import Row, Tokens, as_row
from sakiyomi.sampling.sampler import Sampler

__all__ = ["Rows", "Rule", "Verifier", "draft_rows", "ended", "source_of"]


_NO_TREE = TokenTree()


class Rows:
    """The target's logits for one request: row 0 follows the last committed token, row i + 1 follows node i.

    Verifying reads few rows of a wide tree, so that on the CPU each is processed and normalised when it is first read;
    the result depends on that row alone. On an accelerator all are computed at once, and read back one by one.

    Args:
        logits: (n + 1, V) raw logits of any float type; with ``here`` those of a whole pass, (..., V).
        sampler: made for the target's vocabulary.
        position: absolute position of the token that row 0 predicts; row i + 1 predicts ``position + depth(i) + 1``.
        tree: the tree that was scored; only read where ``sampler.needs_history``.
        committed: all tokens before, prompt included, list or (length,) int64; only read with ``needs_history``.
        here: the request's rows of the pass.
    """

    def __init__(
        self,
        logits: Tensor,
        sampler: Sampler,
        position: int,
        tree: TokenTree = _NO_TREE,
        committed: Sequence[int] | Tensor = (),
        here: slice | None = None,
    ) -> None:
        self.sampler, self.position = sampler, position
        self._logits, self._here, self._tree, self._committed = logits, here, tree, committed
        self._processed: dict[int, Tensor] = {}
        self._probs: dict[int, Row] = {}
        self._supports: dict[int, Tokens | None] = {}
        self._all: Tensor | None = None
        self._best: list[int] | None = None
        self._bests: dict[int, tuple[int, float]] = {}

    def __len__(self) -> int:
        return int(self.raw.shape[0])

    @cached_property
    def raw(self) -> Tensor:
        """(n + 1, V) logits as the target gave them."""
        return self._logits if self._here is None else self._logits.flatten(0, -2)[self._here]

    @property
    def params(self) -> SamplingParams:
        """The request's parameters."""
        return self.sampler.params

    @property
    def on_cpu(self) -> bool:
        """Whether rows are in main memory, so that they can be read one by one."""
        return self.raw.device.type == "cpu"

    @property
    def width(self) -> int:
        """Vocabulary size, V."""
        return int(self.raw.shape[1])

    def processed(self, index: int) -> Tensor:
        """Logits of one row after bias, penalties and bans, (V,); raw ones where no such option is set."""
        if not self.sampler.edits:
            return self.raw[index]
        row = self._processed.get(index)
        if row is None:
            paths = (self._tree.path_tokens(index - 1),)
            row = self.sampler.process(self.raw[index : index + 1], paths, self._committed)[0]
            self._processed[index] = row
        return row

    @property
    def logits(self) -> Tensor:
        """(n + 1, V) processed logits of all rows."""
        if not self.sampler.edits:
            return self.raw
        return torch.stack([self.processed(index) for index in range(len(self))])

    def probs(self) -> Tensor:
        """(n + 1, V) float32 distributions of all rows, on the logits' device."""
        if self._all is None:
            self._all = self.sampler.probs(self.logits)
        return self._all

    def row(self, index: int) -> Row:
        """Distribution of one row, (V,) float32 in numpy. Shared: not to be written to."""
        row = self._probs.get(index)
        if row is None:
            if self._all is not None or not self.on_cpu:
                row = as_row(self.probs()[index])
                require_number(float(row[0]))
            else:
                row = np.empty(self.width, np.float32)
                self._supports[index] = self.sampler.fill(self.processed(index), row)
            self._probs[index] = row
        return row

    def support(self, index: int) -> Tokens | None:
        """Tokens of positive probability in a row, ascending, where they are known to be few; None: take all."""
        self.row(index)
        return self._supports.get(index)

    def best(self, index: int) -> int:
        """The most probable token of one row, of equal ones the first; computes no softmax."""
        if self.on_cpu:
            found = self._bests.get(index)
            if found is None:
                found = self._bests[index] = best(self.processed(index))
            return found[0]
        if self._best is None:
            # One read-back for all rows. Which of several equal tokens is taken depends on the device.
            peaks, tokens = self.logits.max(-1)
            peak, first = torch.stack([peaks.double(), tokens.double()]).tolist()
            for value in peak:
                require_number(value)
            self._best = [int(token) for token in first]
        return self._best[index]

    def chance(self, index: int, token: int) -> float:
        """Softmax probability of a token in one row on the CPU, at temperature 1."""
        found = self._bests.get(index)
        return found[1] if found is not None and found[0] == token else chance(self.processed(index), token)


class Verifier(ABC):
    """An acceptance rule. It is pure: randomness comes in as ``noise``, and nothing is kept between rounds.

    Attributes:
        name: as in ``SamplingParams.acceptance``.
        rule: how drafters propose for it (``Context.rule``); "ratio" for all rules that read draft probabilities.
        lossless: whether the output has the target's own distribution; if so, the distribution tests include the rule.
        takes: kinds of draft for which that holds.
    """

    name: str
    rule: Rule
    lossless = True
    takes: frozenset[DraftKind] = DRAFT_KINDS

    @abstractmethod
    def verify(self, draft: Draft, rows: Rows, noise: RequestNoise) -> Verdict:
        """Decide which nodes are accepted, and which token follows them.

        Args:
            draft: of a kind that the rule takes; not changed.
            rows: the target's, n + 1 for a draft of n nodes; not changed.
            noise: of this request.

        Raises:
            InputError: no token is left in a row, or the draft's distributions are over another number of tokens.
        """


def ended(draft: Draft, path: Sequence[int], token: int, refused: Sequence[int] = ()) -> Verdict:
    """The verdict that accepts ``path`` and then commits ``token``."""
    kind: VerdictKind = "bonus"
    if not len(draft):
        kind = "plain"
    elif draft.tree.children(path[-1] if path else -1):
        kind = "recovered"
    return Verdict(tuple(path), token, kind, tuple(refused))


def source_of(draw: Draw, probs: Row | None) -> Row | None:
    """The distribution that a node was drawn from, (V,), of those that ``draft_rows`` gives; None: a point mass."""
    return None if draw.row is None or probs is None else probs[draw.row]


def draft_rows(draft: Draft, rows: Rows) -> Row | None:
    """The distributions that a draft was drawn from, (rows, V) float32; None: it has none.

    Raises:
        InputError: they have another number of tokens than the target's.
    """
    if draft.probs is None:
        return None
    probs = as_row(draft.probs)
    if probs.shape[1] != rows.width:
        raise InputError(
            f"draft probabilities are over {probs.shape[1]} tokens, the target's over {rows.width}; "
            "pad them with zeros, or cut off the tokens that the target does not have before drawing"
        )
    return probs

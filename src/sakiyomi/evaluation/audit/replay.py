"""Distributions of a pair of models, recorded once and replayed through the real engine at almost no cost.

A verifier is lossless if it gives the target's distribution whatever was drafted, so that it may be tested on any chain
of distributions. A wrong verifier shows best on distributions of the pair itself. A few recorded rows become a Markov
chain: a first row, one row after each of its tokens by rank, and then the first row again. ``TableModel`` looks these
rows up instead of running a model; engine, drafter and verifier are the real ones.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor

from sakiyomi.cache.eviction import ManagedCache
from sakiyomi.core.tree import Draft
from sakiyomi.drafters import Context, Drafter
from sakiyomi.evaluation.tuning.watch import Heard
from sakiyomi.kernels.batch import SequenceRows
from sakiyomi.model_executor.features import PassOutput

WIDTH = 4
"""Tokens that a row keeps: its most probable ones."""
STATES = 1 + WIDTH
Narrow = tuple[Tensor, Tensor]
"""(n,) token ids and their probabilities, sum 1."""
KEPT, CONSIDERED = 32, 64
"""Rows of a text that are kept, and rows of each model among which a choice is made."""
HOTTER = (1.0, 2.0, 4.0)


def narrow(row: Tensor) -> Narrow:
    """The most probable tokens of a row (V,)."""
    best = row.float().topk(min(WIDTH, len(row)))
    return best.indices.cpu(), (best.values / best.values.sum()).cpu()


class Listener(Heard):
    """A drafter that keeps the distribution from which the first token of each draft was drawn.

    Args:
        drafter: makes the drafts.

    Attributes:
        rows: of each request what the token at a place was drawn from, by place.
    """

    def __init__(self, drafter: Drafter) -> None:
        super().__init__(drafter)
        self.rows: defaultdict[int, dict[int, Narrow]] = defaultdict(dict)

    def propose(self, contexts: Sequence[Context], gammas: Sequence[int]) -> list[Draft]:
        """See ``Drafter.propose``."""
        drafts = super().propose(contexts, gammas)
        for context, draft in zip(contexts, drafts, strict=False):
            kept = self.rows[context.id]
            if len(kept) < KEPT and draft.probs is not None:
                drawn = next((drawn for drawn in draft.draws_at(-1) if drawn.row is not None), None)
                if drawn is not None and drawn.row is not None:
                    kept[len(context.tokens)] = narrow(draft.probs[drawn.row])
        return drafts


@dataclass(frozen=True)
class Recording:
    """A chain of recorded distributions over few tokens.

    Attributes:
        target, draft: (states, v) distributions over the tokens that occur.
        step: of each state the state after each token.
    """

    target: Tensor
    draft: Tensor
    step: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, target: Sequence[Narrow], draft: Sequence[Narrow]) -> Recording:
        """Choose rows on which a wrong rule shows best, and make a chain of them.

        A rule is to be right for any two of them, so that a row of the target may meet what the draft said elsewhere,
        and both be taken as they are at higher temperatures: of a model that is sure of itself few others tell much.

        Args:
            target, draft: rows at the same places, at least one.
        """
        picked = torch.linspace(0, len(target) - 1, min(len(target), CONSIDERED)).round().int().tolist()
        tokens = torch.cat([ids for i in picked for ids, _ in (target[i], draft[i])]).unique()
        p, q = (torch.zeros(len(picked), len(tokens)) for _ in range(2))
        for row, i in enumerate(picked):
            for table, (ids, values) in ((p, target[i]), (q, draft[i])):
                table[row, torch.searchsorted(tokens, ids)] = values
        p, q = (torch.cat([_hotter(rows, times) for times in HOTTER]) for rows in (p, q))
        worth = torch.stack([telling(row, q) for row in p])
        chosen = worth.flatten().sort(descending=True, stable=True).indices[:STATES]
        # Of fewer pairs than states some stand for several.
        chosen = chosen.repeat(STATES)[:STATES]
        p, q = p[chosen // len(q)], q[chosen % len(q)]
        tokens = ((p + q).sum(0) > 0).nonzero()[:, 0]
        p, q = p[:, tokens], q[:, tokens]
        ranks = p[0].argsort(descending=True, stable=True).argsort()
        first = tuple(1 + min(int(place), WIDTH - 1) for place in ranks)
        return cls(p, q, (first, *[(0,) * len(tokens)] * (STATES - 1)))

    @property
    def away(self) -> float:
        """Total variation between draft and target, the mean over the states."""
        return float((self.target - self.draft).abs().sum(1).mean() / 2)

    def states(self, tokens: Sequence[int]) -> list[int]:
        """The state in front of each token of a text."""
        found, state = [], 0
        for token in tokens:
            found.append(state)
            state = self.step[state][token]
        return found


def telling(target: Tensor, draft: Tensor) -> Tensor:
    """How well faults show where the target's row is p and the draft's q, (n,): the product of three measures.

    How often a coin decides on a draft token, which is neither sure to stay nor sure to go: the mean of a (1 - a), a =
    min(1, p / q), over tokens drawn from q. Whether it matters what was refused before: how far max(p / 2 - q, 0) is
    from max(p - q, 0), both normalised, times the mass of the first. Whether the target is not sure of one token: the
    chance that two draws of p differ. On the pairs tried, TV (1 - TV) in the place of the first did not tell a block's
    wrong residual from the right one.

    Args:
        target: (v,) p.
        draft: (n, v) q, one for each answer.
    """
    stays = (target / draft.clamp_min(1e-9)).clamp_max(1.0)
    coin = (draft * stays * (1 - stays)).sum(1)
    rest, _ = _normalised((target - draft).clamp_min(0))
    half, mass = _normalised((target / 2 - draft).clamp_min(0))
    level = mass * (half - rest).abs().sum(1) / 2
    return coin * level * (1 - (target * target).sum())


def _hotter(rows: Tensor, times: float) -> Tensor:
    """Distributions as they are at a temperature so many times as high."""
    hotter = rows ** (1 / times) * (rows > 0)
    return hotter / hotter.sum(1, keepdim=True)


def _normalised(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of sum 1, and what they summed to."""
    mass = rows.sum(1)
    return rows / mass.clamp_min(1e-9)[:, None], mass


class _Columns:
    """Stands in for a KV cache: keeps the states after the tokens of every slot."""

    def __init__(self, slots: int) -> None:
        self.max_slots = slots
        self.states: list[list[int]] = [[] for _ in range(slots)]
        self._free = list(range(slots))

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        slot = self._free.pop()
        self.states[slot] = []
        return slot

    def release(self, slot: int) -> None:
        self._free.append(slot)

    def needs(self, slots: int, columns: int) -> int:
        """Columns take no memory."""
        return 0

    def reserve(self, slot: int, columns: int) -> None:
        """There is always room."""

    def has_room(self, slot: int, columns: int) -> bool:
        """There is always room."""
        return True

    def check(self, requests: int, columns: int) -> None:
        """It always fits."""

    def resumable(self, slot: int, length: int, multiple: int = 1) -> int:
        """A text continues from any length."""
        return length

    resume = resumable

    def commit(self, slot: int, length: int, rows: Sequence[int]) -> None:
        states = self.states[slot]
        states[length:] = [states[length + row] for row in rows]


class TableModel:
    """A ``ModelRunner`` that looks its logits up in a table instead of computing them.

    Args:
        probs: (states, v) distribution of each state.
        step: of each state the state after each token; a text begins in the first state after its first token.
        slots: requests at once.
    """

    max_context = 1 << 30
    module = None
    offloaded = False
    clock = SimpleNamespace(made=0)
    device = torch.device("cpu")

    def __init__(self, probs: Tensor, step: Sequence[Sequence[int]], slots: int) -> None:
        self.vocab_size = probs.shape[1]
        self.forward_seconds = 0.0
        self.cache = _Columns(slots)
        self.eviction = ManagedCache(self.cache)  # type: ignore[arg-type]
        self._logits, self._step = probs.log(), step

    def capture(self, layers: Sequence[int]) -> None:
        """A table has no hidden states."""

    def make_room(self, slot: int, columns: int, source: object = None) -> None:
        """There is always room."""

    def takes(self, source: object) -> bool:
        """There is nothing but the text."""
        return True

    def describable(self) -> bool:
        """No: no kernel describes these passes."""
        return False

    def known_seconds(self, rows: int) -> None:
        """Passes cost nothing that is worth a thought."""

    def padded(self, rows: int) -> int:
        """Passes come in every size."""
        return rows

    def score(self, segments: Sequence[SequenceRows], *, last: bool = False) -> PassOutput:
        """See ``ModelRunner.score``."""
        found: list[int] = []
        for segment in segments:
            states = self.cache.states[segment.slot]
            del states[segment.length :]
            first = segment.length - segment.done  # of the tree's rows
            for row, token in enumerate(segment.tokens, start=segment.done):
                parent = row - 1 if segment.parents is None else segment.parents[row]
                place = first + parent
                states.append(self._step[states[place]][token] if place >= 0 else 0)
            found += states[-1:] if last else states[segment.length :]
        return PassOutput(self._logits[found], {})

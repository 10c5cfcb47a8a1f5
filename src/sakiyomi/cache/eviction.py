"""Evicts and quantizes keys and values of every slot at eviction boundaries, the same way for every policy.

A boundary lies at the end of every chunk of a prompt and behind a fixed number of generated tokens, so its place
depends on the request alone. Nothing is evicted or quantized between boundaries, and no pass crosses one. At a boundary
the policy sees observations of committed tokens only. What stays therefore does not depend on drafts, and rolling back
only changes a length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from sakiyomi.cache.eviction_plan import ENDLESS, Capacity, EvictionPlan
from sakiyomi.cache.host import CacheHost
from sakiyomi.cache.observations import RowObservations
from sakiyomi.cache.policies import Policy, View
from sakiyomi.cache.policies.sparse import Sparse
from sakiyomi.cache.recall import MainMemory
from sakiyomi.cache.rotary import Positions, Repositioner, make_turn
from sakiyomi.cache.slot_record import SlotRecord
from sakiyomi.cache.slots import SlotCache


class ManagedCache:
    """A cache and the rule by which pairs stay in it. This one keeps all pairs: it has no boundaries.

    Args:
        cache: of the model.

    Attributes:
        observations: what passes store of their rows for the policy; None: nothing.
        sparse: chooses the columns that rows of prompts attend to; None: all.
        needs_log_probs: -log p of every token is needed.
        reread_tokens: most tokens of a prompt that are read a second time, see ``reread_from``.
        chunked: the contents depend on the chunks in which a text was read.
        tail: last tokens of a prompt that a policy may treat specially; what is kept before them is the same for all
            prompts with the same beginning.
        policy: evicts pairs; None: nothing is evicted.
        shifts: by slot, offset from places to positions, where images in a text take several positions.
    """

    def __init__(self, cache: SlotCache) -> None:
        self.cache = cache
        self.observations: RowObservations | None = None
        self.sparse: Sparse | None = None
        self.policy: Policy | None = None
        self.needs_log_probs = self.chunked = False
        self.reread_tokens, self.tail = 0, 1
        self.shifts: dict[int, int] = {}

    @property
    def far_bytes(self) -> int:
        """Bytes of pairs in main memory that attention does not read; 0 where evicted pairs are gone."""
        return 0

    # ------------------------------------------------------------ a slot's text

    def begin(self, slot: int) -> None:
        """A text begins in this slot, which is empty."""
        self.shifts.pop(slot, None)
        self._observe_from(slot, 0)

    def end(self, slot: int) -> None:
        """The slot is free again."""
        if self.observations is not None:
            self.observations.end(slot)

    def commit(self, slot: int, length: int, rows: Sequence[int]) -> None:
        """Of a pass's rows keep these, see ``SlotCache.commit``."""
        self.cache.commit(slot, length, rows)
        if self.observations is not None:
            self.observations.commit(slot, length, rows)

    def resume(self, slot: int, length: int, multiple: int = 1) -> int:
        """Roll a slot back to at most `length` tokens, a multiple of `multiple`; returns how many are left."""
        return self.cache.resume(slot, length, multiple)

    def lendable(self, slot: int, length: int, multiple: int = 1) -> int:
        """How many of a slot's first `length` tokens, a multiple of `multiple`, another slot can copy."""
        return self.cache.resumable(slot, length, multiple)

    def fork(self, slot: int, other: int, first: int, length: int) -> None:
        """Copy the first `length` tokens of another slot, which are ``lendable``; `first` of them are in place already.

        Raises:
            MemoryLimitError: see ``SlotCache.fork``.
        """
        self.cache.fork(slot, other, first, length)
        self._observe_from(slot, length)

    def snapshot(self, slot: int, length: int) -> dict[str, Tensor]:
        """A copy of all that a slot holds of its text of so many tokens, by name."""
        return self.cache.snapshot(slot, length)

    def restore(self, slot: int, length: int, known: Mapping[str, Tensor]) -> None:
        """Fill an empty slot with what ``snapshot`` gave."""
        self.cache.restore(slot, length, known)
        self._observe_from(slot, length)

    def _observe_from(self, slot: int, length: int) -> None:
        """Observe rows from this place on."""
        if self.observations is not None:
            self.observations.begin(slot, length)

    # ------------------------------------------------------------ eviction

    def boundary(self, slot: int, prompt: int) -> int:
        """The next eviction boundary, in tokens of the text; no pass may reach beyond it.

        Args:
            slot: a request's.
            prompt: tokens of its prompt.
        """
        return ENDLESS

    def evict(self, slot: int, prompt: int, length: int) -> None:
        """Evict what is beyond the budget, and quantize what may be, if `length` tokens reach the boundary."""

    def reread_from(self, slot: int, prompt: int, length: int) -> int:
        """How many tokens count as read when a chunk of a prompt has been read up to `length`; the rest is read again.

        With a policy that recalls pairs, the rows at a prompt's end were read with pairs that earlier rows had chosen.
        These rows now choose their own pairs, are removed, and are read again.
        """
        return length

    def tracking_queries(self) -> QueryTrackingCache | None:
        """A cache that also keeps the queries of each slot's last row; None: pairs are evicted here."""
        tracked = QueryTrackingCache(self.cache)
        tracked.shifts = self.shifts
        return tracked

    def add_log_probs(self, slot: int, neg_log_prob: Sequence[float]) -> None:
        """Take -log p of the next tokens, where the policy needs them."""

    def add_prompt_log_probs(self, slot: int, logits: Tensor, ids: Sequence[int], at: int, end: int) -> None:
        """The same from the logits of a prompt's chunk ids[at:end], see ``SlotRecord.add_prompt``."""


class QueryTrackingCache(ManagedCache):
    """Keeps all pairs, and the queries of every slot's last row, for a drafter that selects pairs by them.

    Args:
        cache: of the model.
    """

    observations: RowObservations

    def __init__(self, cache: SlotCache) -> None:
        super().__init__(cache)
        self.observations = RowObservations(len(cache.shapes), cache.max_slots + cache.extra)
        self._last: dict[int, list[Tensor]] = {}

    def end(self, slot: int) -> None:
        """The slot is free again."""
        super().end(slot)
        self._last.pop(slot, None)

    def resume(self, slot: int, length: int, multiple: int = 1) -> int:
        """Roll a slot back; rows behind what is left are observed next."""
        length = super().resume(slot, length, multiple)
        self._observe_from(slot, length)
        return length

    def evict(self, slot: int, prompt: int, length: int) -> None:
        """Remember the last row's queries."""
        rows = [self.observations.read(layer, slot, length) for layer in range(len(self.cache.shapes))]
        if all(row is not None and len(row) for row in rows):
            self._last[slot] = [row[-1].clone() for row in rows if row is not None]
            self.observations.begin(slot, length)

    def tracking_queries(self) -> QueryTrackingCache | None:
        """Itself."""
        return self

    def queries(self, slot: int) -> list[Tensor] | None:
        """Queries of the last row of each layer, (query heads x dim); None: there was no pass."""
        return self._last.get(slot)


class EvictingCache(ManagedCache):
    """Keeps the cache of one model within a budget, or quantizes it, or both.

    Whole groups of tokens are quantized at boundaries, before a tail in full precision. A text is never rolled back
    behind its last boundary. Layers with a sliding window are quantized like others, since windows count columns.

    Args:
        plan: options of the cache.
        capacity: of the plan for this model's layers.
        cache: has that capacity.
        host: the model, which can run.

    Raises:
        LoadError, UnsupportedError: the policy does not fit the model.
    """

    def __init__(self, plan: EvictionPlan, capacity: Capacity, cache: SlotCache, host: CacheHost) -> None:
        super().__init__(cache)
        self.policy, self.sparse, self.tail, self.chunked = plan.policy, plan.sparse, capacity.tail, True
        self.chunk, self._budgets = plan.chunk, capacity.budgets
        policy = plan.policy or Policy
        self.interval, self.reread_tokens, self._beside = policy.interval, policy.reread_tokens, policy.beside
        self.needs_log_probs = policy.needs_log_probs
        if plan.observer is not None:
            self.observations = RowObservations(len(cache.shapes), cache.max_slots + cache.extra)
        if plan.policy is not None:
            plan.policy.prepare(host)
            if plan.policy.merger is not None:
                plan.policy.merger.prepare(host)
        turn = make_turn(host) if plan.reassigned else None
        self._mover = Repositioner(cache, turn) if turn is not None else None
        self._far = MainMemory(cache, turn) if policy.recalls else None
        self._slots: dict[int, SlotRecord] = {}
        if cache.packed is not None:
            cache.packed.fit(host)

    @property
    def far_bytes(self) -> int:
        """Bytes of pairs in main memory that attention does not read; 0 where evicted pairs are gone."""
        return self._far.pairs.bytes if self._far is not None else 0

    @property
    def _choosable(self) -> SlotCache:
        """The pairs among which the policy chooses: all of them, in main memory, if it recalls, else the cache's."""
        return self._far.pairs if self._far is not None else self.cache

    def places(self, slot: int) -> Sequence[Sequence[Tensor]]:
        """Of each layer and head, the places in the text of the pairs that stayed at the last boundary."""
        record = self._slots[slot]
        if self.policy is None:
            return [[torch.arange(record.boundary)] * shape.heads for shape in self.cache.shapes]
        return record.places

    def tracking_queries(self) -> None:
        """Nothing: see ``ManagedCache.tracking_queries``."""

    # ------------------------------------------------------------ a slot's text

    def begin(self, slot: int) -> None:
        """A text begins in this slot."""
        self.cache.clear(slot)
        self._slots[slot] = SlotRecord.empty(self._choosable.shapes)
        super().begin(slot)

    def end(self, slot: int) -> None:
        """The slot is free again."""
        super().end(slot)
        self._slots.pop(slot, None)

    def resume(self, slot: int, length: int, multiple: int = 1) -> int:
        """Roll a slot back. Where pairs are evicted and its last boundary would be crossed, the slot is cleared.

        Where log probabilities are needed, the token behind the rest must stay the same, since the row before it, which
        gave its probability, is not computed again.
        """
        record = self._slots[slot]
        length = super().resume(slot, length, multiple)
        if length < record.boundary and self.cache.dropped is not None:
            self.begin(slot)
            return 0
        record.boundary = min(record.boundary, length)
        del record.neg_log_prob[length - record.boundary + (length > 0) :]
        return length

    def lendable(self, slot: int, length: int, multiple: int = 1) -> int:
        """Where pairs are evicted or quantized, only a slot at its boundary can be copied."""
        length = super().lendable(slot, length, multiple)
        return length if self.cache.dropped is None or self._slots[slot].boundary == length else 0

    def fork(self, slot: int, other: int, first: int, length: int) -> None:
        """See ``ManagedCache.fork``. Where log probabilities are needed, the token behind the copied ones must also
        be the same, since its probability is copied.
        """
        if self._far is not None:
            self._far.pairs.fork(slot, other, first, length)
        super().fork(slot, other, first, length)
        self._slots[slot] = self._slots[other].copied(length)

    def snapshot(self, slot: int, length: int) -> dict[str, Tensor]:
        """A copy of all that a slot holds at a boundary, by name."""
        record = self._slots[slot]
        known = super().snapshot(slot, length) | record.snapshot()
        return known if self._far is None else known | self._far.snapshot(slot, record.boundary)

    def restore(self, slot: int, length: int, known: Mapping[str, Tensor]) -> None:
        """Fill an empty slot with what ``snapshot`` gave."""
        super().restore(slot, length, known)
        self._slots[slot].restore(length, known)
        if self._far is not None:
            self._far.restore(slot, length, known)

    # ------------------------------------------------------------ eviction

    def boundary(self, slot: int, prompt: int) -> int:
        """The next eviction boundary, in tokens of the text."""
        last = self._slots[slot].boundary
        for end in (prompt - self._beside, prompt):
            if last < end:
                return min(last + self.chunk, end)
        return last + self.interval - (last - prompt) % self.interval

    def reread_from(self, slot: int, prompt: int, length: int) -> int:
        """How many tokens count as read, see ``ManagedCache``."""
        record = self._slots[slot]
        least = min(map(min, self._budgets)) if self.reread_tokens else 0
        if not self.reread_tokens or length < prompt or record.reread == prompt or length <= least:
            return length
        assert self.policy is not None
        record.reread = prompt
        end = max(record.boundary, length - min(self.reread_tokens, self.policy.last_of(least)))
        self._evict(self.policy, slot, prompt, length, end)
        return end

    def add_log_probs(self, slot: int, neg_log_prob: Sequence[float]) -> None:
        """Take -log p of the next tokens."""
        self._slots[slot].neg_log_prob += neg_log_prob

    def add_prompt_log_probs(self, slot: int, logits: Tensor, ids: Sequence[int], at: int, end: int) -> None:
        """The same of a prompt's chunk."""
        self._slots[slot].add_prompt(logits, ids, at, end)

    def evict(self, slot: int, prompt: int, length: int) -> None:
        """Evict what is beyond the budget, and quantize what may be, if `length` tokens reach the boundary."""
        if length < self.boundary(slot, prompt):
            return
        if self.policy is None:
            self.cache.pack(slot, length)
            self._slots[slot].boundary = length
        else:
            self._evict(self.policy, slot, prompt, length, length)

    def _evict(self, policy: Policy, slot: int, prompt: int, length: int, end: int) -> None:
        """Choose among the pairs of `length` tokens. Those from place `end` on are removed; they are read again."""
        record, kept, dropping = self._slots[slot], [], False
        if self._far is not None:
            self._far.store(slot, record.boundary, length)
        before = self._columns_positions(slot, length) if self._mover is not None else []
        for layer, shape in enumerate(self.cache.shapes):
            columns: list[Tensor] = []
            for view in self._views(policy, slot, layer, prompt, length):
                scores = policy.score(view).float()
                best = policy.best(view, scores, shape.window)
                if best is None:
                    stay = torch.arange(scores.shape[1], device=scores.device).expand(len(scores), -1)
                else:
                    dropping, stay = True, best.sort(1).values
                    if policy.merger is not None and not shape.window:
                        scores = policy.merger.merge(view, scores, best)
                stay, places, scores = (some[:, : some.shape[1] - length + end] for some in (stay, view.places, scores))
                columns += stay
                if self._far is None:  # places and scores of evicted pairs are dropped
                    places, scores = places.gather(1, stay), scores.gather(1, stay)
                record.places[layer][view.heads], record.scores[layer][view.heads] = list(places), list(scores)
            kept.append(columns)
        if not dropping:
            self.cache.pack(slot, end)
        elif self._far is not None:
            self._far.recall(slot, end, kept)
        else:
            self.cache.drop(slot, end, kept)
        if dropping and self._mover is not None:
            self._mover.move(slot, end, kept, before)
        del record.neg_log_prob[: end - record.boundary]
        record.boundary = end
        self._observe_from(slot, end)

    def _columns_positions(self, slot: int, length: int) -> Positions:
        """Positions of the columns before the eviction; in main memory they are those of the text."""
        if self._far is None:
            assert self._mover is not None
            return self._mover.positions(slot, length)
        return [[torch.arange(length)] * shape.heads for shape in self.cache.shapes]

    def _views(self, policy: Policy, slot: int, layer: int, prompt: int, length: int) -> list[View]:
        record = self._slots[slot]
        observed = self.observations.read(layer, slot, length) if self.observations is not None else None
        new_count = length - record.boundary
        neg_log_prob = torch.tensor(record.neg_log_prob[:new_count]) if policy.needs_log_probs else None
        views = []
        for part in self._choosable.parts(layer, slot):
            keys, values = self._choosable.columns(layer, slot, part, length - part.dropped)
            if observed is not None:
                observed = observed.to(keys.device)
            places, previous = (torch.stack(some[layer][part.heads]) for some in (record.places, record.scores))
            new = torch.arange(record.boundary, length, device=places.device).expand(len(places), -1)
            views.append(
                View(
                    layer=layer,
                    heads=part.heads,
                    all_heads=self.cache.shapes[layer].heads,
                    prompt=prompt - policy.beside,
                    length=length,
                    budget=self._budgets[layer][part.heads.start],
                    new_count=new_count,
                    moved=self.cache.least(slot) if self._mover is not None else 0,
                    places=torch.cat([places, new], 1),
                    keys=keys,
                    values=values,
                    observations=observed,
                    neg_log_prob=neg_log_prob,
                    previous_scores=previous,
                )
            )
        return views

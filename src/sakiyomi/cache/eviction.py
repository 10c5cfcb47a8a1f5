"""Which pairs of a cache stay, and which are packed: borders, and what happens at them, the same for every policy.

A border lies at the end of every chunk of a prompt and behind every so many generated tokens: its place depends on the
request alone. Between borders nothing is dropped or packed, no pass reaches beyond the next one, and at it the policy
sees what rows of committed tokens have left behind. So what stays does not depend on how the text was read ahead, and
rolling back is still moving a length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sakiyomi.cache.observations import RowObservations
from sakiyomi.cache.policies import Policy, View, read_budget
from sakiyomi.cache.policies.sparse import Sparse
from sakiyomi.cache.quantized import GROUP, Packing, QuantizedKV
from sakiyomi.cache.rotary import make_turn
from sakiyomi.cache.slots import LayerShape, SlotCache
from sakiyomi.core.errors import InputError, MemoryLimitError, UnsupportedError
from sakiyomi.core.memory import available_bytes, readable

if TYPE_CHECKING:
    from sakiyomi.model_executor.runner import ModelRunner

__all__ = ["EvictingCache", "FullCache", "QueryTrackingCache", "neg_log_prob"]

WIDEST = 256  # rows of a tree
ENDLESS = 1 << 30


class FullCache:
    """Keeps all pairs: there are no borders.

    Args:
        cache: of the model.
    """

    needs_log_probs = False
    notes: RowObservations | None = None
    sparse: Sparse | None = None
    far_bytes = 0
    again = 0
    chunked = False
    tail = 1

    def __init__(self, cache: SlotCache) -> None:
        self._cache = cache

    def keep(self, slot: int, length: int, rows: Sequence[int]) -> None:
        """See ``SlotCache.keep``."""
        self._cache.keep(slot, length, rows)

    def begin(self, slot: int) -> None:
        """A text begins in this slot."""

    def end(self, slot: int) -> None:
        """Nobody has this slot."""

    def roll_back(self, slot: int, length: int) -> bool:
        """Take a slot's text back to so many tokens; False where that cannot be done."""
        return True

    def lends(self, slot: int, length: int) -> bool:
        """Whether of so many tokens a slot still has all that there was when they were its whole text."""
        return True

    def fork(self, slot: int, other: int, first: int, length: int) -> None:
        """Have a slot go on from the first `length` tokens of another one, which ``lends`` them; ``first`` of them lie
        there already.

        Raises:
            MemoryLimitError: see ``SlotCache.fork``.
        """
        self._cache.fork(slot, other, first, length)
        self.roll_back(slot, length)

    def snapshot(self, slot: int) -> dict[str, Tensor]:
        """What is known of a slot's pairs, by name."""
        return {}

    def restore(self, slot: int, length: int, known: Mapping[str, Tensor]) -> None:
        """A slot was filled with pairs of which this is known; so many tokens were read."""
        self.roll_back(slot, length)

    def border(self, slot: int, prompt: int) -> int:
        """None is ever reached."""
        return ENDLESS

    def settle(self, slot: int, prompt: int, length: int) -> None:
        """Drop nothing."""

    def go_on(self, slot: int, prompt: int, length: int) -> int:
        """Where reading goes on, a chunk of a prompt having been read up to `length`: there."""
        return length

    def learn(self, slot: int, neg_log_prob: Sequence[float]) -> None:
        """Nobody asks."""

    def learn_prompt(self, slot: int, logits: Tensor, ids: Sequence[int], at: int, end: int) -> None:
        """Nobody asks."""


class QueryTrackingCache(FullCache):
    """Keeps all pairs, and the queries of every slot's last row, for who draws an excerpt of the cache by them.

    Args:
        cache: of the model.
    """

    def __init__(self, cache: SlotCache) -> None:
        self._cache = cache
        self.notes = RowObservations(len(cache.shapes), cache.max_slots + cache.extra)
        self._last: dict[int, list[Tensor]] = {}

    def begin(self, slot: int) -> None:
        """A text begins in this slot."""
        assert self.notes is not None
        self.notes.begin(slot, 0)

    def end(self, slot: int) -> None:
        """Nobody has this slot."""
        assert self.notes is not None
        self.notes.end(slot)
        self._last.pop(slot, None)

    def roll_back(self, slot: int, length: int) -> bool:
        """What comes next are the rows behind so many tokens."""
        assert self.notes is not None
        self.notes.begin(slot, length)
        return True

    def keep(self, slot: int, length: int, rows: Sequence[int]) -> None:
        """See ``SlotCache.keep``."""
        assert self.notes is not None
        self._cache.keep(slot, length, rows)
        self.notes.keep(slot, length, rows)

    def settle(self, slot: int, prompt: int, length: int) -> None:
        """Remember the last row's queries."""
        assert self.notes is not None
        rows = [self.notes.read(layer, slot, length) for layer in range(len(self._cache.shapes))]
        if all(row is not None and len(row) for row in rows):
            self._last[slot] = [row[-1].clone() for row in rows if row is not None]
            self.notes.begin(slot, length)

    def queries(self, slot: int) -> list[Tensor] | None:
        """Of each layer the last row's, (query heads x dim); None: no pass was made."""
        return self._last.get(slot)


@dataclass(eq=False)
class _Held:
    """What is known of a slot's pairs; by layer and head.

    Attributes:
        places: (n,) int64, of the pairs that stayed at the last border.
        scores: (n,) what the policy said of them.
        since: the last border.
        surprise: -log p of every token since then, and of the next one once that is known.
        ahead: (V,) logits of what follows the prompt.
        asked: length of the prompt whose last tokens have chosen what they are to read.
    """

    places: list[list[Tensor]]
    scores: list[list[Tensor]]
    since: int = 0
    neg_log_prob: list[float] = field(default_factory=list)
    ahead: Tensor | None = None
    asked: int = 0


class EvictingCache:
    """Keeps the cache of one model within a budget, or packs it, or both.

    What is packed are whole groups of tokens before a tail in full precision, at borders alone: no text is rolled back
    behind its last border, so rolling back stays moving a length. Layers with a sliding window are packed like others:
    their windows count columns, packed or not.

    Args:
        policy: says what is worth keeping; None: everything is.
        budget: pairs of a head that stay at a border, on average over layers and heads; or bytes of a whole request,
            with what comes between two borders. None without a policy.
        chunk: most tokens of a prompt between two borders.
        packing: how pairs are packed; None: they are not.
        sparse: says which of them rows of prompts look at; None: at all.

    Attributes:
        needs_log_probs: -log p of every token is wanted.
        noted: the policy, if rows of passes leave something behind for it.
        reassigned: whether positions move together.
        notes: what rows leave behind; None: nothing.
        again: most tokens of a prompt that are read a second time, see ``go_on``.
        chunked: what lies there depends on the chunks in which a text was read.
        tail: tokens, the last ones of a prompt, that the policy may treat as such: borders before them are the same for
            all prompts that begin alike.

    Raises:
        InputError: the budget is neither, or the policy is not for packed keys, or these not for one.
    """

    def __init__(
        self,
        policy: Policy | None,
        budget: int | str | None,
        chunk: int,
        *,
        packing: Packing | None = None,
        sparse: Sparse | None = None,
    ) -> None:
        self.policy, self.chunk, self.packing, self.sparse = policy, chunk, packing, sparse
        self.every, self.again = (policy or Policy).every, (policy or Policy).again
        self._asked = read_budget(budget) if budget is not None else (ENDLESS, False)
        self.budget = 0
        self.needs_log_probs = policy is not None and policy.surprise_wanted
        self.noted = policy if policy is not None and policy.notes else None
        self.reassigned = policy is not None and policy.positions == "reassigned"
        self.chunked, self.tail = True, 1
        self._recalls = policy is not None and policy.recalls
        if self.reassigned and packing is not None:
            raise InputError(
                "positions='reassigned' with packed keys: all of them would be rounded anew at every border; use "
                "positions='kept', or leave the quantization out"
            )
        if policy is not None and self._recalls and packing is not None:
            raise InputError(
                f"{policy.name} with packed keys: it has other pairs read at every border, as they are in main memory; "
                "leave the quantization out, or name another policy"
            )
        if policy is not None and packing is not None and not packing.with_policies:
            raise InputError(
                f"{policy.name} with kvquant: its keys are turned back by their place in the text, so none may be "
                "dropped before them; use quant-4, or leave one of both out"
            )
        if policy is not None and policy.merger is not None and (self._recalls or packing is not None):
            why = f"{policy.name}: nothing is dropped that could be merged"
            if packing is not None:
                why = "packed keys: mixtures would be rounded at every border"
            raise InputError(f"lococo with {why}; leave one of them out")
        self.slack = max(chunk, self.every + WIDEST)
        self._slots: dict[int, _Held] = {}

    def limits(self, shapes: Sequence[LayerShape], itemsize: int) -> list[list[int]] | None:
        """Columns that each layer's heads ever have at once, see ``SlotCache``; None: any number, as they are.

        Args:
            shapes: of the layers.
            itemsize: bytes of a number.

        Raises:
            InputError: the budget is smaller than what stays in any case.
            MemoryLimitError: it is larger than the memory that there is.
        """
        if self.policy is None and self.packing is None:
            return None
        beside = self.slack + (self.packing.residual + GROUP - 1 if self.packing is not None else 0)
        if self.policy is None:
            return [[beside] * shape.heads for shape in shapes]
        self.budget, in_bytes = self._asked
        pair = sum(shape.pair_bytes(itemsize) for shape in shapes)
        if in_bytes and self.packing is None:
            self.budget = self.budget // pair - self.slack
        elif in_bytes and self.packing is not None:
            packed = self.packing.group_bytes(shapes)
            self.budget = self.packing.residual + (self.budget - beside * pair) // packed * GROUP
        self._budgets = self.policy.budgets(self.budget, [shape.heads for shape in shapes])
        self.tail = max(1, int(self.policy.ends / 2 * max(map(max, self._budgets))))
        merged = self.policy.merger.merged if self.policy.merger is not None else 0
        low = min(map(min, self._budgets))
        if low <= (least := self.policy.least_of(low) + merged):
            raise InputError(
                f"kv_budget={self._asked[0]}{' bytes' * in_bytes}: that leaves {max(low, 0)} pairs to a head beside "
                f"{beside} for what comes between two borders, and {self.policy.name} keeps {least} in any case"
                f"{f', {merged} merged ones among them' if merged else ''}; "
                "give a larger budget, or a smaller chunk_size, or lower what it keeps"
            )
        self._check_memory(pair, self.packing.group_bytes(shapes) / GROUP if self.packing else pair, beside, shapes)
        endless = self.policy.where == "prompt"
        if self.packing is not None:
            return [[beside if endless else min(beside, own + self.slack) for own in layer] for layer in self._budgets]
        return [[ENDLESS if endless else own + self.slack for own in layer] for layer in self._budgets]

    def _check_memory(self, pair: int, stays: float, beside: int, shapes: Sequence[LayerShape]) -> None:
        """Refuse a budget that no request could ever use.

        Args:
            pair: bytes of a token's keys and values.
            stays: the same where they stay.
            beside: tokens between two borders.
            shapes: of the layers.
        """
        device = str(shapes[0].device)
        need, there = stays * self.budget + pair * beside, available_bytes(device)
        if need > there:
            raise MemoryLimitError(
                f"kv_budget={self._asked[0]}{' bytes' * self._asked[1]}: {readable(need)} for the keys and values of "
                f"one request, where {readable(there)} are available on {device}; about "
                f"{max(0, int((there - pair * beside) / stays)):,} pairs of a head fit: give a smaller budget"
            )

    def packed(self, shapes: Sequence[LayerShape], places: int) -> QuantizedKV | None:
        """Where packed columns lie, after ``limits``; a layer's heads have room for the largest of its budgets.

        Args:
            shapes: of the layers.
            places: slots at most.
        """
        if self.packing is None:
            return None
        endless = self.policy is None or self.policy.where == "prompt"
        limits = None if endless else [max(layer) for layer in self._budgets]
        return self.packing.storage(shapes, places, limits)

    def attach(self, model: ModelRunner) -> None:
        """Serve this model, whose cache has the ``limits``.

        Raises:
            LoadError, UnsupportedError: the policy does not fit to it.
        """
        name = type(model.module).__name__
        for other, what in (
            (model.weights.own_attention, "keeps its own attention"),
            (model.sources is not None, "has an encoder"),
        ):
            if other:
                raise UnsupportedError(
                    f"{name} {what}: its cache is not kept within a budget, nor packed; use cache='full'"
                )
        cache = model.cache
        self._cache, self._layers = cache, len(cache.shapes)
        self.notes = RowObservations(self._layers, cache.max_slots + cache.extra) if self.noted is not None else None
        self._all: SlotCache | None = None
        if self._recalls:
            shapes = [replace(shape, device=torch.device("cpu")) for shape in cache.shapes]
            self._all = SlotCache(shapes, dtype=cache.dtype, max_slots=cache.max_slots, available=available_bytes)
        if self.policy is not None:
            self.policy.prepare(model)
            if self.policy.merger is not None:
                self.policy.merger.prepare(model)
        self._turn = make_turn(model) if self.reassigned else None
        if cache.packed is not None:
            cache.packed.fit(model)

    # ------------------------------------------------------------ one slot

    def begin(self, slot: int) -> None:
        """A text begins in this slot."""
        self._cache.clear(slot)
        nothing = [[torch.zeros(0, device=shape.device) for _ in range(shape.heads)] for shape in self._cache.shapes]
        self._slots[slot] = _Held([[some.long() for some in layer] for layer in nothing], nothing)
        if self.notes is not None:
            self.notes.begin(slot, 0)

    def end(self, slot: int) -> None:
        """Nobody has this slot."""
        self._slots.pop(slot, None)
        if self.notes is not None:
            self.notes.end(slot)

    def roll_back(self, slot: int, length: int) -> bool:
        """Take a slot's text back to so many tokens; False where that is before its last border.

        Where surprise is wanted, the token behind them must be the one that was there: how likely it was, the row
        before it has said, which is not computed again.
        """
        held = self._slots[slot]
        del held.neg_log_prob[max(0, length - held.since) + (length > 0) :]
        return length >= held.since

    def lends(self, slot: int, length: int) -> bool:
        """Whether of so many tokens a slot still has all: where some are dropped or packed, at their border alone."""
        return self._cache.dropped is None or self._slots[slot].since == length

    def fork(self, slot: int, other: int, first: int, length: int) -> None:
        """See ``FullCache.fork``. Where surprise is wanted, the token behind them must be the same, too: how likely
        it was is known.
        """
        if self._all is not None:
            self._all.fork(slot, other, first, length)
        self._cache.fork(slot, other, first, length)
        held = self._slots[other]
        places, scores = ([list(heads) for heads in what] for what in (held.places, held.scores))
        self._slots[slot] = _Held(places, scores, length, list(held.neg_log_prob))
        if self.notes is not None:
            self.notes.begin(slot, length)

    def snapshot(self, slot: int) -> dict[str, Tensor]:
        """What is known of a slot's pairs at a border, by name."""
        held = self._slots[slot]
        known: dict[str, Tensor] = {}
        for name, what in (("places", held.places), ("scores", held.scores)):
            for layer, heads in enumerate(what):
                known |= {f"{name}.{layer}.{head}": tensor.to("cpu", copy=True) for head, tensor in enumerate(heads)}
        for name, store in self._main_memory():
            known[name] = store[slot, :, : held.since].clone()
        return known if held.ahead is None else known | {"ahead": held.ahead.to("cpu", copy=True)}

    def restore(self, slot: int, length: int, known: Mapping[str, Tensor]) -> None:
        """A slot was filled with pairs of which this is known; so many tokens were read."""
        held = self._slots[slot]
        for name, what in (("places", held.places), ("scores", held.scores)):
            for layer, heads in enumerate(what):
                for head, tensor in enumerate(heads):
                    heads[head] = known[f"{name}.{layer}.{head}"].to(tensor.device)
        if self._all is not None:
            self._all.reserve(slot, length)
        for name, store in self._main_memory():
            store[slot, :, :length] = known[name]
        held.since, held.ahead = length, known.get("ahead")
        if self.notes is not None:
            self.notes.begin(slot, length)

    def _main_memory(self) -> list[tuple[str, Tensor]]:
        """Where pairs are recalled, the stores of all of them, by name."""
        if self._all is None:
            return []
        keys = [(f"all_keys.{layer}", store) for layer, store in enumerate(self._all.keys)]
        return keys + [(f"all_values.{layer}", store) for layer, store in enumerate(self._all.values)]

    @property
    def far_bytes(self) -> int:
        """Bytes of pairs in main memory that attention does not read; 0 where dropped pairs are gone."""
        return self._all.bytes if self._all is not None else 0

    def border(self, slot: int, prompt: int) -> int:
        """The next border, in tokens of the cache."""
        since = self._slots[slot].since
        if since < prompt:
            return min(since + self.chunk, prompt)
        return since + self.every - (since - prompt) % self.every

    def go_on(self, slot: int, prompt: int, length: int) -> int:
        """Where reading goes on, a chunk of a prompt having been read up to `length`.

        Where pairs are recalled, the rows at a prompt's end were read with pairs that others had chosen, and what is
        asked is known only now: they choose, are forgotten, and are read once more.
        """
        held = self._slots[slot]
        least = min(map(min, self._budgets)) if self.again else 0
        if not self.again or length < prompt or held.asked == prompt or length <= least:
            return length
        assert self.policy is not None
        held.asked = prompt
        end = max(held.since, length - min(self.again, self.policy.last_of(least)))
        self._settle(slot, prompt, length, end)
        return end

    def learn(self, slot: int, neg_log_prob: Sequence[float]) -> None:
        """Take -log p of the next tokens, where the policy wants to know."""
        self._slots[slot].neg_log_prob += neg_log_prob

    def learn_prompt(self, slot: int, logits: Tensor, ids: Sequence[int], at: int, end: int) -> None:
        """The same of the tokens that a chunk ids[at:end] of a prompt told about: ids[at + 1 : end + 1].

        Of its first token too, where no chunk before it told: by what a prefix says of its next token, or, at the
        beginning of the text, as much as the largest of these, since nothing says how likely it is.

        Args:
            slot: of the request.
            logits: (end - at, V) of the pass.
            ids: the prompt.
            at, end: the chunk.
        """
        held = self._slots[slot]
        following = ids[at + 1 : end + 1]
        found = neg_log_prob(logits[: len(following)], following)
        if len(held.neg_log_prob) == at - held.since:
            told = held.ahead
            held.neg_log_prob += (
                [max(found, default=0.0)] if told is None else neg_log_prob(told[None], ids[at : at + 1])
            )
        held.neg_log_prob += found
        held.ahead = logits[-1].clone() if end == len(ids) else None

    def keep(self, slot: int, length: int, rows: Sequence[int]) -> None:
        """Of a pass's rows keep these, see ``SlotCache.keep``."""
        self._cache.keep(slot, length, rows)
        if self.notes is not None:
            self.notes.keep(slot, length, rows)

    def places(self, slot: int) -> list[list[Tensor]]:
        """Of each layer and head, the places in the text of the pairs that stayed at the last border."""
        held = self._slots[slot]
        if self.policy is None:
            return [[torch.arange(held.since)] * shape.heads for shape in self._cache.shapes]
        return held.places

    def settle(self, slot: int, prompt: int, length: int) -> None:
        """Drop what is beyond the budget, and pack what may be packed, if this is a border.

        Args:
            slot: the request's.
            prompt: tokens of its prompt.
            length: tokens in the cache.
        """
        if length < self.border(slot, prompt):
            return
        if self.policy is None:
            self._cache.pack(slot, length)
            self._slots[slot].since = length
            return
        self._settle(slot, prompt, length, length)

    def _settle(self, slot: int, prompt: int, length: int, end: int) -> None:
        """Choose among the pairs of `length` tokens, and go on from place `end`: what lies behind it always stays, and
        is forgotten here.
        """
        assert self.policy is not None
        held, kept, dropping = self._slots[slot], [], False
        fresh, behind = end - held.since, length - end
        self._store(slot, held.since, length)
        old = [self._stored(slot, layer, length) for layer in range(self._layers)] if self._turn is not None else []
        for layer in range(self._layers):
            columns: list[Tensor] = []
            for view in self._views(slot, layer, prompt, length):
                scores = self.policy.score(view).float()
                best = self.policy.best(view, scores, self._cache.shapes[layer].window)
                if best is None:
                    stay = torch.arange(scores.shape[1], device=scores.device).expand(len(scores), -1)
                else:
                    dropping, stay = True, best.sort(1).values
                    if self.policy.merger is not None and not self._cache.shapes[layer].window:
                        scores = self.policy.merger.merge(view, scores, best)
                stay = stay[:, : stay.shape[1] - behind]
                columns += stay
                places, scores = view.places[:, : scores.shape[1] - behind], scores[:, : scores.shape[1] - behind]
                if self._all is None:  # what is dropped is forgotten, too
                    places, scores = places.gather(1, stay), scores.gather(1, stay)
                held.places[layer][view.heads], held.scores[layer][view.heads] = places, scores
            kept.append(columns)
        if not dropping:
            self._cache.pack(slot, end)
        elif self._all is not None:
            self._cache.excerpt(slot, end, self._all, slot, [torch.stack(of_layer) for of_layer in kept])
        else:
            self._cache.drop(slot, end, kept)
        if dropping and self._turn is not None:
            self._move(slot, end, kept, old)
        held.since = end
        del held.neg_log_prob[:fresh]
        if self.notes is not None:
            self.notes.begin(slot, end)

    def _store(self, slot: int, since: int, length: int) -> None:
        """Where pairs are recalled: the new ones too are in main memory from now on, at their own positions."""
        if self._all is None:
            return
        self._all.reserve(slot, length)
        by = torch.full((1, 1), self._cache.least(slot))
        for layer in range(self._layers):
            for part in self._cache.parts(layer, slot):
                own = slice(since - part.dropped, length - part.dropped)
                keys = part.keys[:, own]
                if self._turn is not None and self._cache.least(slot):
                    keys = self._turn(layer, keys, by.to(keys.device).expand(keys.shape[:2]))
                self._all.keys[layer][slot, part.heads, since:length] = keys
                self._all.values[layer][slot, part.heads, since:length] = part.values[:, own]

    def _views(self, slot: int, layer: int, prompt: int, length: int) -> list[View]:
        assert self.policy is not None
        held = self._slots[slot]
        notes = self.notes.read(layer, slot, length) if self.notes is not None else None
        fresh = length - held.since
        neg_log_prob = torch.tensor(held.neg_log_prob[:fresh]) if self.policy.surprise_wanted else None
        views = []
        read = self._all or self._cache
        for part in read.parts(layer, slot):
            keys, values = read.columns(layer, slot, part, length - part.dropped)
            places, former = (torch.stack(some[layer][part.heads]) for some in (held.places, held.scores))
            new = torch.arange(held.since, length, device=places.device).expand(len(places), -1)
            views.append(
                View(
                    layer=layer,
                    heads=part.heads,
                    all_heads=self._cache.shapes[layer].heads,
                    prompt=prompt,
                    length=length,
                    budget=self._budgets[layer][part.heads.start],
                    fresh=fresh,
                    moved=self._cache.least(slot) if self._turn else 0,
                    places=torch.cat([places, new], 1),
                    keys=keys,
                    values=values,
                    notes=notes,
                    neg_log_prob=neg_log_prob,
                    former=former,
                )
            )
        return views

    # ------------------------------------------------------------ positions that move

    def _positions(self, slot: int, layer: int, length: int) -> list[Tensor]:
        """Of each head's columns the position that its key was rotated for: the last ones are the same for all."""
        found: list[Tensor] = []
        end = length - self._cache.least(slot)
        for part in self._cache.parts(layer, slot):
            n = length - part.dropped
            found += [torch.arange(end - n, end, device=part.keys.device)] * (part.heads.stop - part.heads.start)
        return found

    def _stored(self, slot: int, layer: int, length: int) -> list[Tensor]:
        """The same of the columns that what stays is taken from."""
        if self._all is None:
            return self._positions(slot, layer, length)
        return [torch.arange(length)] * self._cache.shapes[layer].heads  # main memory: as the text has them

    def _move(self, slot: int, length: int, kept: Sequence[Sequence[Tensor]], old: Sequence[Sequence[Tensor]]) -> None:
        """Rotate what is left to where it is now."""
        assert self._turn is not None
        for layer in range(self._layers):
            new = self._positions(slot, layer, length)
            for part in self._cache.parts(layer, slot):
                by = torch.stack(
                    [
                        new[head] - old[layer][head].gather(0, kept[layer][head])
                        for head in range(part.heads.start, part.heads.stop)
                    ]
                )
                n = by.shape[1]
                part.keys[:, :n] = self._turn(layer, part.keys[:, :n], by)


def neg_log_prob(logits: Tensor, tokens: Sequence[int]) -> list[float]:
    """-log p of each token in its row of logits, (rows, V)."""
    chosen = torch.tensor(tokens, device=logits.device, dtype=torch.int64)[:, None]
    return torch.neg(logits.float().log_softmax(-1).gather(1, chosen)[:, 0]).tolist()

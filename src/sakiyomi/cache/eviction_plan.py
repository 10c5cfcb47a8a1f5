"""Options of a bounded cache: policy, budget, chunks, quantization, sparse prompts.

``EvictionPlan`` holds the options. Given the shapes of a model's layers it computes how many columns each head needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sakiyomi.cache.layout import LayerShape
from sakiyomi.cache.policies import Policy
from sakiyomi.cache.policies.sparse import Sparse
from sakiyomi.cache.quantized import GROUP, Packing, QuantizedKV
from sakiyomi.core.cache_specs import read_budget
from sakiyomi.core.errors import InputError, MemoryLimitError, UnsupportedError
from sakiyomi.core.memory import available_bytes, readable

WIDEST = 256  # rows of a tree
ENDLESS = 1 << 30


@dataclass(frozen=True, eq=False)
class Capacity:
    """How much a cache holds; by default any number of pairs, in full precision.

    Attributes:
        limits: of each layer the columns that each head ever has at once, see ``SlotCache``; None: any number.
        packed: where quantized columns lie; None: none are quantized.
        budgets: of each layer the pairs of each head that stay at an eviction boundary; empty without a policy.
        tail: last tokens of a prompt that the policy may treat specially; what is evicted before them is the same for
            all prompts with the same beginning.
    """

    limits: Sequence[Sequence[int]] | None = None
    packed: QuantizedKV | None = None
    budgets: Sequence[Sequence[int]] = ()
    tail: int = 1


@dataclass(frozen=True, eq=False)
class EvictionPlan:
    """Options of a cache that is kept within a budget, or quantized, or both.

    Attributes:
        policy: says which pairs stay; None: all.
        budget: pairs of a head that stay at an eviction boundary, on average over layers and heads; or bytes of a
            whole request, including the tokens between two boundaries. None without a policy.
        chunk: most tokens of a prompt between two boundaries.
        packing: how pairs are quantized; None: they are not.
        sparse: says which pairs rows of prompts attend to; None: all.

    Raises:
        InputError: the budget is neither, or the policy does not go with quantized keys, or these not with it.
    """

    policy: Policy | None
    budget: int | str | None
    chunk: int
    packing: Packing | None = None
    sparse: Sparse | None = None

    def __post_init__(self) -> None:
        policy, packing = self.policy, self.packing
        if self.budget is not None:
            read_budget(self.budget)
        if self.reassigned and packing is not None:
            raise InputError(
                "positions='reassigned' with quantized keys: all of them would be rounded anew at every boundary; use "
                "positions='kept', or leave the quantization out"
            )
        if policy is None:
            return
        if policy.recalls and packing is not None:
            raise InputError(
                f"{policy.name} with quantized keys: it recalls pairs at every boundary, unrounded, from main memory; "
                "leave the quantization out, or name another policy"
            )
        if packing is not None and not packing.with_policies:
            raise InputError(
                f"{policy.name} with kvquant: its keys are turned back by their place in the text, so none may be "
                "dropped before them; use quant-4, or leave one of both out"
            )
        if policy.merger is not None and (policy.recalls or packing is not None):
            why = f"{policy.name}: nothing is dropped that could be merged"
            if packing is not None:
                why = "quantized keys: mixtures would be rounded at every boundary"
            raise InputError(f"lococo with {why}; leave one of them out")

    @property
    def reassigned(self) -> bool:
        """Whether positions move together at every boundary."""
        return self.policy is not None and self.policy.positions == "reassigned"

    @property
    def observer(self) -> Policy | None:
        """The policy, if passes store observations for it."""
        return self.policy if self.policy is not None and self.policy.needs_queries else None

    def check_model(self, name: str, shapes: Sequence[LayerShape], *, has_encoder: bool) -> None:
        """Refuse a model whose pairs cannot be evicted or quantized.

        Args:
            name: of the model.
            shapes: of its layers.
            has_encoder: whether it has one.

        Raises:
            UnsupportedError: it has an encoder; its scores depend on positions that evicted pairs would change; or
                attention to some of the columns alone is asked for, and it has sinks.
        """
        placed = any(shape.chunk or shape.alibi is not None for shape in shapes)
        sinks = self.sparse is not None and any(shape.sinks is not None for shape in shapes)
        reasons = {
            "has ALiBi or chunks, which count all positions": placed,
            "has attention sinks": sinks,
            "has an encoder": has_encoder,
        }
        what = next((reason for reason, holds in reasons.items() if holds), None)
        if what is not None:
            raise UnsupportedError(
                f"{name} {what}: its cache is not kept within a budget, nor packed; use cache='full'"
            )

    def capacity(self, shapes: Sequence[LayerShape], itemsize: int, slots: int, *, alone: int = 0) -> Capacity:
        """What a cache needs to hold.

        Args:
            shapes: of the layers.
            itemsize: bytes of a number.
            slots: of the cache, at most.
            alone: tokens of the longest pass that belongs to no request.

        Raises:
            InputError: the budget is smaller than what stays in any case.
            MemoryLimitError: it is larger than the memory that there is.
        """
        policy, packing = self.policy, self.packing
        if policy is None and packing is None:
            return Capacity()
        slack = max(self.chunk, (policy or Policy).interval + WIDEST, alone)
        between = slack + (packing.residual + GROUP - 1 if packing is not None else 0)
        if policy is None:
            assert packing is not None
            return Capacity([[between] * shape.heads for shape in shapes], packing.storage(shapes, slots))
        assert self.budget is not None
        budget, in_bytes = read_budget(self.budget)
        pair = sum(shape.pair_bytes(itemsize) for shape in shapes)
        group = packing.group_bytes(shapes) if packing is not None else 0
        if in_bytes and packing is None:
            budget = budget // pair - slack
        elif in_bytes and packing is not None:
            budget = packing.residual + (budget - between * pair) // group * GROUP
        budgets = policy.budgets(budget, [shape.heads for shape in shapes])
        self._check_budget(policy, min(map(min, budgets)), between)
        self._check_memory(budget, pair, group / GROUP if group else pair, between, shapes)
        endless = policy.where == "prompt"
        tail = policy.beside + max(1, int(policy.ends / 2 * max(map(max, budgets))))
        if packing is None:
            limits = [[ENDLESS if endless else own + slack for own in layer] for layer in budgets]
            return Capacity(limits, None, budgets, tail)
        limits = [[between if endless else min(between, own + slack) for own in layer] for layer in budgets]
        packed = packing.storage(shapes, slots, None if endless else [max(layer) for layer in budgets])
        return Capacity(limits, packed, budgets, tail)

    def _asked(self) -> str:
        """The budget as it was given, for messages."""
        assert self.budget is not None
        number, in_bytes = read_budget(self.budget)
        return f"kv_budget={number}{' bytes' * in_bytes}"

    def _check_budget(self, policy: Policy, low: int, between: int) -> None:
        """Refuse a budget, of `low` pairs where a head has least, that holds no more than what always stays."""
        merged = policy.merger.merged if policy.merger is not None else 0
        if low <= (least := policy.least_of(low) + merged):
            raise InputError(
                f"{self._asked()}: that leaves {max(low, 0)} pairs to a head beside "
                f"{between} for what comes between two boundaries, and {policy.name} keeps {least} in any case"
                f"{f', {merged} merged ones among them' if merged else ''}; "
                "give a larger budget, or a smaller chunk_size, or lower what it keeps"
            )

    def _check_memory(self, budget: int, pair: int, stays: float, between: int, shapes: Sequence[LayerShape]) -> None:
        """Refuse a budget that no request could ever use.

        Args:
            budget: pairs of a head.
            pair: bytes of a token's keys and values.
            stays: the same where they stay.
            between: tokens between two boundaries.
            shapes: of the layers.
        """
        device: torch.device = shapes[0].device
        need, there = stays * budget + pair * between, available_bytes(str(device))
        if need > there:
            raise MemoryLimitError(
                f"{self._asked()}: {readable(need)} for the keys and values of "
                f"one request, where {readable(there)} are available on {device}; about "
                f"{max(0, int((there - pair * between) / stays)):,} pairs of a head fit: give a smaller budget"
            )

"""Merges the proposals of several drafters into one tree that a single pass scores.

Merging follows SpecInfer (Miao et al. 2023, arXiv 2305.09781, section 3.2). A node keeps every draw that led to it, so
the merged draft is as lossless as its parts under every rule that accepts drafts of kind "merged".
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sakiyomi.cache.prefix import alike
from sakiyomi.core.running_mean import running_mean
from sakiyomi.core.tree import Draft, DraftKind, Draw, TokenTree, best_nodes
from sakiyomi.drafters.adapter import Proposer, as_drafter
from sakiyomi.drafters.base import Context, Drafter, HiddenStates, Ranked, tell
from sakiyomi.drafters.confidence import ChanceCalibration
from sakiyomi.drafters.draft_length import TokenValue
from sakiyomi.drafters.native_texts import NativeTexts
from sakiyomi.drafters.text_base import TextDrafter
from sakiyomi.drafters.tree_reader import GrowingDrafter

logger = logging.getLogger("sakiyomi")
_UNKNOWN = 0.5  # chance of a node whose drafter states none


@dataclass(frozen=True, slots=True)
class _Proposal:
    """The proposal of a member in a round.

    Attributes:
        name: of the member.
        draft: its proposal.
        claimed: the chance that the member gives each node.
        values: for each node the calibrated chance that it is accepted with all above it.
    """

    name: str
    draft: Draft
    claimed: list[float]
    values: list[float]

    @property
    def sure(self) -> float:
        """Chance that the first token is accepted."""
        return min(1.0, sum(self.values[node] for node in self.draft.tree.children(-1)))


class MergedDrafter(Drafter):
    """Merges the proposals of its members.

    Members compete for the nodes of a pass by value: the calibrated chance that a node and all nodes above it are
    accepted. All drawn nodes stay, since dropping one for its token would change the output's distribution. Of the
    chosen nodes the most valuable ones fill the rest.

    Where the value of a token is known, a member that runs a model is skipped in rounds in which the others' proposals
    are so good that its own would not be worth their time.

    Args:
        members: in the order in which they are asked; those without a model should come first. Names differ.
        strict: errors of members are raised; otherwise the request continues without the member.
    """

    kind: DraftKind = "merged"

    def __init__(self, members: Sequence[Drafter | Proposer], *, strict: bool = False) -> None:
        self.members, self._strict = [as_drafter(member) for member in members], strict
        self._without: dict[int, set[str]] = {}  # by request: members that failed
        self._faulty: set[str] = set()
        self.name = "+".join(member.name for member in self.members)
        self.parts = tuple(member.name for member in self.members)
        self.runs_model = any(member.runs_model for member in self.members)
        self.leading = max(member.leading for member in self.members)
        asked = [member.hidden_states for member in self.members if member.hidden_states is not None]
        if asked:
            layers = tuple(sorted({layer for each in asked for layer in each.layers}))
            self.hidden_states = HiddenStates(layers, "all" if any(each.rows == "all" for each in asked) else "last")
        self._calibrations = {member.name: ChanceCalibration() for member in self.members}
        self._texts: NativeTexts | None = None
        self._expected: dict[str, float] = {}
        self._seconds: dict[str, float] = {}

    def observe(self, context: Context, first: int, states: Mapping[int, Tensor]) -> None:
        """See ``Drafter``."""
        for member in self.members:
            if member.hidden_states is not None and member.hidden_states.rows == "all":
                tell(member, "observe", context, first, {layer: states[layer] for layer in member.hidden_states.layers})

    def rank(self, context: Context, tree: TokenTree, rows: Sequence[Ranked]) -> None:
        """See ``Drafter``."""
        for member in self.members:
            if member.leading:
                tell(member, "rank", context, tree, rows)

    @property
    def texts(self) -> NativeTexts | None:
        """Of its requests, where the kernels read texts for all members, but perhaps one whose trees they grow; None:
        they are here.
        """
        if self._texts is None and type(self) is MergedDrafter:
            texts = [
                member for member in self.members if isinstance(member, TextDrafter) and member.kernels is not None
            ]
            others = self.members[len(texts) :]
            if texts and self.members[: len(texts)] == texts and (not others or _grows(others)):
                self._texts = NativeTexts(self, texts, len(self.members))
        return self._texts

    @property
    def grower(self) -> GrowingDrafter | None:
        """The member whose trees the kernels grow; None: there is none."""
        last = self.members[-1]
        return last if self.texts is not None and isinstance(last, GrowingDrafter) else None

    def inherit(self, context: Context, earlier: Context) -> None:
        """See ``Drafter``."""
        if self.texts is not None:
            self.texts.inherit(context, earlier)
        if self._said in earlier.memory:
            length, said = earlier.memory[self._said]
            if alike(earlier.tokens[:length], context.tokens) == length:
                context.memory[self._said] = length, said
        for member in self.members:
            tell(member, "inherit", context, earlier)

    def end(self, context: Context) -> None:
        """See ``Drafter``."""
        super().end(context)
        context.memory.pop(self._said, None)
        self._without.pop(context.id, None)
        for member in self.members:
            tell(member, "end", context)

    def propose(self, contexts: Sequence[Context], gammas: Sequence[int]) -> list[Draft]:
        """See ``Drafter.propose``."""
        if self.texts is not None and self.grower is None:
            return self.texts.propose(contexts, gammas)
        for context in contexts:
            self._learn(context)
        drafts: list[list[_Proposal]] = [[] for _ in contexts]
        for member in self.members:
            wanted = [i for i, context in enumerate(contexts) if self._pays(member, context, drafts[i])]
            if not wanted:
                continue
            before = member.forward_seconds
            try:
                proposed = member.propose([contexts[i] for i in wanted], [gammas[i] for i in wanted])
                found = [self._weighed(member.name, draft) for draft in proposed]
                for i, each in zip(wanted, found, strict=True):
                    drafts[i].append(each)
            except Exception as error:  # the other drafters continue
                if self._strict:
                    raise
                self._leave_out(member, [contexts[i] for i in wanted], error)
                continue
            spent = member.forward_seconds - before
            if spent:
                self._seconds[member.name] = running_mean(self._seconds.get(member.name), spent)
            for each in found:
                if each.values:
                    expected = sum(each.values)
                    known = self._expected.get(member.name, expected)
                    self._expected[member.name] = known + 0.1 * (expected - known)
        merged = [
            self._merge(those, context.nodes if context.nodes > gamma else gamma * len(self.members), context.worth)
            for context, gamma, those in zip(contexts, gammas, drafts, strict=True)
        ]
        for context, those in zip(contexts, drafts, strict=True):
            context.memory[self._said] = len(context.tokens), those
        return merged

    @property
    def _said(self) -> str:
        """Where a request's memory has its last proposals, and how long its text was."""
        return f"{self.name}: said"

    # ------------------------------------------------------------ worth

    def _pays(self, member: Drafter, context: Context, others: Sequence[_Proposal]) -> bool:
        """Whether a member should be asked, given what others have proposed."""
        if context.asks is not None and member.name not in context.asks:
            return False
        if member.name in self._without.get(context.id, ()):
            return False
        seconds = self._seconds.get(member.name, 0.0)
        if context.worth is None or not seconds:
            return True
        # The member's tokens help only where the others' first token is rejected.
        sure = max((other.sure for other in others), default=0.0)
        return context.worth.pays((1.0 - sure) * self._expected.get(member.name, 1.0), seconds)

    def _weighed(self, name: str, draft: Draft) -> _Proposal:
        """A proposal with the values of its nodes. An invalid draft raises here, where the member is known."""
        draft.validate()
        calibration = self._calibrations[name]
        claims = {draw.node: draw.claim(_UNKNOWN) for draw in draft.draws}
        claimed = [claims[node] for node in range(len(draft))]
        return _Proposal(name, draft, claimed, draft.tree.products([calibration.chance(each) for each in claimed]))

    def _learn(self, context: Context) -> None:
        """Compare the last proposals with what the target accepted."""
        length, drafts = context.memory.pop(self._said, (0, ()))
        tokens = context.tokens[length:]
        for proposal in drafts:
            calibration, tree, claimed = self._calibrations[proposal.name], proposal.draft.tree, proposal.claimed
            place = -1
            for token in tokens:
                found = None
                for node in tree.children(place):
                    calibration.learn(claimed[node], tree.tokens[node] == token)
                    if tree.tokens[node] == token:
                        found = node
                if found is None:
                    break
                place = found

    # ------------------------------------------------------------ merging

    @staticmethod
    def _merge(drafts: Sequence[_Proposal], most: int, worth: TokenValue | None) -> Draft:
        """One tree of all proposals; a node has the largest value that any member gives it."""
        tokens: list[int] = []
        parents: list[int] = []
        values: list[float] = []
        draws: list[Draw] = []
        rows: list[Tensor] = []
        places: dict[tuple[int, int], int] = {}
        for draft, worths in ((proposal.draft, proposal.values) for proposal in drafts):
            own: list[int] = []
            for token, parent, value in zip(draft.tree.tokens, draft.tree.parents, worths, strict=True):
                above = -1 if parent < 0 else own[parent]
                node = places.setdefault((above, token), len(tokens))
                if node == len(tokens):
                    tokens.append(token)
                    parents.append(above)
                    values.append(value)
                values[node] = max(values[node], value)
                own.append(node)
            # Siblings drawn without replacement are not independent draws of one row. As chosen nodes they are lossless
            # in any merged tree.
            independent = draft.kind in ("chain", "iid", "merged")
            first = sum(map(len, rows))
            for draw in draft.draws:
                row = draw.row + first if draw.row is not None and independent else None
                draws.append(draw._replace(node=own[draw.node], row=row))
            if draft.probs is not None:
                rows.append(draft.probs)
        drawn = {draw.node for draw in draws if draw.row is not None}
        kept = _kept(parents, values, drawn, most, worth)
        number = {node: i for i, node in enumerate(kept)}
        left = tuple(draw._replace(node=number[draw.node]) for draw in draws if draw.node in number)
        tree = TokenTree(tuple(tokens), tuple(parents)).keep(kept)
        return Draft(tree, "merged", left, torch.cat(rows) if rows else None) if kept else Draft.empty()

    # ------------------------------------------------------------ members

    def _leave_out(self, member: Drafter, contexts: Sequence[Context], error: Exception) -> None:
        """Leave a member out of these requests; the first time, a warning is logged."""
        if member.name not in self._faulty:
            why = f"{type(error).__name__}: {error}"
            said = "drafter %s failed: %s; requests in which it fails continue without it (logged once)"
            logger.warning(said, member.name, why)
        self._faulty.add(member.name)
        for context in contexts:
            self._without.setdefault(context.id, set()).add(member.name)


def _kept(
    parents: Sequence[int], values: Sequence[float], drawn: set[int], most: int, worth: TokenValue | None
) -> list[int]:
    """Nodes of a merged tree that stay, ascending: all that were drawn, and the most valuable of the others."""
    for node in reversed(range(len(parents))):  # the ancestors of drawn nodes stay too
        if node in drawn and parents[node] >= 0:
            drawn.add(parents[node])
    # No member gives a node a larger value than its parent, so the best nodes are a tree.
    order = best_nodes(values)
    kept = drawn | set([node for node in order if node not in drawn][: max(0, most - len(drawn))])
    if worth is not None and not drawn:
        order = [node for node in order if node in kept]
        kept = set(order[: worth.size([values[node] for node in order])])
    return sorted(kept)


def _grows(members: Sequence[Drafter]) -> bool:
    """Whether this is one member alone, whose trees the kernels grow."""
    return len(members) == 1 and isinstance(members[0], GrowingDrafter) and members[0].native

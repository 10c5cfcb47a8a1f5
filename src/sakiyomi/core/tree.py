"""What a drafter proposes and what a verifier decides: trees of tokens as plain Python integers.

A chain is a tree with one path. Nothing here knows a model, a tokenizer or a cache, and no tensor is kept but the rows
of draft probabilities: at a batch of one, tuples of a few integers are faster than any tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from itertools import repeat
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

if TYPE_CHECKING:
    from torch import Tensor

DraftKind = Literal["chain", "iid", "without_replacement", "point_mass", "merged"]
VerdictKind = Literal["recovered", "bonus", "plain"]
Rule = Literal["greedy", "ratio", "coupled"]  # how a drafter should propose; several verifiers may share one
DRAFT_KINDS: frozenset[DraftKind] = frozenset(get_args(DraftKind))
SUM_ERROR = 1e-3  # of a row of probabilities: a sum of 256000 float32 numbers stays well below, bfloat16 ones do not


@cache
def chain_parents(count: int) -> tuple[int, ...]:
    """-1, 0, 1, ...: the parents of the nodes of a chain."""
    return tuple(range(-1, count - 1))


@dataclass(frozen=True)
class TokenTree:
    """Proposed tokens; every node continues its parent. Several nodes may hang from the last committed token.

    Attributes:
        tokens: (n) token ids.
        parents: (n) parent node of each, always an earlier one; -1 = hangs from the last committed token.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()

    @classmethod
    def chain(cls, tokens: Sequence[int]) -> TokenTree:
        """The tree with one path: parents -1, 0, 1, ..."""
        return cls(tuple(tokens), chain_parents(len(tokens)))

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def _depths(self) -> tuple[int, ...]:
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent < 0 else depths[parent] + 1)
        return tuple(depths)

    @cached_property
    def _children(self) -> dict[int, tuple[int, ...]]:
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(self.parents):
            children.setdefault(parent, []).append(node)
        return {parent: tuple(nodes) for parent, nodes in children.items()}

    def depths(self) -> tuple[int, ...]:
        """(n) distance from the last committed token, less one: 0 for its children."""
        return self._depths

    @property
    def depth(self) -> int:
        """Levels; 0 for the empty tree."""
        return len(self) if self.is_chain else max(self._depths, default=-1) + 1

    @property
    def is_chain(self) -> bool:
        """Whether it has one path."""
        return self.parents == chain_parents(len(self.tokens))

    def children(self, node: int) -> tuple[int, ...]:
        """Nodes that continue ``node`` (-1: the last committed token), in the order in which they were added."""
        return self._children.get(node, ())

    def path(self, node: int) -> tuple[int, ...]:
        """Nodes from the root down to ``node``, itself included; empty for -1."""
        nodes = []
        while node >= 0:
            nodes.append(node)
            node = self.parents[node]
        return tuple(reversed(nodes))

    def path_tokens(self, node: int) -> tuple[int, ...]:
        """Tokens from the root down to ``node``, its own included: the history of the row that follows it."""
        return tuple(self.tokens[step] for step in self.path(node))

    def products(self, chances: Sequence[float]) -> list[float]:
        """(n) the chance of each node multiplied with those of all nodes above it."""
        values: list[float] = []
        for chance, parent in zip(chances, self.parents, strict=True):
            values.append(chance * (1.0 if parent < 0 else values[parent]))
        return values

    def keep(self, nodes: Sequence[int]) -> TokenTree:
        """The tree of these nodes alone, ascending; the parent of each is among them."""
        number = {node: i for i, node in enumerate(nodes)} | {-1: -1}
        return TokenTree(
            tuple(self.tokens[node] for node in nodes), tuple(number[self.parents[node]] for node in nodes)
        )

    def mask(self) -> Tensor:
        """(n, n) bool on the CPU: True where the column's node is the row's node itself or one of its ancestors."""
        import numpy as np
        import torch

        mask = np.eye(len(self), dtype=np.bool_)
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                # The parent's row is complete, because parents come first.
                mask[node] |= mask[parent]
        return torch.from_numpy(mask)

    def validate(self, vocab_size: int | None = None) -> None:
        """Check that this is a tree, and that its tokens exist.

        Args:
            vocab_size: number of tokens of the target; None: tokens are only checked not to be negative.

        Raises:
            ValueError: lengths differ, something is no integer, a parent does not come before its child (which a cycle
                implies), or a token does not exist.
        """
        if len(self.tokens) != len(self.parents):
            raise ValueError(f"a tree of {len(self.tokens)} tokens has {len(self.parents)} parents; one each is needed")
        # Floats would pass every comparison below, and numpy's integers end up in the user's tokens.
        for value in (*self.tokens, *self.parents):
            if type(value) is not int:
                kind = type(value).__name__
                raise ValueError(f"{value!r} is a {kind}; tokens and parents are Python integers: int(...)")
        for node, parent in enumerate(self.parents):
            if not -1 <= parent < node:
                raise ValueError(
                    f"node {node} hangs from node {parent}; a parent is an earlier node, or -1 for the last "
                    "committed token"
                )
        for node, token in enumerate(self.tokens):
            if token < 0 or (vocab_size is not None and token >= vocab_size):
                raise ValueError(f"node {node} holds token {token}, outside the vocabulary of {vocab_size} tokens")


def best_nodes(values: Sequence[float], count: int | None = None) -> list[int]:
    """The nodes of largest value, best first, of equal ones the earlier first; ``count`` at most, None: all.

    Where no node is worth more than its parent, which comes before it, those of any count are a tree.
    """
    return sorted(range(len(values)), key=values.__getitem__, reverse=True)[:count]


class Draw(NamedTuple):
    """How one node came about. A node may have several: the same token drawn twice from the same parent.

    A named tuple, since a round makes one for each node: it takes a third of a frozen dataclass's time.

    Attributes:
        node: the node, drawn as a child of its parent.
        drafter: name of the drafter that proposed it.
        row: row of ``Draft.probs`` with the distribution it was drawn from; None: it was chosen, not drawn (a point
            mass), which is always safe to say and only lowers the acceptance.
        prob: the drafter's probability of the token, for traces; None where it has none.
        chance: how likely the drafter expects it to be accepted if its parent is; None: as ``prob``. It only decides
            how nodes of several drafters share a tree.
    """

    node: int
    drafter: str
    row: int | None = None
    prob: float | None = None
    chance: float | None = None

    @classmethod
    def many(
        cls,
        nodes: Iterable[int],
        drafter: str,
        rows: Iterable[int | None],
        probs: Iterable[float | None],
        chances: Iterable[float | None],
    ) -> tuple[Draw, ...]:
        """A draw for each node, as long as all have an entry: made without a call of Python for each."""
        return tuple(map(partial(tuple.__new__, cls), zip(nodes, repeat(drafter), rows, probs, chances)))

    def claim(self, unknown: float) -> float:
        """The chance of acceptance that the drafter claims; ``unknown`` where it gives none."""
        claimed = self.prob if self.chance is None else self.chance
        return unknown if claimed is None else claimed


@dataclass(frozen=True)
class Draft:
    """One round's proposal for one request.

    Attributes:
        tree: the tokens.
        kind: how siblings were drawn: "chain" (one path, each node drawn from its row), "iid" (siblings drawn
            independently from the same row), "without_replacement" (siblings drawn one after another from the same
            row, the earlier ones left out), "point_mass" (chosen, not drawn), "merged" (independent draws of several
            drafters, point masses among them).
        draws: at least one per node; those with the same parent stand in the order in which they were drawn.
        probs: (rows, V) float32 the distributions drawn from, after temperature and truncation; rows sum to 1. The
            drafter may use their memory again in the next round.
        sound: right by construction, so that ``validate`` would find nothing; and draw i is that of node i.
    """

    tree: TokenTree
    kind: DraftKind
    draws: tuple[Draw, ...] = ()
    probs: Tensor | None = None
    sound: bool = field(default=False, compare=False)

    @classmethod
    @cache
    def empty(cls) -> Draft:
        """Nothing proposed: the round is a plain step of the target."""
        return cls(TokenTree(), "point_mass", sound=True)

    @classmethod
    def chain(cls, tokens: Sequence[int], drafter: str, probs: Tensor | None = None) -> Draft:
        """One path; row i of ``probs`` is what token i was drawn from, and without ``probs`` all are point masses."""
        draws = tuple(Draw(node, drafter, None if probs is None else node) for node in range(len(tokens)))
        return cls(TokenTree.chain(tokens), "point_mass" if probs is None else "chain", draws, probs)

    def __len__(self) -> int:
        return len(self.tree)

    @property
    def judged_as(self) -> DraftKind:
        """Kind that a rule must accept: "chain" for a path with one draw a token, point masses too; else the kind."""
        return "chain" if len(self.draws) == len(self.tree.tokens) and self.tree.is_chain else self.kind

    @cached_property
    def _draws_at(self) -> dict[int, tuple[Draw, ...]]:
        draws: dict[int, list[Draw]] = {}
        for draw in self.draws:
            draws.setdefault(self.tree.parents[draw.node], []).append(draw)
        return {parent: tuple(found) for parent, found in draws.items()}

    def draws_at(self, parent: int) -> tuple[Draw, ...]:
        """Draws of the children of ``parent`` (-1: the last committed token), in the order drawn."""
        return self._draws_at.get(parent, ())

    def cut(self, depth: int) -> Draft:
        """The draft without nodes of this depth and deeper. Whole levels go, so that it stays as lossless as it was."""
        depths = self.tree.depths()
        if max(depths, default=-1) < depth:
            return self
        kept = {node: i for i, node in enumerate(node for node, d in enumerate(depths) if d < depth)}
        draws = tuple(draw._replace(node=kept[draw.node]) for draw in self.draws if draw.node in kept)
        return Draft(self.tree.keep(list(kept)), self.kind, draws, self.probs)

    def validate(self, vocab_size: int | None = None) -> None:
        """Check the tree, that each node has a draw, that the draws fit the kind, and that rows are distributions.

        A row of 32000 probabilities takes some 15 us.

        Args:
            vocab_size: width of the target's rows; None: tokens and width are not compared with it.

        Raises:
            ValueError: what is wrong, in words.
        """
        self.tree.validate(vocab_size)
        if self.kind not in DRAFT_KINDS:
            raise ValueError(f"a draft of kind {self.kind!r}; the kinds are {', '.join(sorted(DRAFT_KINDS))}")
        rows, width = (0, vocab_size) if self.probs is None else _shape(self.probs)
        if vocab_size is not None and width != vocab_size:
            raise ValueError(f"rows of {width} probabilities; the target's vocabulary has {vocab_size} tokens")
        drawn: set[int] = set()
        for draw in self.draws:
            if not 0 <= draw.node < len(self):
                raise ValueError(f"a draw names node {draw.node} of a tree of {len(self)}")
            if draw.row is not None and not 0 <= draw.row < rows:
                raise ValueError(f"the draw of node {draw.node} names row {draw.row} of {rows} rows of probabilities")
            drawn.add(draw.node)
        if len(drawn) != len(self):
            raise ValueError(f"nodes {sorted(set(range(len(self))) - drawn)} have no draw; give each node a Draw")
        if self.kind == "point_mass" and any(draw.row is not None for draw in self.draws):
            raise ValueError("a draft of point masses names rows of probabilities; a drawn one is of another kind")
        if self.kind == "chain" and len(self.draws) > len(self):
            raise ValueError(f"a chain of {len(self)} tokens has {len(self.draws)} draws; it has one a token")
        if self.kind == "chain" and not self.tree.is_chain:
            raise ValueError(f"a chain with parents {self.tree.parents}; a tree is of another kind")
        if self.kind in ("iid", "without_replacement"):
            for parent in {self.tree.parents[draw.node] for draw in self.draws}:
                if len({draw.row for draw in self.draws_at(parent)}) > 1:
                    raise ValueError(f"siblings under node {parent} of kind {self.kind!r} were drawn from unlike rows")
        if self.probs is not None:
            _check_rows(self.probs, {draw.row for draw in self.draws if draw.row is not None})


def _shape(probs: Any) -> tuple[int, int]:
    shape = tuple(getattr(probs, "shape", ()))
    if len(shape) != 2 or not hasattr(probs, "is_floating_point") or not probs.is_floating_point():
        raise ValueError(
            f"probabilities are {type(probs).__name__} of shape {shape}; expected a float tensor (rows, V)"
        )
    return shape[0], shape[1]


def _check_rows(probs: Tensor, used: set[int]) -> None:
    """Refuse rows that are no distributions: text drawn by them would not be the target's."""
    for row in sorted(used):
        values = probs[row].detach()
        total, least = float(values.sum()), float(values.min())
        # Written so that a NaN, which makes the sum one, is refused too.
        if not (abs(total - 1.0) <= SUM_ERROR and least >= 0.0):
            raise ValueError(
                f"row {row} of the probabilities sums to {total:.6g} and has {least:.6g} as its least; a row sums to "
                "1 and has no negative number in it. A token without a known probability may be a point mass"
            )


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the target decided about a draft.

    Attributes:
        path: accepted nodes from the root on; empty if none was.
        token: the target's own token, which follows the path.
        kind: "recovered" if the path ended at a node that had children (all rejected), "bonus" if it ended in a leaf,
            "plain" if nothing had been drafted.
        refused: nodes that were verified and rejected, in that order; further nodes are in neither list.
        chances: what the target gave the path's tokens and the last one, after temperature and truncation (at
            temperature 0 without), where that was computed on the way; else empty.
    """

    path: tuple[int, ...]
    token: int
    kind: VerdictKind
    refused: tuple[int, ...] = ()
    chances: tuple[float, ...] = field(default=(), compare=False)

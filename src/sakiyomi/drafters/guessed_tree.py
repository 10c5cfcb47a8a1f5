"""Builds a draft from guesses about single tokens: a chain of the likeliest tokens, or a tree of the likeliest paths.

The caller says which tokens may follow a place, and how likely each of them is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from typing import Self, TypeVar

from sakiyomi.core.tree import Draft, Draw, TokenTree, best_nodes
from sakiyomi.drafters.draft_length import TokenValue

Place = TypeVar("Place")
Expand = Callable[[Place], Sequence[tuple[int, float, Place]]]
"""From a place to its continuations (token, its chance if the place is reached, the place after it), best first."""


@dataclass(slots=True)
class GuessedTree:
    """Guessed tokens in the order in which they were added; parents come first.

    Attributes:
        tokens, parents: as in ``TokenTree``.
        chances: of each token if its parent is right.
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)

    @property
    def tree(self) -> TokenTree:
        """The nodes."""
        return TokenTree(tuple(self.tokens), tuple(self.parents))

    def best(self, nodes: int, worth: TokenValue | None) -> Self:
        """The likeliest nodes: at most so many, and no more than are worth their rows of the pass."""
        values = self.tree.products(self.chances)
        order = best_nodes(values, nodes)
        if worth is not None:
            order = order[: worth.size([values[node] for node in order])]
        kept = sorted(order)
        tree = self.tree.keep(kept)
        chances = [self.chances[node] for node in kept]
        return replace(self, tokens=list(tree.tokens), parents=list(tree.parents), chances=chances)

    def draft(self, name: str) -> Draft:
        """Point masses: the tokens were chosen, not drawn."""
        draws = tuple(Draw(node, name, None, chance) for node, chance in enumerate(self.chances))
        return Draft(self.tree, "point_mass", draws)


def grow(
    start: Place, expand: Expand[Place], depth: int, nodes: int, floor: float, ends: Collection[int]
) -> GuessedTree:
    """The nodes with the largest products of chances, found best-first, which is optimal for the given chances.

    The expected number of accepted tokens is the sum over nodes of the product of the chances down to them, so that
    the best n nodes are the n of largest product; a child's is never above its parent's (Sequoia, arXiv 2402.12374,
    section 3.1, calls this the positional acceptance assumption).

    Args:
        start: the place after the last committed token.
        expand: see ``Expand``.
        depth: longest path.
        nodes: most nodes; if not more than ``depth``, the result is one path of the likeliest tokens.
        floor: tokens with a smaller product of chances are not proposed.
        ends: tokens after which nothing is proposed.
    """
    found = GuessedTree()
    tokens, parents, chances = found.tokens, found.parents, found.chances
    width = 1 if nodes <= depth else None
    heap: list[tuple[float, int, int, int, int, float, Place]] = []
    order = 0  # equal nodes keep their order, and places are never compared

    def open_(place: Place, parent: int, level: int, reached: float) -> None:
        nonlocal order
        for token, chance, behind in expand(place)[:width]:
            if reached * chance < floor:
                break
            heappush(heap, (-reached * chance, order, token, parent, level, chance, behind))
            order += 1

    open_(start, -1, 0, 1.0)
    while heap and len(tokens) < nodes:
        reached, _, token, parent, level, chance, behind = heappop(heap)
        tokens.append(token)
        parents.append(parent)
        chances.append(chance)
        if level + 1 < depth and token not in ends:
            open_(behind, len(tokens) - 1, level + 1, -reached)
    return found

"""From guesses about single tokens to a draft: a chain of the likeliest, or the tree of the likeliest paths.

Knows no text and no model: whoever guesses says what may follow a place, and how likely each is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import TypeVar

from sakiyomi.core.tree import Draft, Draw, TokenTree
from sakiyomi.drafters.draft_length import TokenValue

__all__ = ["Expand", "Growth", "grow"]

Place = TypeVar("Place")
Expand = Callable[[Place], Sequence[tuple[int, float, Place]]]
"""From a place to (token, its chance if the place is right, the place behind it), the likeliest first."""


@dataclass(slots=True)
class Growth:
    """Nodes in the order in which they were added; parents come first.

    Attributes:
        tokens, parents: as in ``TokenTree``.
        chances: of each token if its parent is right.
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)

    def best(self, worth: TokenValue) -> Growth:
        """As many of the nodes as pay for their rows of the pass, the likeliest to be reached."""
        values: list[float] = []
        for parent, chance in zip(self.parents, self.chances, strict=True):
            values.append(chance * (1.0 if parent < 0 else values[parent]))
        # No node is reached more often than its parent, which comes first: the best ones are a tree.
        order = sorted(range(len(values)), key=values.__getitem__, reverse=True)
        kept = sorted(order[: worth.size([values[node] for node in order])])
        place = {node: i for i, node in enumerate(kept)} | {-1: -1}
        return Growth(
            [self.tokens[node] for node in kept],
            [place[self.parents[node]] for node in kept],
            [self.chances[node] for node in kept],
        )

    def draft(self, name: str) -> Draft:
        """Point masses: the tokens were chosen, not drawn."""
        if not self.tokens:
            return Draft.empty()
        draws = tuple(Draw(node, name, None, chance) for node, chance in enumerate(self.chances))
        return Draft(TokenTree(tuple(self.tokens), tuple(self.parents)), "point_mass", draws)


def grow(start: Place, expand: Expand[Place], depth: int, nodes: int, floor: float, ends: Collection[int]) -> Growth:
    """The nodes of largest chance to be reached: best-first, which is optimal for the chances given.

    The expected number of accepted tokens is the sum over nodes of the product of the chances down to them, so that
    the best n nodes are the n of largest product; a child's is never above its parent's (Sequoia, arXiv 2402.12374,
    section 3.1, calls this the positional acceptance assumption).

    Args:
        start: the place behind the last committed token.
        expand: see ``Expand``.
        depth: longest path.
        nodes: most nodes; not above ``depth``: one path, of the likeliest token each.
        floor: what is reached with a smaller chance is not proposed.
        ends: tokens behind which nothing is.
    """
    found = Growth()
    tokens, parents, chances = found.tokens, found.parents, found.chances
    if nodes <= depth:
        reached = 1.0
        while len(tokens) < nodes:
            children = expand(start)
            if not children:
                break
            token, chance, start = children[0]
            reached *= chance
            if reached < floor:
                break
            parents.append(len(tokens) - 1)
            tokens.append(token)
            chances.append(chance)
            if token in ends:
                break
        return found
    heap: list[tuple[float, int, int, int, int, float, Place]] = []
    order = 0  # equals come out as they went in, and places are never compared

    def open_(place: Place, parent: int, level: int, reached: float) -> None:
        nonlocal order
        for token, chance, behind in expand(place):
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

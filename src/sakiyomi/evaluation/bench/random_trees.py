"""A drafter for tests of exactness: random trees in which the right tokens hide now and then."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from sakiyomi.core.tree import Draft, DraftKind, Draw, TokenTree
from sakiyomi.drafters import Context

__all__ = ["RandomTrees"]


class RandomTrees:
    """Proposes trees of several branches; each token of a known text is in its place with probability ``rate``.

    Args:
        texts: new tokens by prompt.
        vocab_size: random tokens are below it.
        rate: how often the right token is among the children.
        width: children of a node on the right path.
        seed: of the trees; they do not depend on anything else.
    """

    name = "random-trees"
    kind: DraftKind = "point_mass"

    def __init__(
        self,
        texts: Mapping[tuple[int, ...], Sequence[int]],
        vocab_size: int,
        rate: float = 0.8,
        width: int = 3,
        seed: int = 0,
    ) -> None:
        self._texts, self._vocab_size, self._rate, self._width = dict(texts), vocab_size, rate, width
        self._random = random.Random(seed)

    def propose(self, contexts: Sequence[Context], gammas: Sequence[int]) -> list[Draft]:
        """See ``Drafter.propose``."""
        return [self._tree(context.tokens, gamma) for context, gamma in zip(contexts, gammas, strict=True)]

    def _tree(self, tokens: Sequence[int], gamma: int) -> Draft:
        rest = self._rest(tokens)
        nodes: list[int] = []
        parents: list[int] = []
        parent = -1
        for depth in range(gamma):
            known = depth < len(rest) and self._random.random() < self._rate
            children = [self._random.randrange(self._vocab_size) for _ in range(self._width)]
            if known:
                children[self._random.randrange(self._width)] = rest[depth]
            children = list(dict.fromkeys(children))
            first = len(nodes)
            nodes += children
            parents += [parent] * len(children)
            # The branch that goes on is the right one where it is known, else any.
            parent = first + (children.index(rest[depth]) if known else self._random.randrange(len(children)))
        draws = tuple(Draw(node, self.name, None) for node in range(len(nodes)))
        return Draft(TokenTree(tuple(nodes), tuple(parents)), "point_mass", draws, None)

    def _rest(self, tokens: Sequence[int]) -> Sequence[int]:
        for prompt, text in self._texts.items():
            if tuple(tokens[: len(prompt)]) == prompt:
                return text[len(tokens) - len(prompt) :]
        return ()

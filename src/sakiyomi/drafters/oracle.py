"""Drafts from the known answer: measures the speed-up of a draft that is right at a given rate and costs nothing.

This is an upper bound for benchmarks, since the answer comes from the target itself. The target first answers a new
request without drafts, which counts as prefill. The answer is stored, so the same request costs nothing later.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence

from sakiyomi.core.errors import InputError
from sakiyomi.core.tree import Draft, DraftKind, Draw, TokenTree
from sakiyomi.drafters.base import Context, Drafter, DrafterContext

logger = logging.getLogger("sakiyomi")
Answer = Callable[[Context], tuple[list[int], float] | None]
"""The target's own continuation of a request and the seconds that it took; None: no slot is free now."""
KEPT = 1024  # answers that are stored


class Oracle(Drafter):
    """Proposes the target's own text with independent errors; a chain of point masses.

    Greedy and coupled requests have an answer; under other rules the text is not known before it is drawn.

    Args:
        answer: asks the target.
        vocab_size: of the target; wrong tokens are below it.
        rate: probability that a proposed token is right: alpha of this drafter.

    Raises:
        InputError: the rate is no probability.
    """

    name = "oracle"
    kind: DraftKind = "point_mass"
    prefill_seconds = 0.0

    def __init__(self, answer: Answer, vocab_size: int, rate: float = 1.0) -> None:
        if not 0.0 <= rate <= 1.0:
            raise InputError(f"the oracle's rate is {rate}; it is the chance that a proposed token is right, 0 to 1")
        self.rate, self._answer, self._vocab_size = rate, answer, vocab_size
        self._said = False
        self._known: OrderedDict[tuple[object, ...], list[int]] = OrderedDict()

    @classmethod
    def make(cls, rate: float | None, around: DrafterContext) -> Oracle:
        """An oracle with this rate; 1 where none is given."""
        return cls(around.answer, around.vocab_size, 1.0 if rate is None else rate)

    @property
    def forward_seconds(self) -> float:
        """The same as ``prefill_seconds``: nothing is computed after the first draft."""
        return self.prefill_seconds

    def propose(self, contexts: Sequence[Context], gammas: Sequence[int]) -> list[Draft]:
        """See ``Drafter.propose``."""
        return [self._chain(context, gamma) for context, gamma in zip(contexts, gammas, strict=True)]

    def _chain(self, context: Context, gamma: int) -> Draft:
        ahead = self._ahead(context)[:gamma]
        stream = context.noise.fork(self.name)
        tokens = []
        for token in ahead:
            if stream.uniform() >= self.rate:
                token = (token + 1 + int(stream.uniform() * (self._vocab_size - 1))) % self._vocab_size
            tokens.append(token)
        draws = tuple(Draw(node, self.name, prob=self.rate) for node in range(len(tokens)))
        return Draft(TokenTree.chain(tokens), self.kind, draws)

    def _ahead(self, context: Context) -> list[int]:
        """The target's answer from here on; computed again where the text differs from the known answer.

        That happens if two tokens are nearly equal and passes of different sizes round differently (``exact=True``
        prevents it).
        """
        start: int
        answer: list[int]
        start, answer = context.memory.get(self.name, (0, []))
        said = context.tokens[start:]
        if not start or said != answer[: len(said)]:
            found = self._find(context)
            if found is None:
                return []
            start, answer = context.memory[self.name] = (len(context.tokens), found)
        return answer[len(context.tokens) - start :]

    def _find(self, context: Context) -> list[int] | None:
        if context.rule == "ratio":
            raise InputError(
                "an oracle does not know text that is drawn without a seed; give a seed, acceptance='coupled', or "
                "temperature 0"
            )
        noise = context.rule == "coupled" and context.noise.state
        key = context.source, tuple(context.tokens), repr(context.params), noise
        if key not in self._known:
            found = self._answer(context)
            if found is None:
                if not self._said:
                    logger.warning(
                        "the oracle drafts nothing: no slot is free to compute the answer in; raise max_batch"
                    )
                self._said = True
                return None
            self._known[key], seconds = found
            self.prefill_seconds += seconds
            if len(self._known) > KEPT:
                self._known.popitem(last=False)
        return self._known[key]

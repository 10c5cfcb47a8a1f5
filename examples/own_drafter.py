"""A drafter of one's own in ten lines: it proposes what followed the last two tokens when they stood there before.

Run it:  python examples/own_drafter.py

The text is the target's own whatever the drafter says; a good guess only makes it come faster.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from sakiyomi import LLM, Draft, SamplingParams
from sakiyomi.drafters import Context


class Echo:
    """What followed the last two tokens the last time."""

    name, kind = "echo", "point_mass"

    def propose(self, contexts: Sequence[Context], gammas: Sequence[int]) -> list[Draft]:
        """One chain for each request; an empty one where nothing is known."""
        return [Draft.chain(self.ahead(c.tokens, gamma), self.name) for c, gamma in zip(contexts, gammas, strict=True)]

    def ahead(self, tokens: list[int], gamma: int) -> list[int]:
        """Up to gamma tokens."""
        places = (i for i in range(len(tokens) - 1, 1, -1) if tokens[i - 2 : i] == tokens[-2:])
        place = next(places, len(tokens))
        return tokens[place : place + gamma]


PROMPT = "Once upon a time there was a little dog. The little dog liked to run. One day, the little dog"

if __name__ == "__main__":
    options = {"compile": False} if "--quick" in sys.argv else {}
    params = SamplingParams(max_new_tokens=64, gamma=3)
    drafted = LLM("tales", Echo(), strict=True, **options).generate(PROMPT, params)
    plain = LLM("tales", "none", **options).generate(PROMPT, params)
    print(drafted.text)
    print(f"the same text without it: {drafted.token_ids == plain.token_ids}")
    print(f"{drafted.stats.tau:.2f} tokens a pass, {drafted.stats.acceptance_rate:.0%} of the drafted tokens accepted")

"""What a drafter sees and gives: the seam at which every method of reading ahead is plugged in."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from sakiyomi.core.params import SamplingParams
from sakiyomi.core.tree import Draft, DraftKind, Rule
from sakiyomi.drafters.draft_length import TokenValue
from sakiyomi.sampling.rng import RequestNoise

if TYPE_CHECKING:
    from torch import Tensor

    from sakiyomi.cache.cross_attention import Source

__all__ = ["Context", "Drafter", "Rule", "tell"]

logger = logging.getLogger("sakiyomi")


@dataclass(eq=False)
class Context:
    """One request as a drafter sees it.

    Attributes:
        id: of the request.
        tokens: all committed tokens, prompt and output. Not to be changed; it only grows.
        params: what the user asked for.
        rule: how the target will judge: "greedy" (propose the most probable), "ratio" (draw, and tell the
            distribution) or
            "coupled" (propose the top of log q + the noise of the token's position).
        noise: the request's randomness; position of the next token is ``len(tokens)``.
        stop_ids: tokens that end the text: nothing after one of them is worth proposing.
        nodes: most tokens wanted in this round's tree; set before each round. As many as the depth wanted: a chain.
        worth: what a token is worth against the time that it takes, in rounds whose size is "auto"; who can weigh his
            own proposals may then go less or more deep than he is asked to. None: the size is as asked for.
        slot: the request's place in the target's cache, for a drafter that runs part of the target; it holds the keys
            and values of all tokens but the last. Set before each round.
        hidden: (hidden,) what the target's head over the vocabulary read at the last token that the target has
            processed, the one before the last in ``tokens``; None before the prompt is through, and where the target
            has an encoder.
        shares: what was read of another request may be used for it, as far as its tokens are the same; not with
            ``exact``, where the same numbers are wanted.
        source: what the text is made from, where the target has an encoder; its ``tokens`` stand before the text for
            whoever looks things up. None: there is nothing but the text.
        memory: for the drafter's own use, one entry a drafter.
    """

    id: int
    tokens: list[int]
    params: SamplingParams
    rule: Rule
    noise: RequestNoise
    stop_ids: frozenset[int]
    nodes: int = 1
    worth: TokenValue | None = None
    slot: int = -1
    hidden: Tensor | None = None
    shares: bool = True
    source: Source | None = None
    memory: dict[str, Any] = field(default_factory=dict)


class Drafter(Protocol):
    """Proposes tokens that the target then checks. A wrong proposal costs time, never correctness.

    A drafter of one's own needs ``name``, ``kind`` and ``propose``; the other members are looked for and may be
    missing: ``kind_for(params)``, where the kind depends on what is asked for, and trees follow the position's noise;
    ``passes``, the draft passes made so far, a level each; ``end(context)`` when a request is over, or, in a
    conversation, when the next one has begun; before that ``inherit(context, earlier)``, which may take over what it
    remembers of the one before; ``forward_seconds`` and ``prefill_seconds``.
    """

    @property
    def name(self) -> str:
        """Names the source in traces."""
        ...

    @property
    def kind(self) -> DraftKind:
        """How its drafts come about; checked against the acceptance rule before any work is done."""
        ...

    def propose(self, contexts: Sequence[Context], gammas: Sequence[int]) -> list[Draft]:
        """One draft for each request, all at once.

        Args:
            contexts: the requests of this round.
            gammas: the depth wanted for each, at least 1; less is allowed, and ``Draft.empty()`` too.
        """
        ...


def tell(drafter: Any, what: str, *contexts: Context) -> None:
    """Tell a drafter that wants to hear of it; it may be anybody's code, and nothing else depends on it.

    Args:
        drafter: None: nobody hears.
        what: name of the member to call: ``end`` or ``inherit``.
        contexts: what it takes.
    """
    hear = getattr(drafter, what, None)
    if hear is None:
        return
    try:
        hear(*contexts)
    except Exception as error:
        name = getattr(drafter, "name", None)
        logger.warning("drafter %s failed in %s: %s: %s", name, what, type(error).__name__, error)

"""Rounds as they happen: what was drafted, what came of it, and what each part took."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sakiyomi.tree import Draft

if TYPE_CHECKING:
    from sakiyomi.drafters import Context
    from sakiyomi.generate import Engine
    from sakiyomi.params import SamplingParams

__all__ = ["Heard", "Judged", "Round", "watched"]


@dataclass(frozen=True, slots=True)
class Judged:
    """A place of a draft that the target came to.

    Attributes:
        listed: candidates that the draft had for it.
        rank: of the one that came; None: it was not among them.
        chance: how likely the drafter thought its first candidate; None: it did not say.
    """

    listed: int
    rank: int | None
    chance: float | None


@dataclass(frozen=True, slots=True)
class Round:
    """One round of one request.

    Attributes:
        nodes, depth: of what was drafted.
        tokens: committed, one more than were accepted.
        draft, score, other: seconds inside the draft's forwards, inside the target's, outside both.
        judged: the places on the way that the text took.
    """

    nodes: int
    depth: int
    tokens: int
    draft: float
    score: float
    other: float
    judged: tuple[Judged, ...] = ()

    @property
    def seconds(self) -> float:
        """The whole round."""
        return self.draft + self.score + self.other


class Heard:
    """A drafter whose last draft can be looked at; in all else it is the drafter.

    Args:
        drafter: who proposes.
    """

    def __init__(self, drafter: Any) -> None:
        self.drafter = drafter
        self.last = Draft.empty()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.drafter, name)

    def propose(self, contexts: Sequence[Context], gammas: Sequence[int]) -> list[Draft]:
        """See ``Drafter.propose``."""
        drafts: list[Draft] = self.drafter.propose(contexts, gammas)
        self.last = drafts[0]
        return drafts


def watched(
    engine: Engine, heard: Heard | None, prompt: Sequence[int], params: SamplingParams
) -> tuple[list[int], list[Round]]:
    """Run one request alone, and note every round after the prompt.

    Args:
        engine: nothing else runs on it.
        heard: its drafter; None: it has none.
        prompt: token ids.
        params: of the request.

    Returns:
        (new tokens, rounds).
    """
    request = engine.submit(list(prompt), params, live=False)
    stats, rounds = request.stats, []
    try:
        while not request.over:
            before = (stats.draft_seconds, stats.score_seconds, stats.prefill_seconds)
            count, length = stats.rounds, len(request.tokens)
            if heard is not None:
                heard.last = Draft.empty()
            began = time.perf_counter()
            engine.step()
            seconds = time.perf_counter() - began
            if stats.rounds == count:
                continue
            draft, score = stats.draft_seconds - before[0], stats.score_seconds - before[1]
            other = seconds - draft - score - (stats.prefill_seconds - before[2])
            fresh = request.tokens[length:]
            proposed = heard.last if heard is not None else Draft.empty()
            rounds.append(
                Round(len(proposed), proposed.tree.depth, len(fresh), draft, score, other, judged(proposed, fresh))
            )
    finally:
        engine.remove(request.id)
    return request.generation().token_ids, rounds


def judged(draft: Draft, tokens: Sequence[int]) -> tuple[Judged, ...]:
    """What became of a draft.

    Args:
        draft: tree or chain; siblings stand in the order of their ranks.
        tokens: that were committed in its place and behind it.
    """
    tree = draft.tree
    below: dict[int, list[int]] = {}
    for node, parent in enumerate(tree.parents):
        below.setdefault(parent, []).append(node)
    chances = {draw.node: draw.chance for draw in draft.draws}
    found, place = [], -1
    for token in tokens:
        children = below.get(place)
        if not children:
            break
        rank = next((rank for rank, node in enumerate(children) if tree.tokens[node] == token), None)
        found.append(Judged(len(children), rank, chances.get(children[0])))
        if rank is None:
            break
        place = children[rank]
    return tuple(found)

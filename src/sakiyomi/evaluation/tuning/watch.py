"""Observes the rounds of an engine: the draft, how much of it was accepted, and the seconds of each part."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from sakiyomi.core.params import SamplingParams
from sakiyomi.core.tree import Draft
from sakiyomi.drafters import Context
from sakiyomi.engine.engine import Engine


@dataclass(frozen=True, slots=True)
class Judged:
    """A place of a draft that the target judged.

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

    def shrunk(self, share: float) -> Round:
        """The same round in this share of its time."""
        return replace(self, draft=share * self.draft, score=share * self.score, other=share * self.other)


class Heard:
    """Wraps a drafter and keeps its last drafts; all other attributes are those of the drafter.

    Args:
        drafter: makes the drafts.

    Attributes:
        last: drafts of the last round, by request.
    """

    def __init__(self, drafter: Any) -> None:
        self.drafter = drafter
        self.last: dict[int, Draft] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.drafter, name)

    def propose(self, contexts: Sequence[Context], gammas: Sequence[int]) -> list[Draft]:
        """See ``Drafter.propose``."""
        drafts: list[Draft] = self.drafter.propose(contexts, gammas)
        self.last = {context.id: draft for context, draft in zip(contexts, drafts, strict=True)}
        return drafts


def watched(
    engine: Engine, heard: Heard | None, prompts: Sequence[Sequence[int]], params: SamplingParams
) -> list[list[Round]]:
    """Run some requests at once: of each the rounds after the prompt's pass, which gives the first token.

    Args:
        engine: nothing else runs on it.
        heard: its drafter; None: it has none.
        prompts: token ids of each; of more than one the rounds' seconds are those of passes that they share.
        params: of all requests.
    """
    if engine.drafter is not None:
        engine.drafter.forget()
    requests = [engine.submit(list(prompt), params, live=False) for prompt in prompts]
    found: list[list[Round]] = [[] for _ in requests]
    try:
        while not all(request.over for request in requests):
            before = [(replace(request.stats), len(request.tokens)) for request in requests]
            if heard is not None:
                heard.last = {}
            began = time.perf_counter()
            engine.step()
            seconds = time.perf_counter() - began
            for request, rounds, (stats, length) in zip(requests, found, before, strict=True):
                if request.stats.rounds == stats.rounds:
                    continue
                draft = request.stats.draft_seconds - stats.draft_seconds
                score = request.stats.score_seconds - stats.score_seconds
                other = seconds - draft - score - (request.stats.prefill_seconds - stats.prefill_seconds)
                fresh = request.tokens[length:]
                proposed = Draft.empty() if heard is None else heard.last.get(request.id, Draft.empty())
                rounds.append(
                    Round(len(proposed), proposed.tree.depth, len(fresh), draft, score, other, judged(proposed, fresh))
                )
    finally:
        for request in requests:
            engine.remove(request.id)
    return found


def judged(draft: Draft, tokens: Sequence[int]) -> tuple[Judged, ...]:
    """How the target judged a draft.

    Args:
        draft: tree or chain; siblings stand in the order of their ranks.
        tokens: that were committed in its place and after it.
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

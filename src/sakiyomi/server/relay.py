"""Continues a stream of a server that died, with the same text, ids and sequence numbers.

A front of several servers notes which tokens each event of a stream has. If the server dies, it gives them to another
one. That one verifies them as a draft, replays its reply up to the place where the client is, and continues.
"""

from __future__ import annotations

import random
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from sakiyomi.core.errors import DivergedError
from sakiyomi.core.outputs import Step, TokenTrace
from sakiyomi.core.text import TextStream
from sakiyomi.engine.request import GIVEN
from sakiyomi.server.jobs import Event, Job

Names = Callable[[int], str]
"""Gives a new id of so many bytes, in hexadecimal digits."""


class Sent(NamedTuple):
    """The tokens of one event of a stream.

    Attributes:
        choice: index of the choice; -1: the stream is over.
        tokens: of the choice.
        over: the choice has no more tokens.
    """

    choice: int
    tokens: tuple[int, ...]
    over: bool


@dataclass
class Relay:
    """A request that another server may continue.

    Attributes:
        seed: of sampling if the body has none, and of the ids in the reply.
        created: time of the request, in seconds.
        given: the part of the reply that the client has already.
        sent: tokens of events since the last ``take``.
        records: keep them; without a front nobody takes them.
    """

    seed: int = field(default_factory=lambda: secrets.randbits(63))
    created: int = field(default_factory=lambda: int(time.time()))
    given: list[Sent] = field(default_factory=list)
    sent: list[Sent] = field(default_factory=list)
    records: bool = True

    def add(self, sent: Sent) -> None:
        """Note the tokens of an event that goes to the client."""
        if self.records:
            self.sent.append(sent)

    def prepare(self, jobs: Sequence[Job]) -> None:
        """Make the texts depend on the seed alone, and begin with what the client has."""
        for job in jobs:
            seed = self.seed if job.params.seed is None else job.params.seed
            job.params = replace(job.params, seed=seed, acceptance="coupled")
            job.given = [token for sent in self.given if sent.choice == job.index for token in sent.tokens]

    def names(self, of: str) -> Names:
        """A generator of ids that is the same on every server."""
        draws = random.Random(f"{self.seed} {of}")
        return lambda size: draws.randbytes(size).hex()

    def take(self) -> list[Sent]:
        """Tokens of events since the last call."""
        taken, self.sent = self.sent, []
        return taken


class Replay:
    """The part of a reply that a client has, and what the engine's steps add to it.

    Only the engine knows why a choice ended, so the last event of a choice is made from its steps again.

    Args:
        jobs: choices of the reply.
        given: what the client has.
        tokenizer: of the texts.
    """

    def __init__(self, jobs: Sequence[Job], given: Sequence[Sent], tokenizer: Any) -> None:
        self._jobs, self._known = jobs, [sent for sent in given if not sent.over]
        self._texts = [TextStream(tokenizer, job.params.stop, before=job.prompt) for job in jobs]
        self._ended = {sent.choice for sent in given if sent.over}
        self._coming = {job.index: Step("") for job in jobs if job.given or job.index in self._ended}
        self._counts = Counter[int]()  # tokens of what `events` gives, by choice
        for choice, tokens, _ in self._known:
            self._counts[choice] += len(tokens)

    def events(self) -> Iterator[Event]:
        """Events for the part that the client has, without the last ones of choices that ended in it."""
        for choice, tokens, _ in self._known:
            trace = tuple(TokenTrace(token, GIVEN) for token in tokens)
            yield Event(self._jobs[choice], Step(self._texts[choice].push(tokens)[0], tokens, trace))

    def rest(self, event: Event) -> tuple[Event, bool] | None:
        """The part of an event that ``events`` did not have.

        Returns:
            It, and whether the client does not have it yet; None: nothing is left of it.

        Raises:
            DivergedError: the text differs from what the client has.
        """
        choice, step = event.job.index, event.step
        if choice not in self._coming or step.error is not None:
            return event, True
        before = self._coming[choice]
        tokens, text = before.token_ids + step.token_ids, before.text + step.text
        step = self._coming[choice] = replace(step, text=text, token_ids=tokens, trace=before.trace + step.trace)
        known = self._counts[choice]
        if event.over and len(tokens) < known:
            raise DivergedError("the text ends before what was given of it does")
        if not event.over and (len(tokens) < known or choice in self._ended):
            return None
        begun = self._texts[choice].text
        if not text.startswith(begun):
            raise DivergedError(f"the text begins with {text[:80]!r}, and what was given of it with {begun[:80]!r}")
        del self._coming[choice]
        kept = replace(step, text=text[len(begun) :], token_ids=tokens[known:], trace=step.trace[known:])
        fresh = choice not in self._ended
        return (replace(event, step=kept), fresh) if kept.token_ids or kept.text or event.over else None

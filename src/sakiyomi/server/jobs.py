"""A job: one sample of one prompt, with its request, its state and the steps that it gets.

The thread that runs jobs is in ``worker.py``, their figures in ``metrics.py``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from sakiyomi.core.outputs import RoundTrace, Stats, Step
from sakiyomi.core.params import SamplingParams
from sakiyomi.engine.request import Request

if TYPE_CHECKING:
    from torch import Tensor

    from sakiyomi.cache.cross_attention import Source
    from sakiyomi.engine.encoder_inputs import Heard
    from sakiyomi.server.tools import Schemas, ToolFormat

__all__ = ["Call", "Echo", "Event", "Job", "Reply"]


class Reply(NamedTuple):
    """What is in the text of a reply besides text.

    Attributes:
        tools: how calls are written; None: there are none.
        schemas: of the arguments of the tools that may be called, by name.
        reasoning: whether the text begins inside thoughts; None: thoughts are not told apart.
        begun: the prompt ends inside the reply, which the text continues.
    """

    tools: ToolFormat | None = None
    schemas: Schemas = MappingProxyType({})
    reasoning: bool | None = None
    begun: bool = False


class Echo(NamedTuple):
    """A prompt as a reply repeats it.

    Attributes:
        text: of the prompt.
        places: where in it each of its tokens begins; empty where log probabilities are not asked for.
    """

    text: str
    places: list[int]


@dataclass(eq=False)
class Job:
    """One sample of one prompt.

    Attributes:
        prompt: its tokens.
        params: of sampling.
        key: of its randomness, as in ``LLM.generate``: (prompt,) or (prompt, sample).
        drafted: whether to speculate.
        asks: the drafters that are asked, by name; None: all that are there.
        traced: every round's tree is wanted.
        index: its place among the samples of its call.
        arrived: when it was asked for, by ``time.perf_counter``.
        first: when its first token came; 0: it has not.
        last: when its last tokens came.
        drafted_before: tokens drafted for it until its last step.
        request: the engine's, once it has it.
        call: that it belongs to.
        client: whose it is, for fair turns.
        over: it was cancelled.
        reason: why it ended, as metrics and the log have it; "" before that.
        reply: what is in its text besides text.
        echo: what comes before its text in the reply: the prompt; None: nothing does.
        unwritten: only the prompt was wanted; the one token that the engine writes is in no reply.
        states: takes sums of the prompt's hidden states, see ``Request``; None: they are not wanted.
        source: images in the prompt, as the model reads them; None: there are none.
        heard: a sound in place of a prompt; its tokens are known once it is submitted. None: no sound.
        given: tokens that its text begins with, as another server has written them.
    """

    prompt: list[int]
    params: SamplingParams
    key: tuple[int, ...] = (0,)
    drafted: bool = True
    traced: bool = False
    asks: tuple[str, ...] | None = None
    index: int = 0
    arrived: float = field(default_factory=time.perf_counter)
    first: float = 0.0
    last: float = 0.0
    drafted_before: int = 0
    request: Request | None = None
    call: Call | None = None
    client: str = ""
    over: bool = False
    reason: str = ""
    reply: Reply = field(default_factory=Reply)
    echo: Echo | None = None
    unwritten: bool = False
    states: list[Tensor] | None = None
    source: Source | None = None
    heard: Heard | None = None
    given: Sequence[int] = ()

    # Both follow from the engine's request alone, so that no count of them can drift.
    @property
    def runs(self) -> bool:
        """Whether it has a slot of the cache."""
        return self.request is not None and not self.request.over and not self.over and self.request.slot is not None

    @property
    def waits(self) -> bool:
        """Whether it waits for a slot."""
        return not self.over and (self.request is None or not (self.request.over or self.runs))


@dataclass(frozen=True, slots=True)
class Event:
    """The step of one job in one round.

    Attributes:
        job: the sample.
        step: tokens and text; the last one says why it ended.
        tree, stats: the round, and the sample's figures so far, where the job is traced.
    """

    job: Job
    step: Step
    tree: RoundTrace | None = None
    stats: Stats | None = None

    @property
    def over(self) -> bool:
        """Whether nothing comes after it."""
        return self.step.finish_reason is not None or self.step.error is not None


class Call:
    """The samples of one client's request; iterate over it for what they write.

    Args:
        jobs: the samples.
        cancel: ends those of them that are not over.
    """

    def __init__(self, jobs: Sequence[Job], cancel: Callable[[Sequence[Job]], None]) -> None:
        self.jobs, self._cancel = jobs, cancel
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._left = len(jobs)

    def put(self, event: Event) -> None:
        """Called in the event loop."""
        self._events.put_nowait(event)

    async def __aiter__(self) -> AsyncIterator[Event]:
        while self._left:
            event = await self._events.get()
            self._left -= event.over
            yield event

    def close(self) -> None:
        """Free what is still running; nothing where all samples are over."""
        self._cancel(self.jobs)

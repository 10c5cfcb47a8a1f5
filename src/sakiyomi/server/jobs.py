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
from sakiyomi.server.said import TextMarks
from sakiyomi.server.thoughts import THINK, ThoughtMarks

if TYPE_CHECKING:
    from torch import Tensor

    from sakiyomi.cache.cross_attention import Source
    from sakiyomi.server.tools import Schemas, ToolFormat


class Reply(NamedTuple):
    """How to read the text of a reply.

    Attributes:
        tools: format of calls; None: no calls.
        schemas: of the arguments of the offered tools, by name.
        reasoning: whether the text begins inside thoughts; None: thoughts are not separated.
        begun: the prompt ends inside the reply, which the text continues.
        marks: around thoughts.
        text: what is around the text; None: nothing.
    """

    tools: ToolFormat | None = None
    schemas: Schemas = MappingProxyType({})
    reasoning: bool | None = None
    begun: bool = False
    marks: ThoughtMarks = THINK
    text: TextMarks | None = None


class Echo(NamedTuple):
    """A prompt as a reply repeats it.

    Attributes:
        text: of the prompt.
        places: offset of each token in it; empty without log probabilities.
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
        asks: names of the drafters to use; None: all.
        traced: record the tree of every round.
        index: its place among the samples of its call.
        arrived: time of the request, by ``time.perf_counter``.
        first: time of its first token; 0: none yet.
        last: time of its latest tokens.
        drafted_before: tokens drafted for it until its latest step.
        request: the engine's request, once it is submitted.
        call: that it belongs to.
        client: for fair scheduling.
        over: it was cancelled.
        reason: why it ended, for metrics and the log; "" while it runs.
        reply: how to read its text.
        echo: the prompt, to be repeated before the text; None: it is not repeated.
        unwritten: only the prompt is wanted; the one token that the engine writes is dropped.
        states: collects sums of the prompt's hidden states, see ``Request``; None: not wanted.
        source: model inputs for images in the prompt; None: no images.
        submit: makes and queues its request, whose prompt is known then; None: the prompt and the parameters do.
        given: tokens of its text that another server has written.
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
    submit: Callable[[], Request] | None = None
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
        """Whether it is the last one of its job."""
        return self.step.finish_reason is not None or self.step.error is not None


class Call:
    """The jobs of one HTTP request; iterating yields their events until all are over.

    Args:
        jobs: the samples.
        cancel: ends unfinished jobs.
    """

    def __init__(self, jobs: Sequence[Job], cancel: Callable[[Sequence[Job]], None]) -> None:
        self.jobs, self._cancel = [*jobs], cancel
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._left = len(jobs)

    def add(self, job: Job) -> None:
        """Another job, which follows from those before it."""
        self.jobs.append(job)
        self._left += 1

    def put(self, event: Event) -> None:
        """Called in the event loop."""
        self._events.put_nowait(event)

    async def __aiter__(self) -> AsyncIterator[Event]:
        while self._left:
            event = await self._events.get()
            self._left -= event.over
            yield event

    def close(self) -> None:
        """End unfinished jobs."""
        self._cancel(self.jobs)

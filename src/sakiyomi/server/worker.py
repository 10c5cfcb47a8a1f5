"""The thread that runs the engine's rounds. Handlers open and close calls on it.

Handlers live in an event loop and never wait for the engine; what they want is put into an inbox that the thread looks
into between rounds. What a round gave to all requests comes back as one callback into the loop.
"""

from __future__ import annotations

import asyncio
import logging
import math
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from sakiyomi.core.outputs import Step
from sakiyomi.core.process import release_workers
from sakiyomi.engine.inputs import TokenizedPrompt
from sakiyomi.engine.request import Request, RetainedSlot
from sakiyomi.server.errors import ApiError, busy, stopping
from sakiyomi.server.jobs import Call, Event, Job
from sakiyomi.server.metrics import Metrics

if TYPE_CHECKING:
    from sakiyomi.engine.engine import Engine
    from sakiyomi.server.kv_events import EventPublisher

logger = logging.getLogger("sakiyomi.server")
T = TypeVar("T")


class Worker:
    """Runs requests on an engine.

    Args:
        engine: stepped by this thread alone.
        max_queue: requests that are accepted beyond the number of slots.
        reuse: prompts share cached prefixes, with running requests and with finished ones.
        metrics: count every step and end.
        events: publishes what the cache holds after every round.

    Attributes:
        fault: the error of the last round, if it failed as a whole; None once a round succeeds.
    """

    def __init__(
        self, engine: Engine, *, max_queue: int, reuse: bool, metrics: Metrics, events: EventPublisher | None = None
    ) -> None:
        self.engine, self.metrics = engine, metrics
        self.slots = engine.target.cache.max_slots
        self.fault: Exception | None = None
        self._most = self.slots + max_queue
        self._reuse, self._events = reuse, events
        self._inbox: queue.SimpleQueue[tuple[str, Job | Callable[[], None] | None]] = queue.SimpleQueue()
        self._open: set[Job] = set()  # the event loop's
        self._jobs: dict[int, Job] = {}  # the thread's, as the next one is
        self._turns = Turns()
        self._seconds = 1.0
        self._draining = self._stopped = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        metrics.gauge("vllm:num_requests_running", "Samples that have a slot of the cache", lambda: self.running)
        metrics.gauge("vllm:num_requests_waiting", "Samples that wait for one", lambda: self.waiting)

    # ------------------------------------------------------------ in the event loop

    def start(self) -> None:
        """Begin; called in the event loop that handlers live in."""
        self._loop = asyncio.get_running_loop()
        release_workers()  # of the thread that has loaded the model, most likely: the engine's computes from now on
        self._thread.start()

    @property
    def load(self) -> int:
        """Samples that run or wait."""
        return len(self._open)

    @property
    def running(self) -> int:
        """Samples that have a slot of the cache."""
        return sum(job.runs for job in self._open)

    @property
    def waiting(self) -> int:
        """Samples that wait for a slot."""
        return sum(job.waits for job in self._open)

    @property
    def alive(self) -> bool:
        """Whether it takes requests and the last round did not fail."""
        return self._thread.is_alive() and not self._draining and self.fault is None

    def open(self, jobs: Sequence[Job]) -> Call:
        """Queue the samples of one request.

        Raises:
            ApiError: there is no room for them now (429), or the server is about to stop (503).
        """
        if self._draining or not self._thread.is_alive():
            raise stopping()
        calls = {job.call for job in self._open if job.call is not None}
        if len(calls) >= self._most and not self._shed(calls, jobs[0].client):
            self.metrics.refused.inc()
            wait = math.ceil(min(60.0, max(1.0, self._seconds * (self.load - self.slots + 1) / self.slots)))
            raise busy(
                f"{len(calls)} requests run or wait, as many as this server takes; try again in about {wait} s", wait
            )
        call = Call(jobs, self.cancel)
        self._queue(jobs, call)
        return call

    def follow(self, call: Call, job: Job) -> None:
        """Queue a sample that follows from the earlier ones of a request; there is always room for it.

        Raises:
            ApiError: the server was stopped.
        """
        self._check_runs()
        call.add(job)
        self._queue([job], call)

    def _queue(self, jobs: Sequence[Job], call: Call) -> None:
        for job in jobs:
            job.call = call
            self._open.add(job)
            self._inbox.put(("add", job))

    def _check_runs(self) -> None:
        # What is put into the inbox before the entry that stops the thread is still read.
        if self._stopped or not self._thread.is_alive():
            raise stopping()

    async def run(self, act: Callable[[], T]) -> T:
        """The result of ``act``, which the engine's thread runs between two rounds.

        Raises:
            ApiError: the server was stopped.
        """
        self._check_runs()
        done: Future[T] = Future()

        def run() -> None:
            if not done.set_running_or_notify_cancel():  # its client has gone
                return
            try:
                done.set_result(act())
            except BaseException as error:
                done.set_exception(error)

        self._inbox.put(("run", run))
        return await asyncio.wrap_future(done)

    def _shed(self, calls: Collection[Call], client: str) -> bool:
        """End a waiting request of the client with most requests, the newest one, if this client has fewer.

        Returns:
            Whether there is room now.
        """
        held = Counter(call.jobs[0].client for call in calls)
        other, most = held.most_common(1)[0]
        waiting = [
            call for call in calls if call.jobs[0].client == other and all(job.request is None for job in call.jobs)
        ]
        if held[client] + 1 >= most or not waiting:
            return False
        error = busy("another client, who has less, needed the place of this request; try again", 1)
        newest = max(waiting, key=lambda call: call.jobs[0].arrived)
        self.metrics.refused.inc()
        for job in newest.jobs:
            self._inbox.put(("remove", job))
        self._deliver([Event(job, Step("", error=error)) for job in newest.jobs])
        return True

    def cancel(self, jobs: Sequence[Job]) -> None:
        """End those that are not over; their slots are free before the next round."""
        for job in jobs:
            if job in self._open:
                self._inbox.put(("remove", job))
                self._end(job, "abort")

    def drain(self) -> None:
        """Refuse new requests from now on."""
        self._draining = True

    def stop(self) -> None:
        """End the thread, and running requests with an error that says so."""
        self._draining = self._stopped = True
        for job in list(self._open):
            self._inbox.put(("remove", job))
            self._deliver([Event(job, Step("", error=ApiError(503, "the server was stopped", code="stopping")))])
        self._inbox.put(("stop", None))

    def join(self, timeout: float) -> None:
        """Wait for the thread's end."""
        self._thread.join(timeout)

    def _deliver(self, events: Sequence[Event]) -> None:
        for event in events:
            job = event.job
            if job not in self._open:
                continue
            if event.over:
                self._end(job, event.step.finish_reason or "error")
            assert job.call is not None
            job.call.put(event)

    def _end(self, job: Job, reason: str) -> None:
        self._open.discard(job)
        job.reason = reason
        self.metrics.ended(reason)

    # ------------------------------------------------------------ in the thread

    def _run(self) -> None:
        while self._read_inbox():
            while len(self._turns) and self._turns.running < self.slots:
                self._submit(self._turns.next())
            if not self.engine.busy:
                continue
            try:
                steps = self.engine.step()
                self.fault = None
            except Exception as error:
                logger.exception("a round failed; the requests that were under way end by it")
                self.fault = error
                self._tell([self._failed(job, error) for job in list(self._jobs.values())])
                continue
            if self._events is not None:
                self._events.update(self.engine.reusable())
            if steps:
                self._tell(
                    [self._event(self._jobs[step.request], step) for step in steps if step.request in self._jobs]
                )

    def _tell(self, events: Sequence[Event]) -> None:
        """One callback for all of them."""
        assert self._loop is not None
        if events:
            try:
                self._loop.call_soon_threadsafe(self._deliver, events)
            except RuntimeError:  # the loop is closed: nobody listens any more
                logger.debug("events after the end of the loop")

    def _read_inbox(self) -> bool:
        """Handle the inbox; wait for an entry if there is nothing to run. False: the thread should end."""
        while True:
            try:
                what, job = self._inbox.get(block=not (self.engine.busy or len(self._turns)))
            except queue.Empty:
                return True
            if job is None:
                return False
            if not isinstance(job, Job):
                job()
                continue
            if what == "add" and not job.over:
                self._turns.add(job)
            elif what == "remove":
                job.over = True
                self._turns.leave(job)
                if job.request is not None and not job.request.over:
                    self._remove(job)

    def _submit(self, job: Job) -> None:
        try:
            job.request = self._request(job) if job.submit is None else job.submit()
        except Exception as error:
            self._turns.leave(job)
            self._tell([Event(job, Step("", error=error))])
            return
        if job.submit is not None:
            job.prompt = job.request.tokens[: job.request.prompt_tokens]
        self._jobs[job.request.id] = job

    def _request(self, job: Job) -> Request:
        return self.engine.submit(
            job.prompt if job.source is None else TokenizedPrompt([*job.prompt], job.params, job.source),
            job.params,
            key=job.key,
            rounds_trace=job.traced,
            place=RetainedSlot(shareable=True) if self._reuse else None,
            shares=self._reuse,
            drafted=job.drafted,
            asks=job.asks,
            given=job.given,
            states=job.states,
            bounded=True,
        )

    def _failed(self, job: Job, error: Exception) -> Event:
        assert job.request is not None
        self._remove(job)
        return Event(job, Step("", request=job.request.id, error=error))

    def _remove(self, job: Job) -> None:
        assert job.request is not None
        self.engine.remove(job.request.id)
        self._jobs.pop(job.request.id, None)
        self._turns.leave(job)

    def _event(self, job: Job, step: Step) -> Event:
        request = job.request
        assert request is not None
        now = time.perf_counter()
        self.metrics.step(job, step, now)
        if step.token_ids:
            job.last = now
            job.first = job.first or now
        tree = request.rounds.pop() if request.rounds else None
        if request.over:
            self._seconds += 0.1 * (now - job.arrived - self._seconds)
            del self._jobs[request.id]
            self._turns.leave(job)
        stats = replace(request.stats, seconds=now - request.began) if job.traced else None
        return Event(job, step, tree, stats)


class Turns:
    """Samples that wait for slots, and those that run, by client and by request.

    The engine would serve in the order of arrival, so that a client with many samples would hold up all others.

    The next one is of the client with the fewest running samples; among its requests, of that with the fewest; among
    equals, of the one that has waited longest.
    """

    def __init__(self) -> None:
        self._waiting: dict[Job, None] = {}  # in the order in which they came
        self._running: set[Job] = set()

    def __len__(self) -> int:
        """How many wait."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Samples that were given out and have not left."""
        return len(self._running)

    def add(self, job: Job) -> None:
        """Another one that waits."""
        self._waiting[job] = None

    def next(self) -> Job:
        """Give out the next one.

        Raises:
            ValueError: none waits.
        """
        clients = Counter(job.client for job in self._running)
        calls = Counter(job.call for job in self._running)
        job = min(self._waiting, key=lambda job: (clients[job.client], calls[job.call]))
        del self._waiting[job]
        self._running.add(job)
        return job

    def leave(self, job: Job) -> None:
        """One is over, whether it waited or ran; nothing where it has left before."""
        self._waiting.pop(job, None)
        self._running.discard(job)

"""Whose turn it is: samples wait here for slots, and those who have little get the next one.

The engine would serve whoever came first, so that a client with many samples holds up everybody behind it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict

from sakiyomi.server.jobs import Job

__all__ = ["Turns"]


class Turns:
    """Samples that wait, and those that run, by client and by request.

    The next one is of the client with the fewest running samples; among its requests, of that with the fewest; among
    equals, of the one that has waited longest.
    """

    def __init__(self) -> None:
        self._waiting: OrderedDict[Job, None] = OrderedDict()
        self._clients: Counter[str] = Counter()  # of samples that run
        self._calls: Counter[int] = Counter()
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
        job = min(self._waiting, key=lambda job: (self._clients[job.client], self._calls[id(job.call)]))
        del self._waiting[job]
        self._running.add(job)
        self._clients[job.client] += 1
        self._calls[id(job.call)] += 1
        return job

    def leave(self, job: Job) -> None:
        """One is over, whether it waited or ran; nothing where it has left before."""
        self._waiting.pop(job, None)
        if job in self._running:
            self._running.remove(job)
            self._clients.subtract([job.client])
            self._calls.subtract([id(job.call)])
            # Only what counts is kept.
            self._clients, self._calls = +self._clients, +self._calls

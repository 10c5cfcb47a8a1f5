"""Whose turn it is: samples wait here for slots, and those who have little get the next one.

The engine would serve whoever came first, so that a client with many samples holds up everybody behind it.
"""

from __future__ import annotations

from collections import Counter

from sakiyomi.server.jobs import Job

__all__ = ["Turns"]


class Turns:
    """Samples that wait, and those that run, by client and by request.

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

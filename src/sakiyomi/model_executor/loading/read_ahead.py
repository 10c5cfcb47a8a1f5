"""Has the system read the next weights from a file while the current layer computes."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

CHUNK = 1 << 17  # bytes that the system is asked to read at a time: of more it may only read the first part


def fetch(file: int, offset: int, size: int) -> None:
    """Have the system read a part of a file into its page cache. Copies nothing."""
    if hasattr(os, "posix_fadvise"):
        for place in range(offset, offset + size, CHUNK):
            os.posix_fadvise(file, place, min(CHUNK, offset + size - place), os.POSIX_FADV_WILLNEED)


class ReadAhead:
    """Learns from the passes in which order weights are used, and fetches the next ones.

    Args:
        sizes: bytes of the weights, by name.
        fetch: fetches one, called in a thread. Errors are ignored: they occur again when the weight is used.
        budget: most bytes that are fetched ahead; at least one weight.

    Attributes:
        coming: weights that are fetched and not used yet.
    """

    def __init__(self, sizes: Mapping[str, int], fetch: Callable[[str], object], *, budget: int) -> None:
        self.coming: OrderedDict[str, None] = OrderedDict()
        self._sizes, self._fetch, self._budget = sizes, fetch, budget
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="sakiyomi-weights")
        self._next: dict[str, str] = {}
        self._last: str | None = None

    def note(self, name: str) -> None:
        """A weight is used now."""
        if name in self.coming:
            del self.coming[name]
        else:  # the first pass, or one with another order
            self.coming.clear()
        if self._last is not None:
            self._next[self._last] = name
        self._last = name

    def forget(self) -> None:
        """The pass has failed: the next one begins anew."""
        self.coming.clear()
        self._last = None

    def look(self, name: str) -> None:
        """Fetch the weights that followed this one the last time."""
        waiting = sum(self._sizes[coming] for coming in self.coming)
        at = self._next.get(next(reversed(self.coming), name))
        while at is not None and at not in self.coming:
            waiting += self._sizes[at]
            if self.coming and waiting > self._budget:
                break
            self.coming[at] = None
            if hasattr(os, "posix_fadvise"):
                self._reader.submit(self._fetch, at)
            at = self._next.get(at)

"""Who has which slot of the cache: a running request, or a conversation between two of its requests.

Knows no passes and no tokens' meaning; what may be used again of a slot is decided here alone.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from sakiyomi.cache.slots import SlotCache
from sakiyomi.drafters.base import Drafter, tell
from sakiyomi.errors import MemoryLimitError
from sakiyomi.keeping import Everything, Keeping
from sakiyomi.request import Place, Request

__all__ = ["Places"]

RECENTLY = 0.5  # seconds for which it holds what the system said of its memory: asking takes longer than all the rest


class Places:
    """Gives slots to requests and takes them back.

    A slot that a conversation keeps between its requests is taken from it, the longest unused one first, when another
    request needs it or its memory: the conversation then reads its next prompt anew.

    Args:
        cache: the target's.
        keeping: what stays there.
        drafter: hears of the end of every request, or of the next one of its conversation.
        chunk_size: prompt tokens in one pass.
        exact: only what any request with the same prompt would compute in the same way is used again.
    """

    def __init__(
        self, cache: SlotCache, keeping: Keeping | Everything, drafter: Drafter | None, chunk_size: int, exact: bool
    ) -> None:
        self._cache, self._keeping = cache, keeping
        self._drafter, self._chunk_size, self._exact = drafter, chunk_size, exact
        self._kept: list[Place] = []  # the longest unused first
        self._fitted = (0, 0, -RECENTLY)  # requests and columns for which there was memory, and when

    def seat(self, request: Request) -> None:
        """A slot for a request: that of its conversation, rolled back to what the prompt shares with it, or a free one.

        Not all requests that run at once may be seated already.
        """
        place = request.place
        if place is None or place.slot is None:
            if not self._cache.free:
                self.release(self._kept[0])
            request.slot = self._cache.take()
            self._keeping.begin(request.slot)
            self._go_on(request)
            return
        assert place.context is not None
        alike = request.context.source is None  # else what is held was made from another source
        shared = place.shared(request.tokens) - self._keeping.wants_surprise  # of the token behind them
        shared = min(max(shared, 0), request.prompt_tokens - 1) if alike else 0  # the last one is wanted
        if self._exact:
            # Rows of decoding passes, and of a chunk of another length, round otherwise than those of a fresh request.
            shared = min(shared, place.whole) // self._chunk_size * self._chunk_size
        self._kept.remove(place)
        if not self._keeping.roll_back(place.slot, shared):
            shared = 0
            self._keeping.begin(place.slot)
        request.slot, place.slot = place.slot, None
        request.cached = request.stats.reused = shared
        if alike:
            tell(self._drafter, "inherit", request.context, place.context)
        tell(self._drafter, "end", place.context)

    def _go_on(self, request: Request) -> None:
        """From a prefix, if the request has one and begins with all of it."""
        prefix = request.place.prefix if request.place is not None else None
        if prefix is None or (self._exact and len(prefix.tokens) % self._chunk_size):
            return  # the rows of its last chunk round otherwise than in a chunk that is longer
        count = len(prefix.tokens)
        if count < request.prompt_tokens and request.tokens[:count] == prefix.tokens:
            assert request.slot is not None
            prefix.take(self._cache, self._keeping, request.slot)
            request.cached = request.stats.reused = count

    def free(self, request: Request) -> None:
        """Take the slot of a request back, or leave it to its conversation if the request did not end by an error."""
        place, slot, request.slot = request.place, request.slot, None
        if slot is not None and place is not None and request.error is None:
            # Of a round's path more may be in the cache than was committed: a stop cut it. The last token counts as
            # not read even so, as where nothing was drafted: what is read next begins at the same place.
            place.held = request.tokens[:-1][: request.cached]
            read_once = max(0, request.prompt_tokens - self._keeping.again)
            place.whole = min(request.cached, read_once) // self._chunk_size * self._chunk_size
            place.slot, place.context = slot, request.context
            self._kept.append(place)
            return
        if slot is not None:
            self._keeping.end(slot)
            self._cache.release(slot)
        tell(self._drafter, "end", request.context)

    def release(self, place: Place) -> None:
        """Free what a conversation keeps; nothing if it keeps nothing."""
        if place.slot is None:
            return
        assert place.context is not None
        self._kept.remove(place)
        self._keeping.end(place.slot)
        self._cache.release(place.slot)
        place.slot = None
        tell(self._drafter, "end", place.context)

    def check_memory(self, requests: Sequence[Request]) -> None:
        """Refuse the last of these requests if all of them would not fit at their longest; kept places make way.

        Raises:
            MemoryLimitError: they would not fit though nothing else were kept.
        """
        most, columns = self._cache.max_slots, max(request.last for request in requests)
        others = [place for place in self._kept if all(request.place is not place for request in requests)]
        count, longest, when = self._fitted
        now = time.monotonic()
        if min(len(requests) + len(others), most) <= count and columns <= longest and now - when < RECENTLY:
            return
        self._cache.check(min(len(requests), most), columns)
        while others:
            try:
                self._cache.check(min(len(requests) + len(others), most), columns)
                break
            except MemoryLimitError:
                self.release(others.pop(0))
        self._fitted = (min(len(requests) + len(others), most), columns, now)

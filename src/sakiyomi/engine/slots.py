"""Assigns the slots of the cache to running requests, and to conversations between two of their requests.

Decides what of a slot's text is reused, in place or copied into another slot. Knows no passes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from sakiyomi.cache.eviction import ManagedCache
from sakiyomi.cache.prefix import LEAST, Prefix, alike
from sakiyomi.core.errors import MemoryLimitError, RemovedError
from sakiyomi.drafters.base import Drafter, tell
from sakiyomi.engine.request import Request, RetainedSlot
from sakiyomi.model_executor.runner import ModelRunner

RECENTLY = 0.5  # seconds for which the free memory that the system reported is not asked for again: that is slow
AWAITED = 64  # tokens, or a chunk of them, that a request waits for: fewer are read anew in one pass

Kin = list[tuple[Request, int]]
"""Requests that got their slots before another one, and how many first tokens each has in common with it."""


class SlotManager:
    """Gives slots to requests and takes them back.

    A slot that a conversation keeps between its requests is taken from it, the longest unused one first, when another
    request needs it or its memory: the conversation then reads its next prompt anew.

    If the prompts of two requests have a common beginning, the later request copies what the earlier one has read.
    While the earlier one is still reading, the later one waits, unless it has itself read more. So the first of several
    requests never waits, and no request waits longer than it would need to read the tokens itself.

    Args:
        target: whose cache has the slots.
        drafter: told when a request ends, or when the next one of its conversation begins.
        chunk_size: prompt tokens in one pass.
        exact: only what any request with the same prompt would compute in the same way is used again.
    """

    def __init__(self, target: ModelRunner, drafter: Drafter | None, chunk_size: int, exact: bool) -> None:
        self._target, self._cache = target, target.cache
        self._drafter, self._chunk_size, self._exact = drafter, chunk_size, exact
        self._seated: dict[Request, Kin] = {}
        self._kept: list[RetainedSlot] = []  # the longest unused first
        self._fitted = (0, 0, -RECENTLY)  # requests and columns for which there was memory, and when

    @property
    def _eviction(self) -> ManagedCache:
        """What stays in the cache; another object once a drafter has asked for queries to be tracked."""
        return self._target.eviction

    @property
    def held_bytes(self) -> int:
        """Bytes of the keys and values that requests and retained slots hold; evicted ones are not among them."""
        seated = [(request.slot, request.cached) for request in list(self._seated)]
        kept = [(place.slot, len(place.held)) for place in list(self._kept)]
        return sum(self._cache.held_bytes(slot, length) for slot, length in seated + kept if slot is not None)

    def reusable(self) -> Iterator[tuple[object, Sequence[int], int]]:
        """Texts that other requests can continue: the holder of each, its tokens, and how many of them count."""
        for request in self._seated:
            if request.slot is not None and request.shares and request.context.source is None:
                whole = min(request.cached, request.prompt_tokens) // self._chunk_size * self._chunk_size
                yield request, request.tokens, whole if self._exact else request.cached
        for place in self._kept:
            if place.shareable and place.lends:
                yield place, place.held, place.whole if self._exact else len(place.held)

    def seat(self, request: Request) -> None:
        """Give a request a slot.

        It is that of its conversation, or of a shareable place whose text it continues, rolled back to what the prompt
        shares with it; or a free one, with what other requests have read of the prompt.

        Fewer requests must have slots than may run at once.

        Raises:
            MemoryLimitError: there is no storage for a prefix.
        """
        kin = [(other, alike(request.tokens, other.tokens)) for other in self._seated if self._akin(request, other)]
        self._seated[request] = [(other, count) for other, count in kin if count >= LEAST]
        place, lender = request.options.place, self._lender(request)
        if place is None or place.slot is None:
            place = self._taken_over(request, lender)
        if place is not None:
            self._hand_over(place, request)
        else:
            request.slot = self._cache.take()
            self._eviction.begin(request.slot)
            self._restore_prefix(request)
        if lender is not None and lender.slot is not None and not self._eviction.chunked:
            self._copy(request, lender.slot, self._lendable(lender.slot, self._held(lender, request)))
        self._share(request)

    def _hand_over(self, place: RetainedSlot, request: Request) -> None:
        """Give a retained slot to a request, rolled back to what can be reused."""
        assert place.slot is not None and place.context is not None
        # Else what is held was made from another source.
        same = request.context.source is None and place.context.source is None
        shared = self._held(place, request) if same else 0
        self._kept.remove(place)
        whole = self._chunk_size if self._exact or (self._eviction.chunked and not place.base) else 1
        read = self._eviction.lendable(place.slot, shared, whole)
        border = place.border
        if border is not None and read < len(border.tokens) <= shared:
            self._eviction.begin(place.slot)
            self._eviction.restore(place.slot, len(border.tokens), border.tensors)
            read = len(border.tokens)
        else:
            read = self._eviction.resume(place.slot, read, whole)
        request.slot, place.slot = place.slot, None
        request.cached = request.stats.reused = read
        request.base = place.base if read else 0
        if not read:
            self._eviction.begin(request.slot)
            self._restore_prefix(request)
        if same:
            tell(self._drafter, "inherit", request.context, place.context)
        tell(self._drafter, "end", place.context)

    def _restore_prefix(self, request: Request) -> None:
        """Fill the slot from the request's prefix, if it has one and begins with all of it."""
        place = request.options.place
        prefix = place.prefix if place is not None else None
        if prefix is None or (self._exact and len(prefix.tokens) % self._chunk_size):
            return  # the rows of its shorter last chunk were rounded differently
        count = len(prefix.tokens)
        if count < request.prompt_tokens and request.tokens[:count] == prefix.tokens:
            self._eviction.restore(request.seat, count, prefix.tensors)
            request.cached = request.stats.reused = count
            request.base = count if self._eviction.chunked else 0

    def _held(self, place: RetainedSlot, request: Request) -> int:
        """How many first tokens of a request's prompt a retained slot holds that can be reused."""
        return self._usable(request, place.shared(request.tokens), place.whole, place.base)

    def _usable(self, request: Request, count: int, whole: int, base: int = 0) -> int:
        """How many of a prompt's first tokens can be reused from another slot that holds `count` of them.

        With `exact`, decoding passes and chunks of another length do not count: they round differently. With eviction,
        the dropped pairs depend on the eviction boundaries, and a new request has one at the end of each chunk. In both
        cases only whole chunks are reused.

        Args:
            request: with the prompt.
            count: tokens that the slot holds, of which the last one may lack its log probability.
            whole: how many of them were computed in whole chunks of a prompt.
            base: where chunks are counted from.
        """
        eviction = self._eviction
        # The last token of the prompt is always computed: its logits are needed.
        count = min(max(count - eviction.needs_log_probs, 0), request.prompt_tokens - eviction.tail)
        return self._whole(min(count, whole), base) if self._exact or eviction.chunked else count

    def _whole(self, count: int, base: int) -> int:
        """`count`, rounded down to whole chunks behind the first `base` tokens."""
        return base + (count - base) // self._chunk_size * self._chunk_size if count > base else 0

    def _lender(self, request: Request) -> RetainedSlot | None:
        """The shareable place that has most of a request's prompt."""
        if not request.shares or request.context.source is not None:
            return None
        held = {place: self._held(place, request) for place in self._kept if place.shareable and place.lends}
        best = max(held, key=held.__getitem__, default=None)
        return best if best is not None and held[best] >= LEAST else None

    def _taken_over(self, request: Request, lender: RetainedSlot | None) -> RetainedSlot | None:
        """The lender, if the request continues its whole text or no other slot is free; None: another one is free."""
        while True:
            full = not self._cache.free or len(self._seated) + len(self._kept) > self._fitted[0]
            wanted = full and self._kept[:1] == [lender]
            if lender is not None and (wanted or lender.shared(request.tokens) >= lender.prompt):
                return lender
            if not full or not self._kept:
                return None
            self.release(self._kept[0])

    # ------------------------------------------------------------ what others read

    def waits(self, request: Request) -> bool:
        """Whether another request is about to read more of this one's prompt."""
        return any(self._coming(request, other, count) for other, count in self._seated[request])

    def share(self) -> None:
        """Copy to each request what others have read of its prompt, unless they are about to read more of it."""
        for request in self._seated:
            self._share(request)

    def _share(self, request: Request) -> None:
        if request.prefilled or request.over:
            self._seated[request] = []
            return
        best, slot = 0, -1
        for other, count in self._seated[request]:
            if other.slot is not None and other.error is None and not self._coming(request, other, count):
                lent = self._lent(request, other, count, other.cached)
                if lent > best and (lent := self._lendable(other.slot, lent)) > best:
                    best, slot = lent, other.slot
        self._copy(request, slot, best)

    def _lendable(self, slot: int, count: int) -> int:
        """Of a slot's first `count` tokens those that can be copied; whole chunks where the chunks matter."""
        whole = self._exact or self._eviction.chunked
        return self._eviction.lendable(slot, count, self._chunk_size if whole else 1)

    def _akin(self, request: Request, other: Request) -> bool:
        """Whether two requests may share anything; what an encoder has read is shared by ``SourceCache``."""
        return (
            other is not request
            and request.shares
            and other.shares
            and not (request.context.source or other.context.source)
        )

    def _coming(self, request: Request, other: Request, count: int) -> bool:
        """Whether another request is about to read so much that waiting for it is faster."""
        most = self._lent(request, other, count, other.prompt_tokens)
        reading = other in self._seated and not other.prefilled and not other.over
        return reading and request.cached <= other.cached <= most - min(AWAITED, self._chunk_size)

    def _lent(self, request: Request, other: Request, count: int, read: int) -> int:
        """How many of `count` common tokens can be reused when the other request has read `read` tokens."""
        held = min(count, read + self._eviction.needs_log_probs)
        return 0 if other.base else self._usable(request, held, other.prompt_tokens - self._eviction.tail)

    def _copy(self, request: Request, slot: int, count: int) -> None:
        """Copy the first tokens of another slot to a request, if they are enough and there is storage."""
        if count - request.cached < LEAST:
            return
        try:
            self._eviction.fork(request.seat, slot, request.cached, count)
        except MemoryLimitError:
            return  # its own next chunk finds none either, and ends it
        except BaseException:
            request.fail(RemovedError(f"request {request.id} was interrupted in the middle of a copy"))
            raise
        request.stats.reused += count - request.cached
        request.cached = count
        request.boundary = self._eviction.boundary(request.seat, request.prompt_tokens)

    def _read_once(self, request: Request) -> int:
        """How many tokens of a prompt every longer prompt with the same beginning reads and keeps in the same way."""
        eviction = self._eviction
        return max(0, request.prompt_tokens - max(eviction.reread_tokens, eviction.tail if eviction.chunked else 0))

    def keep_border(self, request: Request) -> None:
        """Copy what a retained slot holds at the last boundary that longer prompts have, too.

        What is evicted at the end of this one cannot be brought back.
        """
        place, at = request.options.place, request.cached
        if place is None or place.beginning or self._cache.dropped is None or not self._eviction.chunked:
            return
        if at <= self._read_once(request) < at + self._chunk_size and self._eviction.lendable(request.seat, at) == at:
            place.border = Prefix(request.tokens[:at], "", {}, self._eviction.snapshot(request.seat, at))

    # ------------------------------------------------------------ at the end

    def free(self, request: Request) -> None:
        """Free the slot of a request, or leave it to its conversation if the request did not end with an error."""
        self._seated.pop(request, None)
        if request.error is None:
            self.share()  # no request waits for it any more
        place, slot, request.slot = request.options.place, request.slot, None
        if slot is not None and place is not None and request.error is None:
            # A stop may have cut the round's path, so that the cache holds more than was committed. The last token
            # counts as unread, as without drafts: the next request then reads from the same place.
            place.held = request.tokens[:-1][: request.cached]
            place.prompt = min(request.prompt_tokens, len(place.held))
            place.base = request.base
            place.whole = self._whole(min(request.cached, self._read_once(request)), request.base)
            if place.border is not None and place.held[: len(place.border.tokens)] != place.border.tokens:
                place.border = None
            place.slot, place.context = slot, request.context
            self._kept.append(place)
            return
        if slot is not None:
            self._eviction.end(slot)
            self._cache.release(slot)
        tell(self._drafter, "end", request.context)

    def release(self, place: RetainedSlot) -> None:
        """Free what a conversation keeps; nothing if it keeps nothing."""
        if place.slot is None:
            return
        assert place.context is not None
        self._kept.remove(place)
        self._eviction.end(place.slot)
        self._cache.release(place.slot)
        place.slot = place.border = None
        tell(self._drafter, "end", place.context)

    def check_memory(self, requests: Sequence[Request]) -> None:
        """Refuse the last of these requests if all of them would not fit at full length.

        Slots that conversations keep do not count: they are freed when a request needs a slot.

        Raises:
            MemoryLimitError: they would not fit.
        """
        most, now = self._cache.max_slots, time.monotonic()
        count, longest, when = self._fitted  # no other request but the last is longer
        known = min(len(requests) + len(self._kept), most) <= count and requests[-1].last <= longest
        if known and now - when < RECENTLY:
            return
        columns = max(request.last for request in requests)
        others = sum(all(request.options.place is not place for request in requests) for place in self._kept)
        least, wanted = min(len(requests), most), min(len(requests) + others, most)
        self._cache.needs(least, columns)
        while wanted > least:
            try:
                self._cache.needs(wanted, columns)
                break
            except MemoryLimitError:
                wanted -= 1
        self._fitted = (wanted, columns, now)

"""What the kernels are asked of a request in a round: how large its draft may become, and how it is judged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from sakiyomi.core.tree import Draft
from sakiyomi.drafters.base import Context
from sakiyomi.drafters.confidence import RANKS
from sakiyomi.drafters.native_texts import NativeText, NativeTexts, doubles
from sakiyomi.drafters.native_trees import TreeSize, level_seconds
from sakiyomi.drafters.tree_reader import GrowingDrafter, TreeDrafter
from sakiyomi.drafters.trees import BUILDERS
from sakiyomi.engine.batch import case_of
from sakiyomi.engine.request import Request
from sakiyomi.engine.speculation import DraftBatch, RoundClock
from sakiyomi.model_executor.runner import ModelRunner
from sakiyomi.sampling.rng import Uniforms
from sakiyomi.sampling.verifiers.native import pack_case

AHEAD = 64  # columns that are reserved for rounds to come: to ask takes time
FURTHER_COLUMNS = 32  # that are reserved at least where further rounds follow in the same call
NONE = TreeSize.none()


class AskedRound(NamedTuple):
    """What a round is asked for.

    Attributes:
        requests: of the round.
        depths: of their drafts that grow or are found in the kernels.
        drafts: those that are given, by their requests' places.
        drafted: what these took, where all are given.
        clock: of the round.
        texts: where drafts are found; None: they are not.
        further: how many rounds may follow it in the kernels.
        patience: seconds after which none begins.
    """

    requests: Sequence[Request]
    depths: Sequence[int]
    drafts: Mapping[int, Draft]
    drafted: DraftBatch | None
    clock: RoundClock
    texts: NativeTexts | None = None
    further: int = 0
    patience: float = 0.0


@dataclass(eq=False, slots=True)
class Turn:
    """A request in the kernels.

    Attributes:
        context: of the request.
        number: its own there.
        length: tokens of its text there.
        size: of its last draft.
        tree: of its last tree that has grown there.
        room, seat_room: columns that are reserved in the target's cache, and in the draft model's.
        seat: what the drafter whose trees grow there keeps of it; None: none has grown yet.
        slot: of the seat in the draft model's cache, if it has one.
        held: tokens that the draft model has read; where it is none, or reads no text, those that it has heard of.
        wishes: a tree would have been worth its time in the last round.
        waits: nobody has asked for a tree since the draft model was that far behind.
        stream: what candidates are drawn by; None: they are not drawn.
        text: in which its drafts are found; None: the kernels do not have it.
    """

    context: Context
    number: int
    length: int
    size: TreeSize = NONE
    tree: TreeSize = NONE
    room: int = 0
    seat_room: int = 0
    seat: Any = None
    slot: int | None = None
    held: int = 0
    wishes: bool = True
    waits: bool = False
    stream: Uniforms | None = None
    text: NativeText | None = None

    def reserve(
        self, request: Request, target: ModelRunner, draft: ModelRunner, ahead: int, moved: bool, more: int
    ) -> None:
        """Make room for a draft, which writes so many columns `ahead` (see ``GrowingDrafter``), and some more, where
        there is none yet or the caches have `moved`; for rounds of the same call so many `more`.

        Raises:
            MemoryLimitError: there is none.
        """
        more = max(0, min(more, request.last - self.length - self.size.nodes))
        if moved or self.length + self.size.nodes + more > self.room:
            assert request.slot is not None
            self.room = self.length + self.size.nodes + AHEAD
            target.cache.reserve(request.slot, self.room)
        if self.slot is not None and (moved or self.length + self.size.rows + ahead + more > self.seat_room):
            self.seat_room = self.length + self.size.rows + ahead + AHEAD
            draft.cache.reserve(self.slot, self.seat_room)

    def until(self, request: Request, draft: ModelRunner, ahead: int) -> int:
        """How many tokens it may have before another draft of this size; see ``reserve``."""
        most = min(request.last - 1, request.boundary, self.room) - self.size.nodes
        if self.slot is None:
            return most
        most = min(most, self.seat_room - self.size.rows - ahead)
        return min(most, draft.max_context - max(self.size.depth, ahead)) if self.size.depth else most


class PassTables:
    """What passes cost, where drafts are weighed: tables that stay as long as nothing else is known."""

    def __init__(self) -> None:
        self._known: tuple[Any, ...] = ()
        self._tables: tuple[Any, Any] = None, None

    def of(self, sizes: Sequence[TreeSize], drafter: GrowingDrafter | None) -> tuple[Any, Any]:
        """Seconds of passes of the draft model by rows, and of the target by the nodes of all drafts."""
        worths = [size.worth for size in sizes if size.worth is not None and size.depth]
        if not worths or drafter is None:
            return None, None
        costs, nodes, width = worths[0].costs, sum([s.nodes for s in sizes]), max([s.width for s in sizes])
        levels = drafter if isinstance(drafter, TreeDrafter) else None  # else they all come in one pass
        about = (levels.model.clock.version, levels.reader.besides) if levels is not None else ()
        known = costs.score, costs.batch, nodes, width, *about
        if known != self._known:
            level = level_seconds(levels.model, width, levels.reader.besides) if levels is not None else None
            scored = [costs.score(costs.batch + count) for count in range(nodes + 1)]
            self._known, self._tables = known, (level, doubles(scored))
        return self._tables


def pack_draft(request: Request, draft: Draft, width: int, numbers: list[int]) -> bytes:
    """A draft and how it is judged, see ``pack_case``."""
    return pack_case(case_of(request, draft), width, numbers)


def watched(request: Request) -> bool:
    """Whether a request wants more of a round than the kernels leave."""
    options, logprobs = request.options, request.context.params.logprobs
    # What they leave of a greedy token is its chance, whose logarithm is its log probability.
    listed = logprobs is not None and (logprobs > 0 or not request.sampler.greedy)
    return options.rounds_trace or options.keep_logits or listed


def judged(request: Request, drafter: GrowingDrafter | None, target: ModelRunner) -> bytes:
    """How a request's drafts are judged, as the kernels take it; nothing: by Python, or it is ``watched``, or its trees
    are on a device whose memory they do not reach.
    """
    params = request.context.params
    if watched(request):
        return b""
    if drafter is not None:
        keeps = target.backend.keeps and (drafter.model is None or drafter.model.backend.keeps)
        keep = params.builder == "chain" or keeps
        if not keep or BUILDERS[params.builder](params, lambda: RANKS).shape(1, 1) is None:
            return b""
    return pack_draft(request, Draft.empty(), target.vocab_size, [])

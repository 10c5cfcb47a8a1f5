"""What the kernels are asked of a request in a round: how large its draft may become, and how it is judged."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sakiyomi.core.tree import Draft
from sakiyomi.drafters.confidence import RANKS
from sakiyomi.drafters.model import ModelDrafter, Seat
from sakiyomi.drafters.native_texts import NativeText
from sakiyomi.drafters.native_trees import TreeSize, level_seconds
from sakiyomi.drafters.tree_reader import begin_tree, is_drawn
from sakiyomi.drafters.trees import BUILDERS
from sakiyomi.engine.request import Request
from sakiyomi.model_executor.runner import ModelRunner
from sakiyomi.sampling.rng import Uniforms
from sakiyomi.sampling.verifiers.native import Case, pack_case

AHEAD = 64  # columns that are reserved for rounds to come: to ask takes time


_UNKNOWN = TreeSize(-1, 0, 0, 0, None, None, b"")


@dataclass(eq=False, slots=True)
class Turn:
    """A request in the kernels.

    Attributes:
        number: its own there; -1: it is not there.
        length: tokens of its text there.
        size: of its last draft.
        room, seat_room: columns that are reserved in the target's cache, and in the draft model's.
        seat: in the draft model's cache; None: it drafts nothing yet.
        stream: what candidates are drawn by; None: they are not drawn.
        text: in which its drafts are found; None: the kernels do not have it.
    """

    number: int = -1
    length: int = -1
    size: TreeSize = _UNKNOWN
    room: int = 0
    seat_room: int = 0
    seat: Seat | None = None
    stream: Uniforms | None = None
    text: NativeText | None = None

    def reserve(self, request: Request, target: ModelRunner, draft: ModelRunner, moved: bool) -> None:
        """Make room for a draft and some more, where there is none yet or the caches have `moved`.

        Raises:
            MemoryLimitError: there is none.
        """
        if moved or self.length + self.size.nodes > self.room:
            assert request.slot is not None
            self.room = self.length + self.size.nodes + AHEAD
            target.cache.reserve(request.slot, self.room)
        if self.seat is not None and (moved or self.length + self.size.rows > self.seat_room):
            self.seat_room = self.length + self.size.rows + AHEAD
            draft.cache.reserve(self.seat.slot, self.seat_room)


def size_of(request: Request, turn: Turn, gamma: int, drafter: ModelDrafter | None) -> TreeSize:
    """How large a request's draft may become, of which so many levels are wanted; its turn has it too."""
    context, depth = request.context, 0
    if gamma and turn.seat is not None and drafter is not None:
        depth = max(0, drafter.reader.depth(context, gamma))
    if depth == turn.size.depth and (not depth or context.params.builder == "chain"):
        return turn.size  # nothing of a chain changes but its depth
    if not depth or drafter is None:
        turn.size = TreeSize.none(turn.number)
        return turn.size
    confidence, worth = drafter.reader.confidence[context.rule], None if is_drawn(context) else context.worth
    tree, builder = begin_tree(context, depth, context.nodes, lambda: confidence.ranks)
    size = TreeSize.of(turn.number, tree, builder, worth, confidence)
    assert size is not None, "see `judged`"
    turn.size = size
    return size


class PassTables:
    """What passes cost, where drafts are weighed: tables that stay as long as nothing else is known."""

    def __init__(self) -> None:
        self._known: tuple[Any, ...] = ()
        self._tables: tuple[Any, Any] = None, None

    def of(self, sizes: Sequence[TreeSize], drafter: ModelDrafter | None) -> tuple[Any, Any]:
        """Seconds of passes of the draft model by rows, and of the target by the nodes of all drafts."""
        worths = [size.worth for size in sizes if size.worth is not None]
        if not worths or drafter is None:
            return None, None
        costs, nodes, width = worths[0].costs, sum([s.nodes for s in sizes]), max([s.width for s in sizes])
        known = costs.score, costs.batch, nodes, width, drafter.model.clock.version, drafter.reader.besides
        if known != self._known:
            scored = [costs.score(costs.batch + count) for count in range(nodes + 1)]
            level = level_seconds(drafter.model, width, drafter.reader.besides)
            self._known, self._tables = known, (level, (ctypes.c_double * len(scored))(*scored))
        return self._tables


def pack_draft(request: Request, draft: Draft, width: int, numbers: list[int]) -> bytes:
    """A draft and how it is judged, see ``pack_case``."""
    context = request.context
    case = Case(draft, 0, len(context.tokens), request.verifier, request.sampler, context.noise)
    return pack_case(case, width, numbers)


def watched(request: Request) -> bool:
    """Whether a request wants more of a round than the kernels leave, or reads the input of an encoder."""
    options, params = request.options, request.context.params
    seen = options.rounds_trace or options.keep_logits or params.logprobs is not None
    return seen or request.context.source is not None


def judged(request: Request, drafter: ModelDrafter | None, target: ModelRunner) -> bytes:
    """How a request's drafts are judged, as the kernels take it; nothing: by Python, or it is ``watched``, or its trees
    are on a device whose memory they do not reach.
    """
    params = request.context.params
    if watched(request):
        return b""
    if drafter is not None:
        keep = params.builder == "chain" or (target.backend.keeps and drafter.model.backend.keeps)
        if not keep or BUILDERS[params.builder](params, lambda: RANKS).shape(1, 1) is None:
            return b""
    return pack_draft(request, Draft.empty(), target.vocab_size, [])

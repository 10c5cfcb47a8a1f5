"""The requests of one target pass with their rows, and what happens where there is no memory for the pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sakiyomi.cache.slots import SlotCache
from sakiyomi.core.errors import DraftError, LoadError, MemoryLimitError
from sakiyomi.core.memory import no_memory
from sakiyomi.core.outputs import Step
from sakiyomi.core.tree import Draft
from sakiyomi.engine.request import Request
from sakiyomi.kernels.batch import SequenceRows
from sakiyomi.model_executor.features import PassOutput
from sakiyomi.model_executor.runner import ModelRunner
from sakiyomi.sampling.verifiers.native import Case


class Part(NamedTuple):
    """One request's part of a target pass.

    Attributes:
        request: with a slot.
        draft: that is scored; the empty one where a prompt is read.
        rows: of the pass.
    """

    request: Request
    draft: Draft
    rows: SequenceRows


def drafted_part(request: Request, draft: Draft) -> Part:
    """A decoding round: the request's last token and the nodes of its tree."""
    slot, tree = request.seat, draft.tree
    parents = None if tree.is_chain else (-1, *(parent + 1 for parent in tree.parents))
    return Part(request, draft, SequenceRows(slot, request.cached, (request.tokens[-1], *tree.tokens), parents))


def cases(parts: Sequence[Part]) -> list[Case]:
    """What is to be verified, by rows of the pass: one behind the last token, one behind each node."""
    found, row = [], 0
    for request, draft, _ in parts:
        found.append(case_of(request, draft, row))
        row += len(draft.tree.tokens) + 1
    return found


def case_of(request: Request, draft: Draft, row: int = 0) -> Case:
    """A request's draft as it is verified, from this row of logits on."""
    context = request.context
    tokens = context.tokens
    return Case(draft, row, len(tokens), request.verifier, request.sampler, context.noise, tokens)


def make_room(parts: Sequence[Part], cache: SlotCache, steps: list[Step]) -> list[Part]:
    """Reserve cache columns for a round; a request without room, or whose drafter failed with ``strict``, ends.

    Args:
        parts: of the round.
        cache: of the target.
        steps: get the last steps of requests that end.

    Returns:
        The parts of the requests that do not end.
    """
    for request, draft, _ in parts:
        try:
            if request.fault is not None:
                raise request.fault
            cache.reserve(request.seat, request.cached + len(draft.tree.tokens) + 1)
        except (DraftError, MemoryLimitError) as error:
            steps.append(request.fail(error))
    return [part for part in parts if not part.request.over]


def score_alone(
    target: ModelRunner, parts: Sequence[Part], error: Exception, steps: list[Step], *, last: bool = False
) -> tuple[list[Part], PassOutput]:
    """After a pass failed for want of memory, run one for each request alone.

    A request whose own pass fails too ends. All requests end where weights cannot be read.

    Args:
        target: scores the rows.
        parts: of the pass.
        error: what the pass raised.
        steps: get the last steps of requests that end.
        last: as of ``ModelRunner.score``.

    Returns:
        The parts of the requests that do not end, and the output of their rows.

    Raises:
        Exception: the error, if memory is not the reason.
    """
    reason = _reason(error)
    if isinstance(reason, LoadError) or len(parts) == 1:
        steps += [part.request.fail(reason) for part in parts]
        return [], PassOutput.empty(target.vocab_size)
    found: list[PassOutput] = []
    for part in parts:
        try:
            found.append(target.score([part.rows], last=last))
        except Exception as alone:
            steps.append(part.request.fail(_reason(alone)))
    going = [part for part in parts if not part.request.over]
    return going, PassOutput.joined(found) if found else PassOutput.empty(target.vocab_size)


def _reason(error: Exception) -> Exception:
    """Why a pass failed; raises the error where that is neither memory nor weights that cannot be read."""
    reason = error if isinstance(error, LoadError) else no_memory(error)
    if reason is None:
        raise error
    return reason

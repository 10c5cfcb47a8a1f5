"""The requests of one target pass with their rows, and what becomes of them where there is no memory for the pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

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


@dataclass(eq=False)
class Batch:
    """Requests that share a target pass; the lists belong together.

    Attributes:
        requests: with a slot each.
        drafts: one for each; empty ones where prompts are read.
        rows: of the pass, one entry for each.
    """

    requests: list[Request] = field(default_factory=list)
    drafts: list[Draft] = field(default_factory=list)
    rows: list[SequenceRows] = field(default_factory=list)

    @classmethod
    def of_drafts(cls, requests: Sequence[Request], drafts: Sequence[Draft]) -> Batch:
        """A decoding round: each request's last token and the nodes of its tree."""
        batch = cls()
        for request, draft in zip(requests, drafts, strict=True):
            slot, tree = request.slot, draft.tree
            assert slot is not None
            parents = None if tree.is_chain else (-1, *(parent + 1 for parent in tree.parents))
            rows = SequenceRows(slot, request.cached, (request.tokens[-1], *tree.tokens), parents)
            batch.add(request, draft, rows)
        return batch

    def add(self, request: Request, draft: Draft, rows: SequenceRows) -> None:
        """Another request."""
        self.requests.append(request)
        self.drafts.append(draft)
        self.rows.append(rows)

    def pairs(self) -> Iterator[tuple[Request, Draft]]:
        """Each request with its draft."""
        return zip(self.requests, self.drafts, strict=True)

    def cases(self) -> list[Case]:
        """What is to be verified, by rows of the pass: one behind the last token, one behind each node."""
        cases, row = [], 0
        for request, draft in self.pairs():
            context = request.context
            cases.append(Case(draft, row, len(context.tokens), request.verifier, request.sampler, context.noise))
            row += len(draft.tree.tokens) + 1
        return cases

    def drop_ended(self) -> None:
        """Leave out requests that are over."""
        going = [i for i, request in enumerate(self.requests) if not request.over]
        self.requests = [self.requests[i] for i in going]
        self.drafts = [self.drafts[i] for i in going]
        self.rows = [self.rows[i] for i in going]


def make_room(batch: Batch, cache: SlotCache, check: Callable[[Request], None]) -> list[Step]:
    """Room in the cache for a round; a request for which there is none, or no right draft, leaves the batch.

    Args:
        batch: the round.
        cache: of the target.
        check: raises what was wrong with a request's draft, where that ends it.

    Returns:
        The last steps of requests that end.
    """
    steps = []
    for request, draft in batch.pairs():
        assert request.slot is not None
        try:
            check(request)
            cache.reserve(request.slot, request.cached + len(draft.tree.tokens) + 1)
        except (DraftError, MemoryLimitError) as error:
            steps.append(request.fail(error))
    if steps:
        batch.drop_ended()
    return steps


def score_alone(
    target: ModelRunner, batch: Batch, error: Exception, steps: list[Step], *, last: bool = False
) -> PassOutput:
    """After a pass failed for want of memory, run one for each request alone; one that fails alone, too, ends.

    All requests end where weights cannot be read.

    Args:
        target: scores the rows.
        batch: requests that end leave it.
        error: what the pass raised.
        steps: get the last steps of requests that end.
        last: as of ``ModelRunner.score``.

    Raises:
        Exception: the error, if it is another one.
    """
    found: list[PassOutput] = []
    reason = error if isinstance(error, LoadError) else no_memory(error)
    if reason is None:
        raise error
    if len(batch.requests) == 1 or isinstance(reason, LoadError):
        steps += [request.fail(reason) for request in batch.requests]
    else:
        for request, rows in zip(batch.requests, batch.rows, strict=True):
            try:
                found.append(target.score([rows], last=last))
            except Exception as failure:
                alone = failure if isinstance(failure, LoadError) else no_memory(failure)
                if alone is None:
                    raise
                steps.append(request.fail(alone))
    batch.drop_ended()
    return PassOutput.joined(found) if found else PassOutput(torch.empty(0, target.vocab_size), {})

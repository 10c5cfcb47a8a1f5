"""``audit`` on several workers; a piece is some prompts, or a rule whose distribution is tested."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from sakiyomi.core.chats import Chat
from sakiyomi.evaluation.audit.audit import Auditor, Part, put_together
from sakiyomi.evaluation.audit.config import AuditConfig
from sakiyomi.evaluation.audit.report import AuditReport
from sakiyomi.scale.cluster import WorkersOption, import_ray
from sakiyomi.scale.spread import OneByOne, Workers

PIECE = 4  # prompts of a piece, and of the batches that are compared


def audit(
    option: WorkersOption,
    target: str,
    draft: Any,
    *,
    prompts: Sequence[str | Chat],
    drafts: Sequence[Any],
    config: AuditConfig,
    options: Mapping[str, Any],
    note: Callable[[str], None],
) -> AuditReport:
    """See ``sakiyomi.evaluation.audit.audit``; every worker has an engine, and a reference beside it.

    Raises:
        LoadError: Ray is not installed, or a worker cannot load the pair.
    """
    import_ray()
    note("waiting for workers")
    make = functools.partial(_worker, target, draft, tuple(drafts), config, dict(options))
    with Workers(make, option, str(options.get("device", "auto"))) as workers:

        def do(parts: Sequence[Part]) -> Iterator[Any]:
            done: dict[int, Any] = {}
            for number, result in workers.do(enumerate(parts)):
                done[number] = result
                note(f"{parts[number][0]}: {len(done)} of {len(parts)} pieces")
            return (done[number] for number in range(len(parts)))

        pieces = [prompts[first : first + PIECE] for first in range(0, len(prompts), PIECE)]
        return put_together(do, pieces, config)


def _worker(*pair: Any) -> OneByOne:
    return OneByOne(Auditor(*pair).do)

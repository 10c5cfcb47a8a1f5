"""Which rounds of an engine the compiled kernels run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from sakiyomi.core.outputs import Step
from sakiyomi.engine.native_rounds import NativeRounds
from sakiyomi.engine.request import Request


def rounds_of(steps: Sequence[Step] | None, requests: Sequence[Request]) -> int:
    """How many rounds a call has run that gave these steps; one that the kernels did not take counts, too."""
    return max(1, len(steps or ()) // len(requests))


def watch_rounds(patch: pytest.MonkeyPatch, *, kernels: bool = True) -> list[bool]:
    """Of each round from here on, whether the kernels ran all of it; without `kernels` they run none."""
    seen, run = list[bool](), NativeRounds.run

    def watched(*round_: Any) -> Any:
        steps = run(*round_) if kernels else None
        seen.extend([steps is not None] * rounds_of(steps, round_[1]))
        return steps

    patch.setattr(NativeRounds, "run", watched)
    return seen

"""Which rounds of an engine the compiled kernels run."""

from __future__ import annotations

from typing import Any

import pytest

from sakiyomi.engine.native_rounds import NativeRounds


def watch_rounds(patch: pytest.MonkeyPatch, *, kernels: bool = True) -> list[bool]:
    """Of each round from here on, whether the kernels ran all of it; without `kernels` they run none."""
    seen, run = list[bool](), NativeRounds.run

    def watched(*round_: Any) -> Any:
        steps = run(*round_) if kernels else None
        seen.append(steps is not None)
        return steps

    patch.setattr(NativeRounds, "run", watched)
    return seen

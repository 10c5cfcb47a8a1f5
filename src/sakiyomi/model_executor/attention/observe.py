"""An operator by which a pass, eager or recorded, hands rows of numbers to the cache's policy."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from sakiyomi.cache.observations import RowObservations
from sakiyomi.kernels.batch import BatchPlan


class _Pass(threading.local):
    """The running pass of this thread."""

    notes: RowObservations | None = None
    plan: BatchPlan | None = None


_pass = _Pass()


def listen(notes: RowObservations | None, plan: BatchPlan | None) -> None:
    """Set where this thread's next pass writes its rows; None: nowhere."""
    _pass.notes, _pass.plan = notes, plan


def _observe(out: Tensor, note: Tensor, layer: int) -> Tensor:
    if _pass.notes is not None and _pass.plan is not None:
        _pass.notes.write(layer, _pass.plan, note)
    return out.clone()  # the result is used, so that no recording drops the operator as dead code


_library = torch.library.Library("sakiyomi", "FRAGMENT")
_library.define("observe(Tensor out, Tensor note, int layer) -> Tensor")
_library.impl("observe", _observe, "CompositeExplicitAutograd")

"""An operator through which a pass, recorded or not, leaves rows of numbers behind for the cache's policy."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from sakiyomi.cache.observations import RowObservations
from sakiyomi.kernels.batch import BatchPlan


class _Pass(threading.local):
    """By thread: models run beside each other."""

    notes: RowObservations | None = None
    plan: BatchPlan | None = None


_pass = _Pass()


def listen(notes: RowObservations | None, plan: BatchPlan | None) -> None:
    """Where this thread's next pass leaves its rows; None: nowhere."""
    _pass.notes, _pass.plan = notes, plan


def _observe(out: Tensor, note: Tensor, layer: int) -> Tensor:
    if _pass.notes is not None and _pass.plan is not None:
        _pass.notes.write(layer, _pass.plan, note)
    return out.clone()  # what comes back is used, so that no recording leaves the operator out


_library = torch.library.Library("sakiyomi", "FRAGMENT")
_library.define("observe(Tensor out, Tensor note, int layer) -> Tensor")
_library.impl("observe", _observe, "CompositeExplicitAutograd")

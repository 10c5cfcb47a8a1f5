"""The kernels for the work between matrix products on a device: compiled ones on the CPU, Triton on a GPU."""

from __future__ import annotations

import functools
import importlib
import logging
import os
from typing import Any

import torch

logger = logging.getLogger("sakiyomi")


def operators(device: torch.device) -> Any:
    """The functions ``norm``, ``gated`` and ``rotate`` for tensors of a device; None: there are none."""
    return torch.ops.sakiyomi_cpu if device.type == "cpu" else gpu_kernels(device)


@functools.cache
def gpu_kernels(device: torch.device) -> Any:
    """The module with the Triton kernels, tested on this GPU; None, after one log line, if they do not run."""
    # The default; Triton 3.9 and later would log a line about it in every process.
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    try:
        kernels = importlib.import_module("sakiyomi.kernels.triton_kernels")
        x = torch.ones(2, 8, device=device)
        if torch.cuda.get_device_capability(device) < (8, 0) or not bool((kernels.gated(x, x, 0) > 0).all()):
            raise RuntimeError("the device is older than compute capability 8.0, or computes something else")
    except Exception as error:  # no Triton, no C compiler for its launcher, an old driver
        logger.warning(
            "GPU kernels are not available, plain torch runs instead, slower: %s", " ".join(str(error).split())[:300]
        )
        return None
    return kernels

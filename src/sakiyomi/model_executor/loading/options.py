"""The options ``dtype`` and ``device`` as torch's own objects."""

from __future__ import annotations

import torch

from sakiyomi.core.dtypes import check_dtype
from sakiyomi.core.errors import InputError


def parse_dtype(value: str | torch.dtype) -> torch.dtype | None:
    """The dtype asked for; None for "auto".

    Raises:
        InputError: there is no such dtype.
    """
    name = check_dtype(value)
    if name == "auto":
        return None
    found: torch.dtype = getattr(torch, name)
    return found


def parse_device(value: str | torch.device) -> torch.device:
    """The device that a name means.

    Raises:
        InputError: there is no such device, here or in this version.
    """
    if str(value) == "auto":
        # mps exists but is untested: the CPU is the safe choice there.
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(value)
    except (RuntimeError, TypeError) as error:
        raise InputError(f"device is {value!r}; expected 'auto', 'cpu', 'cuda' or 'cuda:N'") from error
    if device.type not in {"cpu", "cuda"}:
        raise InputError(f"device is {value!r}, which this version does not support; expected 'auto', 'cpu' or 'cuda'")
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise InputError(
                f"device is {value!r} and torch sees {count} CUDA devices; pass device='cpu', or install a torch build "
                "for your GPU"
            )
        return torch.device("cuda", device.index or 0)
    return torch.device("cpu")

"""Names of torch's dtypes. Imports no torch."""

from __future__ import annotations

__all__ = ["dtype_name"]


def dtype_name(dtype: object) -> str:
    """The name of a ``torch.dtype`` as configurations and reports spell it: "bfloat16"."""
    return str(dtype).removeprefix("torch.")

"""Settings that commands share. Imports no torch: the command line reads them."""

from __future__ import annotations

from dataclasses import dataclass

from sakiyomi.core.embedded import DEFAULT


@dataclass(frozen=True, kw_only=True)
class TargetSettings:
    """Which model, and how it runs.

    Attributes:
        target: embedded name, folder in Hugging Face format, or hub id.
        dtype: auto (as stored), float32, bfloat16 or float16.
        device: auto (a GPU if torch sees one), cpu, cuda or cuda:N.
    """

    target: str = DEFAULT
    dtype: str = "auto"
    device: str = "auto"

"""Log lines of other libraries that a user cannot act on, written to stderr when these libraries are imported.

They are filtered out. Every other line of these libraries stays.
"""

from __future__ import annotations

import logging
import re

# torchao comes with transformers: kernels of another Python or GPU in its wheel do not load, and enums are registered
# in a way that torch has deprecated. torch counts operations of Triton kernels, where there is Triton.
_KNOWN = {
    "torchao": r"Failed to load .*\.so: ",
    "torch.utils._pytree": r"<enum '\w+'> is an Enum subclass and is now natively supported",
    "torch.utils.flop_counter": r"triton not found; ",
}


def _stays(record: logging.LogRecord) -> bool:
    return re.match(_KNOWN[record.name], record.getMessage()) is None


def leave_out_foreign_notes() -> None:
    """Leave these lines out from now on. Call it before the libraries are imported; more calls change nothing."""
    for name in _KNOWN:
        logging.getLogger(name).addFilter(_stays)

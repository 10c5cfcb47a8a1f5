"""Lines that other libraries log when they are imported, of what their own makers have to mend: nobody here can act on
them, and they would stand on stderr before the first text. Every other line of these libraries stays.
"""

from __future__ import annotations

import logging
import re

# torchao comes with transformers: kernels of another Python or GPU in its wheel do not load, and enums are registered
# in a way that torch has given up. torch counts operations of Triton kernels, where there is Triton.
_KNOWN = {
    "torchao": r"Failed to load .*\.so: ",
    "torch.utils._pytree": r"<enum '\w+'> is an Enum subclass and is now natively supported",
    "torch.utils.flop_counter": r"triton not found; ",
}


class _Known(logging.Filter):
    def __init__(self, pattern: str) -> None:
        super().__init__()
        self._pattern = re.compile(pattern)

    def filter(self, record: logging.LogRecord) -> bool:
        return self._pattern.match(record.getMessage()) is None


def leave_out_foreign_notes() -> None:
    """Have these lines left out from now on; called before the libraries are imported, more than once if need be."""
    for name, pattern in _KNOWN.items():
        logger = logging.getLogger(name)
        if not any(isinstance(each, _Known) for each in logger.filters):
            logger.addFilter(_Known(pattern))

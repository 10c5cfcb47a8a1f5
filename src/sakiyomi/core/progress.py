"""A spinner on stderr that says what is being done, shown only on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["progress"]

_LONG = 500_000_000
_shown: list[Any] = []  # the spinner on the screen: a second one would write over it


@contextmanager
def progress(text: str, *, size: int = _LONG) -> Iterator[Any]:
    """Show a spinner on stderr, if that is a terminal. Inside another spinner, that one shows this text meanwhile.

    Args:
        text: what it says.
        size: bytes to work on; less than 0.5 GB takes too short a time for a spinner.

    Returns:
        An object with ``update(text)``, ``stop()`` and ``start()``.
    """
    # The stream is asked and not rich, which takes a pipe for a terminal under FORCE_COLOR.
    if not sys.stderr.isatty() or size < _LONG:
        yield _Silent()
    elif _shown:
        before = _shown[-1].status
        _shown[-1].update(text)
        try:
            yield _shown[-1]
        finally:
            _shown[-1].update(before)
    else:
        from rich.console import Console

        with Console(file=sys.stderr, highlight=False, markup=False).status(text) as status:
            _shown.append(status)
            try:
                yield status
            finally:
                _shown.remove(status)


class _Silent:
    """Shows nothing."""

    def update(self, text: str) -> None:
        """As rich's."""

    def stop(self) -> None:
        """As rich's."""

    def start(self) -> None:
        """As rich's."""

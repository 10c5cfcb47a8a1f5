"""What is going on, for somebody who watches: a spinner on stderr, and only where it is a terminal."""

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
    """A spinner on stderr, if it is a terminal; within another one, that one says this meanwhile.

    Args:
        text: what it says.
        size: bytes of what is worked on; less than 0.5 GB is done before anybody has read it.

    Returns:
        What comes has ``update(text)``, and ``stop()`` and ``start()``.
    """
    # Asked of the stream and not of rich, for whom FORCE_COLOR makes a terminal of a pipe.
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
    """Says nothing: nobody watches."""

    def update(self, text: str) -> None:
        """As rich's."""

    def stop(self) -> None:
        """As rich's."""

    def start(self) -> None:
        """As rich's."""

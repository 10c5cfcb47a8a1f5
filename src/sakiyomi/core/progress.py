"""Progress on stderr: a spinner on a terminal, elsewhere a line every 20 seconds."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_LONG = 500_000_000
_EVERY = 20.0  # seconds between lines where there is no terminal
_shown: list[Any] = []  # the spinner on the screen: a second one would write over it


@contextmanager
def progress(text: str, *, size: int = _LONG) -> Iterator[Any]:
    """Show a spinner on stderr or, where that is no terminal, print a line every 20 seconds.

    A call inside another one changes the text of the outer one meanwhile.

    Args:
        text: what it says.
        size: bytes to work on; less than 0.5 GB takes too short a time for a spinner.

    Returns:
        An object with ``update(text)``, ``stop()`` and ``start()``.
    """
    # The stream is asked and not rich, which takes a pipe for a terminal under FORCE_COLOR.
    if size < _LONG:
        yield _Lines(text)  # not entered: silent
    elif _shown:
        before = _shown[-1].status
        _shown[-1].update(text)
        try:
            yield _shown[-1]
        finally:
            _shown[-1].update(before)
    else:
        with _spinner(text) if sys.stderr.isatty() else _Lines(text) as status:
            _shown.append(status)
            try:
                yield status
            finally:
                _shown.remove(status)


def _spinner(text: str) -> Any:
    from rich.console import Console

    return Console(file=sys.stderr, highlight=False, markup=False).status(text)


class _Lines:
    """Prints a line every 20 seconds while it is entered; has the methods of rich's spinner."""

    def __init__(self, text: str) -> None:
        self.status, self._over, self._silent = text, threading.Event(), False

    def __enter__(self) -> _Lines:
        threading.Thread(target=self._run, name="progress", daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()

    def update(self, text: str) -> None:
        """As rich's."""
        self.status = text

    def stop(self) -> None:
        """As rich's: print nothing until it starts again."""
        self._silent = True

    def start(self) -> None:
        """As rich's."""
        self._silent = False

    def _run(self) -> None:
        while not self._over.wait(_EVERY):
            if not self._silent:
                print(f"{self.status} ...", file=sys.stderr, flush=True)  # noqa: T201

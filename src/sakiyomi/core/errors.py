"""Every error that a user can cause.

The tree::

    SakiyomiError                 exit code 1
    |-- InputError                exit code 2: a value, option or prompt that makes no sense
    |-- LoadError                 a folder, a file or a hub id that cannot be read
    |-- UnsupportedError          a model, or a combination of options, that cannot work here
    |-- MemoryLimitError          refused before anything was allocated
    |-- DraftError                a drafter that raised or proposed an invalid draft, with strict=True
    |-- DivergedError             a text that differs from the beginning that was given
    |-- RemovedError              a request that was ended before its text was complete
    `-- WorkerError               another process of the same job has ended

Each takes one message that says what was got, what was expected and what to do. Programming mistakes of our own stay
``AssertionError``; nothing here wraps them.
"""

from __future__ import annotations

from typing import ClassVar


class SakiyomiError(Exception):
    """Base of the tree: catch this one to catch everything that a user can cause.

    Attributes:
        exit_code: what the command line exits with when this error ends it.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str) -> None:
        super().__init__(message)

    @property
    def message(self) -> str:
        """The text that was given: what was got, what was expected, what to do."""
        return str(self.args[0])


class InputError(SakiyomiError):
    """A value, an option or a prompt that makes no sense: misuse, exit code 2."""

    exit_code: ClassVar[int] = 2


class LoadError(SakiyomiError):
    """A folder, a file or a hub id from which a model or a tokenizer cannot be read."""


class UnsupportedError(SakiyomiError):
    """A model, or a combination of options, that cannot work in this version or on this machine."""


class MemoryLimitError(SakiyomiError):
    """More memory was asked for than there is; raised before the allocation."""


class DraftError(SakiyomiError):
    """A drafter raised or proposed an invalid draft. It ends a request only with ``strict=True``."""


class DivergedError(SakiyomiError):
    """A text differs from the beginning that was given for it: another model or seed wrote that beginning."""


class RemovedError(SakiyomiError):
    """A request was removed, or interrupted, before its text was complete."""


class WorkerError(SakiyomiError):
    """Another process of the same job has ended or does not answer."""

"""What somebody types into a chat, or a program writes to it, message by message."""

from __future__ import annotations

import contextlib
import sys

from sakiyomi.core.errors import LoadError

__all__ = ["Lines"]

_QUOTES = '"""'


class Lines:
    """Messages from stdin: with line editing and prompts on a terminal, else one a line.

    A backslash at the end of a line continues it on the next one; lines between triple quotes are one message.

    Attributes:
        interactive: somebody types: stdin is a terminal.
    """

    def __init__(self) -> None:
        self.interactive = sys.stdin.isatty()
        self._edits = self.interactive and sys.stdout.isatty()
        if self._edits:
            with contextlib.suppress(ImportError):  # not on every system
                import readline  # noqa: F401  input() then edits lines and knows the earlier ones

    def read(self) -> tuple[bool, str]:
        """The next message, and whether it is a command (its line begins with a slash).

        Raises:
            EOFError: there is no more.
            LoadError: a line is not UTF-8 text; the next call reads the line after it.
        """
        line = self._line("> ")
        if line.lstrip().startswith(_QUOTES):
            return False, self._quoted(line.lstrip().removeprefix(_QUOTES))
        command = line.startswith("/")
        while line.endswith("\\"):
            line = line[:-1] + "\n" + self._line(". ", "")
        return command, line

    def _quoted(self, line: str) -> str:
        lines = [line]
        while not lines[-1].rstrip().endswith(_QUOTES):
            lines.append(self._line(". ", _QUOTES))
        lines[-1] = lines[-1].rstrip().removesuffix(_QUOTES)
        return "\n".join(lines).strip("\n")

    def _line(self, prompt: str, at_end: str | None = None) -> str:
        """One line without its end; ``at_end`` in its place where there is no more."""
        try:
            line = input(prompt) if self._edits else self._plain_line(prompt)
            line.encode()
        except EOFError:
            if at_end is None:
                raise
            return at_end
        except UnicodeError:
            raise LoadError("a line on stdin is not UTF-8 text; it was left out") from None
        return line

    def _plain_line(self, prompt: str) -> str:
        if self.interactive:
            sys.stderr.write(prompt)
            sys.stderr.flush()
        line = sys.stdin.buffer.readline()
        if not line:
            raise EOFError
        return line.decode("utf-8").rstrip("\r\n")

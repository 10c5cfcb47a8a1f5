"""Output of commands: text and tables on stdout, progress on stderr if that is a terminal."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import IO, TYPE_CHECKING, Any

from sakiyomi.core.foreign_notes import leave_out_foreign_notes
from sakiyomi.core.progress import progress

if TYPE_CHECKING:
    from rich.console import Console

    from sakiyomi.core.outputs import Step

__all__ = [
    "COLOURS",
    "cell",
    "emit_json",
    "is_coloured",
    "is_number",
    "legend",
    "note",
    "printed",
    "progress",
    "quiet",
    "say",
    "shortened",
    "stderr",
    "stdout",
    "table",
    "write",
]

COLOURS = {"accepted": "\x1b[32m", "recovered": "\x1b[31m", "bonus": "\x1b[36m", "plain": ""}
"""Colour of each status: green, red, cyan, the terminal's own."""
_END = "\x1b[0m"
_UNSEEN = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"}

MEANINGS = {
    "accepted": "proposed by the draft and kept",
    "recovered": "the target's own, after a refusal",
    "bonus": "the target's own, after a wholly accepted draft",
    "plain": "the target's own, nothing was drafted",
}


def stdout() -> Console:
    """Console of the results; made for each use, since stdout may change."""
    return _console(sys.stdout)


def stderr() -> Console:
    """Console of what is beside them."""
    return _console(sys.stderr)


def _console(file: IO[str]) -> Console:
    from rich.console import Console

    return Console(file=file, highlight=False, soft_wrap=True, markup=False, emoji=False)


def is_coloured(console: Console) -> bool:
    """Whether colours are shown: on a terminal that has some, unless NO_COLOR is set."""
    return console.color_system is not None and not console.no_color and not console.legacy_windows


def write(console: Console, text: str, status: str = "plain", end: str = "") -> None:
    """Write text of a model unchanged (rich would expand tabs); on a terminal without control characters."""
    if console.is_terminal:
        text = text.translate(_UNSEEN)
    if text and COLOURS[status] and is_coloured(console):
        text = COLOURS[status] + text + _END
    console.file.write(text + end)
    console.file.flush()


def say(*lines: str) -> None:
    """Print lines of results unchanged."""
    console = stdout()
    for line in lines:
        console.out(line)


def shortened(text: str, most: int = 60) -> str:
    """A text in one line of at most so many characters."""
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 3] + "..."


def note(text: str) -> None:
    """One line on stderr."""
    print(text, file=sys.stderr)  # noqa: T201


def emit_json(value: Mapping[str, Any]) -> None:
    """One JSON object, on the last line of stdout."""
    print(json.dumps(value, ensure_ascii=False, default=str), flush=True)  # noqa: T201


def table(rows: Sequence[Mapping[str, Any]], *, title: str = "") -> None:
    """Rows with the same keys as a table of plain text; numbers to the right, None as a dash."""
    console = stdout()
    if title:
        console.print(title)
    if not rows:
        return
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [names] + [[cell(row.get(name)) for name in names] for row in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(names))]
    right = [any(is_number(row.get(name)) for row in rows) for name in names]
    for line in cells:
        shown = (text.rjust(w) if r else text.ljust(w) for text, w, r in zip(line, widths, right, strict=True))
        console.print("  ".join(shown).rstrip())


def is_number(value: Any) -> bool:
    """Whether a value of a table is a number; true and false are words there."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def cell(value: Any) -> str:
    """A value as tables show it."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return str(value)


def printed(
    steps: Iterable[Step], tokenizer: Any, stop: Sequence[str], before: Sequence[int], *, coloured: bool
) -> Iterator[Step]:
    """Yield the steps, and print the text of each; the line ends after the last one.

    Args:
        steps: of one request.
        tokenizer: of the target.
        stop: the request's stop strings.
        before: tokens of its prompt.
        coloured: colour tokens by their origin.
    """
    from sakiyomi.core.text import TextStream

    console, status = stdout(), "plain"
    text = TextStream(tokenizer, stop, before=before) if coloured else None
    for step in steps:
        if text is None:
            write(console, step.text)
        else:
            for entry in step.trace:
                if not text.stopped:
                    status = entry.status
                    write(console, text.push([entry.token_id])[0], status)
        yield step
    write(console, "" if text is None else text.finish(), status, end="\n")


def legend(console: Console) -> None:
    """Explain the colours; prints nothing without colours."""
    if not is_coloured(console):
        return
    for status, meaning in MEANINGS.items():
        write(console, f"{status:<10}", status)
        write(console, meaning, end="\n")


class _Lines(logging.Handler):
    """Prints log messages of the library on stderr, each message once."""

    def __init__(self) -> None:
        super().__init__()
        self.said: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if text not in self.said:
            self.said.add(text)
            note(text)


def quiet() -> None:
    """Silence messages and progress bars of other libraries, and print those of this one, unless they are logged."""
    # Read when these libraries are imported, which a recorded model does not need.
    os.environ.update(TRANSFORMERS_VERBOSITY="error", HF_HUB_DISABLE_PROGRESS_BARS="1")
    leave_out_foreign_notes()
    if "transformers" in sys.modules:
        from transformers.utils import logging as notes

        notes.set_verbosity_error()
        notes.disable_progress_bar()
    own = logging.getLogger("sakiyomi")
    for handler in [handler for handler in own.handlers if isinstance(handler, _Lines)]:
        own.removeHandler(handler)
    if not own.handlers:
        own.addHandler(_Lines())
    own.setLevel(logging.INFO)

"""What commands write: text and tables on stdout, progress on stderr and only for somebody who watches."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sakiyomi.core.foreign_notes import leave_out_foreign_notes
from sakiyomi.core.progress import progress

if TYPE_CHECKING:
    from rich.console import Console

    from sakiyomi.core.outputs import Step

__all__ = [
    "COLOURS",
    "emit_json",
    "is_coloured",
    "legend",
    "note",
    "printed",
    "progress",
    "quiet",
    "say",
    "shortened",
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
    """Console of the results. Made anew each time, so that it writes to what stdout is now."""
    from rich.console import Console

    return Console(file=sys.stdout, highlight=False, soft_wrap=True, markup=False, emoji=False)


def is_coloured(console: Console) -> bool:
    """Whether colours are shown: on a terminal that has some, unless NO_COLOR is set."""
    return console.color_system is not None and not console.no_color and not console.legacy_windows


def write(console: Console, text: str, status: str = "plain", end: str = "") -> None:
    """Text of a model, at once and as it is (rich would expand tabs); a terminal is spared its control characters."""
    if console.is_terminal:
        text = text.translate(_UNSEEN)
    if text and COLOURS[status] and is_coloured(console):
        text = COLOURS[status] + text + _END
    console.file.write(text + end)
    console.file.flush()


def say(*lines: str) -> None:
    """Lines of results, as they are."""
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
    cells = [names] + [[_cell(row.get(name)) for name in names] for row in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(names))]
    right = [any(_is_number(row.get(name)) for row in rows) for name in names]
    for line in cells:
        shown = (cell.rjust(w) if r else cell.ljust(w) for cell, w, r in zip(line, widths, right, strict=True))
        console.print("  ".join(shown).rstrip())


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _cell(value: Any) -> str:
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
    """The same steps, each with its text on stdout when it is given; the line ends behind the last one.

    Args:
        steps: of one request.
        tokenizer: of the target.
        stop: the request's stop strings.
        before: tokens of its prompt.
        coloured: tokens have the colour of their origin.
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
    """One line that says what the colours mean; nothing where there are none."""
    if not is_coloured(console):
        return
    for status, meaning in MEANINGS.items():
        write(console, f"{status:<10}", status)
        write(console, meaning, end="\n")


class _Lines(logging.Handler):
    """What the library has to say, as lines on stderr; the same of target and draft once."""

    def __init__(self) -> None:
        super().__init__()
        self.said: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if text not in self.said:
            self.said.add(text)
            note(text)


def quiet() -> None:
    """No lines and bars of other libraries between our own, and all of this library's, unless a log has these."""
    # Read when they are imported, which a recorded model does not need.
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

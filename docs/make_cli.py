"""Writes docs/cli.md from the commands' own ``--help``; a test checks that the page is current.

python docs/make_cli.py
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from typer.main import get_command
from typer.testing import CliRunner

from sakiyomi.cli import app

PAGE = Path(__file__).with_name("cli.md")
HEAD = """# Command line

Look up a command and its flags here. Results are on stdout, progress is on stderr: a spinner on a terminal, elsewhere
a line every 20 seconds. With `--json` the last line of stdout is one JSON object. Exit codes: 0; 1 for what cannot be
done, and for a defect that `audit` found; 2 for misuse; 130 after Ctrl-C. Colours are left out where the output is no
terminal, or where `NO_COLOR` is set. Lists are given by repeating a flag.

This page is made by `python docs/make_cli.py`.
"""


def commands(command: Any, name: str = "") -> Iterator[str]:
    """Names of a command and of all below it."""
    yield name
    for own, below in getattr(command, "commands", {}).items():
        yield from commands(below, f"{name} {own}".strip())


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for command in commands(get_command(app)):
        result = CliRunner().invoke(app, [*command.split(), "--help"], prog_name="sakiyomi", terminal_width=100)
        assert result.exit_code == 0, result.output
        lines = "\n".join(line.rstrip() for line in result.stdout.strip().splitlines())
        parts.append(f"## sakiyomi {command}".rstrip() + f"\n```text\n{lines}\n```\n")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

"""The page of commands, made from the commands' own ``--help``: a hook of mkdocs adds it to the site as ``cli.md``.

The page is not kept in the repository.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from typer.main import get_command
from typer.testing import CliRunner

from sakiyomi.cli import app

NAME = "cli.md"
HEAD = """# Command line

All commands and their flags. Results are on stdout, progress is on stderr: a spinner on a terminal, elsewhere a line
every 20 seconds. With `--json` the last line of stdout is one JSON object. To give a list, repeat the flag. Colours are
off where the output is no terminal, and where `NO_COLOR` is set.

| exit code | meaning |
|---|---|
| 0 | done |
| 1 | the work failed, or `audit` found a defect |
| 2 | the command line is wrong |
| 130 | interrupted by Ctrl-C |
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


def on_files(files: Any, config: Any) -> Any:
    """Called by mkdocs with the files of the site."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, NAME, content=page()))
    return files

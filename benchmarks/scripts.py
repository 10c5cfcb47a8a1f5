"""Makes a command of a function, as `sakiyomi` does: its dataclasses are the flags, its docstring is the help."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import typer

from sakiyomi.cli.common import add_command
from sakiyomi.core.errors import SakiyomiError

__all__ = ["command", "run"]


def command(function: Callable[..., None], defaults: Mapping[str, Any] | None = None) -> typer.Typer:
    """The command of a script that does one thing; ``defaults`` of this command, in the place of the fields' own."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    add_command(app, function, defaults=defaults)
    return app


def run(app: typer.Typer) -> None:
    """Run it; an error that the user can cause is one line on stderr."""
    try:
        app()
    except SakiyomiError as error:
        print(f"error: {error.message}", file=sys.stderr)
        sys.exit(error.exit_code)

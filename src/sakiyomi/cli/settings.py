"""Values of the flags of every command from the environment and from a TOML file, after those of the command line.

``--max-queue`` is ``SAKIYOMI_MAX_QUEUE`` in the environment and ``max_queue`` in the file. Both may name settings of
other commands, so that one file, or one environment, serves them all; what no command has is refused.
"""

from __future__ import annotations

import difflib
import inspect
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import typer

from sakiyomi.core.errors import InputError, LoadError

ENVIRONMENT = "SAKIYOMI_"
"""Prefix of environment variables; the rest is the setting's name in capitals."""
_OTHER_VARIABLES = ("config", "cache_dir", "native", "profiles")
"""Environment variables that are no flags, without the prefix."""
_known: set[str] = set()  # settings of all commands
EXPECTED = {bool: "on or off", int: "a whole number", float: "a number", str: "words, those with spaces in quotes"}
_IN_FILE = EXPECTED | {bool: "true or false"}


def keyword(name: str, default: Any, annotation: Any) -> inspect.Parameter:
    """A parameter of a command."""
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def config_flag(kinds: Mapping[str, Any]) -> inspect.Parameter:
    """The flag ``--config``. Values of the file become defaults, so that flags and the environment override them.

    It checks the environment as well.

    Args:
        kinds: of the settings of one command, by their names.
    """
    _known.update(kinds)

    def take(ctx: typer.Context, path: str | None) -> None:
        _check_environment(kinds)
        if path is None:
            return
        try:
            values = tomllib.loads(Path(path).expanduser().read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise LoadError(f"the configuration {path!r} cannot be read ({error}); expected a TOML file") from None
        if wrong := [name for name in values if name not in _known]:
            name = wrong[0].replace("-", "_")
            near = difflib.get_close_matches(name, kinds, 1) or difflib.get_close_matches(name, _known, 1, cutoff=0.8)
            known = f"did you mean {near[0]!r}? " if near else ""
            raise InputError(f"{path!r} sets {wrong[0]!r}; {known}known names: {', '.join(kinds)}")
        own = {name: value for name, value in values.items() if name in kinds}
        ctx.default_map = {name: _of_file(path, name, kinds[name], value) for name, value in own.items()}

    text = "TOML file with values of the other flags, by their names with _ for -; SAKIYOMI_NAME sets one, too."
    option = typer.Option(
        "--config",
        help=text,
        metavar="FILE",
        is_eager=True,
        callback=take,
        envvar=f"{ENVIRONMENT}CONFIG",
        show_envvar=False,
        rich_help_panel="More",
    )
    return keyword("config", None, Annotated[str | None, option])


def _check_environment(kinds: Mapping[str, Any]) -> None:
    """Refuse invalid values of flags; warn of a name that is close to a flag's. Other names are left alone."""
    for name, text in os.environ.items():
        flag = name.removeprefix(ENVIRONMENT).lower()
        if not text or not name.startswith(ENVIRONMENT) or flag in _OTHER_VARIABLES:
            continue
        if flag not in kinds:
            if flag not in _known and (near := difflib.get_close_matches(flag, kinds, 1, cutoff=0.8)):
                typer.echo(
                    f"{name} is set, and is no setting of any command; did you mean {ENVIRONMENT}{near[0].upper()}?",
                    err=True,
                )
        elif kinds[flag] in (bool, int, float) and not _reads(kinds[flag], text):
            raise InputError(f"{name} is {text!r}; expected {EXPECTED[kinds[flag]]}")


def _reads(kind: Any, text: str) -> bool:
    if kind is bool:
        return text.lower() in ("1", "0", "true", "false", "t", "f", "yes", "no", "y", "n", "on", "off")
    try:
        kind(text)
    except ValueError:
        return False
    return True


def _of_file(path: str, name: str, kind: Any, value: Any) -> Any:
    """A value of a TOML file, as the command line would give it."""
    inner = next((part for part in get_args(kind) if part is not type(None)), kind)
    if get_origin(kind) is list:
        part = get_args(kind)[0]
        taken = (int, float) if part is float else part
        value = [value] if isinstance(value, str) else value
        fits = isinstance(value, list) and all(isinstance(one, taken) for one in value)
        wanted = 'a list: ["...", "..."]' if part is str else "a list of numbers"
    elif inner is str:  # numbers and truth values are words as well: kv_budget = 64, compile = false
        fits, wanted = isinstance(value, str | int | float), "a text in quotes"
        value = str(value) if fits else value
    else:
        taken = (int, float) if inner is float else inner
        fits, wanted = isinstance(value, taken) and isinstance(value, bool) == (inner is bool), _IN_FILE[inner]
    if not fits:
        raise InputError(f"{path!r} sets {name} = {value!r:.80}; expected {wanted}")
    return value

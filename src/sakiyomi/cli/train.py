"""`sakiyomi train`: commands and their flags come from the dataclasses of `sakiyomi.train.commands`."""

from __future__ import annotations

import importlib
import inspect
import json
import shlex
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import typer

from sakiyomi.cli.common import ALIASES, INTERRUPTED, flag_help
from sakiyomi.cli.help import Sections, SectionsGroup, panel
from sakiyomi.cli.output import quiet
from sakiyomi.cli.settings import ENVIRONMENT, config_flag, keyword
from sakiyomi.core.errors import LoadError, SakiyomiError
from sakiyomi.core.preflight import check_settings
from sakiyomi.train.commands import COMMANDS
from sakiyomi.train.settings import Flag, Settings

EXAMPLE = "Example: sakiyomi train draft --target FOLDER --text stories.txt --out my-draft --minutes 10"
app = typer.Typer(
    name="train",
    cls=SectionsGroup,
    help="Train a target from text, its draft or heads, or count n-grams.",
    epilog=EXAMPLE,
    rich_markup_mode=None,
    no_args_is_help=True,
)
Train = Callable[[Any, str], dict[str, Any]]
"""A training recipe: takes settings and the command line that gave them, returns the summary."""


def script(config_class: type[Settings], train: Train, help: str) -> None:
    """Run a recipe that is a file of its own: `python FILE`, with the flags that `sakiyomi train` would make of it."""
    own = typer.Typer(add_completion=False, rich_markup_mode=None)
    own.command(None, cls=Sections, help=help)(_body(None, config_class, lambda: train))
    own()


def _body(name: str | None, config_class: type[Settings], load: Callable[[], Train]) -> Callable[..., None]:
    """What a command does, with one flag for each setting of `config_class`, and `--json`.

    Args:
        name: of the command of `sakiyomi train`; None: of a script.
        config_class: the settings.
        load: imports the recipe.
    """

    def body(**values: Any) -> None:
        as_json = values.pop("json")
        values.pop("config")  # read before the others
        values = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
        try:
            config = config_class.of(**values)
            check_settings(config.flat())
            _check_files(config.flat())
            quiet()
            summary = load()(config, _command_line(name))
        except SakiyomiError as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(error.exit_code) from None
        if "worker" in summary:  # another process reports the result
            return
        typer.echo(json.dumps(summary, ensure_ascii=False) if as_json else _readable(summary))
        if not summary["finished"]:
            raise typer.Exit(INTERRUPTED)

    flags, texts = config_class.flags(), helps(config_class)
    parameters = [_parameter(flag, texts[flag.name]) for flag in flags]
    text = "Print the summary as one JSON line on stdout."
    as_json = Annotated[bool, typer.Option("--json", help=text, rich_help_panel=panel("", "json"))]
    parameters.append(keyword("json", False, as_json))
    parameters.append(config_flag({flag.name: _kind(flag) for flag in flags}))
    body.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    body.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return body


def helps(config_class: type[Settings]) -> dict[str, str]:
    """The help of each flag: from the docstring of its group, unless the command or a base of it says more."""
    found: dict[str, str] = {}
    for flag in config_class.flags():
        found |= flag_help(flag.group)
    return found | flag_help(config_class)


def _check_files(settings: Mapping[str, Any]) -> None:
    """Refuse files of text that are not there, before torch is imported.

    Raises:
        InputError, LoadError: names the first.
    """
    from sakiyomi.train.data import parse_text

    given = [parse_text(spec).path for name in ("text", "prompts", "data") for spec in settings.get(name) or ()]
    given += [Path(spec.partition("=")[2]) for spec in settings.get("valid") or () if "=" in spec]
    for path in given:
        if not path.is_file():
            raise LoadError(f"there is no file {str(path)!r}; check the path (relative to {Path.cwd()})")


def _load(name: str) -> Train:
    """`train_NAME` of `sakiyomi.train.NAME`, with _ for -; `distill-data` is taken from where it can have workers."""
    name = name.replace("-", "_")
    module = "sakiyomi.scale.samples" if name == "distill_data" else f"sakiyomi.train.{name}"
    train: Train = getattr(importlib.import_module(module), f"train_{name}")
    return train


def _parameter(flag: Flag, text: str) -> inspect.Parameter:
    kind: Any = _kind(flag)
    default = list(flag.default) if get_origin(kind) is list else flag.default
    name = "--" + flag.name.replace("_", "-")
    names = (f"{name}/--no-{name[2:]}" if kind is bool else name, *ALIASES.get(flag.name, ()))
    section = panel(flag.group.__name__, flag.name)
    variable = ENVIRONMENT + flag.name.upper()
    option = typer.Option(*names, help=text, envvar=variable, show_envvar=False, rich_help_panel=section)
    return keyword(flag.name, default, Annotated[kind, option])


def _kind(flag: Flag) -> Any:
    """What typer is told: a list where the setting is a tuple."""
    return list[get_args(flag.kind)[0]] if get_origin(flag.kind) is tuple else flag.kind  # type: ignore[misc]


def _command_line(name: str | None) -> str:
    """This process's command line, as the card shows it: without --resume and --json."""
    program = ["python", sys.argv[0]] if name is None else ["sakiyomi", "train", name]
    behind = 0 if name is None else sys.argv.index(name) if name in sys.argv else len(sys.argv)
    given = sys.argv[behind + 1 :]
    return shlex.join([*program, *(argument for argument in given if argument not in ("--resume", "--json"))])


def _readable(summary: dict[str, Any]) -> str:
    """The summary for people: one value a line, the held-out measures indented; the settings stay in the card."""
    lines = [
        f"{key}: {value}"
        for key, value in summary.items()
        if key != "verdict" and not isinstance(value, dict | list | None)
    ]
    for name, measures in summary.get("held_out", {}).items():
        lines += [f"held-out {name}:", *(f"  {key}: {value:.4g}" for key, value in measures.items())]
    if "verdict" in summary:
        lines += ["", summary["verdict"]]
    if not summary["finished"]:
        lines.append("stopped; the same command with --resume continues from here")
    return "\n".join(lines)


for _name, _config in COMMANDS.items():
    _help, _, _example = inspect.getdoc(_config).partition("Example:")  # type: ignore[union-attr]
    _run = _body(_name, _config, partial(_load, _name))
    app.command(_name, cls=Sections, help=_help.partition("\n\n")[0], epilog=f"Example:{_example}")(_run)

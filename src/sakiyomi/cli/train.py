"""`sakiyomi train`: flags come from the dataclasses of `sakiyomi.train.config`, one flag a field."""

from __future__ import annotations

import dataclasses
import inspect
import json
import shlex
import sys
from collections.abc import Callable
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from sakiyomi.errors import SakiyomiError
from sakiyomi.train.config import DraftConfig, EditsConfig, NgramConfig, TargetConfig, TonesConfig

app = typer.Typer(
    name="train",
    help="Train a target from text, distil a draft from a target, count n-grams, or train an encoder-decoder pair.",
    no_args_is_help=True,
)


def _command(name: str, config_class: type[Any], run: Callable[[Any, str], dict[str, Any]], help: str) -> None:
    """Register a command with one flag for each field of `config_class`, and `--json`."""

    def body(**values: Any) -> None:
        as_json = values.pop("json")
        values = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
        try:
            summary = run(config_class(**values), shlex.join(["sakiyomi", "train", name, *_arguments(name)]))
        except SakiyomiError as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(error.exit_code) from None
        typer.echo(json.dumps(summary, ensure_ascii=False) if as_json else _readable(summary))
        if not summary["finished"]:
            from sakiyomi.cli import INTERRUPTED

            raise typer.Exit(INTERRUPTED)

    parameters = [
        _parameter(field, get_type_hints(config_class)[field.name]) for field in dataclasses.fields(config_class)
    ]
    flag = Annotated[bool, typer.Option("--json", help="Print the summary as one JSON line on stdout.")]
    parameters.append(inspect.Parameter("json", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=flag))
    body.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    body.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    app.command(name, help=help)(body)


def _parameter(field: dataclasses.Field[Any], kind: Any) -> inspect.Parameter:
    default: Any = field.default
    if get_origin(kind) is tuple:
        kind, default = list[get_args(kind)[0]], list(default)  # type: ignore[misc]
    flag = "--" + field.name.replace("_", "-")
    names = (f"{flag}/--no-{flag[2:]}",) if kind is bool else (flag,)
    annotation = Annotated[kind, typer.Option(*names, help=field.metadata["help"])]
    return inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _arguments(name: str) -> list[str]:
    """The arguments after `train NAME` of this process, as the card shows them."""
    given = sys.argv[sys.argv.index(name) + 1 :] if name in sys.argv else []
    return [argument for argument in given if argument not in ("--resume", "--json")]


def _readable(summary: dict[str, Any]) -> str:
    """The summary for people: one value a line, the held-out measures indented; the settings stay in the card."""
    lines = [f"{key}: {value}" for key, value in summary.items() if not isinstance(value, dict | list | None)]
    for name, measures in summary.get("held_out", {}).items():
        lines += [f"held-out {name}:", *(f"  {key}: {value:.4g}" for key, value in measures.items())]
    if not summary["finished"]:
        lines.append("stopped; the same command with --resume goes on from here")
    return "\n".join(lines)


def _target(config: TargetConfig, command: str) -> dict[str, Any]:
    from sakiyomi.cli.output import quiet
    from sakiyomi.train.target import train_target

    quiet()
    return train_target(config, command)


def _draft(config: DraftConfig, command: str) -> dict[str, Any]:
    from sakiyomi.cli.output import quiet
    from sakiyomi.train.draft import train_draft

    quiet()
    return train_draft(config, command)


def _ngram(config: NgramConfig, command: str) -> dict[str, Any]:
    from sakiyomi.cli.output import quiet
    from sakiyomi.train.ngram import train_ngram

    quiet()
    return train_ngram(config, command)


def _edits(config: EditsConfig, command: str) -> dict[str, Any]:
    from sakiyomi.cli.output import quiet
    from sakiyomi.train.edits import train_edits

    quiet()
    return train_edits(config, command)


def _tones(config: TonesConfig, command: str) -> dict[str, Any]:
    from sakiyomi.cli.output import quiet
    from sakiyomi.train.tones import train_tones

    quiet()
    return train_tones(config, command)


_command("target", TargetConfig, _target, "Train a Llama target and its tokenizer from text files.")
_command("draft", DraftConfig, _draft, "Distil a small draft from a target, for speculative decoding.")
_command(
    "ngram",
    NgramConfig,
    _ngram,
    "Count the n-grams of a text, or of what a target writes, into one file for drafts.",
)
_command(
    "edits",
    EditsConfig,
    _edits,
    "Train a Pegasus pair, target and draft, that corrects text, with mistakes put into TEXT, and continues stories.",
)
_command(
    "tones",
    TonesConfig,
    _tones,
    "Train a Whisper pair, target and draft, that writes down the words of TEXT, which it plays as tones.",
)


@app.callback()
def _group() -> None:
    """A callback keeps `train` a group of commands even while it has one."""

"""`sakiyomi train`: flags come from the dataclasses of `sakiyomi.train.config`, one flag a field."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import shlex
import sys
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from sakiyomi.core.errors import SakiyomiError
from sakiyomi.train.config import (
    DistillDataConfig,
    DraftConfig,
    EditsConfig,
    LococoConfig,
    MedusaConfig,
    NgramConfig,
    RetainingConfig,
    RetrieverConfig,
    TargetConfig,
    TonesConfig,
)

app = typer.Typer(
    name="train",
    help="Train a target from text, its draft or heads, count n-grams, or train an encoder-decoder pair.",
    no_args_is_help=True,
)


def _command(name: str, config_class: type[Any], help: str) -> None:
    """Register a command with one flag for each field of `config_class`, and `--json`."""

    def body(**values: Any) -> None:
        as_json = values.pop("json")
        values = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
        try:
            summary = _run(name, config_class(**values), shlex.join(["sakiyomi", "train", name, *_arguments(name)]))
        except SakiyomiError as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(error.exit_code) from None
        typer.echo(json.dumps(summary, ensure_ascii=False) if as_json else _readable(summary))
        if not summary["finished"]:
            from sakiyomi.cli.common import INTERRUPTED

            raise typer.Exit(INTERRUPTED)

    parameters = [
        _parameter(field, get_type_hints(config_class)[field.name]) for field in dataclasses.fields(config_class)
    ]
    flag = Annotated[bool, typer.Option("--json", help="Print the summary as one JSON line on stdout.")]
    parameters.append(inspect.Parameter("json", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=flag))
    body.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    body.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    app.command(name, help=help)(body)


def _run(name: str, config: Any, command: str) -> dict[str, Any]:
    """`train_NAME` of `sakiyomi.train.NAME`, with _ for -, which is not imported before it is wanted."""
    from sakiyomi.cli.output import quiet

    name = name.replace("-", "_")
    train = getattr(importlib.import_module(f"sakiyomi.train.{name}"), f"train_{name}")
    quiet()
    summary: dict[str, Any] = train(config, command)
    return summary


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


_command("target", TargetConfig, "Train a Llama target and its tokenizer from text files.")
_command("draft", DraftConfig, "Distil a small draft from a target, for speculative decoding.")
_command(
    "medusa",
    MedusaConfig,
    "Train Medusa heads on a target, which stays as it is, or together with it (--joint).",
)
_command(
    "retaining",
    RetainingConfig,
    "Train retaining heads (Locret) on a target: which keys and values a small cache should keep.",
)
_command(
    "lococo",
    LococoConfig,
    "Train convolutions (LoCoCo) on a target that merge what a small cache drops.",
)
_command(
    "distill-data",
    DistillDataConfig,
    "Have a target write answers, from which its drafts and heads learn best.",
)
_command(
    "ngram",
    NgramConfig,
    "Count the n-grams of a text, or of what a target writes, into one file for drafts.",
)
_command(
    "retriever",
    RetrieverConfig,
    "Train a small Llama that finds pass keys, numbers and values of keys in long texts.",
)
_command(
    "edits",
    EditsConfig,
    "Train a Pegasus pair, target and draft, that corrects text, with mistakes put into TEXT, and continues stories.",
)
_command(
    "tones",
    TonesConfig,
    "Train a Whisper pair, target and draft, that writes down the words of TEXT, which it plays as tones.",
)


@app.callback()
def _group() -> None:
    """A callback keeps `train` a group of commands even while it has one."""

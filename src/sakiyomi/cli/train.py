"""`sakiyomi train`: flags come from the dataclasses of `sakiyomi.train.config`, one flag a field."""

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

from sakiyomi.cli.common import ALIASES, INTERRUPTED
from sakiyomi.cli.help import Sections, SectionsGroup, panel
from sakiyomi.cli.output import quiet
from sakiyomi.cli.settings import ENVIRONMENT, config_flag, keyword
from sakiyomi.core.errors import LoadError, SakiyomiError
from sakiyomi.core.preflight import check_settings
from sakiyomi.train.config import (
    BlockConfig,
    DistillDataConfig,
    DraftConfig,
    EagleConfig,
    Flag,
    LococoConfig,
    MedusaConfig,
    MtpConfig,
    NgramConfig,
    RetainingConfig,
    RetrieverConfig,
    Settings,
    TargetConfig,
)

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
"""What a training recipe is: settings and the command line that gave them in, the summary out."""


def script(config_class: type[Settings], train: Train, help: str) -> None:
    """Run a recipe that is a file of its own: `python FILE`, with the flags that `sakiyomi train` would make of it."""
    own = typer.Typer(add_completion=False, rich_markup_mode=None)
    _command(own, None, config_class, lambda: train, ["python", sys.argv[0]], help)
    own()


def _command(
    group: typer.Typer,
    name: str | None,
    config_class: type[Settings],
    load: Callable[[], Train],
    program: list[str],
    help: str,
    example: str | None = None,
) -> None:
    """Register a command with one flag for each setting of `config_class`, and `--json`.

    Args:
        group: takes the command.
        name: of it; None: it is the whole program.
        config_class: the settings.
        load: gives the recipe, which is not imported before it is wanted.
        program: what stands in front of the arguments in a shell, as the card shows it.
        help: of the command.
        example: of its use.
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
            train = load()
            summary = train(config, shlex.join([*program, *_arguments(name)]))
        except SakiyomiError as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(error.exit_code) from None
        if "worker" in summary:  # another process tells what has come of it
            return
        typer.echo(json.dumps(summary, ensure_ascii=False) if as_json else _readable(summary))
        if not summary["finished"]:
            raise typer.Exit(INTERRUPTED)

    parameters = [_parameter(flag) for flag in config_class.flags()]
    text = "Print the summary as one JSON line on stdout."
    as_json = Annotated[bool, typer.Option("--json", help=text, rich_help_panel=panel("", "json"))]
    parameters.append(keyword("json", False, as_json))
    parameters.append(config_flag({flag.name: _kind(flag) for flag in config_class.flags()}))
    body.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    body.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    group.command(name, cls=Sections, help=help, epilog=example)(body)


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
    """`train_NAME` of `sakiyomi.train.NAME`, with _ for -; of `distill-data` what can share it among workers."""
    name = name.replace("-", "_")
    module = "sakiyomi.scale.samples" if name == "distill_data" else f"sakiyomi.train.{name}"
    train: Train = getattr(importlib.import_module(module), f"train_{name}")
    return train


def _parameter(flag: Flag) -> inspect.Parameter:
    kind: Any = _kind(flag)
    default = flag.default
    if get_origin(kind) is list:
        default = list(default)
    name = "--" + flag.name.replace("_", "-")
    names = (f"{name}/--no-{name[2:]}" if kind is bool else name, *ALIASES.get(flag.name, ()))
    section = panel(flag.group, flag.name)
    variable = ENVIRONMENT + flag.name.upper()
    option = typer.Option(*names, help=flag.help, envvar=variable, show_envvar=False, rich_help_panel=section)
    annotation = Annotated[kind, option]
    return keyword(flag.name, default, annotation)


def _kind(flag: Flag) -> Any:
    """What typer is told: a list where the setting is a tuple."""
    return list[get_args(flag.kind)[0]] if get_origin(flag.kind) is tuple else flag.kind  # type: ignore[misc]


def _arguments(name: str | None) -> list[str]:
    """The arguments of this process, behind `train NAME` where there is one, as the card shows them."""
    behind = 0 if name is None else sys.argv.index(name) if name in sys.argv else len(sys.argv)
    given = sys.argv[behind + 1 :]
    return [argument for argument in given if argument not in ("--resume", "--json")]


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
        lines.append("stopped; the same command with --resume goes on from here")
    return "\n".join(lines)


RECIPES: dict[str, tuple[type[Settings], str]] = {
    "target": (TargetConfig, "Train a Llama target and its tokenizer from text files."),
    "draft": (DraftConfig, "Distil a small draft from a target, for speculative decoding."),
    "medusa": (MedusaConfig, "Train Medusa heads on a target, which stays as it is, or together with it (--joint)."),
    "eagle": (EagleConfig, "Train an EAGLE-3 head on a target, whose hidden states it reads."),
    "mtp": (MtpConfig, "Train a layer for further tokens (MTP) on a target, its own or a new one."),
    "block": (BlockConfig, "Train a block drafter on a target, which guesses several tokens in one pass."),
    "retaining": (
        RetainingConfig,
        "Train retaining heads (Locret) on a target: which keys and values a small cache should keep.",
    ),
    "lococo": (LococoConfig, "Train convolutions (LoCoCo) on a target that merge what a small cache drops."),
    "distill-data": (DistillDataConfig, "Have a target write answers, from which its drafts and heads learn best."),
    "ngram": (NgramConfig, "Count the n-grams of a text, or of what a target writes, into one file for drafts."),
    "retriever": (
        RetrieverConfig,
        "Train a small Llama that finds pass keys, numbers and values of keys in long texts.",
    ),
}
EXAMPLES = {
    "target": "--text stories.jsonl --out my-target --minutes 60",
    "draft": "--target FOLDER --text stories.txt --out my-draft --minutes 10",
    "medusa": "--target FOLDER --data answers.jsonl --out my-heads --minutes 40",
    "eagle": "--target FOLDER --text stories.jsonl --out my-head --minutes 40",
    "mtp": "--target FOLDER --text stories.jsonl --out my-layer --minutes 40",
    "block": "--target FOLDER --text stories.jsonl --out my-drafter --minutes 40",
    "retaining": "--target FOLDER --data answers.jsonl --out my-retaining-heads",
    "lococo": "--target FOLDER --data answers.jsonl --out my-convolutions",
    "distill-data": "--target FOLDER --data prompts.jsonl --out answers.jsonl",
    "ngram": "--target FOLDER --text notes.txt --out notes.safetensors",
    "retriever": "--text stories.jsonl --out my-retriever --minutes 60",
}
for _name, (_config, _help) in RECIPES.items():
    _example = f"Example: sakiyomi train {_name} {EXAMPLES[_name]}"
    _command(app, _name, _config, partial(_load, _name), ["sakiyomi", "train", _name], _help, _example)

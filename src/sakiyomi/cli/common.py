"""Flags from dataclasses: a field is a flag of the same name, with its default; the help is its line in the docstring.

A command takes one object for each group of its flags, ready made: ``LLMConfig``, ``SamplingParams``, its own.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin, get_type_hints

import typer

from sakiyomi.cli.help import Sections, SectionsGroup, panel, parts
from sakiyomi.cli.output import emit_json, note, progress, quiet
from sakiyomi.cli.settings import ENVIRONMENT, EXPECTED, config_flag, keyword
from sakiyomi.core.embedded import DRAFTS, FREE_DRAFT
from sakiyomi.core.errors import InputError, LoadError
from sakiyomi.core.memory import loading, readable
from sakiyomi.core.preflight import check_settings

if TYPE_CHECKING:
    from sakiyomi.core.outputs import Generation
    from sakiyomi.core.params import SamplingParams
    from sakiyomi.engine.config import LLMConfig
    from sakiyomi.engine.llm import LLM

INTERRUPTED = 130
"""Exit code after Ctrl-C."""
ALIASES = {"target": ("--model",), "temperatures": ("--temperature",)}  # as other tools call them


@dataclass(frozen=True)
class JsonOption:
    """How results are shown.

    Attributes:
        json: end stdout with one line that holds one JSON object.
    """

    json: bool = False

    def emit(self, found: Mapping[str, Any]) -> None:
        """Print the object, if it is wanted."""
        if self.json:
            emit_json(found)


@dataclass(frozen=True)
class FileArgument:
    """Which file.

    Attributes:
        file: the file to look at.
    """

    file: str = field(metadata={"argument": "FILE"})


def load(model: LLMConfig, say: Callable[[str], None] | None = None) -> LLM:
    """Load the engine, and report by ``say``, by default on stderr, what a user might not expect."""
    say = say or note
    with progress(f"loading {model.target}"), loading():
        from sakiyomi.engine.llm import LLM
        from sakiyomi.model_executor.weights import rounding_of

        llm = LLM(**dataclasses.asdict(model))
    weights = llm.target.weights
    if weights.quantization is not None:
        say(str(weights.quantization))
    elif (blocks := rounding_of(weights)) is not None:
        size = "" if weights.bytes is None else f"; a pass reads {readable(weights.bytes)}"
        say(f"weights in {blocks}, rows (activations) in 8 bits{size}")
    if llm.profile is not None:
        found = llm.profile
        say(
            "sakiyomi tune found that speculation is slower on this machine: generating without a draft"
            if llm.draft is None
            else f"draft {found.draft}, gamma {found.gamma}: the result of sakiyomi tune"
        )
    elif model.draft == "auto" and llm.name not in DRAFTS:
        say(
            f"no draft is known for {model.target}: {FREE_DRAFT} drafts without training; "
            "faster: sakiyomi tune, sakiyomi train draft, or --draft with a small model of its tokenizer, or heads"
        )
    return llm


def draft_spec(llm: LLM, draft: str) -> str:
    """The draft in use, as ``--draft`` names it.

    Args:
        llm: of the target.
        draft: the given value of ``--draft``.
    """
    if draft != "auto":
        return draft
    return llm.profile.draft if llm.profile is not None else DRAFTS.get(llm.name, FREE_DRAFT)


@contextmanager
def server_packages() -> Iterator[None]:
    """For a block that imports the server, whose packages are an extra.

    Raises:
        LoadError: they are not installed.
    """
    try:
        yield
    except ImportError as error:
        raise LoadError(
            f"the server needs packages that are not installed ({error.name}); pip install 'sakiyomi[serve]'"
        ) from None


def samples_of(result: Generation | list[Generation]) -> list[Generation]:
    """The result of ``LLM.generate`` for one prompt as a list, also if n is 1."""
    return result if isinstance(result, list) else [result]


def from_stdin() -> str:
    """All of stdin, without the newline that echo adds.

    Raises:
        LoadError: it is not UTF-8 text.
    """
    try:
        text = sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise LoadError(f"the text on stdin is not UTF-8 text ({error.reason} at byte {error.start})") from None
    return text.removesuffix("\n")


def note_lossy(params: SamplingParams) -> None:
    """Note on stderr that the parameters change the distribution of the text."""
    if params.acceptance == "typical" and not params.greedy:
        note("acceptance typical is lossy: the output does not follow the target's own distribution")


def add_command(
    app: typer.Typer,
    run: Callable[..., None],
    *,
    name: str | None = "",
    defaults: Mapping[str, Any] | None = None,
) -> None:
    """Register a function as a command: its parameters are the groups of flags, its docstring is the help.

    Args:
        app: takes the command.
        run: called with one object for each group, a dataclass whose fields become the flags, in order.
        name: of the command, by default the function's; None: it is what ``app`` does where none of its own commands is
            named.
        defaults: of this command, in the place of the fields' own.
    """
    groups = [group for name, group in get_type_hints(run).items() if name != "return"]

    def body(ctx: typer.Context, **given: Any) -> None:
        given.pop("config", None)  # read before the others
        if ctx.invoked_subcommand is None:
            made = [_build(group, {f.name: given[f.name] for own, f in flags if own is group}) for group in groups]
            check_settings({name: value for group in made for name, value in vars(group).items()})
            quiet()
            run(*made)
        else:
            _refuse_flags(ctx, given)

    flags: list[tuple[type[Any], dataclasses.Field[Any]]] = []
    for group in groups:  # of two fields with one name the first is the flag
        flags += [(group, field) for field in _flags(group) if field.name not in {other.name for _, other in flags}]
    found = [_parameter(group, field, (defaults or {}).get(field.name, field.default)) for group, field in flags]
    found.append(config_flag({field.name: _KINDS[str(field.type)][0] for _, field in flags}))
    found.append(keyword("ctx", inspect.Parameter.empty, typer.Context))
    body.__signature__ = inspect.Signature(found)  # type: ignore[attr-defined]
    body.__annotations__ = {parameter.name: parameter.annotation for parameter in found}
    help, example = parts(run)
    if name is None:
        app.info.epilog = example
        app.callback(invoke_without_command=True, help=help, epilog=example)(body)
    else:
        app.command(name or run.__name__, cls=Sections, help=help, epilog=example)(body)


def add_group(
    app: typer.Typer, name: str, *commands: Callable[..., None], main: Callable[..., None] | None = None, **options: Any
) -> typer.Typer:
    """Register a command that has commands of its own; ``main`` is what it does where none of them is named."""
    own = typer.Typer(cls=SectionsGroup, rich_markup_mode=None, no_args_is_help=main is None)
    if main is not None:
        add_command(own, main, name=None)
    for run in commands:
        add_command(own, run)
    app.add_typer(own, name=name, **options)
    return own


def flag_help(config: type[Any]) -> dict[str, str]:
    """The ``Attributes`` sections of the docstrings of a class and of its bases: what each field is."""
    found: dict[str, str] = {}
    for kind in reversed(config.__mro__):
        _, _, section = inspect.cleandoc(kind.__doc__ or "").partition("Attributes:\n")
        for entry in re.split(r"\n(?= {4}\w)", "\n" + section.partition("\n\n")[0]):
            names, colon, meaning = entry.strip().partition(":")
            if colon:
                found.update(dict.fromkeys((n.strip() for n in names.split(",")), " ".join(meaning.split())))
    return found


def _flags(group: type[Any]) -> list[dataclasses.Field[Any]]:
    """Fields that have a flag; objects (logits_processors) can only be given in Python."""
    return [field for field in dataclasses.fields(group) if str(field.type) in _KINDS]


def parameters(group: type[Any]) -> list[str]:
    """Names of the fields that have a flag."""
    return [field.name for field in _flags(group)]


def parsed(group: type[Any], name: str, text: str) -> Any:
    """The value of a field from a text, as its flag reads it; "none" is None or an empty list.

    Raises:
        InputError: the text is invalid.
    """
    kind, convert = _KINDS[next(str(field.type) for field in _flags(group) if field.name == name)]
    inner = next((part for part in get_args(kind) if part is not type(None)), kind)
    several = get_origin(kind) is list
    try:
        words = [] if text == "none" and inner is not kind else shlex.split(text) if several else [text]
        values = [_truth(word) if inner is bool else inner(word) for word in words]
    except ValueError:
        raise InputError(f"{name} is {text!r}; expected {EXPECTED[inner]}") from None
    return convert(values) if several else _converted(name, convert, values[0]) if values else None


def _parameter(group: type[Any], field: dataclasses.Field[Any], default: Any) -> inspect.Parameter:
    kind, _ = _KINDS[str(field.type)]
    text = flag_help(group)[field.name]
    if default is dataclasses.MISSING:
        default = inspect.Parameter.empty
    elif isinstance(default, tuple | list) or str(field.type).startswith(("Sequence", "Mapping", "tuple")):
        default = list(default or ())
    if field.metadata.get("argument"):
        return keyword(
            field.name, default, Annotated[kind, typer.Argument(help=text, metavar=field.metadata["argument"])]
        )
    flag = "--" + field.name.replace("_", "-")
    # What is off by default needs no flag that says so.
    own = f"{flag}/--no-{flag[2:]}" if bool in (kind, *get_args(kind)) and default is not False else flag
    names = [name for name in (field.metadata.get("short"), own, *ALIASES.get(field.name, ())) if name]
    option = typer.Option(
        *names,
        help=text,
        metavar=_METAVARS.get(str(field.type)),
        envvar=ENVIRONMENT + field.name.upper(),
        show_envvar=False,
        rich_help_panel=panel(group.__name__, field.name),
        show_default=default not in (None, []) and default is not False,
        callback=_words if kind == list[str] else None,
    )
    return keyword(field.name, default, Annotated[kind, option])


def _words(context: typer.Context, parameter: typer.CallbackParam, values: list[str]) -> list[str]:
    """Values of a flag. A value from the environment is split as in a shell, unless it is an existing path."""
    source = context.get_parameter_source(parameter.name or "")
    if source is None or source.name != "ENVIRONMENT":
        return values
    text = os.environ[str(parameter.envvar)]
    return [text] if Path(text).expanduser().exists() else shlex.split(text)


def _refuse_flags(context: typer.Context, given: Mapping[str, Any]) -> None:
    """Refuse flags before the name of a command, which would be ignored."""
    for name in given:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise InputError(
                f"--{name.replace('_', '-')} stands before {context.invoked_subcommand!r}, which would ignore it; "
                "flags go after the command they belong to"
            )


def _build(group: type[Any], given: Mapping[str, Any]) -> Any:
    kinds = {field.name: _KINDS[str(field.type)][1] for field in _flags(group)}
    return group(**{name: _converted(name, kinds[name], value) for name, value in given.items()})


def _converted(name: str, convert: Callable[[Any], Any], value: Any) -> Any:
    try:
        return convert(value)
    except ValueError:
        raise InputError(f"{name} is {value!r}; expected a number, or none") from None


def _truth(word: str) -> bool:
    if word not in ("on", "off", "true", "false"):
        raise ValueError(word)
    return word in ("on", "true")


def _number_or_word(text: str | None) -> int | str | None:
    return int(text) if text is not None and re.fullmatch(r"[+-]?\d+", text) else text


def _number_or_none(text: str | None) -> float | None:
    return None if text is None or text.lower() == "none" else float(text)


def _compile(text: str) -> bool | str:
    words: dict[str, bool | str] = {"auto": "auto", "true": True, "false": False}
    if text.lower() not in words:
        raise InputError(f"compile is {text!r}; it is auto or false")
    return words[text.lower()]


def _biases(pairs: Sequence[str]) -> dict[int, float] | None:
    found: dict[int, float] = {}
    for pair in pairs:
        token, separator, bias = pair.partition("=")
        try:
            found[int(token)] = float(bias)
        except ValueError:
            separator = ""
        if not separator:
            raise InputError(f"logit-bias is {pair!r}; expected TOKEN_ID=BIAS, for instance 17=-2.5")
    return found or None


def _shape(text: str) -> Any:
    """A name, or a list: 1,7,6 or [[0],[1],[0,0]]."""
    if not text[:1].isdigit() and text[:1] != "[":
        return text
    try:
        return json.loads(text if text.startswith("[") else f"[{text}]")
    except ValueError:
        raise InputError(f"tree is {text!r}; expected a name, counts such as 1,7,6, or [[0],[1],[0,0]]") from None


def _same(value: Any) -> Any:
    return value


# Annotations are strings (`from __future__ import annotations`): what typer is told for each, and what is made of the
# value. A choice stays a plain word: the dataclass refuses unknown ones in its own words.
_KINDS: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "str": (str, _same),
    "int": (int, _same),
    "float": (float, _same),
    "bool": (bool, _same),
    "str | None": (str | None, _same),
    "int | None": (int | None, _same),
    "float | None": (str | None, _number_or_none),
    "bool | None": (bool | None, _same),
    "int | str": (str, _number_or_word),
    "int | str | None": (str | None, _number_or_word),
    "str | bool": (str, _compile),
    "Acceptance": (str, _same),
    "Task": (str, _same),
    "Timestamps": (str, _same),
    "Shape": (str, _shape),
    "Sequence[str]": (list[str], tuple),
    "Sequence[int]": (list[int], tuple),
    "Sequence[str | Sequence[int]]": (list[str], tuple),
    "tuple[str, ...]": (list[str], tuple),
    "tuple[int, ...]": (list[int], tuple),
    "tuple[float, ...]": (list[float], tuple),
    "Mapping[int, float] | None": (list[str], _biases),
}
_METAVARS = {"int | str": "N|WORD", "float | None": "<float|none>", "Mapping[int, float] | None": "TOKEN_ID=BIAS"}

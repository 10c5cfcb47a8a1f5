"""Flags from dataclasses: a field is a flag of the same name, with its default; the help is its line in the docstring.

A command takes one object for each group of its flags, ready made: ``SamplingParams``, ``ModelOptions``, its own.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import json
import os
import re
import shlex
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin

import typer

from sakiyomi.core.errors import InputError, LoadError

if TYPE_CHECKING:
    from sakiyomi.core.params import SamplingParams
    from sakiyomi.engine.llm import LLM

__all__ = ["JsonOption", "ModelOptions", "command", "flag_help", "load", "parameters", "parsed"]


OTHER_VARIABLES = ("config", "cache_dir", "native", "profiles")
"""Of the environment: what is no flag of ``serve``, by the names behind its prefix."""


@dataclass(frozen=True)
class ModelOptions:
    """Which models, and how they run: the parameters of ``LLM``, whose defaults these are (a test compares them).

    Attributes:
        target: embedded name (tales), folder in Hugging Face format, GGUF file, or hub id.
        draft: drafter: auto (what tune has found, else tales-draft for tales, else none), none, model:FOLDER (an
            embedded name or a hub id works as well), prompt-lookup, suffix or ngram (from the text itself; suffix:FILE
            remembers earlier texts, ngram:FILE is trained), self-int8 (the target in 8 bits), early-exit:LAYERS (its
            first layers), oracle:RATE (the known answer, to measure what a draft could bring); several are joined by +.
        cache: cache policy (h2o), bits of its numbers (quant-8, quant-4, quant-2; kvquant-4, kvquant-3, kvquant-2 at
            levels fitted to the model), or both (h2o+quant-4); full keeps everything as it is, offload:FOLDER too,
            in mapped files.
        kv_budget: KV pairs per head, or bytes (2GiB), for policies that need a budget.
        kv_memory: bytes (2GiB) of one request's keys and values, in the place of kv_budget.
        chunk_size: tokens of a prompt that are read at once.
        dtype: auto (as the checkpoint says), float32, bfloat16 or float16.
        device: auto, cpu, cuda or cuda:N.
        quantize: int8 or int4 rounds the target's weights to so many bits; says what that changes, and keeps a packed
            copy beside the model (or in the cache) for the next time.
        offload: where weights stay between passes if they do not fit: disk (in the model's own files), cpu (main
            memory, for a GPU), auto (as much as fits on the device, then in main memory, then on disk), or a folder for
            weights that cannot be used as they are stored.
        compile: auto (compiled graphs once they are ready), true (wait for them) or false.
        max_context: most tokens of prompt and text together; the model's own limit if not given.
        max_batch: requests at once at most.
        exact: output is bit-equal for every draft, gamma and batch.
        strict: a drafter that fails ends the text with an error; otherwise the text goes on without it.
        allow_pickle: open pickle weights, which can run any code.
        trust_remote_code: run Python code that comes with the model.
    """

    target: str = "tales"
    draft: str = "auto"
    cache: str = "full"
    kv_budget: str | None = None
    kv_memory: str | None = None
    chunk_size: int | None = None
    dtype: str = "auto"
    device: str = "auto"
    quantize: str | None = None
    offload: str | None = None
    compile: str = "auto"
    max_context: int | None = None
    max_batch: int = 8
    exact: bool = False
    strict: bool = False
    allow_pickle: bool = False
    trust_remote_code: bool = False

    def values(self) -> dict[str, Any]:
        """Keyword arguments of ``LLM``, target included."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        values["compile"] = _compile(self.compile)
        if self.kv_budget is not None and self.kv_budget.isdigit():
            values["kv_budget"] = int(self.kv_budget)
        return values

    def load(self, **changed: Any) -> LLM:
        """The engine, with some values replaced by these."""
        from sakiyomi.engine.llm import LLM

        return LLM(**(self.values() | changed))


@dataclass(frozen=True)
class JsonOption:
    """How results are shown.

    Attributes:
        json: end stdout with one line that holds one JSON object.
    """

    json: bool = False


def load(model: ModelOptions, say: Callable[[str], None] | None = None) -> LLM:
    """The engine, and on stderr, or where ``say`` has it, what a user might not expect of it."""
    from sakiyomi.cli.output import note, progress, quiet

    say = say or note
    with progress(f"loading {model.target}"):
        quiet()
        llm = model.load()
    if llm.target.weights.quantization is not None:
        say(str(llm.target.weights.quantization))
    if llm.profile is not None:
        found = llm.profile
        say(
            "sakiyomi tune has found that reading ahead does not pay here: writing without a draft"
            if llm.draft is None
            else f"draft {found.draft}, gamma {found.gamma}, as sakiyomi tune has found"
        )
    elif model.draft == "auto" and llm.draft is None:
        say(
            f"no draft is known for {model.target}: writing without one; a small model of its tokenizer goes in --draft"
        )
    return llm


def note_lossy(params: SamplingParams) -> None:
    """Say on stderr where what is asked for changes the text's distribution."""
    from sakiyomi.cli.output import note

    if params.acceptance == "typical" and not params.greedy:
        note("acceptance typical is lossy: the text has another distribution than the target's own")


def command(
    app: typer.Typer,
    name: str | None,
    *groups: type[Any],
    help: str,
    defaults: Mapping[str, Any] | None = None,
    environment: str | None = None,
) -> Callable[[Callable[..., None]], None]:
    """Register a command that is called with one object for each group.

    Args:
        app: takes the command.
        name: of the command; None: it is what ``app`` does where none of its own commands is named.
        groups: dataclasses; their fields become the flags, in order.
        help: shown by ``--help``.
        defaults: of this command, in the place of the fields' own.
        environment: its flags may also be set by environment variables that begin so, and in a file (``--config``).
    """

    def register(run: Callable[..., None]) -> None:
        def body(ctx: typer.Context, **given: Any) -> None:
            given.pop("config", None)  # read before the others
            if ctx.invoked_subcommand is None:
                run(*(_build(group, given) for group in groups))
            else:
                _refuse_flags(ctx, given)

        flags = [(group, field) for group in groups for field in _flags(group)]
        found = [
            _parameter(group, field, (defaults or {}).get(field.name, field.default), environment)
            for group, field in flags
        ]
        if environment is not None:
            found.append(_config_flag({field.name: _KINDS[str(field.type)][0] for _, field in flags}, environment))
        found.append(_keyword("ctx", inspect.Parameter.empty, typer.Context))
        body.__signature__ = inspect.Signature(found)  # type: ignore[attr-defined]
        body.__annotations__ = {parameter.name: parameter.annotation for parameter in found}
        if name is None:
            app.callback(invoke_without_command=True, help=help)(body)
        else:
            app.command(name, help=help)(body)

    return register


def flag_help(config: type[Any]) -> dict[str, str]:
    """The ``Attributes`` section of a docstring: what each field is."""
    text = inspect.cleandoc(config.__doc__ or "")
    _, _, section = text.partition("Attributes:\n")
    section = section.partition("\n\n")[0]
    found: dict[str, str] = {}
    for entry in re.split(r"\n(?= {4}\w)", "\n" + section):
        names, colon, meaning = entry.strip().partition(":")
        if colon:
            found.update(dict.fromkeys((n.strip() for n in names.split(",")), " ".join(meaning.split())))
    return found


def _flags(group: type[Any]) -> list[dataclasses.Field[Any]]:
    """Fields that a command line can say; objects (logits_processors) stay with Python."""
    return [field for field in dataclasses.fields(group) if str(field.type) in _KINDS]


def parameters(group: type[Any]) -> list[str]:
    """Names of the fields that have a flag."""
    return [field.name for field in _flags(group)]


def parsed(group: type[Any], name: str, text: str) -> Any:
    """What a field's flag would make of a text: "none" is None or no words, a list is given word by word.

    Raises:
        InputError: it is no such value.
    """
    kind, convert = _KINDS[next(str(field.type) for field in _flags(group) if field.name == name)]
    inner = next((part for part in get_args(kind) if part is not type(None)), kind)
    several = get_origin(kind) is list
    try:
        words = [] if text == "none" and inner is not kind else shlex.split(text) if several else [text]
        values = [_truth(word) if inner is bool else inner(word) for word in words]
    except ValueError:
        raise InputError(f"{name} is {text!r}; expected {_EXPECTED[inner]}") from None
    return convert(values) if several else convert(values[0]) if values else None


def _config_flag(kinds: Mapping[str, Any], environment: str) -> inspect.Parameter:
    """The file's values become defaults, so that flags and environment come first. Looks at the environment as well."""

    def take(ctx: typer.Context, path: str | None) -> None:
        _check_environment(kinds, environment)
        if path is None:
            return
        try:
            values = tomllib.loads(Path(path).expanduser().read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise LoadError(f"the configuration {path!r} cannot be read ({error}); expected a TOML file") from None
        if wrong := [name for name in values if name not in kinds]:
            near = difflib.get_close_matches(wrong[0].replace("-", "_"), kinds, 1)
            known = f"did you mean {near[0]!r}? " if near else ""
            raise InputError(f"{path!r} sets {wrong[0]!r}; {known}what there is: {', '.join(kinds)}")
        ctx.default_map = {name: _of_file(path, name, kinds[name], value) for name, value in values.items()}

    text = "TOML file with values of the other flags, by their names (with _ for -)."
    option = typer.Option(
        "--config", help=text, metavar="FILE", is_eager=True, callback=take, envvar=f"{environment}CONFIG"
    )
    return _keyword("config", None, Annotated[str | None, option])


def _check_environment(kinds: Mapping[str, Any], prefix: str) -> None:
    """Refuse what is no value of a flag; a name that nearly is one is told of: others may have names of their own."""
    for name, text in os.environ.items():
        flag = name.removeprefix(prefix).lower()
        if not text or not name.startswith(prefix) or flag in OTHER_VARIABLES:
            continue
        if flag not in kinds:
            if near := difflib.get_close_matches(flag, kinds, 1, cutoff=0.8):
                typer.echo(f"{name} is set and means nothing; did you mean {prefix}{near[0].upper()}?", err=True)
        elif kinds[flag] in (bool, int, float) and not _reads(kinds[flag], text):
            raise InputError(f"{name} is {text!r}; expected {_EXPECTED[kinds[flag]]}")


def _reads(kind: Any, text: str) -> bool:
    if kind is bool:
        return text.lower() in ("1", "0", "true", "false", "t", "f", "yes", "no", "y", "n", "on", "off")
    try:
        kind(text)
    except ValueError:
        return False
    return True


def _of_file(path: str, name: str, kind: Any, value: Any) -> Any:
    """A value of a TOML file as the command line would give it."""
    inner = next((part for part in get_args(kind) if part is not type(None)), kind)
    if get_origin(kind) is list:
        fits, wanted = (
            isinstance(value, list) and all(isinstance(part, str) for part in value),
            'a list: ["...", "..."]',
        )
    elif inner is str:  # numbers and truth values are words as well: kv_budget = 64, compile = false
        fits, wanted = isinstance(value, str | int | float), "a text in quotes"
        value = str(value) if fits else value
    else:
        taken = (int, float) if inner is float else inner
        fits, wanted = isinstance(value, taken) and isinstance(value, bool) == (inner is bool), _FILE_EXPECTED[inner]
    if not fits:
        raise InputError(f"{path!r} sets {name} = {value!r:.80}; expected {wanted}")
    return value


def _parameter(
    group: type[Any], field: dataclasses.Field[Any], default: Any, environment: str | None
) -> inspect.Parameter:
    kind, _ = _KINDS[str(field.type)]
    text = flag_help(group)[field.name]
    if default is dataclasses.MISSING:
        default = inspect.Parameter.empty
    elif isinstance(default, tuple | list) or str(field.type).startswith(("Sequence", "Mapping", "tuple")):
        default = list(default or ())
    if field.metadata.get("argument"):
        return _keyword(
            field.name, default, Annotated[kind, typer.Argument(help=text, metavar=field.metadata["argument"])]
        )
    flag = "--" + field.name.replace("_", "-")
    # What is off by default needs no flag that says so.
    names = (f"{flag}/--no-{flag[2:]}",) if "bool" in str(field.type) and default is not False else (flag,)
    option = typer.Option(
        *names,
        help=text,
        metavar=_METAVARS.get(str(field.type)),
        envvar=None if environment is None else environment + field.name.upper(),
        show_envvar=False,
        show_default=default not in (None, []) and default is not False,
    )
    return _keyword(field.name, default, Annotated[kind, option])


def _refuse_flags(context: typer.Context, given: Mapping[str, Any]) -> None:
    """A flag before the name of a command would be ignored."""
    for name in given:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise InputError(
                f"--{name.replace('_', '-')} stands before {context.invoked_subcommand!r}, which would ignore it; "
                "flags go after the command they belong to"
            )


def _keyword(name: str, default: Any, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _build(group: type[Any], given: Mapping[str, Any]) -> Any:
    return group(**{field.name: _KINDS[str(field.type)][1](given[field.name]) for field in _flags(group)})


def _truth(word: str) -> bool:
    if word not in ("on", "off", "true", "false"):
        raise ValueError(word)
    return word in ("on", "true")


def _number_or_word(text: str) -> int | str:
    return int(text) if re.fullmatch(r"[+-]?\d+", text) else text


def _compile(text: str) -> bool | str:
    words: dict[str, bool | str] = {"auto": "auto", "true": True, "false": False}
    if text.lower() not in words:
        raise InputError(f"compile is {text!r}; it is auto, true or false")
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
# value. Acceptance stays a plain word: the dataclass refuses unknown ones in its own words.
_KINDS: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "str": (str, _same),
    "int": (int, _same),
    "float": (float, _same),
    "bool": (bool, _same),
    "str | None": (str | None, _same),
    "int | None": (int | None, _same),
    "float | None": (float | None, _same),
    "bool | None": (bool | None, _same),
    "int | str": (str, _number_or_word),
    "Acceptance": (str, _same),
    "Shape": (str, _shape),
    "Sequence[str]": (list[str], tuple),
    "Sequence[int]": (list[int], tuple),
    "Sequence[str | Sequence[int]]": (list[str], tuple),
    "tuple[str, ...]": (list[str], tuple),
    "tuple[int, ...]": (list[int], tuple),
    "tuple[float, ...]": (list[float], tuple),
    "Mapping[int, float] | None": (list[str], _biases),
}
_EXPECTED = {bool: "on or off", int: "a whole number", float: "a number", str: "words, those with spaces in quotes"}
_FILE_EXPECTED = _EXPECTED | {bool: "true or false"}
_METAVARS = {"int | str": "N|WORD", "Mapping[int, float] | None": "TOKEN_ID=BIAS"}

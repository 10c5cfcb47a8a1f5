"""The models of a server, from flags and a file. Read before heavy imports."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sakiyomi.core.draft_specs import model_spec, split_spec
from sakiyomi.core.embedded import folder_of
from sakiyomi.core.errors import InputError, LoadError, SakiyomiError
from sakiyomi.core.memory import available_bytes, parse_bytes, readable
from sakiyomi.core.preflight import check_settings
from sakiyomi.engine.config import LLMConfig

BARE = 450 << 20  # bytes of a process with the libraries and no model
SHARE = 0.8  # of the memory that is available at the start, by default
SHRINKS = {"int8": 0.55, "int4": 0.32}  # of weights of 16 bits
WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth")


@dataclass(frozen=True)
class ModelOptions:
    """The models of a server.

    Attributes:
        target: embedded name (tales), folder in Hugging Face format, GGUF file, or hub id. Given more than once, the
            server has several models, each by the name of its folder: the first is loaded at the start, the others when
            requests name them.
        models: TOML file with a table for each model. The name of the table is the model's; its lines are settings such
            as target, draft, quantize and cache. Flags apply to models that do not set them.
        model_memory: memory for all models together (12GiB); by default four fifths of the memory available at the
            start. A model that does not fit replaces the least recently used one.
    """

    target: tuple[str, ...] = ("tales",)
    models: str | None = None
    model_memory: str | None = None


def room_of(options: ModelOptions, models: Mapping[str, LLMConfig]) -> int:
    """Bytes for all models together.

    Raises:
        InputError: a model does not fit, even alone.
    """
    if options.model_memory is not None:
        room = parse_bytes(options.model_memory, "model_memory")
    else:
        room = int(SHARE * available_bytes())
    for name, model in models.items():
        if (needed := likely_bytes(model)) > room:
            raise InputError(
                f"model {name!r} takes about {readable(needed)}, and models may take {readable(room)} together "
                "(model_memory); quantize it, or allow more"
            )
    return room


def read_models(options: ModelOptions, flags: LLMConfig) -> dict[str, LLMConfig]:
    """Settings of each model, by its name; the first one is loaded at the start.

    Args:
        options: which models.
        flags: defaults of all models.

    Raises:
        InputError: a setting is invalid, or a name occurs twice.
        LoadError: the file, or a model, does not exist.
    """
    if options.models is None:
        found = [(Path(target).name, dataclasses.replace(flags, target=target)) for target in options.target]
    else:
        if options.target != ("tales",):
            raise InputError("models names a file with every model; leave target out, or write it there")
        found = [*_tables(options.models, flags)]
    models = dict(found)
    if len(models) < len(found):
        twice = next(name for name, _ in found if [other for other, _ in found].count(name) > 1)
        raise InputError(f"two models are called {twice!r}; give them names of their own in a file (--models)")
    for name, model in models.items():
        try:
            check_settings(vars(model))
        except SakiyomiError as error:
            where = f"model {name!r}: " if options.models is not None else ""
            raise type(error)(f"{where}{error.message}") from None
    return models


def _tables(path: str, flags: LLMConfig) -> Sequence[tuple[str, LLMConfig]]:
    try:
        tables = tomllib.loads(Path(path).expanduser().read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LoadError(f"the models {path!r} cannot be read ({error}); expected a TOML file") from None
    known = {field.name: str(field.type) for field in dataclasses.fields(LLMConfig)}
    if not tables:
        raise InputError(f"{path!r} names no model; expected a table for each: [name], then target = ...")
    found = []
    for name, values in tables.items():
        if not isinstance(values, dict) or not isinstance(values.get("target"), str):
            raise InputError(
                f"{path!r}: {name!r} is no model; expected a table for each model: [name], and below it target = ..."
            )
        for key, value in values.items():
            if key not in known:
                raise InputError(f"{path!r} sets {key!r} of model {name!r}; known settings: {', '.join(known)}")
            kinds = [part for part in known[key].split(" | ") if part != "None"]
            if type(value).__name__ not in kinds:
                raise InputError(f"{path!r} sets {key} = {value!r} of model {name!r}; expected {' or '.join(kinds)}")
        found.append((name, dataclasses.replace(flags, **values)))
    return found


def likely_bytes(model: LLMConfig) -> int:
    """Estimate of a model's memory from its files: weights and a process, in bytes. A hub id counts as 0."""
    drafts = [part.partition(":") for part in split_spec(model.draft)]
    files = _file_bytes(model.target) * SHRINKS.get(model.quantize or "", 1.0)
    return BARE + int(files + sum(_file_bytes(model_spec(rest).name) for _, _, rest in drafts if rest))


def _file_bytes(name: str) -> int:
    path = folder_of(name)
    if path.is_file():
        return path.stat().st_size
    for pattern in WEIGHTS if path.is_dir() else ():
        if sizes := [file.stat().st_size for file in path.glob(pattern)]:
            return sum(sizes)
    return 0

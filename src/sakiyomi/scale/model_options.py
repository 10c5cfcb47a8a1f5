"""Which models a server has, as flags and a file say it; read before anything heavy is imported."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sakiyomi.core.errors import InputError, LoadError, SakiyomiError
from sakiyomi.core.memory import parse_bytes
from sakiyomi.core.preflight import check_settings
from sakiyomi.engine.config import LLMConfig

__all__ = ["ModelOptions", "memory_of", "read_models"]


@dataclass(frozen=True)
class ModelOptions:
    """Which models a server has.

    Attributes:
        target: embedded name (tales), folder in Hugging Face format, GGUF file, or hub id. Given more than once, the
            server has several models, each by the name of its folder: the first is loaded at once, the others when
            requests name them.
        models: TOML file with one table for each model. The table's name is the model's, and its lines are settings
            such as target, draft, quantize and cache; flags are those of all models that do not set them.
        model_memory: memory that models may take together (12GiB); by default four fifths of what is available at the
            start. One that does not fit beside the others takes the place of the one that was used longest ago.
    """

    target: tuple[str, ...] = ("tales",)
    models: str | None = None
    model_memory: str | None = None


def memory_of(options: ModelOptions) -> int | None:
    """Bytes that models may take together, if somebody said so."""
    return None if options.model_memory is None else parse_bytes(options.model_memory, "model_memory")


def read_models(options: ModelOptions, flags: LLMConfig) -> dict[str, LLMConfig]:
    """What each model is made of, by its name; the first is loaded at once.

    Args:
        options: which models.
        flags: what all models have that say nothing else.

    Raises:
        InputError: a setting makes no sense, or a name is there twice.
        LoadError: the file, or a model, is not there.
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
                f"{path!r}: {name!r} is no model; expected a table with its target: [{name}], target = ..."
            )
        for key, value in values.items():
            if key not in known:
                raise InputError(f"{path!r} sets {key!r} of model {name!r}; known settings: {', '.join(known)}")
            kinds = [part for part in known[key].split(" | ") if part != "None"]
            if type(value).__name__ not in kinds:
                raise InputError(f"{path!r} sets {key} = {value!r} of model {name!r}; expected {' or '.join(kinds)}")
        found.append((name, dataclasses.replace(flags, **values)))
    return found

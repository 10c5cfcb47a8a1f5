"""Settings as dataclasses: a field is a flag of the same name, its range stands beside its default.

A field is a setting (`setting`) or a group of settings (`Group`). On the command line, in checkpoints and on cards the
settings of all groups stand side by side under their own names. The help of a flag is the field's line in the docstring
of its class; the docstring of a command may say more. Imports no torch.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Self, TypeVar, get_type_hints

from sakiyomi.core.errors import InputError


def setting(
    default: Any,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float = math.inf,
    choices: tuple[str, ...] = (),
    needed: str = "",
    resume: bool = False,
) -> Any:
    """A field with its range.

    Args:
        default: of the field.
        least, above, most: range of a number, or of each item of a tuple: at least, more than, at most.
        choices: the words that are allowed; none given: any.
        needed: what the setting is, where it has to be given.
        resume: `--resume` may change it, because the finished model does not depend on it.
    """
    metadata = {"least": least, "above": above, "most": most, "choices": choices, "needed": needed, "resume": resume}
    return dataclasses.field(default=default, metadata=metadata)


def require(condition: bool, name: str, value: object, expected: str) -> None:
    """Raise InputError that names the setting, its value and what was expected, unless the condition holds."""
    if not condition:
        raise InputError(f"{name} is {value!r}, expected {expected}; set {_flag(name)}")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _check(field: dataclasses.Field[Any], value: Any) -> None:
    bounds = field.metadata
    if choices := bounds["choices"]:
        require(value in choices, field.name, value, f"{', '.join(choices[:-1])} or {choices[-1]}")
    least, above, most = bounds["least"], bounds["above"], bounds["most"]
    if least is None and above is None:
        return
    expected = f"{least:g} or more" if least is not None else f"more than {above:g}"
    expected += f", at most {most:g}" if most < math.inf else ""
    for number in value if isinstance(value, tuple) else (value,):
        low = number >= least if least is not None else number > above
        require(low and number <= most and math.isfinite(number), field.name, value, expected)


@dataclass(frozen=True, kw_only=True)
class Group:
    """Settings that belong together.

    Raises:
        InputError: a value is outside its range; the message names the setting.
    """

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if not isinstance(field.default, Group):
                _check(field, getattr(self, field.name))


Kind = TypeVar("Kind", bound=Group)


@dataclass(frozen=True)
class Flag:
    """A setting as the command line shows it.

    Attributes:
        name: of the setting.
        kind: its type.
        default: of this command.
        group: class that has it.
        metadata: see `setting`.
    """

    name: str
    kind: Any
    default: Any
    group: type[Group]
    metadata: Any


@dataclass(frozen=True, kw_only=True)
class Settings(Group):
    """All settings of a command: its own, and groups, whose defaults it chooses.

    Raises:
        InputError: a setting that has to be given is missing.
    """

    def __post_init__(self) -> None:
        values = self.flat()
        missing = [flag for flag in self.flags() if flag.metadata["needed"] and not values[flag.name]]
        if missing:
            wanted = " and ".join(f"{_flag(flag.name)} ({flag.metadata['needed']})" for flag in missing)
            raise InputError(f"{' and '.join(flag.name for flag in missing)} not given; give {wanted}")
        super().__post_init__()

    @classmethod
    def flags(cls) -> list[Flag]:
        """All settings, those of a group in its place."""
        found = []
        for field in dataclasses.fields(cls):
            owner = field.default if isinstance(field.default, Group) else cls
            kind = type(owner) if isinstance(owner, Group) else owner
            hints = get_type_hints(kind)
            for own in dataclasses.fields(owner) if isinstance(owner, Group) else (field,):
                found.append(Flag(own.name, hints[own.name], getattr(owner, own.name), kind, own.metadata))
        return found

    @classmethod
    def of(cls, **values: Any) -> Self:
        """From settings side by side."""
        own: dict[str, Any] = {}
        for field in dataclasses.fields(cls):
            if isinstance(group := field.default, Group):
                names = {part.name for part in dataclasses.fields(group)} & values.keys()
                own[field.name] = dataclasses.replace(group, **{name: values.pop(name) for name in names})
        return cls(**own, **values)

    def flat(self) -> dict[str, Any]:
        """Settings side by side."""
        found: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            found |= dataclasses.asdict(value) if isinstance(value, Group) else {field.name: value}
        return found

    def group(self, kind: type[Kind]) -> Kind:
        """The one group of this kind."""
        (found,) = (value for value in vars(self).values() if isinstance(value, kind))
        return found

    def changed(self, **values: Any) -> Self:
        """The same with some settings replaced."""
        return self.of(**(self.flat() | values))

"""Settings as dataclasses: one flag a field, ranges beside their defaults, groups of what belongs together.

A field is a setting (`setting`) or a group of settings (`Group`). On the command line, in checkpoints and on cards the
settings of all groups stand side by side under their own names. Knows nothing of torch.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, ClassVar, Self, get_type_hints

from sakiyomi.core.errors import InputError
from sakiyomi.kernels.variants import multiplies_bf16

__all__ = [
    "Group",
    "LlamaSizes",
    "LoopConfig",
    "RunConfig",
    "Settings",
    "TextConfig",
    "check_sizes",
    "passes_on",
    "require",
    "setting",
]


def setting(
    default: Any,
    help: str,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float = math.inf,
    resume: bool = False,
) -> Any:
    """A setting with its range: at least `least`, or more than `above`, and at most `most`; for tuples each item.

    Args:
        default: of the field.
        help: of its flag.
        least, above, most: the range of a number.
        resume: whether `--resume` may change it, because the finished model does not depend on it.
    """
    bounds = {"least": least, "above": above, "most": most}
    return dataclasses.field(default=default, metadata={"help": help, "resume": resume} | bounds)


def check_sizes(hidden: int, heads: int, kv_heads: int) -> None:
    """Raise InputError unless the widths divide as Llama needs them."""
    require(hidden % heads == 0, "heads", heads, f"a divisor of hidden {hidden}")
    # The rotary embedding turns the two halves of a head against each other.
    require(hidden // heads % 2 == 0, "heads", heads, f"heads of an even width, not {hidden // heads}")
    require(heads % kv_heads == 0, "kv_heads", kv_heads, f"a divisor of heads {heads}")


def _check_range(field: dataclasses.Field[Any], value: Any) -> None:
    least, above, most = (field.metadata[name] for name in ("least", "above", "most"))
    if least is None and above is None:
        return
    expected = f"{least:g} or more" if least is not None else f"more than {above:g}"
    expected += f", at most {most:g}" if most < math.inf else ""
    for number in value if isinstance(value, tuple) else (value,):
        low = number >= least if least is not None else number > above
        require(low and number <= most and math.isfinite(number), field.name, value, expected)


def require(condition: bool, name: str, value: object, expected: str) -> None:
    """Raise InputError that names the setting, its value and what was expected, unless the condition holds."""
    if not condition:
        raise InputError(f"{name} is {value!r}, expected {expected}; set {_flag(name)}")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


@dataclass(frozen=True)
class Flag:
    """A setting as the command line shows it.

    Attributes:
        name: of the setting.
        kind: its type.
        default: of this command.
        help: one or two sentences.
        group: name of the class that has it.
        resume: whether `--resume` may change it.
    """

    name: str
    kind: Any
    default: Any
    help: str
    group: str
    resume: bool


@dataclass(frozen=True, kw_only=True)
class Group:
    """Settings that belong together.

    Raises:
        InputError: a value is outside its range; the message names the setting.
    """

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if not isinstance(field.default, Group):
                _check_range(field, getattr(self, field.name))


@dataclass(frozen=True, kw_only=True)
class Settings(Group):
    """All settings of a command: its own, and groups, whose defaults it chooses.

    Raises:
        InputError: a setting that has no default is not given.
    """

    REQUIRED: ClassVar[dict[str, str]] = {}
    """What has to be given, and what it is."""
    HELP: ClassVar[dict[str, str]] = {}
    """Help that says more about a setting of a group than the group does."""

    def __post_init__(self) -> None:
        values = self.flat()
        missing = [name for name in self.REQUIRED if not values[name]]
        if missing:
            wanted = " and ".join(f"{_flag(name)} ({self.REQUIRED[name]})" for name in missing)
            raise InputError(f"{' and '.join(missing)} not given; give {wanted}")
        super().__post_init__()

    @classmethod
    def flags(cls) -> list[Flag]:
        """All settings, those of a group in its place."""
        return [dataclasses.replace(flag, help=cls.HELP.get(flag.name, flag.help)) for flag in _flags(cls, cls)]

    @classmethod
    def of(cls, **values: Any) -> Self:
        """From settings side by side."""
        own: dict[str, Any] = {}
        for field in dataclasses.fields(cls):
            if isinstance(group := field.default, Group):
                names = {setting.name for setting in dataclasses.fields(group)}
                own[field.name] = dataclasses.replace(
                    group, **{name: values.pop(name) for name in names & values.keys()}
                )
        return cls(**own, **values)

    def flat(self) -> dict[str, Any]:
        """Settings side by side."""
        found: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            found |= dataclasses.asdict(value) if isinstance(value, Group) else {field.name: value}
        return found

    def changed(self, **values: Any) -> Self:
        """The same with some settings replaced."""
        return self.of(**(self.flat() | values))


def _flags(kind: type[Any], defaults: object) -> list[Flag]:
    """Those of a class; their defaults are attributes of the class itself, or of a group made of it."""
    hints, found = get_type_hints(kind), []
    for field in dataclasses.fields(kind):
        default = getattr(defaults, field.name)
        if isinstance(default, Group):
            found += _flags(type(default), default)
        else:
            said = field.metadata
            found.append(Flag(field.name, hints[field.name], default, said["help"], kind.__name__, said["resume"]))
    return found


@dataclass(frozen=True, kw_only=True)
class LoopConfig(Group):
    """What every training run shares: budget, schedule, checkpoints."""

    out: str = setting("", "Folder of the finished model; checkpoints and logs go below it.", resume=True)
    name: str = setting("", "Name of the model on its card; empty: the last part of OUT.", resume=True)
    valid: tuple[str, ...] = setting((), "Held-out file, NAME=FILE; losses are reported under the name. Repeatable.")
    minutes: float = setting(
        75.0, "Training time in minutes of wall clock; the learning rate reaches 0 at its end.", above=0
    )
    tokens: int = setting(
        0, "Training budget in tokens; above 0 it replaces `minutes` (reproducible on any machine).", least=0
    )
    decay_share: float = setting(
        0.4, "Last share of the budget in which the learning rate falls linearly to 0.", above=0, most=1
    )
    warmup_steps: int = setting(30, "Steps of linear warm-up.", least=0)
    finish_minutes: float = setting(
        15.0, "Length of the early decay asked for by SIGUSR1 or by the file OUT/finish.", above=0, resume=True
    )
    row_tokens: tuple[int, ...] = setting(
        (256, 256, 512, 1024), "Row lengths in tokens; step s uses the (s mod n)-th.", least=1
    )
    step_tokens: int = setting(8192, "Tokens of one optimizer step; a multiple of every row length.", least=1)
    clip: float = setting(1.0, "Largest norm of the gradient.", above=0)
    note: tuple[str, ...] = setting(
        (), "Line for the card, such as a data set with its licence. Repeatable.", resume=True
    )
    seed: int = setting(1, "Seed of the initial weights and of the order of the data.", least=0)
    save_minutes: float = setting(
        3.0, "Minutes of training between checkpoints; the last two are kept.", least=0, resume=True
    )
    eval_minutes: float = setting(5.0, "Minutes of training between held-out losses.", least=0, resume=True)
    log_seconds: float = setting(20.0, "Seconds between log lines if stderr is no terminal.", least=0, resume=True)
    compile: bool = setting(True, "Compile the layers with torch.compile where a C++ compiler exists.", resume=True)
    threads: int = setting(0, "CPU threads of each process; 0 takes them all.", least=0, resume=True)
    workers: int = setting(
        1,
        "Processes on this machine that share the rows of each step; the run is that of one. Under torchrun they are "
        "torchrun's.",
        least=1,
        resume=True,
    )
    resume: bool = setting(
        False, "Continue from the newest checkpoint below OUT, with the settings of its first part.", resume=True
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require(bool(self.row_tokens), "row_tokens", self.row_tokens, "at least one length")
        for length in self.row_tokens:
            require(self.step_tokens % length == 0, "step_tokens", self.step_tokens, f"a multiple of {length}")


@dataclass(frozen=True, kw_only=True)
class TextConfig(Group):
    """What a whole model that is trained on text reads, and how fast it learns."""

    text: tuple[str, ...] = setting(
        (), "Training file FILE@STABLE:DECAY: its share of the rows before and during the decay. Repeat for more files."
    )
    muon_lr: float = setting(
        0.02, "Peak learning rate of Muon (2-D matrices of the layers); 0: AdamW trains them, too.", least=0
    )
    adam_lr: float = setting(0.004, "Peak learning rate of AdamW (embeddings and norms).", least=0)
    weight_decay: float = setting(0.05, "Weight decay of the 2-D matrices of the layers.", least=0)
    precision: str = setting(
        "auto",
        "Precision of the passes, and of Muon's iterations: bf16, no (float32: several workers are then the run of one "
        "to the sixth digit), or auto: bf16 where the processor multiplies it, which is faster there and several times "
        "slower elsewhere.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.precision in ("auto", "bf16", "no"), "precision", self.precision, "auto, bf16 or no")

    @property
    def passes(self) -> str:
        """Precision of the passes on this machine: bf16 or no."""
        return passes_on("cpu", self.precision)


def passes_on(device: str, precision: str) -> str:
    """Precision of a run's passes as it is asked for; of "auto" what the device is fast in: bf16 or no.

    Args:
        device: its type, as torch calls it. All but processors multiply bf16.
        precision: of the settings.
    """
    if precision != "auto":
        return precision
    return "bf16" if device != "cpu" or multiplies_bf16() else "no"


@dataclass(frozen=True, kw_only=True)
class LlamaSizes(Group):
    """Sizes of a Llama."""

    hidden: int = setting(384, "Width of the hidden states.", least=1)
    layers: int = setting(12, "Layers of the finished model.", least=1)
    heads: int = setting(6, "Attention heads.", least=1)
    kv_heads: int = setting(2, "Key/value heads.", least=1)
    intermediate: int = setting(1024, "Width of the MLP.", least=1)
    rope_theta: float = setting(10000.0, "Base of the rotary embedding.", above=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sizes(self.hidden, self.heads, self.kv_heads)


@dataclass(frozen=True, kw_only=True)
class RunConfig(Settings):
    """All settings of a training run."""

    REQUIRED: ClassVar[dict[str, str]] = {"out": "a folder for the model"}

    loop: LoopConfig = LoopConfig()

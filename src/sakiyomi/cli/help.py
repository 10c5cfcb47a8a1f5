"""``--help`` in sections, basics first, with an example at its end; plain text, the same on a screen and in a pipe."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from typer.core import TyperCommand, TyperGroup

from sakiyomi.core.errors import InputError

BASICS = "Basics"
_BASIC = frozenset(
    {
        "alpha", "api_key", "c", "count", "draft", "dtype", "file", "gamma", "host", "init", "json", "max_new_tokens",
        "minutes", "out", "port", "prompts", "quantize", "resume", "rows", "seed", "system", "target", "temperature",
        "text", "valid",
    }
)  # fmt: skip
"""Settings that a first try of any command may need."""
_PANELS = {
    "LLMConfig": "Model and machine",
    "SamplingParams": "Sampling and speculation",
    "TranscribeOptions": "Transcription",
    "TranscriptionParams": "Transcription",
    "ServerConfig": "Server",
    "ModelOptions": "Server",
    "AuditConfig": "Checks",
    "LoopOptions": "Budget, schedule, checkpoints",
    "TextOptions": "Learning from text",
    "SampleOptions": "What the target writes to learn from",
}
_EXAMPLE = "Example:"
_MOVED = {
    "bench inflate": "python benchmarks/inflate.py OUT_FOLDER",
    "models --markdown": "python tests/causal_models.py",
    "plan cluster": "python benchmarks/cluster.py",
    "train retriever": "python recipes/retriever.py --out OUT",
}
"""Commands and options that left the package for the source repository, and the script that replaces each."""


def panel(group: str, name: str) -> str:
    """The section of a setting, by the name of the dataclass that holds it."""
    return BASICS if name in _BASIC else _PANELS.get(group, "Sizes" if group.endswith("Sizes") else "More")


def parts(run: Callable[..., Any]) -> tuple[str, str | None]:
    """The help in a docstring, and the example at its end, if there is one."""
    text, mark, example = (inspect.getdoc(run) or "").partition(_EXAMPLE)
    return text.strip(), f"{_EXAMPLE} {' '.join(example.split())}" if mark else None


class _Sectioned:
    """Writes options below the names of their sections; refuses what left the package, and says where it is."""

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        """See click."""
        for word in (*args[:1], *(word for word in args if word.startswith("-"))):
            if (script := _MOVED.get(f"{ctx.info_name} {word}")) is not None:
                raise InputError(f"{ctx.info_name} {word} is now in the source repository: {script}")
        return super().parse_args(ctx, args)  # type: ignore[misc]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """See click. Basics come first, then sections in the order of their first option."""
        sections: dict[str, list[tuple[str, str]]] = {BASICS: []}
        arguments = []
        for parameter in self.get_params(ctx):  # type: ignore[attr-defined]
            if (record := parameter.get_help_record(ctx)) is None:
                continue
            if parameter.param_type_name == "argument":
                arguments.append(record)
            else:
                sections.setdefault(getattr(parameter, "rich_help_panel", None) or "Other", []).append(record)
        if arguments:
            with formatter.section("Arguments"):
                formatter.write_dl(arguments)
        for name, records in sections.items():
            if records:
                with formatter.section(name):
                    formatter.write_dl(records)
        if isinstance(self, TyperGroup):
            self.format_commands(ctx, formatter)


class Sections(_Sectioned, TyperCommand):
    """A command."""


class SectionsGroup(_Sectioned, TyperGroup):
    """A command with commands of its own."""

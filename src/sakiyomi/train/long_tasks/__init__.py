"""Long-context tasks that need no download: made at any length, at any depth, with a score between 0 and 1.

Each task hides what its question needs in a text of the asked number of tokens, and says where (``Example.spans``).
The kinds follow those of InfiniteBench (arXiv 2402.13718) and RULER (arXiv 2404.06654); wording and lists are our own.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from sakiyomi.core.errors import InputError
from sakiyomi.train.long_tasks.example import Example, Task, hits
from sakiyomi.train.long_tasks.filler import NOISE, Filler, Noise, Texts, read_filler
from sakiyomi.train.long_tasks.haystack import DensePairs, MultiKey, Needle, Pairs
from sakiyomi.train.long_tasks.variables import Variables
from sakiyomi.train.long_tasks.words import CommonWords

__all__ = [
    "NOISE",
    "TASKS",
    "CommonWords",
    "DensePairs",
    "Example",
    "Filler",
    "MultiKey",
    "Needle",
    "Noise",
    "Pairs",
    "Task",
    "Texts",
    "Variables",
    "hits",
    "named",
    "read_filler",
]

TASKS: dict[str, Task] = {
    task.name: task
    for task in (Needle("passkey"), Needle("number"), Pairs(), DensePairs(), MultiKey(), Variables(), CommonWords())
}
"""The tasks by name, with the settings of their classes; ``dataclasses.replace`` makes others."""


def named(name: str, filler: Filler | None = None) -> Task:
    """A task by its name.

    Args:
        name: of it.
        filler: what it hides its facts in; None: its own.

    Raises:
        InputError: there is none, or it hides nothing.
    """
    if name not in TASKS:
        raise InputError(f"there is no task {name!r}; tasks are {', '.join(TASKS)}")
    task: Any = TASKS[name]
    if filler is None:
        return TASKS[name]
    if not hasattr(task, "filler"):
        raise InputError(f"task {name!r} has no text around what it asks for; leave filler out")
    found: Task = dataclasses.replace(task, filler=filler)
    return found

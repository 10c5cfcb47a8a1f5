"""Long-context tasks that need no download: made at any length, at any depth, with a score between 0 and 1.

Each task hides what its question needs in a text of the asked number of tokens, and says where (``Example.spans``).
The kinds follow those of InfiniteBench (arXiv 2402.13718) and RULER (arXiv 2404.06654); wording and lists are our own.
"""

from __future__ import annotations

from dataclasses import replace

from sakiyomi.core.errors import InputError
from sakiyomi.train.long_tasks.example import NOISE, Example, Filler, Noise, Task, Texts, hits, read_filler
from sakiyomi.train.long_tasks.made import braced, common_words, dense_pairs, locker, one_value, several, variables

__all__ = ["NOISE", "TASKS", "Example", "Filler", "Noise", "Task", "Texts", "hits", "named", "read_filler"]

TASKS = {
    task.name: task
    for task in (
        Task("passkey", one_value, answer_tokens=8, filler=NOISE),
        Task("number", one_value, answer_tokens=14, filler=NOISE),
        Task("kv", several(braced), answer_tokens=7, filler=NOISE),
        Task("kv-dense", dense_pairs, answer_tokens=7, least=1),
        Task("multikey", several(locker), answer_tokens=7, filler=NOISE),
        Task("variables", variables, answer_tokens=29, filler=NOISE),
        Task("words", common_words, answer_tokens=100),
    )
}
"""The tasks by name."""


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
    task = TASKS[name]
    if filler is None:
        return task
    if task.filler is None:
        raise InputError(f"task {name!r} has no text around what it asks for; leave filler out")
    return replace(task, filler=filler)

"""The facts that tasks hide, with the words around them."""

from __future__ import annotations

from sakiyomi.train.long_tasks.example import Fact

__all__ = ["NEEDLES", "locker", "needle", "pair", "question"]

NEEDLES = {"passkey": "pass key", "number": "long number"}
"""What is hidden, by task."""


def needle(task: str, value: str) -> Fact:
    """The one value of a text; it stands there twice."""
    what = NEEDLES[task]
    front = f"For the record, the {what} is "
    return Fact(
        text=f"{front}{value}; that is {value} and nothing else.",
        asked=f"Question: Which {what} does the text name?",
        cue=f"Answer: The {what} is",
        answer=value,
        span=(len(front), len(front) + len(value)),
    )


def pair(key: str, value: str) -> Fact:
    """A pair as JSON has it, without braces."""
    return Fact(
        text=f'"{key}": "{value}"',
        asked=f'Question: Which value belongs to the key "{key}"?',
        cue=f'Answer: "{key}": "',
        answer=value,
        span=(len(key) + 5, len(key) + 5 + len(value)),
    )


def locker(key: str, value: str) -> Fact:
    """One of several numbers, each with its owner."""
    front = f"The locker of the {key} opens with "
    return Fact(
        text=f"{front}{value}.",
        asked=f"Question: What opens the locker of the {key}?",
        cue=f"Answer: The locker of the {key} opens with",
        answer=value,
        span=(len(front), len(front) + len(value)),
    )


def question(asked: str, cue: str) -> str:
    """What follows the context."""
    return f"\n\n{asked}\n{cue}"

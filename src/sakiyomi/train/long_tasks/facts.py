"""The facts that tasks hide, with the words around them."""

from __future__ import annotations

from sakiyomi.train.long_tasks.example import Fact

__all__ = ["NEEDLES", "locker", "needle", "pair", "question"]

NEEDLES = {"passkey": "pass key", "number": "long number"}
"""What is hidden, by task."""


def needle(task: str, value: str) -> Fact:
    """The one value of a text; it stands there twice."""
    what = NEEDLES[task]
    return Fact(
        f"For the record, the {what} is ",
        value,
        f"; that is {value} and nothing else.",
        asked=f"Question: Which {what} does the text name?",
        cue=f"Answer: The {what} is",
    )


def pair(key: str, value: str) -> Fact:
    """A pair as JSON has it, without braces."""
    asked = f'Question: Which value belongs to the key "{key}"?'
    return Fact(f'"{key}": "', value, '"', asked, cue=f'Answer: "{key}": "')


def locker(key: str, value: str) -> Fact:
    """One of several numbers, each with its owner."""
    opens = f"The locker of the {key} opens with"
    return Fact(f"{opens} ", value, ".", f"Question: What opens the locker of the {key}?", cue=f"Answer: {opens}")


def question(asked: str, cue: str) -> str:
    """What follows the context."""
    return f"\n\n{asked}\n{cue}"

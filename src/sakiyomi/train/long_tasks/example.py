"""What a task gives: a text, a question about it, its answers, and where in the text they stand."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sakiyomi.core.errors import InputError
from sakiyomi.train.long_tasks.filler import Filler

TRIES = 12
"""Texts that are encoded at most while the length is sought; the gap shrinks to a piece or two in about five."""


@dataclass(frozen=True)
class Example:
    """A question about a long text.

    Attributes:
        task: name of its task.
        context: the long text.
        question: what follows the text, ending where the answer begins.
        answers: what the answer must hold, all of them.
        spans: (begin, end) in characters of the context: what the answers need.
        asked: the question without the beginning of an answer.
        others: further questions that the text answers, each as ``question`` has it and with its answer.
    """

    task: str
    context: str
    question: str
    answers: tuple[str, ...]
    spans: tuple[tuple[int, int], ...]
    asked: str
    others: tuple[tuple[str, str], ...] = ()

    def prompt(self, query_first: bool = False) -> str:
        """Text for the model.

        Args:
            query_first: the question also stands in front of the text, for methods that decide while they read.
        """
        return (f"{self.asked}\n\n" if query_first else "") + self.context + self.question


@dataclass(frozen=True)
class Task:
    """A kind of question.

    Attributes:
        name: as in ``TASKS``.
        builder: of task, rng and depth (arguments of ``make``) makes what makes an example with so many units of text.
        answer_tokens: new tokens that an answer may take, enough where every character is a token.
        filler: what the facts are hidden in; None: the text has none.
        least: fewest units (filler sentences, pairs, words) of a text.
    """

    name: str
    builder: Callable[[Task, np.random.Generator, float | None], Callable[[int], Example]]
    answer_tokens: int
    filler: Filler | None = None
    least: int = 0

    def make(self, rng: np.random.Generator, length: int, tokenizer: Any, depth: float | None = None) -> Example:
        """An example, which depends on the arguments alone.

        Args:
            rng: source of all that is random.
            length: most tokens of ``prompt(query_first=True)``, special tokens included; the plain prompt is shorter
                by its question.
            tokenizer: of the model, as transformers has it.
            depth: where in the text what is asked for stands, 0 the beginning, 1 the end; None: anywhere.

        Raises:
            InputError: the length leaves no room for the task, or the depth is outside 0..1.
        """
        if depth is not None and not 0 <= depth <= 1:
            raise InputError(f"depth is {depth!r}, expected a number from 0 (the beginning) to 1 (the end), or None")
        return fitted(self.builder(self, rng, depth), self.least, length, tokenizer)

    def score(self, text: str, example: Example) -> float:
        """How right an answer is, 0..1."""
        return hits(text, example.answers)


@dataclass(frozen=True)
class Fact:
    """Something to be found, and the question for it.

    Attributes:
        front, back: what stands before and behind the answer in the context.
        answer: without its beginning, and without a space in front.
        asked: the question.
        cue: the beginning of the answer.
    """

    front: str
    answer: str
    back: str
    asked: str = ""
    cue: str = ""

    @property
    def text(self) -> str:
        """As it stands in the context."""
        return self.front + self.answer + self.back


def hits(text: str, answers: Sequence[str]) -> float:
    """Share of the answers that stand in a text as whole words: 4821 is not found in 48215."""
    found = [re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", text) is not None for answer in answers]
    return sum(found) / len(found)


def tokens_of(text: str, tokenizer: Any) -> int:
    """Tokens of a prompt as the model gets it, special tokens included."""
    # verbose=False: a text longer than the tokenizer's own limit is what is wanted here, no reason for a warning
    return len(tokenizer(text, verbose=False)["input_ids"])


def fitted(build: Callable[[int], Example], least: int, length: int, tokenizer: Any) -> Example:
    """The longest example of a family whose query-first prompt has at most `length` tokens.

    Args:
        build: makes the example with so many units (filler sentences, pairs, words), each about alike in tokens.
        least: fewest units.
        length: most tokens.
        tokenizer: of the model.

    Raises:
        InputError: the smallest example is longer.
    """
    low, best = least, build(least)
    tokens = smallest = tokens_of(best.prompt(query_first=True), tokenizer)
    if tokens > length:
        raise InputError(
            f"length is {length} tokens, and the shortest text for task {best.task!r} has {tokens}; give {tokens} or "
            "more"
        )
    per_unit, high = 16.0, None
    for _ in range(TRIES):
        step = max(1, int((length - tokens) / per_unit))
        middle = low + step if high is None else min(low + step, high - 1)
        if middle == low:
            break
        example = build(middle)
        found = tokens_of(example.prompt(query_first=True), tokenizer)
        if found > length:
            high = middle
        else:
            low, best, tokens = middle, example, found
        per_unit = max((found - smallest) / (middle - least), 1e-6)
    return best

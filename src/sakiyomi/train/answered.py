"""Prompts with their answers: from files, and from tasks that are made during the run."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sakiyomi.core.errors import InputError
from sakiyomi.train.chats import encoded, written_chat
from sakiyomi.train.counted import marked, token_ids
from sakiyomi.train.data import Ids, Record, TextSpec, excerpts, read_records
from sakiyomi.train.long_tasks import Filler, named
from sakiyomi.train.rows import Mixture, Shuffled, check_unchanged

SHORTEST = 16
"""Tokens of a prompt below which there is nothing to choose from."""
CHARACTERS = 4  # of a token, about: texts are cut into excerpts before they are encoded
PARTS = 8  # of an excerpt, the last of which is the answer
JOINT = "\n\n"  # between a question in front and the prompt
NOTHING: Ids = np.zeros(0, dtype=np.int64)


FURTHER = 3
"""One in so many tokens of a row is for further questions about its text."""


@dataclass(frozen=True)
class Answered:
    """A prompt and its answer as token ids.

    Attributes:
        prompt: of the model, special tokens included.
        answer: what follows.
        front: the question, to be put in front of the prompt; empty: it stands there already, or is not wanted.
    """

    prompt: Ids
    answer: Ids
    front: Ids

    def row(self, length: int, answer_tokens: int, first: int | None) -> tuple[Ids, int]:
        """All as one row of at most `length` tokens, and how many of them are the prompt's.

        Args:
            length: of the row. Of a longer prompt the middle is left out: questions stand at the ends.
            answer_tokens: most tokens of the answer, which takes no more than half of the row.
            first: the token that every prompt begins with, before the front; None: there is none.
        """
        answer = self.answer[: min(answer_tokens, length // 2)]
        front = self.front[: length // 4]
        begin = self.prompt[:1] if first is not None and len(self.prompt) and self.prompt[0] == first else NOTHING
        prompt = self.prompt[len(begin) :]
        room = length - len(begin) - len(front) - len(answer)
        if len(prompt) > room:
            prompt = np.concatenate([prompt[: room // 2], prompt[len(prompt) - (room - room // 2) :]])
        before = np.concatenate([begin, front, prompt])
        return np.concatenate([before, answer]).astype(np.int64), len(before)


def read_answered(
    path: Path, tokenizer: Any, vocab: int, *, query_tokens: int = 0, length: int = 1024, most: int = 0, seed: int = 0
) -> tuple[list[Answered], dict[str, int]]:
    """Prompts with answers from a file; `data.read_records` has the forms.

    Of a chat the last reply is the answer. A text is cut into excerpts of about a row, of which the last part is the
    answer: the text continues.

    Args:
        path: a .jsonl, .json or .txt file (.gz allowed).
        tokenizer: of the target.
        vocab: tokens that it knows.
        query_tokens: with more than 0 the question is wanted in front: the record's own, or so many last tokens.
        length: tokens of a row, for texts.
        most: of the records that are kept, drawn with the seed; 0: all.
        seed: of the choice.

    Returns:
        The prompts with answers, and how many records were passed over, by reason.

    Raises:
        LoadError: see `data.read_records`.
        InputError: no record has an answer, or every prompt is too short.
    """
    kept: list[Record] = []
    passed = {"no answer": 0, "too short": 0}
    rng, seen = np.random.default_rng((seed, 7)), 0
    for record in read_records(path, answered=True):
        found = _with_answers(record, length)
        passed["no answer"] += not found
        for one in found:
            seen += 1
            if not most or len(kept) < most:
                kept.append(one)
            elif (place := int(rng.integers(seen))) < most:  # each is kept with the same chance, and memory is bounded
                kept[place] = one
    if not kept:
        raise InputError(
            f"{path} has {passed['no answer']} records without an answer and none with one; expected instruction and "
            "output, prompt and answer, or chats that end with a reply"
        )
    made = [_encoded(one, tokenizer, vocab, query_tokens) for one in kept]
    long = [one for one in made if len(one.prompt) >= SHORTEST and len(one.answer)]
    passed["too short"] = len(made) - len(long)
    if not long:
        longest = max(len(one.prompt) for one in made)
        raise InputError(
            f"{path}: the longest of {len(made)} prompts has {longest} tokens, and heads learn from {SHORTEST} or "
            "more, followed by an answer; give longer ones"
        )
    return long, passed


def _with_answers(record: Record, length: int) -> list[Record]:
    """The record, a text in parts, a chat up to its last reply; none: it has no answer."""
    if record.messages is not None:
        last = max((i for i, (role, text) in enumerate(record.messages) if role == "assistant" and text), default=0)
        return [dataclasses.replace(record, messages=record.messages[: last + 1])] if last else []
    if record.tokens is not None:
        return [record] if 0 < record.asked < len(record.tokens) else []
    if record.answer is not None:
        return [record] if record.answer.strip() else []
    parts = excerpts(record.text, CHARACTERS * length)
    return [dataclasses.replace(record, text=part) for part in parts]


def _encoded(one: Record, tokenizer: Any, vocab: int, query_tokens: int) -> Answered:
    named = bool(query_tokens and one.question)
    if one.tokens is not None:
        ids = token_ids(marked(one, vocab))
        prompt, answer = ids[: one.asked], ids[one.asked :]
    elif one.messages is not None:
        before, after = written_chat(tokenizer, one.messages[:-1], asking=True), written_chat(tokenizer, one.messages)
        prompt = encoded(tokenizer, before, special=not getattr(tokenizer, "chat_template", None))
        # A template may write a message differently when it is answered: the answer is then taken as it is.
        answer = encoded(tokenizer, after[len(before) :] if after.startswith(before) else one.messages[-1][1])
    else:
        prompt = encoded(tokenizer, f"{one.question}{JOINT}{one.text}" if named else one.text, special=True)
        count = len(prompt) - len(prompt) // PARTS
        prompt, answer = (
            (prompt[:count], prompt[count:]) if one.answer is None else (prompt, encoded(tokenizer, one.answer))
        )
    return Answered(prompt, answer, prompt[-query_tokens:] if query_tokens and not named else NOTHING)


# ---------------------------------------------------------------- tasks


class TaskRows:
    """Questions of one of ``sakiyomi.train.long_tasks``.

    Args:
        name: of the task.
        tokenizer: of the target.
        query_aware: the question also stands in front.
        marked: tokens of further questions, which cannot be predicted, are given as ~id.
        filler: what facts are hidden in; None: the task's own.

    Raises:
        InputError: no task is called so, or it hides nothing.
    """

    def __init__(
        self, name: str, tokenizer: Any, query_aware: bool, *, marked: bool = False, filler: Filler | None = None
    ) -> None:
        self._task, self._tokenizer, self._query_aware = named(name, filler), tokenizer, query_aware
        self._marked = marked

    def make(self, rng: np.random.Generator, length: int) -> Answered:
        """A question whose prompt and answer have `length` tokens at most.

        Raises:
            InputError: the task needs more.
        """
        further = 0 if self._query_aware else length // FURTHER
        example = self._task.make(rng, length - self._task.answer_tokens - further, self._tokenizer)
        prompt = encoded(self._tokenizer, example.prompt(query_first=self._query_aware), special=True)
        answer = encoded(self._tokenizer, _behind(example.question, ", ".join(example.answers)))
        if further:
            # Any part of a text may be asked for: with one question a row, most of it would be labelled as unused.
            for question, value in example.others:
                more = encoded(self._tokenizer, question + _behind(question, value))
                if self._marked:
                    asked = len(more) - len(encoded(self._tokenizer, _behind(question, value)))
                    more = np.concatenate([~more[:asked], more[asked:]])
                if len(prompt) + len(answer) + len(more) > length:
                    break
                answer = np.concatenate([answer, more])
        return Answered(prompt, answer, NOTHING)


def _behind(question: str, answer: str) -> str:
    """An answer that continues the question, inside a quotation or after a word, and what closes it.

    The row that closes it looks at what stood after the value: without that an answer does not end where it should.
    """
    return answer + '"' if question.endswith('"') else " " * question[-1].isalnum() + answer + "."


# ---------------------------------------------------------------- batches


class Questions(Mixture):
    """Rows of prompts with answers, drawn from files and tasks by share.

    A batch is a list of rows, each its token ids and how many of them are the prompt's.

    Args:
        files: of each what was read of it.
        tasks: makers of others.
        specs: shares of the files and then of the tasks.
        answer_tokens: most tokens of an answer.
        most: positions of the target.
        first: token that every prompt begins with; None: none.
        seed: of all choices.

    Attributes:
        tokens: of all rows so far.
    """

    def __init__(
        self,
        files: Sequence[Sequence[Answered]],
        tasks: Sequence[TaskRows],
        specs: Sequence[TextSpec],
        *,
        answer_tokens: int,
        most: int,
        first: int | None,
        seed: int,
    ) -> None:
        super().__init__([Shuffled(file, seed=seed, key=key) for key, file in enumerate(files)], specs, seed)
        self._files, self._tasks = files, tasks
        self._answer_tokens, self._most, self._first = answer_tokens, most, first
        self.tokens = 0

    def take(self, source: int, length: int, rng: np.random.Generator) -> tuple[Ids, int]:
        """See `Mixture`."""
        task = source - len(self.streams)
        one = self._tasks[task].make(rng, min(length, self._most)) if task >= 0 else self.streams[source].take(length)
        return self.row(one, length)

    def joined(self, rows: list[tuple[Ids, int]]) -> list[tuple[Ids, int]]:
        """See `Mixture`; rows differ in length and stay as they are."""
        self.tokens += sum(len(ids) for ids, _ in rows)
        return rows

    def row(self, one: Answered, length: int) -> tuple[Ids, int]:
        """One of at most `length` tokens, or the target's positions, and how many are the prompt's."""
        return one.row(min(length, self._most), self._answer_tokens, self._first)

    def state(self) -> dict[str, Any]:
        """How much was taken, and the sizes of all files."""
        taken = [rows.epoch * rows.size + rows.offset for rows in self.streams]
        return {"taken": taken, "sizes": self._sizes(), "tokens": self.tokens}

    def _sizes(self) -> list[int]:
        return [sum(len(one.prompt) + len(one.answer) for one in file) for file in self._files]

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from what `state` gave.

        Raises:
            LoadError: the files are not those of the checkpoint.
        """
        check_unchanged("tokens", self._sizes(), state["sizes"])
        for rows, taken in zip(self.streams, state["taken"], strict=True):
            rows.restore(divmod(taken, rows.size))
        self.tokens = int(state["tokens"])

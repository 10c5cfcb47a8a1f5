"""The prompts of a run: those that it learns from, and those that are held out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sakiyomi.core.errors import InputError
from sakiyomi.train.answered import Answered, Questions, TaskRows, joined, parse_tasks, read_answered
from sakiyomi.train.config import AnsweredConfig
from sakiyomi.train.data import Ids, check_shares, parse_text
from sakiyomi.train.evaluate import parse_valid
from sakiyomi.train.labels import vocabulary
from sakiyomi.train.preflight import check_run
from sakiyomi.train.report import Reporter

__all__ = ["Prompts", "check_prompts", "read_prompts"]

HELD_OUT = 1_000_003  # in the seeds of held-out tasks, so that no step of a run has them
Batch = dict[str, Ids]


@dataclass(frozen=True)
class Prompts:
    """What a run reads.

    Attributes:
        questions: to learn from.
        held_out: rows by file or task.
        files: names of the training files.
        tasks: names of the tasks.
        held_back: prompts of those that became held-out ones.
    """

    questions: Questions
    held_out: dict[str, Batch]
    files: list[str]
    tasks: list[str]
    held_back: int

    def epochs(self) -> dict[str, float]:
        """How often each file was read."""
        return self.questions.epochs(self.files)


def check_prompts(config: AnsweredConfig) -> None:
    """Refuse what can be found wrong before anything is loaded.

    Raises:
        InputError, LoadError: see `check_run`; or shares and names that are none.
    """
    check_shares("--data and --tasks", [*map(parse_text, config.data), *parse_tasks(config.tasks)])
    parse_valid(config.loop.valid)
    check_run(config, [])


def read_prompts(
    config: AnsweredConfig, target: Any, tokenizer: Any, reporter: Reporter, *, marked: bool = False
) -> Prompts:
    """Read files, and make held-out rows of all that is read or made.

    Args:
        config: of the run.
        target, tokenizer: whose tokens are read.
        reporter: is told what is passed over.
        marked: see `TaskRows`.

    Raises:
        InputError, LoadError: a file cannot be read or has too few prompts, or the rows are too short for a task.
    """
    files, tasks = [parse_text(spec) for spec in config.data], parse_tasks(config.tasks)
    valid = parse_valid(config.loop.valid)
    positions = int(getattr(target.config.get_text_config(), "max_position_embeddings", 0) or 1 << 30)
    longest = min(positions, max(config.loop.row_tokens))
    if longest < max(config.loop.row_tokens):
        reporter.note(f"the target has {positions} positions: prompts with their answers are at most so long")
    makers = {str(spec.path): TaskRows(str(spec.path), tokenizer, config.query_aware, marked=marked) for spec in tasks}

    def read(path: Path) -> list[Answered]:
        most = max(10 * config.eval_rows, config.eval_rows + _most_rows(config))  # of ten one may be held back
        query_tokens = config.query_tokens if config.query_aware else 0
        found, passed = read_answered(
            path,
            tokenizer,
            vocabulary(target),
            query_tokens=query_tokens,
            length=longest,
            most=most,
            seed=config.loop.seed,
        )
        for reason, count in passed.items():
            if count:
                reporter.note(f"{path}: {count} records were passed over: {reason}")
        return found

    given = {spec.path: read(spec.path) for spec in files}
    held = {name: read(path)[: config.eval_rows] for name, path in valid.items()}
    if not valid:
        held = {path.name: _hold_back(config, path, rows) for path, rows in given.items()}
    shares = [*files, *tasks]
    questions = Questions(
        list(given.values()),
        list(makers.values()),
        [spec.stable for spec in shares],
        [spec.decay for spec in shares],
        answer_tokens=config.answer_tokens,
        most=positions,
        first=tokenizer.bos_token_id,
        seed=config.loop.seed,
    )
    held_out = {
        name: joined([questions.row(one, max(config.loop.row_tokens)) for one in rows]) for name, rows in held.items()
    }
    held_out |= {name: _of_task(config, key, maker, questions) for key, (name, maker) in enumerate(makers.items())}
    held_back = 0 if valid else sum(map(len, held.values()))
    return Prompts(questions, held_out, [spec.path.name for spec in files], list(makers), held_back)


def _most_rows(config: AnsweredConfig) -> int:
    """Rows that a run of so many steps can use; a run by the clock is given a thousand steps a minute."""
    steps = config.loop.tokens // config.loop.step_tokens if config.loop.tokens else 1000 * config.loop.minutes
    return int(steps * (config.loop.step_tokens // min(config.loop.row_tokens)))


def _hold_back(config: AnsweredConfig, path: Path, rows: list[Answered]) -> list[Answered]:
    """Some of a file's prompts, which are no longer trained on.

    Raises:
        InputError: there are too few.
    """
    count = min(config.eval_rows, len(rows) // 10)
    if not count:
        raise InputError(
            f"{path} has {len(rows)} prompts with answers, of which a tenth is to be held back; give ten or more, or "
            "held-out data with --valid NAME=FILE"
        )
    chosen = set(np.random.default_rng((config.loop.seed, len(rows))).choice(len(rows), count, replace=False).tolist())
    held = [rows[index] for index in sorted(chosen)]
    rows[:] = [one for index, one in enumerate(rows) if index not in chosen]
    return held


def _of_task(config: AnsweredConfig, key: int, maker: TaskRows, questions: Questions) -> Batch:
    """Held-out rows of a task; they are made before training, so that a length that is too short is found."""
    length = max(config.loop.row_tokens)
    rngs = [np.random.default_rng((config.loop.seed, HELD_OUT, key, i)) for i in range(config.eval_rows)]
    return joined([questions.row(maker.make(rng, questions.length(length)), length) for rng in rngs])

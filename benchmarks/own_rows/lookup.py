"""Drafts from text alone against prompt lookup of transformers, on texts that repeat what stands in their prompt.

Three kinds of text. *stories*: what the target writes by itself behind the prompts; a small model says much twice. In
the other two the text is given, because the target could not write it: each pass is the target's own and costs what it
costs, and a logits processor, the same for everybody, makes the text's next token the likeliest. *summary*: every other
sentence of a passage in the prompt. *edit*: a source file of this package with one name changed throughout, behind
the file as it was.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.resources import files

from torch import Tensor

from own_rows.common import run_counted
from sakiyomi.core.dtypes import dtype_name
from sakiyomi.core.params import SamplingParams
from sakiyomi.core.prompts import STORIES
from sakiyomi.engine.llm import LLM
from sakiyomi.engine.plain import EngineView
from sakiyomi.evaluation.bench.frame import PairRow, Race, Races, Run, declared, generated
from sakiyomi.evaluation.bench.models import Pair, rounding
from sakiyomi.evaluation.bench.runner import Contender, Judge, same_tokens

__all__ = ["Given", "Task", "given", "given_tasks", "lookup", "own_tasks", "sentences"]
__all__ += ["task_conditions", "task_run"]

DRAFTERS = ("prompt-lookup", "suffix", "ngram")
EDITS = (
    ("theory/chains.py", "gamma", "length"),
    ("core/tree.py", "parents", "above"),
    ("drafters/draft_length.py", "costs", "prices"),
    ("sampling/rng.py", "position", "place"),
    ("sampling/rows.py", "weights", "masses"),
    ("core/running_mean.py", "seconds", "time"),
)
"""Files of this package, and which name is changed into which."""


class Given:
    """A logits processor that makes the next token of a given text the likeliest, whatever path leads there.

    Args:
        start: tokens of the prompt.
        text: token ids.
    """

    def __init__(self, start: int, text: Sequence[int]) -> None:
        self._start, self._text = start, list(text)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores (R, V) of the token behind each history (R, L), as transformers calls its processors."""
        place = input_ids.shape[1] - self._start
        if 0 <= place < len(self._text):
            scores[:, self._text[place]] = scores.amax() + 10.0
        return scores


@dataclass(frozen=True)
class Task:
    """A prompt and how its text is made."""

    prompt: list[int]
    params: SamplingParams


@declared("greedy, one prompt at a time, tokens/s")
def lookup(row: PairRow) -> Races:
    """Own plain, prompt-lookup, suffix and ngram against prompt lookup of transformers, for each kind of text."""
    pair, llm = row.pair, row.llm("none")
    kinds: dict[str, tuple[list[Task], Judge]] = {"stories": (own_tasks(row), pair.judge(llm))}
    kinds |= {kind: (given_tasks(row, llm, kind), same_tokens) for kind in ("summary", "edit")}
    conditions = {"target": row.config.target, "dtype": dtype_name(llm.target.dtype), "gamma": row.config.gamma}
    conditions |= {"rounding": rounding(llm), "graphs": llm.target.mode}
    for kind, (tasks, judge) in kinds.items():
        yield Race(_contenders(pair, llm, tasks, judge), where=kind)
        conditions[kind] = task_conditions(tasks)
    return conditions


def _contenders(pair: Pair, llm: LLM, tasks: Sequence[Task], judge: Judge) -> list[Contender]:
    runs: dict[str, Run] = {}
    if pair.config.peers:
        calls = [(task.prompt, task.params) for task in tasks]
        runs["transformers prompt lookup"] = partial(run_counted, pair.peer("prompt lookup"), calls)
    runs["sakiyomi plain"] = task_run(EngineView(llm), tasks)
    runs |= {f"sakiyomi {spec}": task_run(EngineView(llm, llm.drafter(spec)), tasks) for spec in DRAFTERS}
    contenders = [Contender(name, run, judge) for name, run in runs.items()]
    if llm.target.weights.quantization is not None and pair.config.peers:
        contenders = [replace(c, against=contenders[min(i, 1)].name) for i, c in enumerate(contenders)]
    return contenders


def task_run(way: EngineView, tasks: Sequence[Task]) -> Run:
    """A run of our engine over these tasks, one after the other."""
    return lambda: generated(way, [([task.prompt], task.params) for task in tasks])[0]


def own_tasks(row: PairRow) -> list[Task]:
    """The pair's prompts, and what the target writes behind them by itself."""
    return [Task(prompt, row.params(ignore_eos=True)) for prompt in row.pair.prompts]


def given(row: PairRow, prompt: list[int], text: list[int]) -> Task:
    """This text behind this prompt."""
    processors = [Given(len(prompt), text)]
    return Task(prompt, row.params(max_new_tokens=len(text), ignore_eos=True, logits_processors=processors))


def given_tasks(row: PairRow, llm: LLM, kind: str) -> list[Task]:
    """Prompts of kind "summary" or "edit" and their texts, cut so that both fit in the context and the length."""
    texts = _summaries() if kind == "summary" else _edits()
    tokenizer, config = row.pair.target.tokenizer, row.config
    most = min(config.max_new_tokens, (llm.max_context - 2) // 2)
    tasks = []
    for before, after in texts[: config.count]:
        prompt, text = (
            list(tokenizer(part, add_special_tokens=False)["input_ids"]) for part in (before + "\n\n", after)
        )
        prompt, text = prompt[: llm.max_context - most - 1], text[:most]
        tasks.append(given(row, prompt, text))
    return tasks


def sentences(start: int) -> list[str]:
    """Of a passage of several stories, from this one on."""
    return re.split(r"(?<=[.!?]) ", " ".join((STORIES[start:] + STORIES[:start])[:5]))


def _summaries() -> list[tuple[str, str]]:
    """Passages of several stories, and every other sentence of each."""
    return [(" ".join(passage), " ".join(passage[::2])) for passage in map(sentences, range(len(STORIES)))]


def _edits() -> list[tuple[str, str]]:
    """The last two thirds of source files, before and after a change of a name."""
    found = []
    for name, old, new in EDITS:
        source = files("sakiyomi").joinpath(name).read_text(encoding="utf-8")
        before = source[len(source) // 3 :].partition("\n")[2][:1600]
        found.append((before, re.sub(rf"\b{old}\b", new, before)))
    return found


def task_conditions(tasks: Sequence[Task]) -> str:
    """Lengths, for the conditions."""
    prompts = [len(task.prompt) for task in tasks]
    lengths = [task.params.max_new_tokens for task in tasks]
    return f"{len(tasks)} prompts of {min(prompts)}-{max(prompts)} tokens, {min(lengths)}-{max(lengths)} new tokens"

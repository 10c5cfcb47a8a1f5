"""Drafts from text alone against prompt lookup of transformers, on texts that repeat what stands in their prompt.

Three kinds of text. *stories*: what the target writes by itself behind the prompts; a small model says much twice. In
the other two the text is given, because the target could not write it: each pass is the target's own and costs what it
costs, and a logits processor, the same for everybody, makes the text's next token the likeliest. *summary*: every other
sentence of a passage in the prompt. *edit*: a source file of this package with one name changed throughout, behind
the file as it was.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from torch import Tensor

from sakiyomi.core.errors import InputError
from sakiyomi.core.outputs import Stats
from sakiyomi.core.params import SamplingParams
from sakiyomi.core.prompts import STORIES
from sakiyomi.drafters import DrafterContext, make_drafter
from sakiyomi.engine.plain import EngineView
from sakiyomi.evaluation.bench.config import BenchConfig, Note
from sakiyomi.evaluation.bench.meter import round_figures
from sakiyomi.evaluation.bench.models import Pair
from sakiyomi.evaluation.bench.peers import ForwardClock, Transformers
from sakiyomi.evaluation.bench.report import Row, of_race
from sakiyomi.evaluation.bench.runner import Contender, Judge, Lap, race, same_tokens, timed

if TYPE_CHECKING:
    from sakiyomi.engine.llm import LLM

__all__ = ["Given", "Task", "given", "given_tasks", "lookup", "our_lap_of", "own_tasks", "task_conditions"]

DRAFTERS = ("prompt-lookup", "suffix", "ngram")
EDITS = (
    ("theory/chains.py", "gamma", "length"),
    ("tree.py", "parents", "above"),
    ("gamma.py", "costs", "prices"),
    ("noise.py", "position", "place"),
    ("numerics.py", "weights", "masses"),
    ("clock.py", "seconds", "time"),
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


def lookup(config: BenchConfig, note: Note) -> Row:
    """Own plain, prompt-lookup, suffix and ngram against prompt lookup of transformers, for each kind of text."""
    pair = Pair(config)
    note("lookup: compiling")
    llm = pair.llm("none")
    kinds: dict[str, tuple[list[Task], Judge]] = {"stories": (own_tasks(pair), pair.judge(llm))}
    for kind in ("summary", "edit"):
        kinds[kind] = (given_tasks(pair, llm, kind), same_tokens)
    rows: list[Row] = []
    for kind, (tasks, judge) in kinds.items():

        def tell(text: str, kind: str = kind) -> None:
            note(f"{kind}: {text}")

        contenders = _contenders(pair, llm, tasks, judge)
        title = "greedy, one prompt at a time, tokens/s"
        row = of_race("lookup", title, race(contenders, repeats=config.repeats, note=tell), **task_conditions(tasks))
        rows.append(row)
    named = list(zip(kinds, rows, strict=True))
    lines = [dict(line) | {"name": f"{kind}: {line['name']}"} for kind, row in named for line in row.lines]
    notes = [f"{kind}: {text}" for kind, row in named for text in row.notes]
    conditions = {"target": config.target, "dtype": str(llm.target.dtype).removeprefix("torch."), "gamma": config.gamma}
    conditions |= {"rounding": llm.target.weights.quantization and str(llm.target.weights.quantization)}
    conditions |= {"graphs": "compiled" if llm.compiled() else "eager", "laps": config.repeats}
    for kind, row in named:
        conditions[kind] = ", ".join(f"{name} {value}" for name, value in row.conditions.items() if name != "laps")
    return Row("lookup", rows[0].title, lines, conditions, notes)


def _contenders(pair: Pair, llm: LLM, tasks: Sequence[Task], judge: Judge) -> list[Contender]:
    contenders = []
    if pair.config.peers:
        contenders.append(Contender("transformers prompt lookup", _theirs(pair.peer("prompt lookup"), tasks), judge))
    contenders.append(Contender("sakiyomi plain", our_lap_of(EngineView(llm), tasks), judge))
    around = DrafterContext(llm, llm.vocab_size, _nothing, _nothing, llm.target, _nothing, _nothing)
    for spec in DRAFTERS:
        run = EngineView(llm, make_drafter([spec], around))
        contenders.append(Contender(f"sakiyomi {spec}", our_lap_of(run, tasks), judge))
    if llm.target.weights.quantization is not None and pair.config.peers:
        contenders = [replace(c, against=contenders[min(i, 1)].name) for i, c in enumerate(contenders)]
    return contenders


def _nothing(name: Any) -> Any:
    raise InputError("a draft from text alone loads no model")


def our_lap_of(run: EngineView, tasks: Sequence[Task]) -> Callable[[], Lap]:
    """A lap of our engine over these tasks, one after the other."""

    def lap() -> Lap:
        done: list[Any] = []

        def work() -> list[list[int]]:
            for task in tasks:
                done.extend(run.generate([task.prompt], task.params))
            return [result.token_ids for result in done]

        found = timed(work)
        return replace(found, figures=round_figures(Stats.total(result.stats for result in done)))

    return lap


def _theirs(peer: Transformers, tasks: Sequence[Task]) -> Callable[[], Lap]:
    def lap() -> Lap:
        with ForwardClock([peer.model]) as clock:
            found = timed(lambda: [peer.generate(task.prompt, task.params) for task in tasks])
        # As with ours, the first pass and the first token of a text are the prompt's.
        rounds = clock.calls[0] - len(tasks)
        return replace(found, figures={"tau": (found.tokens - len(tasks)) / max(rounds, 1)})

    return lap


def own_tasks(pair: Pair) -> list[Task]:
    """The pair's prompts, and what the target writes behind them by itself."""
    config = pair.config
    params = SamplingParams(max_new_tokens=config.max_new_tokens, gamma=config.gamma, ignore_eos=True)
    return [Task(prompt, params) for prompt in pair.prompts]


def given(prompt: list[int], text: list[int], config: BenchConfig) -> Task:
    """This text behind this prompt."""
    processor = Given(len(prompt), text)
    params = SamplingParams(
        max_new_tokens=len(text),
        gamma=config.gamma,
        ignore_eos=True,
        logits_processors=[processor],  # type: ignore[list-item]
    )
    return Task(prompt, params)


def given_tasks(pair: Pair, llm: LLM, kind: str) -> list[Task]:
    """Prompts of kind "summary" or "edit" and their texts, cut so that both fit in the context and the length."""
    texts = _summaries() if kind == "summary" else _edits()
    tokenizer, config = pair.target.tokenizer, pair.config
    most = min(config.max_new_tokens, (llm.max_context - 2) // 2)
    tasks = []
    for before, after in texts[: config.count]:
        prompt, text = (
            list(tokenizer(part, add_special_tokens=False)["input_ids"]) for part in (before + "\n\n", after)
        )
        prompt, text = prompt[: llm.max_context - most - 1], text[:most]
        tasks.append(given(prompt, text, config))
    return tasks


def _summaries() -> list[tuple[str, str]]:
    """Passages of several stories, and every other sentence of each."""
    found = []
    for start in range(len(STORIES)):
        passage = " ".join((STORIES[start:] + STORIES[:start])[:5])
        sentences = re.split(r"(?<=[.!?]) ", passage)
        found.append((passage, " ".join(sentences[::2])))
    return found


def _edits() -> list[tuple[str, str]]:
    """The last two thirds of source files, before and after a change of a name."""
    found = []
    for name, old, new in EDITS:
        source = files("sakiyomi").joinpath(name).read_text(encoding="utf-8")
        before = source[len(source) // 3 :].partition("\n")[2][:1600]
        found.append((before, re.sub(rf"\b{old}\b", new, before)))
    return found


def task_conditions(tasks: Sequence[Task]) -> dict[str, Any]:
    """Lengths, for the conditions."""
    prompts = [len(task.prompt) for task in tasks]
    lengths = [task.params.max_new_tokens for task in tasks]
    return {
        "prompts": len(tasks),
        "prompt_tokens": f"{min(prompts)}-{max(prompts)}",
        "new_tokens": f"{min(lengths)}-{max(lengths)}",
    }

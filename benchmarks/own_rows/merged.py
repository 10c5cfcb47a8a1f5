"""Drafts of a model and of the text itself, merged in one tree, against each of the two alone.

Besides the texts of row ``lookup``, which the target could not write, so that a draft distilled from it knows nothing
of them either: *retold*, a passage told again with a sentence that the target writes behind each that is taken over,
and *revised*, with one such sentence behind three. Summaries and edits by a model that can do both look like that.
"""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import Any

from own_rows.lookup import Task, given, given_tasks, own_tasks, sentences, task_conditions, task_run
from sakiyomi.core.params import SamplingParams
from sakiyomi.drafters import Context
from sakiyomi.drafters.merged import MergedDrafter
from sakiyomi.drafters.model import ModelDrafter
from sakiyomi.drafters.suffix import SuffixDrafter
from sakiyomi.engine.plain import EngineView
from sakiyomi.evaluation.bench.frame import PairRow, Race, Races, declared
from sakiyomi.evaluation.bench.runner import Standing, same_tokens
from sakiyomi.sampling.sampler import Sampler

__all__ = ["merged"]


MIXED = {"retold": 1, "revised": 3}
"""Sentences that are taken over before each that the target writes."""
PASSAGE = 6  # sentences
OWN = 40  # most tokens of a sentence of its own


class Unaided(ModelDrafter):
    """A draft model that is not told the text that a processor gives: it would always be right."""

    def _sampler(self, context: Context) -> Sampler:
        return Sampler(replace(context.params, logits_processors=()), self._vocab_size)


@declared("greedy, one prompt at a time, tokens/s")
def merged(row: PairRow) -> Races:
    """Plain, the draft model, suffix, and both merged, on the texts of row lookup; sizes are chosen by "auto"."""
    llm = row.llm()
    kinds: dict[str, Any] = {"stories": (own_tasks(row), row.pair.judge(llm))}
    kinds |= {kind: (given_tasks(row, llm, kind), same_tokens) for kind in ("summary", "edit")}
    for kind, taken in MIXED.items():
        row.note(f"writing the texts of {kind}")
        kinds[kind] = (_mixed(row, EngineView(llm), taken), same_tokens)
    conditions: dict[str, Any] = {"target": row.config.target, "draft": row.config.draft_model, "sizes": "auto"}
    for kind, (tasks, judge) in kinds.items():
        free = [Task(task.prompt, replace(task.params, gamma="auto")) for task in tasks]
        assert llm.draft is not None and llm.draft.model is not None
        model = Unaided(llm.draft.model, llm.vocab_size)
        ways = {
            "plain": EngineView(llm),
            "model": EngineView(llm, model),
            "suffix": EngineView(llm, SuffixDrafter()),
            "suffix+model": EngineView(llm, MergedDrafter([SuffixDrafter(), model])),
        }
        standings = yield Race({name: task_run(way, free) for name, way in ways.items()}, judge, kind)
        row.notes.append(f"{kind}: {_verdict(standings)}")
        conditions[kind] = task_conditions(free)
    return conditions | {"graphs": llm.target.mode}


def _mixed(row: PairRow, target: EngineView, taken: int) -> list[Task]:
    """Passages, each told again with sentences that the target writes in their place in the text."""
    config, tokenizer = row.config, row.pair.target.tokenizer
    ends = SamplingParams(max_new_tokens=OWN, stop=[".", "!", "?"], ignore_eos=True)
    tasks = []
    for story in range(config.count):
        passage = sentences(story)[:PASSAGE]
        prompt = list(tokenizer(" ".join(passage) + "\n\n", add_special_tokens=False)["input_ids"])
        prompt = prompt[: target.engine.max_context - config.max_new_tokens - OWN - 1]
        text: list[int] = []
        for number, sentence in enumerate(passage, start=1):
            if len(text) >= config.max_new_tokens:
                break
            text += tokenizer((" " if text else "") + sentence, add_special_tokens=False)["input_ids"]
            text = text[: config.max_new_tokens]
            if number % taken == 0:
                text += target.generate([prompt + text], ends)[0].token_ids
        text = text[: config.max_new_tokens]
        tasks.append(given(row, prompt, text))
    return tasks


def _verdict(standings: list[Standing]) -> str:
    """How the merged draft stands beside the better of the two, run by run."""
    found = {standing.name: standing for standing in standings}
    better = max((found["model"], found["suffix"]), key=lambda standing: statistics.median(standing.speeds))
    ratio = found["suffix+model"].ratio_to(better)
    return f"merged against {better.name}, the better of the two: {ratio:.2f}"

"""``sakiyomi bench spec``: questions one after the other, plain decoding and every drafter interleaved on each.

The protocol of Spec-Bench (Xia et al. 2024, arXiv 2401.07851): one request at a time, greedy, wall clock with the
prompt's pass, plain decoding in the same run. Two things are stricter here. All drafters answer a question before the
next one is asked, so that a change of the machine's speed affects all of them. Every prompt of a later turn contains
the plain answers, so that all drafters get the same prompts even after a near-tie.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from sakiyomi.core.errors import InputError, UnsupportedError
from sakiyomi.core.outputs import Stats
from sakiyomi.core.params import SamplingParams
from sakiyomi.core.prompts import STORIES
from sakiyomi.drafters import parse_drafters
from sakiyomi.engine import machine
from sakiyomi.engine.chat_template import WORDS, Dialogue, Exchange, read_template
from sakiyomi.engine.llm import LLM
from sakiyomi.engine.plain import EngineView
from sakiyomi.evaluation.bench.config import Note, silent
from sakiyomi.evaluation.bench.long.questions import middle_cut
from sakiyomi.evaluation.bench.models import NearTies
from sakiyomi.evaluation.bench.report import Row
from sakiyomi.evaluation.bench.runner import Contender, TimedRun, race
from sakiyomi.evaluation.bench.spec.config import SpecConfig
from sakiyomi.evaluation.bench.spec.results import (
    PLAIN,
    Question,
    Record,
    Results,
    chosen,
    digest,
    own_questions,
    read_questions,
)
from sakiyomi.evaluation.bench.spec.table import rows, since
from sakiyomi.evaluation.loading import load
from sakiyomi.evaluation.tuning.candidates import available, made

COUNTS = ("rounds", "committed", "drafted", "accepted", "prefill_seconds")


Asked = tuple[Question, frozenset[str]]
"""A question, and the drafters whose results are known already."""
Share = Callable[[SpecConfig, str, str, Sequence[Asked]], Generator[Results, None, None]]
"""Has questions answered in any order, and yields the new results. Takes settings, chat template, digest of the
questions' file, and the questions."""


def run(config: SpecConfig, note: Note = silent, share: Share | None = None) -> list[Row]:
    """Measure what no file of results has yet, and make the tables of all results.

    Args:
        config: what is asked for.
        note: receives progress messages.
        share: has the questions answered elsewhere; by default they are answered here.

    Raises:
        SakiyomiError: a file, a drafter or a setting is wrong.
    """
    questions = own_questions() if config.questions is None else read_questions(config.questions)
    wanted = chosen(questions, config.categories, config.count)
    template = read_template(config.template)
    _check(config)
    before = None if config.against is None else Results.read(config.against)
    results = Results.kept(config.out)
    asked = [(one, frozenset(name for of, name in results.records if of == one.id)) for one in wanted]
    with closing((share or partial(_here, note))(config, template, digest(questions), asked)) as found:
        for number, more in enumerate(found, 1):
            results.add(more)
            if share is not None:
                note(f"{number} of {len(wanted)} questions are answered")
    return rows(results) + ([] if before is None else [since(results, before)])


def _here(
    note: Note, config: SpecConfig, template: str, file: str, asked: Sequence[Asked]
) -> Generator[Results, None, None]:
    spec = Spec(config, template, file, note)
    yield spec.results([])  # settings and file are compared before any work
    for place, (question, known) in enumerate(asked, start=1):
        where = f"question {place} of {len(asked)} ({question.category}), "
        yield spec.answer(question, known, lambda text, where=where: note(where + text))  # type: ignore[misc]


class Spec:
    """A target and its drafters, ready to answer questions.

    Args:
        config: what is asked for.
        template: of chats.
        file: digest of that of the questions, for the settings.
        note: receives progress messages.

    Raises:
        SakiyomiError: something cannot be loaded, or there is no room for answers.
    """

    def __init__(self, config: SpecConfig, template: str, file: str, note: Note = silent) -> None:
        self._config = config
        note(f"loading {config.target}")
        # One more slot than requests that run at once: the judge and oracles need one of their own.
        self._llm = llm = load(config, "none", exact=config.exact, max_batch=2, strict=True)
        if llm.target.sources is not None:
            raise UnsupportedError(
                f"{config.target!r} has an encoder, and questions are for models that continue a text"
            )
        room = llm.max_context - config.max_new_tokens
        if room < 2:
            raise InputError(
                f"max_new_tokens is {config.max_new_tokens} and the context has {llm.max_context} tokens; ask for fewer"
            )
        dialogue = Dialogue(llm.tokenizer, template, config.system)
        self._talk = partial(Talk, dialogue, min(room, config.prompt_tokens or room))
        drafted, self._notes = _drafted(llm, config, note)
        note("recording passes")
        if config.compile:
            llm.wait()
        self._settings, self._conditions = _settings(config, llm, template, file), machine.conditions()
        self._ways = {PLAIN: EngineView(llm), **drafted}
        for way in self._ways.values():  # the first text has costs that later ones do not have
            way.generate(
                [llm.tokenizer(STORIES[0]).input_ids[:room]], SamplingParams(max_new_tokens=16, gamma=config.gamma)
            )

    def answer(self, question: Question, known: Collection[str], note: Note = silent) -> Results:
        """Have every drafter without a known result answer, and plain decoding beside them."""
        missing = [name for name in self._ways if name not in known]
        asked = {name: self._ways[name] for name in dict.fromkeys((PLAIN, *missing))} if missing else {}
        return self.results(
            _ask(self._config, self._llm, self._talk(question, self._config.repeats > 1), asked, note) if asked else []
        )

    def results(self, records: Sequence[Record]) -> Results:
        """These records, with what they were measured under."""
        found = {record.key: record for record in records}
        return Results(self._settings, self._conditions, found, notes=self._notes)


def _check(config: SpecConfig) -> None:
    """Refuse before a model is loaded.

    Raises:
        InputError: a draft that is none, or that remembers what it must not.
        UnsupportedError: a draft that changes how the target itself runs.
    """
    for spec in config.draft:
        for part in parse_drafters(spec):
            kind, _, argument = str(part).partition(":")
            if kind == "suffix" and argument and config.repeats > 1:
                raise InputError(
                    f"draft {spec!r} remembers the texts of one run and knows them in the next one; give --repeats 1"
                )
            if kind == "self-evicted":
                raise UnsupportedError(
                    "draft self-evicted has the target run in another way, so that plain decoding beside it would not "
                    "be the usual one; python benchmarks/rows.py --rows evicted in the source repository measures it"
                )


def _drafted(llm: LLM, config: SpecConfig, note: Note) -> tuple[dict[str, EngineView], list[str]]:
    """An engine for each drafter, and why some are missing."""
    specs = [*config.draft]
    if not specs:
        specs = available(llm, config.target)
        specs += [f"suffix+{spec}" for spec in specs if spec.startswith("model:")]
    found, why = made(specs, llm.drafter, config.draft, note)
    notes = [f"{spec} is left out: {message}" for spec, message in why.items()]
    notes += [
        f"{spec}: no draft is known for {config.target}"
        for spec, drafter in found.items()
        if drafter is None and spec != PLAIN
    ]
    views = {spec: EngineView(llm, drafter, strict=True) for spec, drafter in found.items() if drafter is not None}
    return views, notes


def _settings(config: SpecConfig, llm: LLM, template: str, file: str) -> dict[str, Any]:
    """Settings that must be equal in results that are joined."""
    shown = template if template in WORDS else hashlib.sha256(template.encode()).hexdigest()[:16]
    same = ("max_new_tokens", "prompt_tokens", "gamma", "repeats", "system", "exact")
    known = machine.conditions()
    return {
        "target": llm.name,
        **llm.recipe(),
        "device": str(llm.target.device),
        "graphs": llm.target.mode,
        "template": "plain text" if Dialogue(llm.tokenizer, template).plain else shown,
        "questions": file,
        **{name: getattr(config, name) for name in same},
        **{name: known[name] for name in ("processor", "cores", "threads")},
    }


@dataclass
class Talk:
    """A question and the prompts of its turns; each is made when the plain answer before it is known.

    Attributes:
        dialogue: makes prompts.
        most: tokens that a prompt may have; longer ones are cut in the middle, so that template and last message stay.
        question: the question.
        repeated: it is asked several times, so that drafters must not remember it.
        prompts: token ids of the turns so far, the same for all drafters.
        answers: plain ones.
    """

    dialogue: Dialogue
    most: int
    question: Question
    repeated: bool = False
    prompts: list[list[int]] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)

    def run(self, way: EngineView, params: SamplingParams) -> TimedRun:
        """Answer all turns, one after the other."""
        done = []
        if self.repeated and way.engine.drafter is not None:
            way.engine.drafter.forget()
        for turn, said in enumerate(self.question.turns):
            if turn == len(self.prompts):
                before = [Exchange(*pair) for pair in zip(self.question.turns, self.answers, strict=False)]
                prompt = self.dialogue.read(self.dialogue.messages_with(said, before))
                self.prompts.append(middle_cut(prompt, self.most))
            done += way.generate([self.prompts[turn]], params)
            if turn == len(self.answers):
                self.answers.append(done[-1].text)
        total = Stats.total(result.stats for result in done)
        counted = {name: float(getattr(total, name)) for name in COUNTS}
        return TimedRun(total.seconds, total.tokens, tuple(tuple(result.token_ids) for result in done), counted)


def _ask(
    config: SpecConfig, llm: LLM, talk: Talk, ways: dict[str, EngineView], note: Callable[[str], None]
) -> list[Record]:
    """All drafters on one question; plain decoding answers first."""
    params = SamplingParams(max_new_tokens=config.max_new_tokens, gamma=config.gamma)
    judge = NearTies(llm.target, talk.prompts)
    contenders = [Contender(name, partial(talk.run, way, params), judge) for name, way in ways.items()]
    standings = race(contenders, repeats=config.repeats, warm_up=0, note=note)
    counts = [
        tuple({"tokens": run.tokens, "seconds": run.seconds, **run.figures} for run in standing.runs)
        for standing in standings
    ]
    return [
        Record(
            talk.question.id,
            talk.question.category,
            standing.name,
            own,
            counts[0],
            bool(standing.agreement.equal),
            standing.agreement.accepted,
            standing.agreement.note,
            tuple(talk.answers) if standing is standings[0] else (),
        )
        for standing, own in zip(standings, counts, strict=True)
    ]

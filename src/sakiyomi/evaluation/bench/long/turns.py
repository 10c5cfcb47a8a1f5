"""Row ``turns``: a conversation that grows. Each turn is a question of a made task, whose answer can be judged."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle, islice
from typing import Any

from sakiyomi.core.errors import SakiyomiError
from sakiyomi.core.memory import resident_bytes
from sakiyomi.core.params import SamplingParams
from sakiyomi.evaluation.bench.long.jobs import OVER, Bench, Line, Watch, row, spread
from sakiyomi.evaluation.bench.long.questions import Question, made, tasks_of
from sakiyomi.evaluation.bench.long.systems import ONE_SHOT, Loader, System
from sakiyomi.evaluation.bench.report import Row

TITLE = "one conversation that grows: right answers in percent, and bytes after the first and the last turn"


def talk(make: Loader, system: System, length: int, given: Sequence[Sequence[Question]], watch: Watch) -> Line:
    """Right answers of a system in conversations, and memory after each turn; see ``jobs.Measure``.

    The model's own replies stay in the conversation. A conversation that no longer fits ends early. Bytes are those of
    the first conversation.
    """
    done, why = list[tuple[list[float], dict[str, list[int]]]](), ""
    for questions in given:
        make.release()  # memory of the conversation before would count from the first turn on
        scores, tokens, kv, resident = list[float](), list[int](), list[int](), list[int]()
        try:
            running: Any = make(system, length)  # never one-shot, which keeps nothing between two prompts
            llm, held = running.llm, list[int]()
            with llm.conversation() as conversation:
                for question in questions:
                    held += question.tokens
                    answer = conversation.generate(held, SamplingParams(max_new_tokens=question.answer_tokens))
                    held += answer.token_ids
                    scores.append(question.score(answer.text))
                    tokens.append(len(held))
                    kv.append(llm.target.cache.bytes)
                    resident.append(resident_bytes())
        except (*OVER, SakiyomiError) as error:
            if not scores and not done:
                raise
            why = str(error) or "no memory is left"
        if scores:
            done.append((scores, {"tokens": tokens, "kv": kv, "resident": resident}))
    shares, series = [statistics.fmean(scores) for scores, _ in done], done[0][1]
    return {
        "turns": min(len(scores) for scores, _ in done),
        "tokens_held": series["tokens"][-1],
        "accuracy": statistics.fmean(shares),
        "accuracy_spread": spread(shares),
        "kv_from_bytes": series["kv"][0],
        "kv_to_bytes": series["kv"][-1],
        "resident_growth_bytes": series["resident"][-1] - series["resident"][0],
        "series": series,
        "state": "ended early" if why else "",
        "note": why,
    }


def turns(bench: Bench) -> Row:
    """One conversation for each seed, the same ones for every system."""
    config, tokenizer = bench.config, bench.tokenizer
    tasks, names = tasks_of(config), list(islice(cycle(config.tasks), config.turns))
    given = [
        [
            _turn(made(name, tasks[name], seed, config.turn_tokens, place, config, tokenizer), place, tokenizer)
            for place, name in enumerate(names)
        ]
        for seed in config.numbers("seeds")
    ]
    # The questions of later turns are not known, and one-shot keeps nothing between two prompts.
    wanted = [system for system in bench.systems if not system.query_first and system.cache != ONE_SHOT]
    whole = {config.turns * config.turn_tokens: given}
    found = [line for system in wanted for line in bench.lines("turns", talk, system, whole)]
    conditions = {"turns": config.turns, "turn_tokens": config.turn_tokens, "seeds": ",".join(config.seeds)}
    shown = row("turns", TITLE, found, conditions)
    lines = [{key: value for key, value in line.items() if key != "length"} for line in shown.lines]
    notes = [text for system, line in zip(wanted, lines, strict=True) for text in _by_turn(system, line)]
    return replace(shown, lines=lines, notes=[*shown.notes, *notes])


def _turn(question: Question, place: int, tokenizer: Any) -> Question:
    """A begin token belongs to the first turn alone."""
    begins = place and question.tokens[0] == tokenizer.bos_token_id
    return replace(question, tokens=question.tokens[1:]) if begins else question


def _by_turn(system: System, line: Line) -> list[str]:
    """Bytes after turns 1, 2, 4 and so on, and after the last; all of them are in the JSON."""
    held = line["series"]["kv"] if "series" in line else []
    places = sorted({min(2**i, len(held)) for i in range(len(held).bit_length() + 1)})
    shown = ", ".join(f"{turn}: {held[turn - 1] / 1e6:.3g}" for turn in places)
    return [f"{system.label}, KV MB after turn: {shown}"] if held else []

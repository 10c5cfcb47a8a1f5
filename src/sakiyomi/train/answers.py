"""Answers of a target to chats or texts, as training text of its draft; the target writes further prompts itself.

A chat model that continues its own template's user turn writes messages of a user (Xu et al. 2024, arXiv 2406.08464,
section 2). Other models write beginnings of texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from sakiyomi.core.chats import is_chat, question
from sakiyomi.core.errors import SakiyomiError
from sakiyomi.core.params import SamplingParams
from sakiyomi.core.prompts import read_prompts
from sakiyomi.engine.chat_template import has_template, prompt_ids
from sakiyomi.engine.llm import LLM
from sakiyomi.train.chats import written_chat
from sakiyomi.train.counted import LONGEST_PROMPT
from sakiyomi.train.data import Ids, TextSpec
from sakiyomi.train.samples import Asked, Plan, Samples

INSTRUCTIONS = Path(__file__).with_name("instructions.jsonl")
"""Messages of users, written for this package: questions, lists, code, rewriting, summaries, translation, maths."""
HELD_OUT = 8
"""Every so many-th instruction is kept for measurements, no draft learns from it."""
MARK = "sakiyomi-user-turn"
LONGEST_MESSAGE, SHORTEST_MESSAGE = 96, 4
"""Tokens of a message that the target writes."""
BEGINNING = 24
"""Tokens of a beginning of a text that it writes."""
TEMPERATURE, TOP_P = 0.9, 0.95
"""How it writes prompts: varied, and without the tail of the distribution."""


def instructions(*, held_out: bool) -> list[Any]:
    """Chats of one message each, those for training or those for measurements."""
    found = read_prompts(INSTRUCTIONS)
    return [chat for number, chat in enumerate(found) if (number % HELD_OUT == 0) == held_out]


def as_asked(tokenizer: Any, prompt: Any, most: int | None = None) -> list[int]:
    """Token ids of a prompt as it is answered: a text becomes a message where the model has a chat template.

    Args:
        tokenizer: of the model.
        prompt: a text or a chat.
        most: tokens to which a text is cut where there is no template.
    """
    chat = question(prompt) if not is_chat(prompt) and has_template(tokenizer) else prompt
    return prompt_ids(tokenizer, chat, most)


class Answers(Samples):
    """A file of answers: first to given prompts, in their order, then to prompts that the target writes.

    Args:
        plan: see `Samples`; its `count` is a limit, `minutes` usually ends the writing.
        target: digest of it.
        llm: writes.
        given: prompts as token ids.
        origin: file of the prompts, for the record.
    """

    def __init__(self, plan: Plan, target: str, llm: LLM, given: Sequence[list[int]], origin: Path) -> None:
        self._llm, self._given = llm, given
        super().__init__(plan, target, llm.tokenizer, [TextSpec(origin, 1.0, 1.0)])

    def asked(self, number: int, pools: Sequence[Sequence[Ids]]) -> Asked:
        """See `Samples`; the prompts of a batch depend on the seed and its number alone."""
        plan = self.plan
        temperature, wanted = plan.temperatures[number % len(plan.temperatures)], plan.batch
        prompts = list(self._given[number * wanted : (number + 1) * wanted])
        if len(prompts) < wanted:
            prompts += own_prompts(self._llm, wanted - len(prompts), plan.seed * 100_003 + number)
        if len(prompts) < wanted:  # given ones again, with other answers
            order = np.random.default_rng((plan.seed, number)).integers(len(self._given), size=wanted - len(prompts))
            prompts += [self._given[place] for place in order]
            temperature = temperature or 1.0
        return Asked(prompts, plan.tokens, temperature, number)


def own_prompts(llm: LLM, count: int, seed: int) -> list[list[int]]:
    """Prompts that a target writes itself, `count` at most: messages of a user, or beginnings of texts.

    Messages that are not finished, too short, or written twice are left out.

    Args:
        llm: the target.
        count: how many are wanted.
        seed: of the sampling.
    """
    tokenizer = llm.tokenizer
    chat = has_template(tokenizer)
    begin = user_turn(tokenizer) if chat else ([tokenizer.eos_token_id], "")
    if begin is None:
        return []
    prefix, end = begin
    params = SamplingParams(
        max_new_tokens=LONGEST_MESSAGE if chat else BEGINNING,
        temperature=TEMPERATURE,
        top_p=TOP_P,
        seed=seed,
        stop=(end,) if end else (),
    )
    found: dict[str, list[int]] = {}
    for done in llm.generate([prefix] * (2 * count if chat else count), params):
        text = done.text.strip()
        if not chat:
            found[text] = [*prefix, *done.token_ids]
        elif done.finish_reason == "stop" and len(done.token_ids) >= SHORTEST_MESSAGE and text:
            with suppress(SakiyomiError):  # a message that the template refuses
                found[text] = prompt_ids(tokenizer, question(text))
    return [ids for ids in found.values() if len(ids) + llm.max_context // 4 <= llm.max_context][:count]


def user_turn(tokenizer: Any) -> tuple[list[int], str] | None:
    """What stands before a user's first message in a chat, as token ids, and what follows it; None: it is not found."""
    try:
        text = written_chat(tokenizer, [("user", MARK)], asking=True)
    except SakiyomiError:
        return None
    before, mark, after = text.partition(MARK)
    ids = list(tokenizer(before, add_special_tokens=False)["input_ids"])
    return (ids, after.strip()[:LONGEST_PROMPT]) if mark and ids else None

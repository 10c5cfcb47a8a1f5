"""What `bench long` and `bench locret` measure: the only home of these defaults. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from fractions import Fraction

from sakiyomi.core.checks import at_least
from sakiyomi.core.errors import InputError
from sakiyomi.core.memory import parse_bytes
from sakiyomi.evaluation.settings import TargetSettings

FORMATS = ("leval", "longbench", "infinitebench")
LEAST = {"lengths": 8, "seeds": 0}
"""The least number of each list of whole numbers."""


@dataclass(frozen=True, kw_only=True)
class LongSettings(TargetSettings):
    """Prompts for long contexts, and how each system answers them.

    Attributes:
        tasks: made tasks, whose right answers are known (again for each).
        filler: file of texts (.jsonl or .txt, .gz allowed) in which made tasks hide what they ask for; by default a few
            sentences that repeat.
        questions: file of questions instead of made tasks; prompts are cut in the middle to each of the lengths.
        format: of that file: leval, longbench or infinitebench.
        lengths: tokens of a prompt, question included (again for each).
        count: prompts of each task, length and seed; with a file, questions that each seed draws.
        seeds: each makes its own prompts; the spread is that of the seeds' means.
        chunk_size: tokens of a prompt that are processed at once; by default that of LLM.
        memory_limit: most bytes that a system's process may hold, for example 2GiB. A system that needs more shows OOM,
            and a further line shows the longest context that fits.
        memory: run each system in a process of its own and measure its peak; otherwise all systems share one model.
    """

    target: str = "retriever"
    tasks: tuple[str, ...] = ("passkey",)
    filler: str | None = None
    questions: str | None = None
    format: str | None = None
    lengths: tuple[str, ...] = ("1024", "4096")
    count: int = 8
    seeds: tuple[str, ...] = ("0", "1", "2")
    chunk_size: int | None = None
    memory_limit: str | None = None
    memory: bool = True


@dataclass(frozen=True, kw_only=True)
class LongConfig(LongSettings):
    """Which systems are compared, on which prompts.

    Lists are given by repeating a flag, or in one word with commas: ``--systems full,h2o[sinks=4,local=32]``.

    Attributes:
        systems: what LLM(cache=...) takes: full, h2o, locret:FOLDER and so on; and one-shot: transformers, the whole
            prompt in one pass. With +query-first a system's prompts have the question in front of the text too.
        budgets: of systems that have one: KV pairs (512), or a share of the context (1/8).
        templates: of longbench: folder with dataset2prompt.json and dataset2maxlen.json; by default that of the
            questions.
        max_new_tokens: new tokens of an answer; by default as many as the task or the file's format says.
        books: .jsonl with a text a line, or a text file: measures the perplexity of the text after a long context, and
            how often a system and the full cache have the same most probable token.
        follow: tokens after the context that are measured.
        turns: turns of a conversation that grows; each turn is a prompt of a task, of turn_tokens.
        turn_tokens: tokens of a turn.
        compile: record decoding passes before they are measured; otherwise all passes are eager.
    """

    systems: tuple[str, ...] = ("full", "h2o", "snapkv", "streaming")
    budgets: tuple[str, ...] = ("1/8",)
    templates: str | None = None
    max_new_tokens: int | None = None
    books: str | None = None
    follow: int = 256
    turns: int = 0
    turn_tokens: int = 256
    compile: bool = False

    def __post_init__(self) -> None:
        for name in ("systems", "budgets", "tasks", "lengths", "seeds"):
            words = tuple(dict.fromkeys(split_list(getattr(self, name))))
            if not words:
                raise InputError(f"{name} is empty; give at least one")
            object.__setattr__(self, name, words)
        at_least(self, count=1, follow=1, turns=0, turn_tokens=1, max_new_tokens=1)
        if self.format not in (None, *FORMATS):
            raise InputError(f"format is {self.format!r}; expected {', '.join(FORMATS)}")
        if (self.questions is None) != (self.format is None):
            raise InputError(f"questions and format go together: --questions FILE --format {'|'.join(FORMATS)}")
        if self.filler is not None and self.questions is not None:
            raise InputError("filler is for made tasks, and questions come from a file; leave one of the two out")
        if self.templates is not None and self.format != "longbench":
            raise InputError("templates belong to questions of format longbench; leave them out")
        for budget in self.budgets:
            budget_pairs(budget, 8)
        for name in LEAST:
            self.numbers(name)
        if self.limit_bytes is not None and not self.memory:
            raise InputError("memory_limit needs each system in a process of its own, and memory is off; leave one out")

    def numbers(self, name: str) -> list[int]:
        """The lengths or the seeds, ascending.

        Raises:
            InputError: one is no such number.
        """
        words, least = getattr(self, name), LEAST[name]
        if not all(re.fullmatch(r"\d+", word) and int(word) >= least for word in words):
            raise InputError(f"{name} is {','.join(words)}; expected whole numbers of at least {least}")
        return sorted({int(word) for word in words})

    @property
    def limit_bytes(self) -> int | None:
        """``memory_limit`` as a number."""
        return None if self.memory_limit is None else parse_bytes(self.memory_limit, "memory_limit")


def split_list(words: Sequence[str]) -> list[str]:
    """Items of a list whose words may hold several, with commas between them; those in brackets are an item's own."""
    parts = (part.strip() for word in words for part in re.split(r",(?![^\[]*\])", word))
    return [part for part in parts if part]


def budget_pairs(budget: str, length: int) -> int:
    """KV pairs that a budget allows.

    Args:
        budget: a number of them ("512"), or a share ("1/8").
        length: tokens of the context.

    Raises:
        InputError: it is neither.
    """
    if re.fullmatch(r"\d+", budget) and int(budget) > 0:
        return int(budget)
    if re.fullmatch(r"\d+/\d+", budget) and int(budget.split("/")[1]):
        share = Fraction(budget)
        if 0 < share <= 1:
            return max(1, int(share * length))
    raise InputError(f"budget is {budget!r}; expected a number of KV pairs (512) or a share of the context (1/8)")


OFFICIAL = {
    "phi-3-mini": "hyx21/Locret-phi-3-mini-128K",
    "llama-3.1-8b": "hyx21/Locret-llama-3.1-8B-instruct",
}
"""Published heads, by a part of the target's name."""
EMBEDDED = {"retriever": "retriever-retaining", "tales": "tales-retaining"}
OURS = "own"


@dataclass(frozen=True, kw_only=True)
class LocretConfig(LongSettings):
    """Which model and retaining heads are measured, on which prompts.

    Attributes:
        heads: retaining heads of the target: a folder, an embedded name, or official (those published for
            Phi-3-mini-128K and Llama-3.1-8B-instruct). Embedded models have their own.
        lococo: folder of convolutions (`sakiyomi train lococo`), for the table of the combination.
        settings: paper, each system as published; or own, this package's defaults.
        budget: KV pairs (6000), or a share of the context (1/8), of systems that have one.
        chunk_size: tokens of a prompt that are processed at once; as published 3072 (Phi-3) and 1024 (Llama-3.1).
    """

    heads: str | None = None
    lococo: str | None = None
    settings: str = "paper"
    budget: str = "1/8"
    tasks: tuple[str, ...] = ("passkey", "number", "kv", "multikey")
    lengths: tuple[str, ...] = ("4096",)
    count: int = 4
    seeds: tuple[str, ...] = ("0", "1")

    def __post_init__(self) -> None:
        if self.settings not in ("paper", OURS):
            raise InputError(f"settings is {self.settings!r}; expected paper or {OURS}")
        self.long()

    def long(self) -> LongConfig:
        """The settings as ``bench long`` takes them, with every system of the tables."""
        shared = {field.name: getattr(self, field.name) for field in fields(LongSettings)}
        return LongConfig(**shared, systems=tuple(dict.fromkeys(self.systems().values())), budgets=(self.budget,))

    def systems(self) -> dict[str, str]:
        """What the article calls each system, and its spec."""
        option = "[paper]" if self.settings == "paper" else ""
        locret = f"locret:{self.heads_name}{option}"
        found = {
            "FullAttn": "full",
            "InfLLM": f"infllm{option}",
            "HF-2bits": f"quant-2{option}",
            "SirLLM": f"sirllm{option}",
            "MInference": f"minference{option}",
            "Locret": locret,
            "FullAttn-4bits": "quant-4",
            "Locret-4bits": f"{locret}+quant-4",
        }
        if self.lococo is not None:
            merger = f"lococo:{self.lococo}"
            found |= {"LoCoCo": f"h2o+{merger}", "Combination": f"{locret}+{merger}"}
        return found

    @property
    def heads_name(self) -> str:
        """Folder, embedded name or hub id of the heads.

        Raises:
            InputError: none are known.
        """
        if self.heads == "official":
            name = self.target.lower()
            for part, hub in OFFICIAL.items():
                if part in name:
                    return hub
            raise InputError(
                f"heads is official, and none were published for {self.target!r}; they were for Phi-3-mini-128K and "
                "Llama-3.1-8B-instruct: give a folder of heads"
            )
        heads = self.heads or EMBEDDED.get(self.target)
        if heads is None:
            raise InputError(f"no retaining heads are known for {self.target!r}; give their folder with --heads")
        return heads

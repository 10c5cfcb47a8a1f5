"""Settings of the commands that write or count text and train nothing."""

from __future__ import annotations

from dataclasses import dataclass

from sakiyomi.train.config.base import Settings, require, setting

__all__ = ["DistillDataConfig", "NgramConfig"]


@dataclass(frozen=True, kw_only=True)
class DistillDataConfig(Settings):
    """What a target itself answers, as training data of its drafts and heads."""

    out: str = setting("", "The .jsonl file; the same command goes on with it where it was stopped.")
    target: str = setting("", "The target: embedded name (tales), folder in Hugging Face format, or hub id.")
    data: tuple[str, ...] = setting(
        (), "Prompts FILE@SHARE: beginnings of texts, or the users' turns of chats in ShareGPT's form. Repeatable."
    )
    samples: int = setting(4096, "Answers that the target writes.", least=1)
    minutes: float = setting(60.0, "Most minutes that writing may take.", above=0)
    tokens: int = setting(160, "Most new tokens of an answer.", least=1)
    batch: int = setting(128, "Answers written in one batch.", least=1)
    temperatures: tuple[float, ...] = setting(
        (0.0, 0.0, 1.0), "Temperatures of the batches in turn; 0 is greedy.", least=0
    )
    device: str = setting("auto", "Where to run: auto, cpu, cuda or cuda:N.")
    seed: int = setting(1, "Seed of prompts and samples.", least=0)
    workers: str = setting(
        "",
        "Engines that share the batches, each in a process of its own, on a Ray cluster: N, or MIN:MAX. By default "
        "one, in this process, without Ray. The file does not depend on it.",
    )
    worker_cpus: int = setting(1, "Processors of each worker; a worker on cuda has a GPU as well.", least=1)
    address: str = setting("", "Of the cluster: auto, HOST:PORT or ray://HOST:PORT; by default Ray is started here.")

    def __post_init__(self) -> None:
        for name, what in (("out", "a .jsonl file"), ("target", "the model that writes"), ("data", "files of prompts")):
            require(bool(getattr(self, name)), name, getattr(self, name), what)
        super().__post_init__()
        require(self.out.endswith(".jsonl"), "out", self.out, "a file that ends in .jsonl")
        require(bool(self.temperatures), "temperatures", self.temperatures, "at least one")


@dataclass(frozen=True, kw_only=True)
class NgramConfig(Settings):
    """Tables of n-grams, counted in text or in what a target writes."""

    out: str = setting("", "The file of the tables, .safetensors; `ngram:OUT` drafts from it.")
    text: tuple[str, ...] = setting((), "Training file, .jsonl or .txt (.gz allowed). Repeat for more files.")
    valid: tuple[str, ...] = setting(
        (), "Held-out file, NAME=FILE; alpha is measured on it. Repeatable; without it some of the text is held back."
    )
    target: str = setting(
        "", "The target: embedded name (tales), folder, or hub id. With it alpha is measured, and it can write samples."
    )
    tokenizer: str = setting("", "Folder of the tokenizer, where no target is given.")
    order: int = setting(4, "Tokens of the longest n-gram.", least=1, most=5)
    least: int = setting(2, "Fewest occurrences of an n-gram of three or more tokens that is kept.", least=1)
    keep: int = setting(8, "Continuations kept of each run of tokens, the most frequent ones.", least=1, most=64)
    samples: int = setting(
        0,
        "Continuations of the text's beginnings that the target writes; they are counted instead of the text.",
        least=0,
    )
    sample_tokens: int = setting(160, "New tokens of each.", least=1)
    temperature: float = setting(0.0, "Temperature of the samples; 0 is greedy.", least=0)
    positions: int = setting(2048, "Held-out tokens of each file on which alpha is measured.", least=1)
    seed: int = setting(1, "Seed of the samples, and of what is held back.", least=0)

    def __post_init__(self) -> None:
        for name, what in (("out", "a file for the tables"), ("text", "training text")):
            require(bool(getattr(self, name)), name, getattr(self, name), what)
        super().__post_init__()
        require(bool(self.target) != bool(self.tokenizer), "target", self.target, "this or tokenizer, and not both")
        require(bool(self.target) or not self.samples, "samples", self.samples, "0 without a target that writes them")

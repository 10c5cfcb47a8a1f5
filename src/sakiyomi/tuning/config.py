"""What `sakiyomi tune` looks at; the only home of these defaults. Imports no torch: the command line reads them."""

from __future__ import annotations

from dataclasses import dataclass

from sakiyomi.errors import InputError

__all__ = ["PairConfig"]


@dataclass(frozen=True)
class PairConfig:
    """A target, and drafters to choose from.

    Attributes:
        target: embedded name (tales), folder in Hugging Face format, or hub id.
        draft: drafter to consider (again for each), beside those that need nothing but the target: none,
            prompt-lookup, suffix, ngram, its own first layers, itself in 8 bits, the draft and heads that belong to it.
        drafts: folder of candidates, each a folder with a small model; those that do not fit are listed with why.
        prompts: file of prompts: one a line, or .jsonl with text, prompt or turns; by default a few beginnings of
            stories. Half of them calibrate, the other half is kept for the comparison.
        count: prompts that are used at most.
        prompt_tokens: prompts are cut to this many tokens.
        max_new_tokens: new tokens of each text.
        finalists: configurations that are run beside plain decoding, those with the best predictions.
        laps: how often each of them is run; medians count.
        all: run every configuration, however it was predicted, and say how far predictions were off.
        dtype: auto (as the checkpoint says), float32, bfloat16 or float16.
        device: auto, cpu, cuda or cuda:N.
        quantize: int8 or int4: as the target will run.
        save: keep the result, so that draft auto uses it for this target from now on.
    """

    target: str = "tales"
    draft: tuple[str, ...] = ()
    drafts: str | None = None
    prompts: str | None = None
    count: int = 8
    prompt_tokens: int = 64
    max_new_tokens: int = 64
    finalists: int = 4
    laps: int = 3
    all: bool = False
    dtype: str = "auto"
    device: str = "auto"
    quantize: str | None = None
    save: bool = True

    def __post_init__(self) -> None:
        for name, least in (("count", 2), ("prompt_tokens", 1), ("max_new_tokens", 8), ("finalists", 1), ("laps", 1)):
            if getattr(self, name) < least:
                raise InputError(f"{name} is {getattr(self, name)}; expected at least {least}")

"""What a benchmark runs on; the only home of these defaults. Imports no torch: the command line reads them."""

from __future__ import annotations

from dataclasses import dataclass, field

from sakiyomi.errors import InputError
from sakiyomi.prompts import STORIES, read_prompts

__all__ = ["BenchConfig", "InflateConfig", "Note"]


@dataclass(frozen=True)
class BenchConfig:
    """What is measured, and how often.

    Attributes:
        rows: rows to run (--rows again for each), all if none is given: bookkeeping, plain, speculative, stories,
            batch, exact, compiling, peers.
        target: embedded name, folder or hub id; rows of the random model do not use it.
        draft: auto, or model:FOLDER.
        dtype: of target and draft: auto (as stored), float32, bfloat16 or float16.
        gamma: draft tokens a round, the same for every contender.
        repeats: laps that count; one more is run before them.
        max_new_tokens: new tokens of each text.
        prompt_tokens: prompts are cut to this many tokens.
        prompts: file of prompts: one a line, or .jsonl with text, prompt or turns; by default a few beginnings of
            stories.
        count: prompts that are used at most.
        peers: measure others beside it: transformers, and in row peers llama.cpp.
        compile: use compiled graphs, which are waited for; otherwise everything runs eagerly.
    """

    rows: tuple[str, ...] = ()
    target: str = "tales"
    draft: str = "auto"
    dtype: str = "auto"
    gamma: int = 4
    repeats: int = 5
    max_new_tokens: int = 128
    prompt_tokens: int = 64
    prompts: str | None = None
    count: int = 8
    peers: bool = True
    compile: bool = True

    def __post_init__(self) -> None:
        for name in ("gamma", "repeats", "max_new_tokens", "prompt_tokens", "count"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}; expected at least 1")

    def texts(self) -> list[str]:
        """The prompts.

        Raises:
            LoadError, InputError: the file cannot be read, or has none.
        """
        return list(STORIES[: self.count]) if self.prompts is None else read_prompts(self.prompts, self.count)

    def check_pair(self) -> None:
        """Refuse at once what a row about a pair would refuse after others have run.

        Raises:
            InputError, LoadError: the draft is no model, the dtype is not known, or the prompts cannot be read.
        """
        from sakiyomi.loading.model import parse_dtype

        parse_dtype(self.dtype)
        self.draft_model  # noqa: B018
        self.texts()

    @property
    def draft_model(self) -> str:
        """Name of the draft model, which transformers has to load too.

        Raises:
            InputError: the drafter is no model.
        """
        if self.draft == "auto" and self.target == "tales":
            return "tales-draft"
        kind, _, name = self.draft.partition(":")
        if kind != "model" or not name:
            raise InputError(f"draft is {self.draft!r}; here it has to be a draft model: model:FOLDER")
        return name


@dataclass(frozen=True)
class InflateConfig:
    """A model to be made larger without a change of what it computes.

    Attributes:
        out: folder of the new model; it must not exist, or be empty.
        params: about so many parameters: 134M, 500M, 1.5B.
        target: the model to start from, a Llama: embedded name, folder or hub id. Its vocabulary stays as it is.
    """

    out: str = field(metadata={"argument": "OUT_FOLDER"})
    params: str
    target: str = "tales"


class Note:
    """Is told what is going on; this one keeps it to itself."""

    def __call__(self, text: str) -> None:
        """Take one line of progress."""

"""What a benchmark runs on: the only home of these defaults. Imports no torch, because the command line reads them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from sakiyomi.core.chats import Chat
from sakiyomi.core.checks import at_least
from sakiyomi.core.embedded import DRAFTS, MEDUSA_HEADS
from sakiyomi.core.errors import InputError, LoadError, UnsupportedError
from sakiyomi.core.params import QUANTIZATIONS
from sakiyomi.core.prompts import STORIES, read_prompts, read_references, read_text
from sakiyomi.evaluation.settings import TargetSettings

Note = Callable[[str], None]
"""Receives lines of progress."""


@dataclass(frozen=True, kw_only=True)
class TextSettings(TargetSettings):
    """On which prompts a target and its draft are measured, and how often.

    Attributes:
        draft: auto (tales-draft, for tales alone), or model:FOLDER.
        prompts: file of prompts: one a line, or .jsonl with text, prompt, turns or a chat (messages); by
            default a few beginnings of stories.
        count: maximum number of prompts.
        max_new_tokens: new tokens of each text.
        repeats: measured runs of each contender; one run before them warms up.
    """

    draft: str = "auto"
    prompts: str | None = None
    count: int = 8
    max_new_tokens: int = 128
    repeats: int = 5

    def __post_init__(self) -> None:
        at_least(self, count=1, max_new_tokens=1, repeats=1)


@dataclass(frozen=True, kw_only=True)
class PairSettings(TextSettings):
    """The same, with settings of drafts and passes.

    Attributes:
        heads: Medusa heads of the target: a folder, or tales-medusa (the default for tales).
        gamma: draft tokens a round.
        prompt_tokens: prompts are cut to this many tokens, chats are not.
        compile: record decoding passes before they are measured, as an LLM does by default while it runs; otherwise
            all passes are eager.
    """

    heads: str | None = None
    gamma: int = 4
    prompt_tokens: int = 64
    compile: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, gamma=1, prompt_tokens=1)


@dataclass(frozen=True, kw_only=True)
class BenchConfig(PairSettings):
    """What is measured, and how often.

    Attributes:
        rows: rows to run (--rows again for each). Without any the one-minute table (minute): transformers, plain, with
            the draft. kinds: any model by kinds of prompts and weights, beside other engines. all: speculative,
            stories, sweep, oracle, peers, dropin, typical.
        draft: auto (tales-draft, for tales alone), or model:FOLDER; rows minute and kinds take any drafter.
        heads: for row typical, Medusa heads of the target: a folder, or tales-medusa (the default for tales).
        task: NAME=FILE (again for each): prompts of row kinds, as for prompts; of a file with categories those of the
            category NAME, if there are any. By default a few that come with the package: chat, code, summary.
        gguf: the target as a .gguf file too, one more kind of weights of row kinds.
        quantize: int8 or int4: quantize the weights of our own target. Its drafted text is then compared with its plain
            text, not with that of other programs. Row dropin ignores it; rows peers and kinds measure this kind beside
            the dtype, and every kind without it.
        gamma: draft tokens a round, the same for every contender.
        batch_sizes: concurrent requests of row sweep (again for each), as far as memory suffices.
        quality: file of held-out text. Rows about a pair then show the perplexity of each contender's weights on its
            beginning and, where prompts carry a reference or an answer, the share of texts that begin with it.
        peers: measure other programs too: transformers, and in rows peers and kinds other engines.
        environments: folder of the environments of other engines, one each: openvino, vllm, llamacpp, onnxruntime; by
            default engines in the cache folder. Row peers says how to make those that are not there.
    """

    rows: tuple[str, ...] = ()
    task: tuple[str, ...] = ()
    gguf: str | None = None
    quantize: str | None = None
    batch_sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    quality: str | None = None
    peers: bool = True
    environments: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.quantize not in (None, *QUANTIZATIONS):
            raise InputError(f"quantize is {self.quantize!r}; expected {' or '.join(QUANTIZATIONS)}, or nothing")
        if min(self.batch_sizes, default=0) < 1:
            raise InputError(f"batch_sizes is {self.batch_sizes}; expected one size of at least 1, or more")

    def texts(self) -> list[str | Chat]:
        """The prompts: texts and chats.

        Raises:
            LoadError, InputError: the file cannot be read, or has none.
        """
        return list(STORIES[: self.count]) if self.prompts is None else read_prompts(self.prompts, self.count)

    def references(self) -> list[str | None]:
        """The right answers to the prompts; None for a prompt without one.

        Raises:
            LoadError: the file cannot be read.
        """
        return [None] * len(self.texts()) if self.prompts is None else read_references(self.prompts, self.count)

    def kinds(self) -> dict[str, list[str | Chat]]:
        """The prompts of each ``task``, evenly spaced over their file; empty: none is named.

        Raises:
            InputError: one is not NAME=FILE, is named twice, or the file has no prompt.
            LoadError: a file cannot be read.
        """
        found: dict[str, list[str | Chat]] = {}
        for text in self.task:
            name, _, path = text.partition("=")
            if not name or not path or name in found:
                raise InputError(
                    f"task is {text!r}; expected NAME=FILE, for instance chat=questions.jsonl, a name once"
                )
            every = read_prompts(Path(path).expanduser(), category=name)
            found[name] = every[:: max(1, len(every) // self.count)][: self.count]
        return found

    def check_pair(self, *, alone: bool = False) -> None:
        """Refuse at once what a row about a pair would refuse after others have run.

        Args:
            alone: no row needs a draft model.

        Raises:
            InputError, LoadError: the draft is no model, the dtype is not known, or a file cannot be read.
            UnsupportedError: a packed copy, which no other program can run.
        """
        from sakiyomi.model_executor.loading.model import parse_device, parse_dtype
        from sakiyomi.model_executor.loading.packed import is_packed

        parse_dtype(self.dtype)
        parse_device(self.device)
        for name in (self.target,) if alone else (self.target, self.draft_model):
            if is_packed(Path(name).expanduser()):
                raise UnsupportedError(
                    f"{name!r} is a packed copy, which cannot be measured beside others; pass the model's own folder, "
                    "with quantize its packed copy is used"
                )
        self.texts()
        self.kinds()
        if self.gguf is not None and not Path(self.gguf).expanduser().is_file():
            raise LoadError(f"gguf is {self.gguf!r}, which is no file; give the path of a .gguf file")
        if self.quality is not None:
            read_text(self.quality)

    @property
    def medusa_heads(self) -> str:
        """Name of the heads.

        Raises:
            InputError: none are known for this target.
        """
        heads = self.heads or MEDUSA_HEADS.get(self.target)
        if heads is None:
            raise InputError(f"no Medusa heads are known for {self.target}; give their folder with --heads")
        return heads

    @property
    def draft_model(self) -> str:
        """Name of the draft model, which transformers has to load too.

        Raises:
            InputError: the drafter is no model.
        """
        if self.draft == "auto" and self.target in DRAFTS:
            return DRAFTS[self.target]
        kind, _, name = self.draft.partition(":")
        if kind != "model" or not name:
            raise InputError(
                f"draft is {self.draft!r}; for {self.target} it has to be a draft model: model:FOLDER; bench --rows "
                "kinds takes any draft"
            )
        return name


@dataclass(frozen=True, kw_only=True)
class CardConfig(TextSettings):
    """A target to be measured for others to see.

    Attributes:
        draft: what proposes draft tokens, as for `sakiyomi generate`.
        out: name of the two files to write: OUT.md, a page, and OUT.json.
        quantize: int8 or int4: quantize the weights of our own target; its text is then compared with its own plain
            text.
        repeats: measured runs of each contender; fewer where they take too long.
        environments: folder of the environments of other engines; llama.cpp is measured where its own is there (see
            `sakiyomi bench --rows peers`).
    """

    target: str = field(metadata={"argument": "TARGET"})
    out: str = "card"
    quantize: str | None = None
    count: int = 4
    max_new_tokens: int = 64
    repeats: int = 3
    environments: str | None = None


def silent(text: str) -> None:
    """Ignore a line of progress."""

"""What `sakiyomi tune` looks at; the only home of these defaults. Imports no torch: the command line reads them."""

from __future__ import annotations

from dataclasses import dataclass, field

from sakiyomi.core.chats import Chat
from sakiyomi.core.checks import at_least
from sakiyomi.core.errors import InputError
from sakiyomi.core.prompts import read_prompts
from sakiyomi.evaluation.settings import TargetSettings

KINDS = ("auto", "eagle", "block", "medusa", "draft")


@dataclass(frozen=True, kw_only=True)
class PairConfig(TargetSettings):
    """A target, and drafters to choose from.

    Attributes:
        draft: drafter to consider (again for each), beside those that need nothing but the target: none,
            prompt-lookup, suffix, ngram, recycle+suffix+prompt-lookup, its own first layers, itself in 8 and in
            4 bits, the draft and heads that belong to it.
        drafts: folder of candidates, each a folder with a small model; unusable ones are listed with the reason.
        prompts: file of prompts: one a line, or .jsonl with text, prompt, turns or a chat (messages, conversations). A
            model with a chat template gets a text as a message. By default instructions, or beginnings of stories for
            a model without one. Every second prompt calibrates, the others are kept for the comparison.
        count: maximum number of prompts.
        prompt_tokens: prompts are cut to this many tokens, chats are not.
        max_new_tokens: new tokens of each text.
        temperature: of the texts; 0: greedy.
        finalists: how many of the configurations with the best predictions are measured beside plain decoding.
        seconds: about how long it may take; the number of prompts follows from it.
        all: measure every configuration on all prompts of the comparison, however long that takes, and report how far
            predictions were off.
        quantize: int8 or int4: quantize the target's weights, if it will run so.
        save: keep the result, so that draft auto uses it for this target from now on.
        watch: choose nothing: measure the draft that was chosen before, and say whether its acceptance has fallen.
        train: minutes to train a drafter first, on what the target answers to prompts; the same command continues a
            stopped run. 0: none.
        train_prompts: file of prompts for the training, or the word instructions for those of the package; all of
            --prompts are then kept for measuring. By default --prompts, of which every eighth is kept for measuring,
            else the instructions.
        kind: what is trained: eagle, block, medusa, draft (a small model), or auto: the one with the best predicted
            speed here.
        yes: do not ask after the first forecast whether to continue.
    """

    draft: tuple[str, ...] = ()
    drafts: str | None = None
    prompts: str | None = None
    count: int = 128
    prompt_tokens: int = 64
    max_new_tokens: int = 64
    temperature: float = 0.0
    finalists: int = 4
    seconds: int = 150
    all: bool = False
    quantize: str | None = None
    save: bool = True
    watch: bool = False
    train: float = 0.0
    train_prompts: str | None = None
    kind: str = "auto"
    yes: bool = False

    def __post_init__(self) -> None:
        at_least(self, count=2, prompt_tokens=1, max_new_tokens=8, temperature=0, finalists=1, seconds=1, train=0)
        if self.kind not in KINDS:
            raise InputError(f"kind is {self.kind!r}; expected {', '.join(KINDS)}")
        given = {"train_prompts": self.train_prompts, "yes": self.yes, "kind": self.kind != "auto"}
        if not self.train and (name := next((name for name, value in given.items() if value), None)):
            raise InputError(f"{name} is given, and nothing is to be trained; give --train MINUTES, or leave it out")
        if self.train and self.watch:
            raise InputError("watch measures the draft that was chosen before; leave out --train, or --watch")

    def texts(self) -> list[str | Chat] | None:
        """The prompts of the file, texts and chats; None: none is given.

        Raises:
            LoadError, InputError: the file cannot be read, or has none.
        """
        return None if self.prompts is None else read_prompts(self.prompts, self.count)


@dataclass(frozen=True)
class TuneConfig(TargetSettings):
    """What to tune, and on what.

    Attributes:
        heads: folder of the heads, or the name of embedded ones; the result is kept there.
        valid: held-out texts or chats, a .jsonl, .json or .txt file (.gz allowed); the target answers their prompts.
        prompts: how many of them.
        new_tokens: longest answer.
        max_nodes: largest tree.
        quantize: int8 or int4: quantize the target's weights, if it will run so.
    """

    heads: str = field(metadata={"argument": "HEADS"})
    valid: str = ""
    prompts: int = 24
    new_tokens: int = 128
    max_nodes: int = 31
    quantize: str | None = None

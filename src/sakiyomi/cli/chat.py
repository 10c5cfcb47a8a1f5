"""``sakiyomi chat``: a conversation with a model, whose cache is kept from one reply to the next."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import typer

from sakiyomi.cli.common import JsonOption, ModelOptions, command, load, note_lossy
from sakiyomi.core.errors import InputError, SakiyomiError
from sakiyomi.core.outputs import Stats
from sakiyomi.core.params import SamplingParams

if TYPE_CHECKING:
    from sakiyomi.cli.lines import Lines
    from sakiyomi.engine.chat_template import Dialogue, Exchange
    from sakiyomi.engine.llm import LLM

__all__ = ["Chat", "register"]

MAX_NEW_TOKENS = 512  # a reply ends by itself, or by Ctrl-C: sooner than in generate it should not


@dataclass(frozen=True)
class ChatOptions:
    """With whom, and how.

    Attributes:
        name: embedded name, folder or hub id, as --target.
        system: what the model is told before everything else.
        template: auto (the tokenizer's chat template, or plain text where it has none), none (plain text: what you say
            and what the model writes is one text), or a Jinja file.
        trace: colour each token by its origin (accepted, recovered, bonus, plain).
    """

    name: str | None = field(default=None, metadata={"argument": "TARGET"})
    system: str = ""
    template: str = "auto"
    trace: bool = False


@dataclass(frozen=True)
class Reply:
    """Figures of one reply. ``finish_reason`` is "interrupted" after Ctrl-C."""

    prompt_tokens: int
    finish_reason: str
    stats: Stats


def register(app: typer.Typer) -> None:
    """Add the command."""
    command(
        app,
        "chat",
        ChatOptions,
        ModelOptions,
        SamplingParams,
        JsonOption,
        defaults={"max_new_tokens": MAX_NEW_TOKENS},
        help="Talk with a model.\n\nOf every message only what is new is computed. Type /help for commands; Ctrl-C "
        "stops a reply, Ctrl-D leaves. From a pipe each line is a message.",
    )(chat)


def chat(options: ChatOptions, model: ModelOptions, params: SamplingParams, output: JsonOption) -> None:
    """Run the command."""
    if options.name is not None:
        if model.target not in (ModelOptions.target, options.name):
            raise InputError(f"the target is given twice, {options.name!r} and --target {model.target!r}; give one")
        model = dataclasses.replace(model, target=options.name)
    check(params)
    from sakiyomi.cli.lines import Lines
    from sakiyomi.cli.output import emit_json, legend, note, stdout
    from sakiyomi.engine.chat_template import Dialogue, read_template

    template = read_template(options.template)
    llm = load(model)
    dialogue = Dialogue(llm.tokenizer, template, options.system)
    lines = Lines()
    if dialogue.plain:
        note(f"{model.target} runs without a chat template: what you say and what it writes is one text that goes on")
    if model.exact:
        note(f"exact: of earlier prompts whole chunks of {llm.engine.chunk_size} tokens are used again (--chunk-size)")
    if lines.interactive:
        note('/help lists commands, """ begins and ends several lines, Ctrl-C stops a reply, Ctrl-D leaves')
        if options.trace:
            legend(stdout())
    talk = Chat(llm, dialogue, lines, params, options.trace)
    talk.run()
    if output.json:
        emit_json({"target": model.target, "draft": model.draft, **talk.to_dict()})
    if talk.failed and not lines.interactive:
        raise typer.Exit(1)


REFUSED = {
    "n": "a conversation has one reply to a message, and /again gives another one",
    "logprobs": "they are shown by sakiyomi generate --json only; leave them out",
}
"""Parameters that a conversation has no place for, and what to do instead."""


def check(params: SamplingParams) -> None:
    """Refuse what a conversation has no place for.

    Raises:
        InputError: with the remedy.
    """
    for name, remedy in REFUSED.items():
        if (value := getattr(params, name)) != getattr(SamplingParams, name):
            raise InputError(f"{name} is {value}; {remedy}")
    note_lossy(params)


class Chat:
    """A conversation at work.

    Args:
        llm: the engine.
        dialogue: what was said before.
        lines: where messages come from.
        params: of all replies until ``/set`` changes them.
        trace: tokens are coloured by their origin.

    Attributes:
        attempt: how many other replies the last message had before: with a seed the next one has other randomness.
        replies: figures of each reply, also of those taken back.
        failed: a message had no reply.
    """

    def __init__(self, llm: LLM, dialogue: Dialogue, lines: Lines, params: SamplingParams, trace: bool) -> None:
        self.llm, self.dialogue, self.lines, self.params, self.trace = llm, dialogue, lines, params, trace
        self.conversation = llm.conversation()
        self.attempt = 0
        self.replies: list[Reply] = []
        self.over = self.failed = self._told = False

    def run(self) -> None:
        """Answer messages and obey commands until there are no more."""
        from sakiyomi.cli.commands import obey
        from sakiyomi.cli.output import note

        warned = False
        with self.conversation:
            while not self.over:
                is_command = False
                try:
                    is_command, text = self.lines.read()
                    warned = False
                    if is_command:
                        obey(self, text)
                    elif text.strip():
                        self.answer(text, self.dialogue.exchanges)
                except SakiyomiError as error:
                    note(f"error: {error.message}")
                    self.failed = self.failed or not is_command
                except EOFError:
                    if self.lines.interactive:
                        note("")
                    return
                except KeyboardInterrupt:
                    if not self.lines.interactive:
                        raise
                    note("" if warned else "\nCtrl-C again, or Ctrl-D, leaves; /help lists commands")
                    if warned:
                        return
                    warned = True

    def answer(self, message: str, before: Sequence[Exchange], attempt: int = 0) -> None:
        """Stream the reply to a message behind these exchanges. Stopped by Ctrl-C it is what was said by then.

        Raises:
            SakiyomiError: there is no reply, and what was said before stays as it was.
        """
        from sakiyomi.cli.output import note, printed, stdout, write

        prompt = self.dialogue.prompt(message, before)
        if len(prompt) >= self.llm.max_context:
            raise InputError(
                f"with this message the conversation has {len(prompt)} tokens, and the context holds "
                f"{self.llm.max_context}: /undo takes the last exchange back, /reset begins anew"
            )
        said: list[str] = []
        reason = "interrupted"
        try:
            with closing(self.conversation.stream(prompt, self.params, index=attempt)) as steps:
                for step in printed(steps, self.llm.tokenizer, self.params.stop, self.trace):
                    said.append(step.text)
                    reason = step.finish_reason or reason
        except KeyboardInterrupt:
            if not self.lines.interactive:
                raise
            write(stdout(), "", end="\n")
        self.replies.append(Reply(len(prompt), reason, self.conversation.stats))
        text = "".join(said)
        if reason == "interrupted" and not text.strip():
            note("stopped before the first word: nothing of this exchange is kept")
            return
        self.dialogue.exchanges = [*before, (message, text)]
        self.attempt = attempt
        self._comment(text)

    def _comment(self, text: str) -> None:
        """One line where a reply ended otherwise than its reader may think."""
        from sakiyomi.cli.output import note

        last = self.replies[-1]
        if self.used >= self.llm.max_context:
            full = f"the context of {self.llm.max_context} tokens is full"
            note(f"{full}: /undo takes the last exchange back, /reset begins anew")
        elif last.finish_reason == "length" and self.lines.interactive and not self._told:
            self._told = True  # once is enough for those who want their replies short
            note(f"cut after {last.stats.tokens} tokens: /set max_new_tokens N for longer replies")
        elif not text.strip() and self.lines.interactive:
            note("an empty reply: the model ended it at once")

    @property
    def used(self) -> int:
        """Tokens of the last prompt and the reply to it."""
        return self.replies[-1].prompt_tokens + self.replies[-1].stats.tokens if self.replies else 0

    def to_dict(self) -> dict[str, Any]:
        """Messages and figures as JSON values."""
        return {
            "messages": self.dialogue.messages,
            "replies": [{**dataclasses.asdict(reply), "stats": reply.stats.to_dict()} for reply in self.replies],
            "stats": Stats.total(reply.stats for reply in self.replies).to_dict(),
        }

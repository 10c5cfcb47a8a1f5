"""A running conversation: reads messages, streams replies, and collects figures. Lines with a slash are commands."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from sakiyomi.cli import images
from sakiyomi.cli.common import note_lossy
from sakiyomi.cli.output import note, printed, stdout, write
from sakiyomi.core.errors import InputError, LoadError, SakiyomiError
from sakiyomi.core.outputs import Stats, Step
from sakiyomi.core.params import SamplingParams

if TYPE_CHECKING:
    from sakiyomi.engine.chat_template import Content, Dialogue, Exchange
    from sakiyomi.engine.llm import LLM

_QUOTES = '"""'


@dataclass(frozen=True)
class Reply:
    """Figures of one reply. ``finish_reason`` is "interrupted" after Ctrl-C."""

    prompt_tokens: int
    finish_reason: str
    stats: Stats


REFUSED = {
    "n": "a message has one reply, and /again generates another",
    **dict.fromkeys(("logprobs", "prompt_logprobs"), "they are shown by sakiyomi generate --json only; leave them out"),
}
"""Parameters that a conversation does not support, and what to do instead."""


def check(params: SamplingParams) -> None:
    """Refuse parameters that a conversation does not support.

    Raises:
        InputError: says what to do instead.
    """
    for name, remedy in REFUSED.items():
        if (value := getattr(params, name)) != getattr(SamplingParams, name):
            raise InputError(f"{name} is {value}; {remedy}")
    note_lossy(params)


class Tools(Protocol):
    """Answers messages with the help of tools, see ``ToolUse``."""

    def answer(self, chat: Chat, messages: Sequence[dict[str, Any]], attempt: int) -> tuple[str, list[dict[str, Any]]]:
        """The text of the reply, and the calls and results before it."""
        ...


class Chat:
    """A running conversation.

    Args:
        llm: the engine.
        dialogue: earlier messages.
        lines: source of messages.
        params: of replies, until ``/set`` changes them.
        trace: colour tokens by their origin.
        obey: runs the command of a line with a slash.
        tools: that the model may call; None: none.

    Attributes:
        images: image files for the next message.
        attempt: number of earlier replies to the last message, which varies the randomness of a seed.
        replies: figures of all replies, removed ones included.
        failed: a message got no reply.
    """

    def __init__(
        self,
        llm: LLM,
        dialogue: Dialogue,
        lines: Lines,
        params: SamplingParams,
        trace: bool,
        obey: Callable[[Chat, str], None],
        tools: Tools | None = None,
    ) -> None:
        self.llm, self.dialogue, self.lines, self.params, self.trace = llm, dialogue, lines, params, trace
        self._obey, self.tools = obey, tools
        self.conversation = llm.conversation()
        self.images: list[str] = []
        self.attempt = 0
        self.replies: list[Reply] = []
        self.over = self.failed = self._told = False

    def run(self) -> None:
        """Answer messages and obey commands until there are no more."""
        warned = False
        with self.conversation:
            while not self.over:
                is_command = False
                try:
                    is_command, text = self.lines.read()
                    warned = False
                    if is_command:
                        self._obey(self, text)
                    elif text.strip():
                        self.answer(images.content(text, self.images), self.dialogue.exchanges)
                        self.images = []
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

    def answer(self, message: Content, before: Sequence[Exchange], attempt: int = 0) -> None:
        """Stream the reply to a message after these exchanges. Ctrl-C ends it; the text so far is kept.

        Raises:
            SakiyomiError: there is no reply; the conversation is unchanged.
        """
        from sakiyomi.engine.chat_template import Exchange

        messages = self.dialogue.messages_with(message, before)
        between: Sequence[dict[str, Any]] = ()
        if self.tools is None:
            text = self._plain(messages, attempt)
        else:
            text, between = self.tools.answer(self, messages, attempt)
        if self.replies[-1].finish_reason == "interrupted" and not text.strip():
            note("stopped before the first word: this exchange was not kept")
            return
        self.dialogue.exchanges = [*before, Exchange(message, text, between)]
        self.attempt = attempt
        self._comment(text)

    def _plain(self, messages: list[dict[str, Any]], attempt: int) -> str:
        prompt: Any = self.dialogue.prompt(messages)
        if not isinstance(prompt, list):
            images.check_sees(self.llm)
            prompt = self.llm.engine.process(prompt, self.params)
        tokens = prompt if isinstance(prompt, list) else prompt.tokens
        said: list[str] = []

        def show(steps: Iterable[Step]) -> Iterator[Step]:
            for step in printed(steps, self.llm.tokenizer, self.params.stop, tokens, coloured=self.trace):
                said.append(step.text)
                yield step

        self.stream(prompt, tokens, self.params, attempt, show)
        return "".join(said)

    def stream(
        self,
        prompt: Any,
        tokens: Sequence[int],
        params: SamplingParams,
        attempt: int,
        show: Callable[[Iterable[Step]], Iterable[Step]],
    ) -> None:
        """Stream one reply of the model, and note its figures.

        Args:
            prompt: for the conversation.
            tokens: of it.
            params: of sampling.
            attempt: number of earlier replies to the same message.
            show: prints the steps, and gives them back.

        Raises:
            InputError: the prompt is too long.
        """
        if len(tokens) >= self.llm.max_context:
            raise InputError(
                f"with this message the conversation has {len(tokens)} tokens, and the context holds "
                f"{self.llm.max_context}: /undo removes the last exchange, /reset starts over"
            )
        reason = "interrupted"
        try:
            with contextlib.closing(self.conversation.stream(prompt, params, index=attempt)) as steps:
                for step in show(steps):
                    reason = step.finish_reason or reason
        except KeyboardInterrupt:
            if not self.lines.interactive:
                raise
            write(stdout(), "", end="\n")
        self.replies.append(Reply(len(tokens), reason, self.conversation.stats))

    def _comment(self, text: str) -> None:
        """Note an end of a reply that the user may not expect."""
        last = self.replies[-1]
        if self.used >= self.llm.max_context:
            full = f"the context of {self.llm.max_context} tokens is full"
            note(f"{full}: /undo removes the last exchange, /reset starts over")
        elif last.finish_reason == "length" and self.lines.alone and not self._told:
            self._told = True  # once is enough
            how = "/set max_new_tokens N" if self.lines.interactive else "--max-new-tokens N"
            note(f"cut after {last.stats.tokens} tokens: {how} for longer replies")
        elif not text.strip() and self.lines.alone:
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


class Lines:
    """Messages from stdin: with line editing and prompts on a terminal, otherwise one per line.

    A backslash at the end of a line continues it on the next one; lines between triple quotes are one message.

    Attributes:
        interactive: stdin is a terminal.
        alone: a person reads each reply, and is told of ends that surprise.
    """

    def __init__(self) -> None:
        self.interactive = self.alone = sys.stdin.isatty()
        self._edits = self.interactive and sys.stdout.isatty()
        if self._edits:
            with contextlib.suppress(ImportError):  # not on every system
                import readline  # noqa: F401  input() then edits lines and knows the earlier ones

    def read(self) -> tuple[bool, str]:
        """The next message, and whether it is a command (its line begins with a slash).

        Raises:
            EOFError: there is no more.
            LoadError: a line is not UTF-8 text; the next call reads the next line.
        """
        line = self._line("> ")
        if line.lstrip().startswith(_QUOTES):
            return False, self._quoted(line.lstrip().removeprefix(_QUOTES))
        command = line.startswith("/")
        while line.endswith("\\"):
            line = line[:-1] + "\n" + self._line(". ", "")
        return command, line

    def _quoted(self, line: str) -> str:
        lines = [line]
        while not lines[-1].rstrip().endswith(_QUOTES):
            lines.append(self._line(". ", _QUOTES))
        lines[-1] = lines[-1].rstrip().removesuffix(_QUOTES)
        return "\n".join(lines).strip("\n")

    def _line(self, prompt: str, at_end: str | None = None) -> str:
        """One line without its end; at the end of the input ``at_end``, if it is given."""
        try:
            line = input(prompt) if self._edits else self._plain_line(prompt)
            line.encode()
        except EOFError:
            if at_end is None:
                raise
            return at_end
        except UnicodeError:
            raise LoadError("a line on stdin is not UTF-8 text; it was left out") from None
        return line

    def _plain_line(self, prompt: str) -> str:
        if self.interactive:
            sys.stderr.write(prompt)
            sys.stderr.flush()
        line = sys.stdin.buffer.readline()
        if not line:
            raise EOFError
        return line.decode("utf-8").rstrip("\r\n")


class Given(Lines):
    """Messages of the command line; a slash has no meaning there.

    Args:
        messages: of the user, in order.
    """

    def __init__(self, messages: Sequence[str]) -> None:
        self.interactive, self.alone = False, True
        self._left = deque(messages)

    def read(self) -> tuple[bool, str]:
        """The next message.

        Raises:
            EOFError: there is no more.
        """
        if not self._left:
            raise EOFError
        return False, self._left.popleft()

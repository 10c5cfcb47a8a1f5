"""``sakiyomi chat``: a conversation with a model, whose cache is kept from one reply to the next.

A line that begins with a slash is a command; a new one is a function here and one line in ``COMMANDS``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from sakiyomi.cli import images
from sakiyomi.cli.common import JsonOption, flag_help, from_stdin, load, parameters, parsed
from sakiyomi.cli.output import is_coloured, legend, note, stdout
from sakiyomi.cli.talk import REFUSED, Chat, Given, Lines, check
from sakiyomi.cli.tool_use import ToolUse, commands_of
from sakiyomi.core.errors import InputError
from sakiyomi.core.images import read_images
from sakiyomi.core.outputs import Stats
from sakiyomi.core.params import SamplingParams
from sakiyomi.core.preflight import check_target
from sakiyomi.engine.config import LLMConfig

if TYPE_CHECKING:
    from sakiyomi.engine.chat_template import Content

MAX_NEW_TOKENS = 512  # more than in generate: a reply ends by itself, or by Ctrl-C


@dataclass(frozen=True)
class ChatOptions:
    """The model, and how to talk to it.

    Attributes:
        name: the target: embedded name, folder, file or hub id, as --target; with --target it is the first message.
        messages: messages to answer, one after the other; then the chat ends. - reads one from stdin. Without any the
            chat goes on line by line.
        system: system prompt.
        template: auto (the tokenizer's chat template, or plain text if it has none), none (plain text: messages and
            replies form one continuing text), or a Jinja file.
        trace: colour each token by its source (accepted, recovered, bonus, plain).
        tools: JSON or TOML file of tools that the model may call. Each has a name, a command (a list in which {NAME}
            stands for an argument; without such places the arguments are JSON on stdin), and, if wanted, description,
            parameters (a JSON schema), ask = false and timeout (seconds).
        yes_tools: run the commands of tools without asking.
    """

    name: str | None = field(default=None, metadata={"argument": "TARGET"})
    messages: tuple[str, ...] = field(default=(), metadata={"argument": "MESSAGE"})
    system: str = ""
    template: str = "auto"
    trace: bool = False
    tools: str | None = None
    yes_tools: bool = False


def chat(options: ChatOptions, model: LLMConfig, params: SamplingParams, output: JsonOption) -> None:
    """Talk with a model, or ask it once.

    Only the new tokens of each message are computed. Type /help for commands; Ctrl-C stops a reply, Ctrl-D leaves.
    From a pipe each line is a message.

    Example: sakiyomi chat --model FOLDER "What is the capital of France?"
    """
    model, messages = _given(options, model)
    check(params)
    from sakiyomi.engine.chat_template import Dialogue, read_template

    template = read_template(options.template)
    commands = commands_of(options.tools, yes=options.yes_tools)
    llm = load(model)
    dialogue = Dialogue(llm.tokenizer, template, options.system, llm.processor)
    lines = Given(messages) if messages else Lines()
    if dialogue.plain:
        note(f"{model.target} runs without a chat template: your messages and its replies form one continuing text")
    if model.exact:
        note(f"exact: earlier prompts are reused in whole chunks of {llm.engine.chunk_size} tokens (--chunk-size)")
    if lines.interactive:
        note(
            '/help lists commands, """ begins and ends a message of several lines, Ctrl-C stops a reply, Ctrl-D leaves'
        )
        if options.trace:
            legend(stdout())
    tools = ToolUse(llm, options.template, commands, str(options.tools)) if commands else None
    talk = Chat(llm, dialogue, lines, params, options.trace, obey, tools)
    talk.run()
    output.emit({"target": model.target, "draft": model.draft, **talk.to_dict()})
    llm.record()
    if talk.failed and not lines.interactive:
        raise typer.Exit(1)


def _given(options: ChatOptions, model: LLMConfig) -> tuple[LLMConfig, list[str]]:
    """The model with its target, and the messages: the first argument is either."""
    given = [text for text in (options.name, *options.messages) if text is not None]
    if given and model.target == LLMConfig.target and (_on_disk(given[0]) or not re.search(r"\s", given[0])):
        model = dataclasses.replace(model, target=given.pop(0))
        check_target(model.target, allow_pickle=model.allow_pickle, trust_remote_code=model.trust_remote_code)
    elif given and _on_disk(given[0]) and Path(given[0]).is_dir():
        raise InputError(f"the target is given twice, {given[0]!r} and --target {model.target!r}; give one")
    messages = [from_stdin() if text == "-" else text for text in given]
    if not all(text.strip() for text in messages):
        raise InputError("a message is empty; give a text")
    return model, messages


def _on_disk(name: str) -> bool:
    """Whether there is a file or folder of this name, which may be any text."""
    with contextlib.suppress(OSError, ValueError):  # a text may be too long for a name
        return Path(name).exists()
    return False


# ---------------------------------------------------------------- commands


def obey(chat: Chat, line: str) -> None:
    """Run a command.

    Raises:
        SakiyomiError: the command failed, and changed nothing.
    """
    name, _, rest = line[1:].partition(" ")
    name, rest = ALIASES.get(name.strip(), name.strip()), rest.strip()
    if name not in COMMANDS:
        raise InputError(
            f"there is no command /{name}; /help lists them; a space before the slash sends the line as a message"
        )
    if rest and not _usage(name)[0]:
        raise InputError(f"/{name} takes no argument; it was given {rest!r}")
    COMMANDS[name](chat, rest)


def _usage(name: str) -> tuple[str, str]:
    """The argument of a command, "" for none, and its help."""
    argument, _, text = str(COMMANDS[name].__doc__).rstrip(".").rpartition(": ")
    return argument, text[:1].lower() + text[1:]


def _help(chat: Chat, rest: str) -> None:
    """This list."""
    lines = [(f"/{name} {_usage(name)[0]}".rstrip(), _usage(name)[1]) for name in COMMANDS]
    lines += [
        ("\\ at a line's end", "the message continues on the next line"),
        ('""" ... """', "several lines as one message"),
    ]
    for usage, text in lines:
        note(f"{usage:<20}{text}")


def _reset(chat: Chat, rest: str) -> None:
    """Start over; system prompt and parameters stay."""
    chat.dialogue.exchanges, chat.images = [], []
    chat.attempt = 0
    chat.conversation.close()
    note("a new conversation" + (", with the same system prompt" if chat.dialogue.system else ""))


def _undo(chat: Chat, rest: str) -> None:
    """Remove the last exchange."""
    _last(chat)
    chat.dialogue.exchanges = chat.dialogue.exchanges[:-1]
    chat.attempt = 0
    left = len(chat.dialogue.exchanges)
    note(f"removed; {left} exchange{'s' * (left != 1)} left")


def _again(chat: Chat, rest: str) -> None:
    """Generate another reply to the last message."""
    message = _last(chat)
    if chat.params.greedy:
        note("at temperature 0 a reply is always the same; /set temperature 0.8 to get others")
    chat.answer(message, chat.dialogue.exchanges[:-1], chat.attempt + 1)


def _last(chat: Chat) -> Content:
    if not chat.dialogue.exchanges:
        raise InputError("there was no message yet")
    return chat.dialogue.exchanges[-1][0]


def _image(chat: Chat, rest: str) -> None:
    """[FILE]: send an image with the next message; without FILE none."""
    if not rest:
        chat.images = []
        note("no image goes with the next message")
        return
    if chat.tools is not None:
        raise InputError("images and --tools cannot be combined; start the chat without --tools")
    images.check_sees(chat.llm)
    read_images([*chat.images, rest])
    chat.images.append(rest)
    note(f"{len(chat.images)} image{'s' * (len(chat.images) != 1)} will go with the next message")


def _system(chat: Chat, rest: str) -> None:
    """[TEXT]: set the system prompt; without TEXT remove it."""
    chat.dialogue.system = rest
    note("the system prompt is set" if rest else "there is no system prompt now")


def _set(chat: Chat, rest: str) -> None:
    """[NAME [VALUE]]: set a parameter, or show it; without NAME all of them."""
    name, _, value = rest.partition(" ")
    name = name.replace("-", "_")
    known = [field for field in parameters(SamplingParams) if field not in REFUSED]
    if not name:
        for field in known:
            note(f"{field:<20}{getattr(chat.params, field)!r:<12} {flag_help(SamplingParams)[field]}")
        return
    if name in REFUSED:
        raise InputError(f"{name} cannot be set here; {REFUSED[name]}")
    if name not in known:
        raise InputError(f"there is no parameter {name!r}; there are {', '.join(known)}")
    if value.strip():
        changed = dataclasses.replace(chat.params, **{name: parsed(SamplingParams, name, value.strip())})
        check(changed)
        chat.params = changed
    note(f"{name} is {getattr(chat.params, name)!r}")


def _stats(chat: Chat, rest: str) -> None:
    """Statistics of the last reply and of all."""
    if not chat.replies:
        raise InputError("there was no reply yet")
    parts = {"last reply": chat.replies[-1:]}
    if len(chat.replies) > 1:
        parts[f"all {len(chat.replies)} replies"] = chat.replies
    for name, replies in parts.items():
        stats = Stats.total(reply.stats for reply in replies)
        read = sum(reply.prompt_tokens for reply in replies)
        note(
            f"{name}: {stats.tokens} tokens, {stats.tokens_per_second:.0f} tokens/s, tau {stats.tau:.2f}, acceptance "
            f"{stats.acceptance_rate:.2f}; {stats.reused} of {read} prompt tokens were in the cache"
        )
    note(f"context: {chat.used} of {chat.llm.max_context} tokens")


def _save(chat: Chat, rest: str) -> None:
    """FILE: write the messages to a JSON file."""
    chat.dialogue.save(_file(rest))
    note(f"{len(chat.dialogue.messages)} messages are in {rest}")


def _load(chat: Chat, rest: str) -> None:
    """FILE: continue with the messages of such a file."""
    chat.dialogue.load(_file(rest), called=chat.tools is not None)
    chat.attempt = 0
    note(f"{len(chat.dialogue.messages)} messages loaded; the conversation continues after them")


def _file(rest: str) -> Path:
    if not rest:
        raise InputError("a file's name is missing, for instance: chat.json")
    return Path(rest).expanduser()


def _color(chat: Chat, rest: str) -> None:
    """on|off: colour tokens by their source."""
    if rest not in ("on", "off"):
        raise InputError(f"color is {rest!r}; it is on or off")
    chat.trace = rest == "on"
    console = stdout()
    if chat.trace and not is_coloured(console):
        note("colours are off: stdout is not a colour terminal, or NO_COLOR is set")
    elif chat.trace:
        legend(console)


def _exit(chat: Chat, rest: str) -> None:
    """Leave, as Ctrl-D does."""
    chat.over = True


COMMANDS = {
    run.__name__.strip("_"): run
    for run in (_help, _reset, _undo, _again, _image, _system, _set, _stats, _save, _load, _color, _exit)
}
"""By name. A docstring is a command's help: its argument, a colon and what it does, or only that."""
ALIASES = {"?": "help", "clear": "reset", "regenerate": "again", "trace": "color", "quit": "exit", "bye": "exit"}

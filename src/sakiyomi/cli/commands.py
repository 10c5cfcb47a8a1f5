"""What a line that begins with a slash does in a chat. A new one is a function here and one line in ``COMMANDS``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sakiyomi.cli import images
from sakiyomi.cli.common import flag_help, parameters, parsed
from sakiyomi.cli.output import is_coloured, legend, note, stdout
from sakiyomi.cli.talk import REFUSED, Chat, check
from sakiyomi.core.errors import InputError
from sakiyomi.core.outputs import Stats
from sakiyomi.core.params import SamplingParams

if TYPE_CHECKING:
    from sakiyomi.engine.chat_template import Content

__all__ = ["COMMANDS", "obey"]


@dataclass(frozen=True)
class Command:
    """What it does with the rest of its line, how that is called ("" where there is none), what it is for."""

    run: Callable[[Chat, str], None]
    argument: str
    help: str


def obey(chat: Chat, line: str) -> None:
    """Run a command.

    Raises:
        SakiyomiError: it cannot be done; nothing has changed then.
    """
    name, _, rest = line[1:].partition(" ")
    name, rest = ALIASES.get(name.strip(), name.strip()), rest.strip()
    if name not in COMMANDS:
        raise InputError(
            f"there is no command /{name}; /help lists them; a space before the slash sends the line as a message"
        )
    if rest and not COMMANDS[name].argument:
        raise InputError(f"/{name} takes no argument; it was given {rest!r}")
    COMMANDS[name].run(chat, rest)


def _help(chat: Chat, rest: str) -> None:
    lines = [(f"/{name} {command.argument}".rstrip(), command.help) for name, command in COMMANDS.items()]
    lines += [
        ("\\ at a line's end", "the message continues on the next line"),
        ('""" ... """', "several lines as one message"),
    ]
    for usage, text in lines:
        note(f"{usage:<20}{text}")


def _reset(chat: Chat, rest: str) -> None:
    chat.dialogue.exchanges, chat.images = [], []
    chat.attempt = 0
    chat.conversation.close()
    note("a new conversation" + (", with the same system prompt" if chat.dialogue.system else ""))


def _undo(chat: Chat, rest: str) -> None:
    _last(chat)
    chat.dialogue.exchanges = chat.dialogue.exchanges[:-1]
    chat.attempt = 0
    left = len(chat.dialogue.exchanges)
    note(f"removed; {left} exchange{'s' * (left != 1)} left")


def _again(chat: Chat, rest: str) -> None:
    message = _last(chat)
    if chat.params.greedy:
        note("at temperature 0 a reply is always the same; /set temperature 0.8 to get others")
    chat.answer(message, chat.dialogue.exchanges[:-1], chat.attempt + 1)


def _last(chat: Chat) -> Content:
    if not chat.dialogue.exchanges:
        raise InputError("there was no message yet")
    return chat.dialogue.exchanges[-1][0]


def _image(chat: Chat, rest: str) -> None:
    if not rest:
        chat.images = []
        note("no image goes with the next message")
        return
    images.check_sees(chat.llm)
    images.read_images([*chat.images, rest])
    chat.images.append(rest)
    note(f"{len(chat.images)} image{'s' * (len(chat.images) != 1)} will go with the next message")


def _system(chat: Chat, rest: str) -> None:
    chat.dialogue.system = rest
    note("the system prompt is set" if rest else "there is no system prompt now")


def _set(chat: Chat, rest: str) -> None:
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
    chat.dialogue.save(_file(rest))
    note(f"{len(chat.dialogue.messages)} messages are in {rest}")


def _load(chat: Chat, rest: str) -> None:
    chat.dialogue.load(_file(rest))
    chat.attempt = 0
    note(f"{len(chat.dialogue.messages)} messages loaded; the conversation continues after them")


def _file(rest: str) -> Path:
    if not rest:
        raise InputError("a file's name is missing, for instance: chat.json")
    return Path(rest).expanduser()


def _color(chat: Chat, rest: str) -> None:
    if rest not in ("on", "off"):
        raise InputError(f"color is {rest!r}; it is on or off")
    chat.trace = rest == "on"
    console = stdout()
    if chat.trace and not is_coloured(console):
        note("colours are off: stdout is not a colour terminal, or NO_COLOR is set")
    elif chat.trace:
        legend(console)


def _exit(chat: Chat, rest: str) -> None:
    chat.over = True


COMMANDS = {
    "help": Command(_help, "", "this list"),
    "reset": Command(_reset, "", "start over; system prompt and parameters stay"),
    "undo": Command(_undo, "", "remove the last exchange"),
    "again": Command(_again, "", "generate another reply to the last message"),
    "image": Command(_image, "[FILE]", "send an image with the next message; without FILE none"),
    "system": Command(_system, "[TEXT]", "set the system prompt; without TEXT remove it"),
    "set": Command(_set, "[NAME [VALUE]]", "set a parameter, or show it; without NAME all of them"),
    "stats": Command(_stats, "", "statistics of the last reply and of all"),
    "save": Command(_save, "FILE", "write the messages to a JSON file"),
    "load": Command(_load, "FILE", "continue with the messages of such a file"),
    "color": Command(_color, "on|off", "colour tokens by their source"),
    "exit": Command(_exit, "", "leave, as Ctrl-D does"),
}
ALIASES = {"?": "help", "clear": "reset", "regenerate": "again", "trace": "color", "quit": "exit", "bye": "exit"}

"""Messages, and the prompt made of them: by a chat template, or, without one, as plain text.

Knows a tokenizer and files of messages; it knows no model and no engine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from sakiyomi.core.chats import Chat, is_chat
from sakiyomi.core.errors import InputError, LoadError
from sakiyomi.core.files import whole_file
from sakiyomi.core.images import ImagePrompt, read_images
from sakiyomi.engine.rendering import Rendering, rendered, template_of

WORDS = ("auto", "none")
"""What may be given instead of a template."""
Content = str | list[dict[str, str]]
"""What a message says: a text, or parts, ``{"type": "image", "path": ...}`` and ``{"type": "text", "text": ...}``."""
_OPENING = '"(“'


class Exchange(NamedTuple):
    """A message and the reply to it.

    Attributes:
        message: of the user.
        reply: its text.
        between: calls of tools and their results before the reply, as messages in OpenAI's form.
    """

    message: Content
    reply: str
    between: Sequence[Mapping[str, Any]] = ()


_NEW_REPLY = Rendering()


def read_template(name: str) -> str:
    """The text of a template's file; "auto" and "none" are given back as they are.

    Raises:
        LoadError: it cannot be read.
    """
    if name in WORDS:
        return name
    try:
        return Path(name).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise LoadError(
            f"the chat template {name!r} cannot be read ({error}); expected auto, none or a Jinja file"
        ) from None


class Dialogue:
    """A system prompt and the exchanges that followed.

    Args:
        tokenizer: a transformers tokenizer.
        template: a Jinja text; "auto" for the tokenizer's own, or none where it has none; "none" for plain text.
        system: the system prompt; "" for none.
        processor: of a model that sees, whose template is used where the tokenizer has none.

    Attributes:
        exchanges: messages and replies, the oldest first.

    Raises:
        InputError: the template does not work, or a system prompt has no place in it.
    """

    def __init__(self, tokenizer: Any, template: str = "auto", system: str = "", processor: Any = None) -> None:
        self._tokenizer = tokenizer
        own, theirs = getattr(tokenizer, "chat_template", None), getattr(processor, "chat_template", None)
        if template == "auto" and not own and isinstance(theirs, str):
            template = theirs
        self.plain = template == "none" or (template == "auto" and not own)
        self._template = None if template in WORDS else template
        self.exchanges: list[Exchange] = []
        self._system = ""
        if not self.plain:
            self.rendered(_messages("", [], "Hello"))
        self.system = system

    @property
    def system(self) -> str:
        """The system prompt. Setting it raises InputError if the prompt would not contain it."""
        return self._system

    @system.setter
    def system(self, text: str) -> None:
        if not _is_text(text):
            raise InputError(f"the system prompt {text!r:.80} is no Unicode text; give it in UTF-8")
        if text and self.plain:
            raise InputError(
                "without a chat template a system prompt has no place; write it at the head of the first message"
            )
        if text.strip() not in ("" if self.plain else self.rendered(_messages(text, [], "Hello"))):
            raise InputError("the chat template leaves system prompts out; write it at the head of the first message")
        self._system = text

    @property
    def template(self) -> str:
        """The template's text; "" without one."""
        if self.plain:
            return ""
        return self._template or template_of(self._tokenizer)

    @property
    def messages(self) -> list[dict[str, Any]]:
        """All messages with their roles."""
        return _messages(self._system, self.exchanges)

    def messages_with(self, message: Content, before: Sequence[Exchange]) -> list[dict[str, Any]]:
        """All messages up to one behind these exchanges, with their roles."""
        return _messages(self._system, before, message)

    def read(self, messages: Sequence[Mapping[str, Any]], how: Rendering = _NEW_REPLY) -> list[int]:
        """Token ids of any messages, by default up to where the next reply begins.

        Args:
            messages: what the template takes; without one, texts of users and assistants.
            how: see there.

        Raises:
            InputError: the template does not take them.
        """
        if self.plain:
            if how.options:
                raise InputError("options need a chat template, and the model has none; leave them out")
            if how.tools:
                raise InputError("the model has no chat template that could describe tools to it; leave tools out")
            text = ""
            for message in messages:
                role, said = message["role"], message.get("content", "")
                if not isinstance(said, str):
                    raise InputError("the model has no chat template that could give images a place; send text")
                if role not in ("user", "assistant"):
                    raise InputError(
                        f"without a chat template a {role} message has no place; write it at the head of the first one"
                    )
                text += (_joint(text, said) if role == "user" else "") + said
            return list(self._tokenizer(_as_text(text))["input_ids"])
        # The template writes the begin token itself.
        return list(self._tokenizer(self.text(messages, how), add_special_tokens=False)["input_ids"])

    def prompt(self, messages: Chat, how: Rendering = _NEW_REPLY) -> list[int] | ImagePrompt:
        """What a model reads of any messages: their tokens, or, if they have images, a text with these.

        Raises:
            InputError, LoadError: the template does not take them, or an image cannot be read.
        """
        if not is_chat(messages):
            raise InputError(f"{messages!r:.80} is no chat; expected a list of objects with role and content")
        for number, message in enumerate(messages, start=1):
            if not isinstance(message.get("role"), str) or not ("content" in message or "tool_calls" in message):
                raise InputError(
                    f"message {number} of the chat is {message!r:.80}; expected an object with role and content"
                )
        parts = [part for message in messages if isinstance(said := message.get("content"), list) for part in said]
        shown = [part for part in parts if isinstance(part, Mapping) and part.get("type") == "image"]
        if not shown:
            return self.read(messages, how)
        if wrong := [part for part in shown if not isinstance(part.get("path"), str)]:
            raise InputError(f"the chat has the image {wrong[0]!r:.80}; expected path with the name of a file")
        files = [part["path"] for part in shown]
        return ImagePrompt(self.text(messages, how), read_images(files))

    def text(self, messages: Sequence[Mapping[str, Any]], how: Rendering = _NEW_REPLY) -> str:
        """What the template makes of messages, whose contents may be lists of parts, with images; see ``read``.

        Raises:
            InputError: the template does not take them, or there is none.
        """
        if self.plain:
            raise InputError("the model has no chat template that could give images a place; give one, or send text")
        taken = signature(self._tokenizer.apply_chat_template).parameters if how.options else ()
        if wrong := [name for name in how.options if name in taken]:
            raise InputError(f"options has {wrong[0]!r}, which is no name that a template has of its own; leave it out")
        text = self.rendered(messages, how)
        names = [str(tool.get("function", tool).get("name", "")) for tool in how.tools]
        told = all(name and name in text for name in names)
        if not told and text == self.rendered(messages, how._replace(tools=())):
            raise InputError("the chat template does not tell the model of tools; leave them out, or give another one")
        mark, begun = how.begun
        return _as_text(text + ("" if text.rstrip().endswith(mark) else mark) + begun)

    def save(self, path: Path) -> None:
        """Write the messages as JSON, whole or not at all.

        Raises:
            LoadError: the file cannot be written, or is one of that name that holds no messages.
        """
        if path.exists():
            try:
                _parse(path)
            except LoadError:
                raise LoadError(f"{str(path)!r} exists and holds no messages; choose another name") from None
        text = json.dumps({"messages": self.messages}, ensure_ascii=False, indent=1) + "\n"
        if not path.parent.is_dir():
            raise LoadError(f"the messages cannot be written to {str(path)!r}: there is no folder {str(path.parent)!r}")
        with whole_file(path, "choose another name") as fresh:
            fresh.write_text(text, encoding="utf-8")

    def load(self, path: Path, *, called: bool = False) -> None:
        """Replace the messages by those of a file.

        Args:
            path: of the file.
            called: calls of tools may be among them.

        Raises:
            LoadError: it cannot be read, or holds something else.
            InputError: the template does not take them. Nothing has changed then.
        """
        system, exchanges = _parse(path)
        if not called and any(exchange.between for exchange in exchanges):
            raise InputError(f"the messages in {str(path)!r} have calls of tools; start the chat with --tools")
        if not self.plain:
            texts = [exchange._replace(between=()) for exchange in exchanges]
            self.rendered(_messages(system, texts, "Hello"))
        self.system = system
        self.exchanges = exchanges

    def rendered(self, messages: Sequence[Mapping[str, Any]], how: Rendering = _NEW_REPLY) -> str:
        """What the template writes, which may leave tools out; see ``text``.

        Raises:
            InputError: the template does not take the messages.
        """
        return rendered(self._tokenizer, self._template, messages, how)


def has_template(tokenizer: Any, processor: Any = None) -> bool:
    """Whether a model brings a chat template."""
    return any(getattr(part, "chat_template", None) for part in (tokenizer, processor))


def prompt_ids(tokenizer: Any, prompt: str | Chat, most: int | None = None) -> list[int]:
    """Token ids of a text, at most the first ``most``, or of a whole chat.

    Raises:
        InputError: the chat template does not take the chat.
    """
    if is_chat(prompt):
        return Dialogue(tokenizer).read(prompt)
    return list(tokenizer(prompt)["input_ids"])[:most]


def _messages(system: str, exchanges: Sequence[Exchange], message: Content | None = None) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    for said, reply, between in exchanges:
        found += [{"role": "user", "content": said}, *map(dict, between), {"role": "assistant", "content": reply}]
    return found if message is None else [*found, {"role": "user", "content": message}]


def _is_text(value: Any) -> TypeGuard[str]:
    """Whether this is Unicode text: a lone surrogate, which JSON can hold, cannot be tokenized or written."""
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False


def _is_content(value: Any) -> TypeGuard[Content]:
    """Whether it is what a message can say."""
    if not isinstance(value, list):
        return _is_text(value)
    names = {"image": "path", "text": "text"}
    parts = [part if isinstance(part, dict) else {} for part in value]
    kinds = [names.get(str(part.get("type"))) for part in parts]
    return bool(parts) and all(
        kind is not None and part.keys() == {"type", kind} and _is_text(part[kind])
        for part, kind in zip(parts, kinds, strict=True)
    )


def _as_text(said: str) -> str:
    if not _is_text(said):
        raise InputError("the messages are no Unicode text: there is half of a surrogate pair in them; leave it out")
    return said


def _joint(before: str, after: str) -> str:
    """A space, if a message would otherwise run into the last word of the text before it."""
    end, head = before[-1:], after[:1]
    if not end or not head or end.isspace() or not end.isascii():
        return ""
    return " " if (head.isascii() and head.isalnum()) or head in _OPENING else ""


def _parse(path: Path) -> tuple[str, list[Exchange]]:
    """System prompt and exchanges of a file: ``{"messages": [...]}``, or the list alone."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LoadError(f"the messages in {str(path)!r} cannot be read: {error}") from None
    messages = value.get("messages") if isinstance(value, dict) else value
    if not isinstance(messages, list):
        raise LoadError(f'{str(path)!r} holds no messages; expected {{"messages": [{{"role": ..., "content": ...}}]}}')
    for number, message in enumerate(messages, start=1):
        if not _is_message(message):
            raise LoadError(f"message {number} of {str(path)!r} is {message!r:.80}; expected a role and its content")
    first = int(bool(messages) and messages[0]["role"] == "system")
    exchanges: list[Exchange] = []
    said: list[Any] = []  # since the last reply
    for message in messages[first:]:
        said.append(message)
        if message["role"] == "assistant" and not message.get("tool_calls"):
            exchanges.append(Exchange(said[0]["content"], message["content"], tuple(said[1:-1])))
            if not _is_exchange(said):
                break
            said = []
    if said:
        roles = ", ".join(message["role"] for message in messages)
        raise LoadError(
            f"the roles in {str(path)!r} are {roles:.80}; expected user and assistant alternately, ending "
            "with assistant, perhaps behind one system"
        )
    return messages[0]["content"] if first else "", exchanges


def _is_message(value: Any) -> bool:
    """Whether it is an object with a role and its content, or with calls."""
    if not isinstance(value, dict) or not isinstance(role := value.get("role"), str):
        return False
    content, calls = value.get("content"), value.get("tool_calls")
    if role == "assistant" and calls:
        return isinstance(calls, list) and (content is None or _is_text(content))
    return _is_content(content) if role == "user" else _is_text(content)


def _is_exchange(said: Sequence[Mapping[str, Any]]) -> bool:
    """Whether these messages are one of the user, calls with their results, and a reply."""
    first, *between = [message["role"] for message in said[:-1]] or [""]
    return first == "user" and set(between) <= {"assistant", "tool"} and between[:1] != ["tool"]

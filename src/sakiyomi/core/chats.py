"""Chats: messages of a system, a user and an assistant, as files and callers write them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from sakiyomi.core.errors import LoadError

Message = tuple[str, str]
"""Role ("system", "user" or "assistant") and text."""
ROLES = {
    "system": "system",
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard"), "assistant"),
}
"""By the names that ShareGPT's files use."""
Chat = Sequence[Mapping[str, Any]]
"""What a chat template takes: objects with ``role`` and ``content``."""


def chat_messages(record: dict[str, Any], place: str) -> list[Message] | None:
    """The messages of a record: `conversations` (ShareGPT), `messages`, or the first of `turns`; None: it is no chat.

    `turns` (MT-bench) are messages of the user. The later ones refer to replies that the file does not have.

    Raises:
        LoadError: a message has another role, or no text.
    """
    turns = record.get("conversations", record.get("messages"))
    if turns is None and isinstance(asked := record.get("turns"), list) and asked:
        turns = [{"role": "user", "content": asked[0]}]
    if turns is None:
        return None
    found: list[Message] = []
    for turn in turns if isinstance(turns, list) else [turns]:
        turn = turn if isinstance(turn, dict) else {}
        role, text = turn.get("from", turn.get("role")), turn.get("value", turn.get("content"))
        if not isinstance(role, str) or role not in ROLES or not isinstance(text, str):
            raise LoadError(
                f"{place} has a message from {role!r} with {type(text).__name__} content; expected one of "
                f"{', '.join(ROLES)} and a text"
            )
        found.append((ROLES[role], text.strip()))
    return found


def asked(messages: Sequence[Message]) -> list[dict[str, str]]:
    """The messages up to the last one of the user, which is to be answered; empty: there is none."""
    last = max((i for i, (role, _) in enumerate(messages, start=1) if role == "user"), default=0)
    return [{"role": role, "content": text} for role, text in messages[:last]]


def question(text: str) -> list[dict[str, str]]:
    """A chat of one message."""
    return [{"role": "user", "content": text}]


def is_chat(prompt: object) -> TypeGuard[Chat]:
    """Whether a prompt is a list of messages."""
    return isinstance(prompt, list | tuple) and bool(prompt) and all(isinstance(one, Mapping) for one in prompt)

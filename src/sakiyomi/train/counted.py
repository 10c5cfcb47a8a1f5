"""Documents of which some tokens are learnt from and others are only read: chats, and answers to prompts.

A document is one array of token ids in which a token that does not count stands as its complement, ``~id``, a negative
number: rows are then cut, shuffled and kept as those of any other text.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sakiyomi.core.errors import InputError, LoadError
from sakiyomi.train.data import Ids, check_ids, encode_documents, normalise, read_records

__all__ = [
    "Message",
    "answered_tokens",
    "chat_messages",
    "chat_prompts",
    "encode_chat",
    "read_counted",
    "read_prompts",
    "token_ids",
    "written_chat",
]

Message = tuple[str, str]
"""Role ("system", "user" or "assistant") and text."""

ROLES = {
    "system": "system",
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard"), "assistant"),
}
"""By the names that ShareGPT's files use."""
PLAIN = {"system": "{}\n\n", "user": "USER: {}\n", "assistant": "ASSISTANT:"}
"""How a chat is written where the tokenizer has no template; the reply follows behind a space."""


def token_ids(document: Ids) -> Ids:
    """The tokens of a document, those that do not count too."""
    return np.where(document < 0, ~document, document)


def read_counted(path: Path, tokenizer: Any, vocab: int) -> list[Ids]:
    """Documents of a file: texts, lists of token ids, or chats in ShareGPT's form, told apart by their keys.

    Of a text all tokens count; of ``tokens`` those behind the first ``prompt`` ones; of a chat (``conversations`` with
    ``from`` and ``value``, or ``messages`` with ``role`` and ``content``) what the assistant says. Chats in which it
    says nothing are passed over.

    Raises:
        LoadError: a line is not JSON, or is none of these; its number and the reason are said.
        InputError: nothing in the file counts.
    """
    texts: list[str] = []
    found: list[Ids] = []
    chats = 0
    for number, record in read_records(path):
        place = f"{path} line {number}"
        if not isinstance(record, dict):
            raise LoadError(f"{place} holds a {type(record).__name__}; expected an object")
        messages = chat_messages(record, place)
        if messages is not None:
            chats += 1
            chat = encode_chat(tokenizer, messages)
            if chat is not None:
                found.append(chat)
        elif isinstance(record.get("text"), str):
            texts.append(normalise(record["text"]))
        else:
            found.append(answered_tokens(record, place, vocab))
    found += encode_documents([text for text in texts if text], tokenizer)
    if chats and not any((document >= 0).any() for document in found):
        raise InputError(
            f"{path} holds {chats} chats in which no assistant says anything; expected messages from gpt or assistant"
        )
    if not found:
        raise LoadError(f"{path} holds no document; expected at least one non-empty text or chat")
    return found


def read_prompts(path: Path, tokenizer: Any) -> list[list[int]]:
    """Prompts of a file of chats: every point where the assistant is to speak. Empty: the file holds other things.

    Raises:
        LoadError: see ``read_counted``.
    """
    found: list[list[int]] = []
    others = 0
    for number, record in read_records(path):
        messages = chat_messages(record, f"{path} line {number}") if isinstance(record, dict) else None
        if messages is not None:
            found += chat_prompts(tokenizer, messages)
        else:
            others += 1
    if found and others:
        raise InputError(f"{path} holds chats and {others} records of other kinds; put them into files of their own")
    return found


def encode_chat(tokenizer: Any, messages: Sequence[Message]) -> Ids | None:
    """A chat's tokens, of which those of the assistant count; None: it says nothing.

    What stands before a reply is encoded as it will be when the model is asked for that reply, and the reply for
    itself, so that both meet where they will then.
    """
    parts: list[np.ndarray] = []
    done = ""
    for i, (role, _) in enumerate(messages):
        if role != "assistant":
            continue
        before, after = written_chat(tokenizer, messages[:i], asking=True), written_chat(tokenizer, messages[: i + 1])
        if not before.startswith(done):  # a template that writes earlier turns differently: this reply alone counts
            parts, done = [], ""
        if not after.startswith(before):
            raise InputError(
                "the chat template writes a message differently when it is answered: no place of the reply can be "
                "told; give chats as tokens with the length of their prompt"
            )
        read, reply = (
            np.array(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], dtype=np.int64)
            for text in (before[len(done) :], after[len(before) :])
        )
        parts += [~read, reply]
        done = after
    if not parts:
        return None
    end = [] if getattr(tokenizer, "chat_template", None) else [[tokenizer.eos_token_id]]
    return np.concatenate([*parts, *end]).astype(np.int64)


def chat_prompts(tokenizer: Any, messages: Sequence[Message]) -> list[list[int]]:
    """Token ids up to each point where the assistant speaks, or is to speak at the end."""
    ends = [i for i, (role, _) in enumerate(messages) if role == "assistant"]
    if messages and messages[-1][0] == "user":
        ends.append(len(messages))
    return [
        list(tokenizer(written_chat(tokenizer, messages[:end], asking=True), add_special_tokens=False)["input_ids"])
        for end in ends
        if end
    ]


def written_chat(tokenizer: Any, messages: Sequence[Message], *, asking: bool = False) -> str:
    """Messages as one text; ``asking``: up to where the assistant's next one begins."""
    if getattr(tokenizer, "chat_template", None):
        turns = [{"role": role, "content": text} for role, text in messages]
        try:
            return str(tokenizer.apply_chat_template(turns, add_generation_prompt=asking, tokenize=False))
        except Exception as error:  # a template is a program of somebody else's
            raise InputError(f"the chat template fails ({type(error).__name__}: {error})") from error
    written = ""
    for role, text in messages:
        written += f"{PLAIN[role]} {text}\n" if role == "assistant" else PLAIN[role].format(text)
    return written + PLAIN["assistant"] * asking


def chat_messages(record: dict[str, Any], place: str) -> list[Message] | None:
    """The messages of a record; None: it is no chat."""
    turns = record.get("conversations", record.get("messages"))
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


def answered_tokens(record: dict[str, Any], place: str, vocab: int) -> Ids:
    """The document of a record with token ids."""
    tokens, prompt = record.get("tokens"), record.get("prompt", 0)
    whole = isinstance(tokens, list) and all(type(token) is int for token in tokens)
    if not whole or not tokens or type(prompt) is not int or not 0 <= prompt <= len(tokens):
        raise LoadError(
            f'{place} has no "text", no "conversations" and no "tokens" (ids, perhaps with "prompt", the number of '
            "those that do not count); expected one of them"
        )
    check_ids(tokens, vocab, place)
    ids = np.array(tokens, dtype=np.int64)
    ids[:prompt] = ~ids[:prompt]
    return ids

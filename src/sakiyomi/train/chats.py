"""Chats as training text: how they are written, and which of their tokens are learnt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from sakiyomi.core.chats import Message
from sakiyomi.core.errors import InputError

PLAIN = {"system": "{}\n\n", "user": "USER: {}\n", "assistant": "ASSISTANT: {}\n"}
"""How a chat is written where the tokenizer has no template."""
ASKING = "ASSISTANT:"
"""Marks where the next reply begins; a space follows."""


def written_chat(tokenizer: Any, messages: Sequence[Message], *, asking: bool = False) -> str:
    """Messages as one text, by the tokenizer's chat template where there is one.

    Args:
        tokenizer: of the target; None: there is none yet.
        messages: of the chat.
        asking: up to where the assistant's next message begins.
    """
    if getattr(tokenizer, "chat_template", None):
        turns = [{"role": role, "content": text} for role, text in messages]
        try:
            return str(tokenizer.apply_chat_template(turns, add_generation_prompt=asking, tokenize=False))
        except Exception as error:  # a template is a program that comes with the model
            raise InputError(f"the chat template fails ({type(error).__name__}: {error})") from error
    return "".join(PLAIN[role].format(text) for role, text in messages) + ASKING * asking


def encode_chat(tokenizer: Any, messages: Sequence[Message]) -> np.ndarray | None:
    """A chat's tokens, those outside the assistant's replies as their complement; None: it says nothing.

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
                "the chat template writes a message differently when it is answered, so the place of the reply is "
                "unknown; give chats as tokens with the length of their prompt"
            )
        parts += [~encoded(tokenizer, before[len(done) :]), encoded(tokenizer, after[len(before) :])]
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
    texts = [written_chat(tokenizer, messages[:end], asking=True) for end in ends if end]
    return [encoded(tokenizer, text).tolist() for text in texts]


def encoded(tokenizer: Any, text: str, *, special: bool = False) -> np.ndarray:
    """Token ids of a text; `special`: with those that the tokenizer puts around it."""
    # verbose=False: a text longer than the model's context is cut into rows, no reason for a warning
    return np.array(tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"], dtype=np.int64)

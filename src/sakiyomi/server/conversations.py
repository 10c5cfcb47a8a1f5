"""Messages of a request as chat templates take them, and where the prompt that they become ends."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from sakiyomi.engine.chat_template import Ending
from sakiyomi.server.errors import bad_request
from sakiyomi.server.schema import ChatRequest, ImagePart, Message, TextPart, TokenizeRequest, ToolCall
from sakiyomi.server.tools import takes_texts

__all__ = ["as_template_takes", "ending_of", "text_of"]


def ending_of(
    body: ChatRequest | TokenizeRequest, messages: Sequence[Mapping[str, Any]], *, in_channels: bool = False
) -> Ending:
    """Where the prompt of messages ends.

    Args:
        body: of the request.
        messages: of it, as templates take them.
        in_channels: the text must keep to a grammar of messages in channels.

    Raises:
        ApiError: the last message cannot be continued.
    """
    if not body.continue_final_message:
        return "new" if body.add_generation_prompt else "none"
    if body.add_generation_prompt and "add_generation_prompt" in body.model_fields_set:
        raise bad_request(
            "continue_final_message and add_generation_prompt are both true; set one of them, as the last message goes "
            "on or a new one begins",
            "continue_final_message",
        )
    last, place = messages[-1], f"messages[{len(messages) - 1}]"
    if last["role"] != "assistant":
        raise bad_request(
            f"continue_final_message needs a last message of the assistant; {place}.role is {last['role']!r}",
            "continue_final_message",
        )
    if "tool_calls" in last:
        raise bad_request(
            f"{place}.tool_calls stand behind the text that continue_final_message would continue; send their results",
            f"{place}.tool_calls",
        )
    if in_channels:
        raise bad_request(
            "continue_final_message cannot be combined with tools or response_format here: replies of this model are "
            "messages in channels, and the grammar begins with one",
            "continue_final_message",
            code="unsupported_value",
        )
    return "begun"


def as_template_takes(messages: Sequence[Message], template: str) -> list[dict[str, Any]]:
    """Messages as this template takes them."""
    texts = takes_texts(template)
    return [_plain(message, number, texts) for number, message in enumerate(messages)]


def _plain(message: Message, number: int, texts: bool) -> dict[str, Any]:
    content = message.content
    if content is None and not (message.role == "assistant" and message.tool_calls):
        raise bad_request(
            f"the {message.role} message has no content", f"messages[{number}].content", code="missing_field"
        )
    parts = [content] if isinstance(content, str) else content or []
    said: Any = "".join(map(text_of, parts))
    if any(isinstance(part, ImagePart) for part in parts):
        said = [{"type": "image"} if isinstance(p, ImagePart) else {"type": "text", "text": text_of(p)} for p in parts]
    found: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role, "content": said}
    if message.name is not None:
        found["name"] = message.name
    if message.tool_call_id is not None:
        found["tool_call_id"] = message.tool_call_id
    if (thoughts := message.reasoning_content or message.reasoning) is not None:
        found["reasoning_content"] = thoughts
        if not said:  # of gpt-oss, which takes them beside calls alone
            found["thinking"] = thoughts
    if message.tool_calls:
        found["tool_calls"] = [_called(call, texts) for call in message.tool_calls]
    return found


def text_of(part: TextPart | ImagePart | str) -> str:
    """What a part of a message says; "" for an image."""
    return part if isinstance(part, str) else part.text if isinstance(part, TextPart) else ""


def _called(call: ToolCall, texts: bool) -> dict[str, Any]:
    """A call as templates take it. They write arguments themselves; what cannot be read goes in as it is."""
    arguments: Any = call.function.arguments
    if not texts:
        with suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}

"""Messages of a request as chat templates take them, their images, and where the prompt that they become ends.

Images are data URLs; nothing is fetched. What a client sends is checked before it costs anything: how many bytes it
decodes to by its length, how many pixels by the image's header.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from sakiyomi.core.errors import InputError
from sakiyomi.core.images import decode_image
from sakiyomi.engine.rendering import Ending
from sakiyomi.server.config import ServerConfig
from sakiyomi.server.errors import bad_request, unsupported
from sakiyomi.server.schema import ChatRequest, ImagePart, Message, TextPart, TokenizeRequest, ToolCall
from sakiyomi.server.tools import USUAL, CallWay

if TYPE_CHECKING:
    from PIL.Image import Image


def ending_of(
    body: ChatRequest | TokenizeRequest, messages: Sequence[Mapping[str, Any]], *, in_channels: bool = False
) -> Ending:
    """How the prompt of messages ends: "new" for a new reply, "begun" inside the last one, "none" after it.

    Args:
        body: of the request.
        messages: of it, in the form for templates.
        in_channels: the reply is under a grammar of channels.

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
        raise unsupported(
            "continue_final_message cannot be combined with tools or response_format here: replies of this model are "
            "messages in channels, and the grammar begins with one",
            "continue_final_message",
        )
    return "begun"


def begun_thoughts(
    messages: Sequence[Mapping[str, Any]], ending: Ending
) -> tuple[Sequence[Mapping[str, Any]], Ending, str]:
    """Messages, how their prompt ends, and the thoughts that a new reply begins with.

    A last message to be continued that has thoughts and no text is the beginning of a new reply.
    """
    last = messages[-1]
    thoughts = str(last.get("reasoning_content", "")) if ending == "begun" and not last.get("content") else ""
    return (messages[:-1], "new", thoughts) if thoughts else (messages, ending, "")


def as_template_takes(
    messages: Sequence[Message], way: CallWay = USUAL, parts: Callable[[], bool] = bool
) -> list[dict[str, Any]]:
    """Messages in the form that templates take.

    Args:
        messages: of a request.
        way: how calls are given.
        parts: whether the template takes lists of parts, which are one text otherwise; by default it does not.
    """
    return [_plain(message, number, way, parts) for number, message in enumerate(messages)]


def _plain(message: Message, number: int, way: CallWay, takes_parts: Callable[[], bool]) -> dict[str, Any]:
    content = message.content
    if content is None and not (message.role == "assistant" and message.tool_calls):
        raise bad_request(
            f"the {message.role} message has no content", f"messages[{number}].content", code="missing_field"
        )
    parts = [content] if isinstance(content, str) else content or []
    said: Any = "".join(map(text_of, parts))
    several = message.role == "user" and len(parts) > 1
    if any(isinstance(part, ImagePart) for part in parts) or (several and takes_parts()):
        said = [{"type": "image"} if isinstance(p, ImagePart) else {"type": "text", "text": text_of(p)} for p in parts]
    found: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role}
    found |= way.content if content is None else {"content": said}
    if message.name is not None:
        found["name"] = message.name
    if message.tool_call_id is not None:
        found["tool_call_id"] = message.tool_call_id
    if (thoughts := message.reasoning_content or message.reasoning) is not None:
        found["reasoning_content"] = thoughts
        if not said:  # for gpt-oss, whose template takes thoughts only beside calls
            found["thinking"] = thoughts
    if message.tool_calls:
        found["tool_calls"] = [_called(call, way.texts) for call in message.tool_calls]
    return found


def text_of(part: TextPart | ImagePart | str) -> str:
    """Text of a part of a message; "" for an image."""
    return part if isinstance(part, str) else part.text if isinstance(part, TextPart) else ""


def _called(call: ToolCall, texts: bool) -> dict[str, Any]:
    """A call in the form for templates, which format arguments themselves; invalid JSON is passed on as text."""
    arguments: Any = call.function.arguments
    if not texts:
        with suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


def read_images(messages: Sequence[Message], config: ServerConfig, blind: str | None) -> list[Image]:
    """The images of messages, in their order.

    Args:
        messages: of a request.
        config: with the limits.
        blind: why the model reads no images; None: it does.

    Raises:
        ApiError: 400: an image cannot be read, or exceeds a limit.
    """
    found = [
        (message.role, part.image_url.url, f"messages[{i}].content[{j}].image_url.url")
        for i, message in enumerate(messages)
        for j, part in enumerate(message.content or ())
        if isinstance(part, ImagePart)
    ]
    if found and blind is not None:
        raise unsupported(f"this server reads no images: {blind}; send text alone", found[0][2])
    if len(found) > config.max_images:
        raise bad_request(f"{len(found)} images in one request; this server allows {config.max_images}", "messages")
    images, left = [], config.max_image_pixels
    for role, url, field in found:
        if role not in ("user", "tool"):
            raise bad_request(f"an image in a {role} message; images are sent in user messages", field)
        images.append(_read(url, config.max_image_bytes, left, field))
        left -= images[-1].width * images[-1].height
    return images


def _read(url: str, most_bytes: int, most_pixels: int, field: str) -> Image:
    """The image of a data URL, as RGB, rotated as its metadata say.

    Args:
        url: ``data:image/TYPE;base64,DATA``.
        most_bytes, most_pixels: its limits.
        field: of the body, for errors.

    Raises:
        ApiError: 400: it is no data URL or no image, or exceeds a limit.
    """
    head, comma, data = url.partition(",")
    if not comma or not head.startswith("data:"):
        raise unsupported(
            f"the image is given as {url!r:.60}; this server fetches nothing: send the image itself, as "
            "data:image/png;base64,...",
            field,
        )
    if not head.startswith("data:image/") or not head.endswith(";base64"):
        raise bad_request(f"the image begins with {head!r:.60}; expected data:image/TYPE;base64,", field)
    if (size := len(data) * 3 // 4) > most_bytes:
        raise bad_request(f"the image has {size} bytes, {most_bytes} are taken; send a smaller one", field)
    try:
        content = base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise bad_request(f"the image is no base64 ({error})", field) from None
    try:
        return decode_image(content, most_pixels)
    except InputError as error:
        raise bad_request(error.message, field) from None

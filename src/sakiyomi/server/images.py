"""Images of chat messages: data URLs, decoded within bounds. Nothing is fetched, from wherever.

Runs in the threads that read bodies. What a client sends is checked before it costs anything: how many bytes it decodes
to by its length, how many pixels by the image's header.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from typing import TYPE_CHECKING

from sakiyomi.core.errors import InputError
from sakiyomi.core.images import decode_image
from sakiyomi.server.config import ServerConfig
from sakiyomi.server.errors import bad_request
from sakiyomi.server.schema import ImagePart, Message

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["read_images"]


def read_images(messages: Sequence[Message], config: ServerConfig, blind: str | None) -> list[Image]:
    """The images of messages, in their order.

    Args:
        messages: of a request.
        config: with the bounds.
        blind: why the model reads none; None: it does.

    Raises:
        ApiError: 400: one of them cannot be read, or is beyond the bounds.
    """
    found = [
        (message.role, part.image_url.url, f"messages[{i}].content[{j}].image_url.url")
        for i, message in enumerate(messages)
        for j, part in enumerate(message.content or ())
        if isinstance(part, ImagePart)
    ]
    if found and blind is not None:
        raise bad_request(
            f"this server reads no images: {blind}; send text alone", found[0][2], code="unsupported_value"
        )
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
    """The image of a data URL, in red, green and blue, turned as its camera was held.

    Args:
        url: ``data:image/TYPE;base64,DATA``.
        most_bytes, most_pixels: that it may have.
        field: of the body, to blame.

    Raises:
        ApiError: 400: it is another URL, no image, or beyond the bounds.
    """
    head, comma, data = url.partition(",")
    if not comma or not head.startswith("data:"):
        raise bad_request(
            f"the image is given as {url!r:.60}; this server fetches nothing: send the image itself, as "
            "data:image/png;base64,...",
            field,
            code="unsupported_value",
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

"""Images of the command line: read from files, and put into messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sakiyomi.core.errors import InputError, LoadError, UnsupportedError
from sakiyomi.core.images import ImagePrompt, decode_image
from sakiyomi.core.params import SamplingParams

if TYPE_CHECKING:
    from PIL.Image import Image

    from sakiyomi.engine.chat_template import Dialogue
    from sakiyomi.engine.inputs import TokenizedPrompt
    from sakiyomi.engine.llm import LLM

MOST_PIXELS = 1 << 26  # of all images of a prompt


def check_sees(llm: LLM) -> None:
    """Refuse images for a model that does not read them.

    Raises:
        UnsupportedError: it reads none.
    """
    if (why := llm.target.blind) is not None:
        raise UnsupportedError(f"{llm.name!r} reads no images: {why}")
    if llm.processor is None:
        raise UnsupportedError(f"{llm.name!r} reads no images: its folder has no preprocessor_config.json")


def content(text: str, files: Sequence[str]) -> str | list[dict[str, str]]:
    """Content of a message: these images, then a text."""
    if not files:
        return text
    return [*({"type": "image", "path": file} for file in files), {"type": "text", "text": text}]


def prompt_of(
    llm: LLM, dialogue: Dialogue, messages: Sequence[Mapping[str, Any]], params: SamplingParams
) -> list[int] | TokenizedPrompt:
    """The prompt of a dialogue's messages; only tokens if no message has images.

    Raises:
        InputError, UnsupportedError: a file, the model or its template does not support the images.
    """
    parts = [part for message in messages if isinstance(message["content"], list) for part in message["content"]]
    files = [part["path"] for part in parts if part["type"] == "image"]
    if not files:
        return dialogue.read(messages)
    check_sees(llm)
    return llm.engine.process(ImagePrompt(dialogue.text(messages), read_images(files)), params)


def read_images(files: Sequence[str]) -> list[Image]:
    """The images of files.

    Raises:
        InputError, LoadError: one cannot be read, or they are too large.
    """
    images: list[Image] = []
    left = MOST_PIXELS
    for file in files:
        try:
            images.append(decode_image(Path(file).expanduser().read_bytes(), left))
        except OSError as error:
            raise LoadError(f"the image {file!r} cannot be read ({error}); check the path") from None
        except ImportError:
            raise LoadError("images need the package pillow, which is not installed; pip install pillow") from None
        except InputError as error:
            raise InputError(f"{file}: {error.message}") from None
        left -= images[-1].width * images[-1].height
    return images

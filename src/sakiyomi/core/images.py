"""A prompt with images, and the images of files, read within bounds."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sakiyomi.core.errors import InputError, LoadError
from sakiyomi.core.messages import one_line

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
"""Those of OpenAI's API; of a GIF the first picture is taken."""
MOST_PIXELS = 1 << 26  # of all images of a prompt that come from files


@dataclass(frozen=True, eq=False)
class ImagePrompt:
    """Text with images in it, for a model that sees.

    Args:
        text: with the model's own mark wherever an image stands, as its processor's ``apply_chat_template`` writes it.
        images: what that processor takes (PIL images, arrays, tensors), in the order of their marks.

    Raises:
        InputError: there are no images, or the text is none.
    """

    text: str
    images: Sequence[Any]

    def __post_init__(self) -> None:
        if not isinstance(self.text, str) or not self.text:
            raise InputError(f"the text of an ImagePrompt is {self.text!r:.80}; expected a text with marks of images")
        if not isinstance(self.images, Sequence) or isinstance(self.images, str) or not self.images:
            raise InputError("an ImagePrompt has no images; give a list of them, or the text alone as the prompt")

    def __repr__(self) -> str:
        return f"ImagePrompt({self.text[:40]!r}, {len(self.images)} images)"


def decode_image(content: bytes, most: int) -> Image:
    """The image of a file, in red, green and blue, turned as its camera was held.

    Args:
        content: of the file.
        most: pixels that it may have; known from its header, before anything is decoded.

    Raises:
        InputError: it cannot be read, or has more.
    """
    from PIL import Image, ImageOps

    try:
        with Image.open(io.BytesIO(content), formats=FORMATS) as found:
            if found.width * found.height <= most:
                return ImageOps.exif_transpose(found).convert("RGB")
            pixels = f"{found.width} x {found.height}"
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        pixels = "far too many"
    except Exception as error:  # decoders raise errors of any kind
        raise InputError(f"the image cannot be read ({one_line(error):.120}); expected {', '.join(FORMATS)}") from None
    raise InputError(f"the image has {pixels} pixels, {most} are taken in all images; give a smaller one")


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

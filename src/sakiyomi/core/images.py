"""A prompt with images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sakiyomi.core.errors import InputError

__all__ = ["ImagePrompt"]


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

"""Images of the command line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sakiyomi.core.errors import UnsupportedError

if TYPE_CHECKING:
    from sakiyomi.engine.llm import LLM


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

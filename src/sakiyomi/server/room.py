"""How much of the context a prompt takes, and what it leaves for new tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sakiyomi.server.errors import bad_request

__all__ = ["Room"]


class Room:
    """What fits.

    Args:
        context: tokens.
        longest: characters of the longest token.
    """

    def __init__(self, context: int, longest: int) -> None:
        self._context, self._longest = context, longest

    def check(self, prompt: Any, field: str) -> None:
        """Refuse a prompt of which no text of its length would fit; ``field`` is to blame."""
        # Before it is tokenized, or copied: that takes time, and what is refused is to take none.
        most = self._context * (self._longest if isinstance(prompt, str) else 1)
        if len(prompt) > most:
            kind = "characters" if isinstance(prompt, str) else "tokens"
            raise bad_request(
                f"the prompt has {len(prompt)} {kind}, and no text of more than {most} fits into the context of "
                f"{self._context} tokens; shorten it",
                field,
                code="context_length_exceeded",
            )

    def limit(self, tokens: Sequence[int], asked: int | None, field: str, source: str) -> int:
        """New tokens at most, behind those of a prompt.

        Args:
            tokens: of the prompt.
            asked: for so many; None: for as many as there is room for.
            field: that asked for them.
            source: the prompt's field.

        Raises:
            ApiError: there is no room for them.
        """
        room = self._context - len(tokens)
        if room < 1:
            raise bad_request(
                f"the prompt has {len(tokens)} tokens, and the context holds {self._context} with at least one "
                "new one; shorten it",
                source,
                code="context_length_exceeded",
            )
        if asked is not None and asked > room:
            raise bad_request(
                f"{field} is {asked}, and after the prompt's {len(tokens)} tokens the context has room for {room}",
                field,
                code="context_length_exceeded",
            )
        return room if asked is None else max(asked, 1)

"""Calls of tools: how a model writes them, and how they are found in its text while it comes.

A new way of writing is one line in ``FORMATS``.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass
from typing import Any

from sakiyomi.server.errors import ApiError

__all__ = ["FORMATS", "ToolFormat", "ToolReader", "tool_format"]


@dataclass(frozen=True)
class ToolFormat:
    """How a call is written: an object with its name and arguments, between two marks.

    Attributes:
        trigger: how it begins, whatever is called.
        arguments: name of the field that holds them.
        end: what follows the arguments.
        mark: of that, what is behind the object.
    """

    trigger: str
    arguments: str
    end: str
    mark: str

    def begin(self, name: str) -> str:
        """Up to where the arguments begin."""
        return f'{self.trigger}\n{{"name": {json.dumps(name)}, "{self.arguments}": '


FORMATS = {"<tool_call>": ToolFormat("<tool_call>", "arguments", "}\n</tool_call>", "</tool_call>")}
"""By what a chat template that tells of tools has in it: Hermes and Qwen, and many after them."""


def tool_format(template: str) -> ToolFormat:
    """How a model with this template writes calls.

    Raises:
        ApiError: it is not known.
    """
    for sign, form in FORMATS.items():
        if sign in template:
            return form
    raise ApiError(
        400,
        f"the model's chat template calls tools in a way that this server does not know; it knows {', '.join(FORMATS)}",
        param="tools",
        code="unsupported_field",
    )


class ToolReader:
    """Takes calls out of a text while it comes.

    Args:
        form: how they are written.
    """

    def __init__(self, form: ToolFormat) -> None:
        self._form = form
        self._pending = ""
        self.calls: list[dict[str, Any]] = []

    def push(self, text: str, last: bool) -> tuple[str, list[dict[str, Any]]]:
        """What of the text is no call, and the calls that have become whole; ``last``: no more comes.

        A call that never becomes whole is text.
        """
        self._pending += text
        plain, before = "", len(self.calls)
        while True:
            head, mark, rest = self._pending.partition(self._form.trigger)
            if not mark:
                break
            inner, closed, after = rest.partition(self._form.mark)
            call = self._read(inner) if closed else None
            if call is None and not (closed or last):
                plain, self._pending = plain + head, mark + rest
                return plain.rstrip("\n") if self.calls else plain, self.calls[before:]
            plain += head if call is not None else head + mark + inner + closed
            self._pending = after if closed else ""
            if call is not None:
                self.calls.append(call)
        keep = 0 if last else self._beginning()
        plain += self._pending[: len(self._pending) - keep]
        self._pending = self._pending[len(self._pending) - keep :]
        return plain.strip("\n") if self.calls else plain, self.calls[before:]

    def _beginning(self) -> int:
        """Characters at the end that may begin a call."""
        trigger = self._form.trigger
        return next((n for n in range(len(trigger) - 1, 0, -1) if self._pending.endswith(trigger[:n])), 0)

    def _read(self, inner: str) -> dict[str, Any] | None:
        try:
            value = json.loads(inner)
            name, arguments = value["name"], value[self._form.arguments]
        except (ValueError, KeyError, TypeError):
            return None
        return {
            "index": len(self.calls),
            "id": f"call_{secrets.token_hex(12)}",
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)},
        }

"""How a model writes calls and thoughts, as its chat template tells."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from typing import Any

from sakiyomi.core.errors import InputError
from sakiyomi.engine.chat_template import Dialogue
from sakiyomi.engine.rendering import Rendering
from sakiyomi.server.errors import unsupported
from sakiyomi.server.general_tools import GENERAL, described, joined, told
from sakiyomi.server.learnt_format import TOOLS, learnt, way_of_calls
from sakiyomi.server.learnt_marks import cut_thoughts, learnt_text, learnt_thoughts
from sakiyomi.server.notations import Pairs
from sakiyomi.server.said import TextMarks
from sakiyomi.server.thoughts import THINK, ThoughtMarks
from sakiyomi.server.tools import ToolFormat, in_channels, listed_format

_EXAMPLE = "nothing but a call in this form: "
_TYPED = re.compile(r"""['"]type['"]""")


class ChatForm:
    """What is learnt from a template, when it is asked for first.

    Args:
        dialogue: has the template.

    Attributes:
        channels: the format of replies in channels; None: they are not.
    """

    def __init__(self, dialogue: Dialogue) -> None:
        self._dialogue = dialogue
        self.channels = in_channels(dialogue.template)

    @cached_property
    def calls(self) -> ToolFormat | None:
        """How the model writes calls of tools; None: it has no chat template."""
        if not (template := self._dialogue.template):
            return None
        if self.channels is None and (form := learnt(self._write)) is not None:
            # A model that is told of tools in words is told how to call, too.
            return form if self._tells or not isinstance(form.pairs, Pairs) else GENERAL
        known = self.channels or listed_format(template)
        return GENERAL if known is None else replace(known, way=way_of_calls(self._write))

    @property
    def always(self) -> ToolFormat | None:
        """The format of calls if texts have a head in it, too: then replies are read by it where there are no tools."""
        return form if (form := self.calls) is not None and form.recipient else None

    @cached_property
    def thoughts(self) -> ThoughtMarks | None:
        """What stands around the model's thoughts; None: it has none that could be told apart."""
        if not (template := self._dialogue.template):
            return None
        usual = THINK if THINK.closing in template else None
        return learnt_thoughts(self._write) or usual or cut_thoughts(self._write, template)

    @cached_property
    def text(self) -> TextMarks | None:
        """What stands around the text of a reply; None: nothing, or messages in channels."""
        return None if self.channels or not self._dialogue.template else learnt_text(self._write, self.thoughts)

    def begun(self, thoughts: str) -> tuple[str, str]:
        """The mark before thoughts that a reply begins with, and these.

        Raises:
            ApiError: the template has no thoughts.
        """
        if not thoughts:
            return "", ""
        if self.channels is not None and (channels := self.channels.channels) is not None:
            return channels.before[0] + channels.body, thoughts
        if self.thoughts is None:
            raise unsupported(
                "the last message has thoughts alone, and the chat template has no marks around thoughts; give it text",
                "continue_final_message",
            )
        return self.thoughts.opening, thoughts

    def in_words(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> tuple[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]]]:
        """Messages and tools for the template, without what it has no place for, see ``general_tools``."""
        there = bool(tools) or any("tool_calls" in message or message["role"] == "tool" for message in messages)
        if not there or (form := self.calls) is None:
            return messages, tools
        if form is GENERAL:
            return told(messages, tools, system=self._takes_system), ()
        given = messages if form.way is not None else [_as_text(message, form) for message in messages]
        if self._tells:
            return given, tools
        return described(
            given, tools, _EXAMPLE + form.written([("NAME", {"ARGUMENT": "VALUE"})]), system=self._takes_system
        ), ()

    def _write(self, messages: Sequence[Any], tools: Sequence[Any], new: bool) -> str:
        return self._dialogue.rendered(messages, Rendering(tools, ending="new" if new else "none", nulls=True))

    @cached_property
    def takes_parts(self) -> bool:
        """Whether the user's message may be a list of parts."""
        parts = [{"type": "text", "text": "PARTONE"}, {"type": "text", "text": "PARTTWO"}]
        with suppress(InputError):
            found = self._dialogue.rendered([{"role": "user", "content": parts}])
            return "PARTONE" in found and "PARTTWO" in found and not _TYPED.search(found)
        return False

    @cached_property
    def _tells(self) -> bool:
        """Whether the template tells the model of tools."""
        asked = [{"role": "user", "content": "QUESTION"}]
        with suppress(InputError):
            return self._write(asked, TOOLS, True) != self._write(asked, (), True)
        return True

    @cached_property
    def _takes_system(self) -> bool:
        said = [{"role": "system", "content": "SYSTEM"}, {"role": "user", "content": "QUESTION"}]
        with suppress(InputError):
            return "SYSTEM" in self._dialogue.rendered(said)
        return False


def _as_text(message: Mapping[str, Any], form: ToolFormat) -> Mapping[str, Any]:
    """A message whose calls are texts in its content, for templates that leave calls out."""
    if not (calls := message.get("tool_calls")):
        return message
    found = [(call["function"]["name"], call["function"]["arguments"]) for call in calls]
    said = {name: value for name, value in message.items() if name != "tool_calls"}
    return said | {"content": joined(message.get("content", ""), form.written(found))}

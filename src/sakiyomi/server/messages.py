"""Anthropic's interface, ``/v1/messages``: its blocks become messages, and a reply becomes blocks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, Tag

from sakiyomi.server.errors import ApiError, bad_request
from sakiyomi.server.fields import BY_TYPE, Count, ListOrText, Strict, Text
from sakiyomi.server.replies import Piece, Style
from sakiyomi.server.schema import ChatRequest, Speculation, ToolName, function, joined, read_as
from sakiyomi.server.stream import event

REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}
NAMES = {"max_completion_tokens": "max_tokens", "stop": "stop_sequences", "user": "metadata.user_id"}
"""Fields of chat completions that have another name here."""


class CacheControl(Strict):
    """A mark to cache the prompt up to here. It changes nothing: every prompt is cached while there is room."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class Cached(Strict):
    """An object that may have such a mark."""

    cache_control: CacheControl | None = None


class TextBlock(Cached):
    """Text."""

    type: Literal["text"]
    text: Text
    citations: list[Any] | None = None


class Thinking(Cached):
    """Thoughts of an earlier reply; they are not used again."""

    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class ToolUse(Cached):
    """A call that the model made before."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ToolResult(Cached):
    """The result of a tool, or, with ``is_error``, its error, which templates have no other place for."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: ListOrText[list[TextBlock]] = ""
    is_error: bool | None = None


AnyBlock = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[Thinking, Tag("<thinking>")]
    | Annotated[ToolUse, Tag("<tool_use>")]
    | Annotated[ToolResult, Tag("<tool_result>")],
    BY_TYPE,
]


class Turn(Strict):
    """One message."""

    role: Literal["user", "assistant"]
    content: ListOrText[Annotated[list[AnyBlock], Field(min_length=1)]]


class Tool(Cached):
    """A tool. The server runs none itself."""

    type: Literal["custom"] | None = None
    name: ToolName
    description: Text | None = None
    input_schema: dict[str, Any]


class ToolChoice(Strict):
    """Which tools are called: as the model decides (auto), at least one (any), this one (tool), or none."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class NoThinking(Strict):
    """Sets ``enable_thinking`` to false, if the chat template has it."""

    type: Literal["disabled"]


class UserName(Strict):
    """``user_id`` goes to the log."""

    user_id: str | None = Field(None, max_length=512)


class CountRequest(Cached):
    """Body of ``/v1/messages/count_tokens``."""

    model: str | None = None
    messages: Annotated[list[Turn], Field(min_length=1, max_length=4096)]
    system: ListOrText[list[TextBlock]] | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: NoThinking | None = None

    def chat(self, template: str, **values: Any) -> ChatRequest:
        """The same request for chat completions.

        Args:
            template: the chat template.
            **values: further fields.

        Raises:
            ApiError: chat completions cannot express it.
        """
        messages: list[dict[str, Any]] = []
        if self.system is not None:
            messages.append({"role": "system", "content": joined(self.system)})
        for number, turn in enumerate(self.messages):
            messages += _messages(turn, f"messages[{number}].content")
        if self.messages[-1].role == "assistant":
            values |= self._begun(messages)
        if not messages:
            raise bad_request("messages have no text and no result of a tool; send a message of the user", "messages")
        values |= {"model": self.model, "messages": messages}
        if self.thinking is not None and "enable_thinking" in template:
            values["chat_template_kwargs"] = {"enable_thinking": False}
        if self.tools:
            values["tools"] = [
                function(tool.name, description=tool.description, parameters=tool.input_schema) for tool in self.tools
            ]
        if (choice := self.tool_choice) is not None:
            named = function(choice.name or "")
            values["tool_choice"] = {"any": "required", "tool": named}.get(choice.type, choice.type)
            values["parallel_tool_calls"] = not choice.disable_parallel_tool_use
        return read_as(ChatRequest, values, NAMES | _names_of_tools(self.tools or ()))

    def _begun(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        """Fields that make chat completions continue the last message; none if that message is empty."""
        last = messages[-1] if messages else {}
        if last.get("tool_calls"):
            place = f"messages[{len(self.messages) - 1}].content"
            raise bad_request(f"{place} ends with calls of tools; send a message with their results behind it", place)
        if last.get("role") != "assistant":  # it has only thoughts, which are not used again
            return {}
        if not last["content"]:
            messages.pop()
            return {}
        return {"continue_final_message": True, "add_generation_prompt": False}


class MessagesRequest(CountRequest):
    """Body of ``/v1/messages``."""

    max_tokens: Count
    temperature: Annotated[float, Field(ge=0, le=1)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0
    stop_sequences: Annotated[list[Text], Field(max_length=16)] | None = None
    stream: bool = False
    metadata: UserName | None = None
    service_tier: str | None = None
    speculation: Speculation = Speculation()

    def chat(self, template: str, **values: Any) -> ChatRequest:
        """See ``CountRequest.chat``."""
        return super().chat(
            template,
            max_completion_tokens=self.max_tokens,
            stop=self.stop_sequences or None,
            stream_options={"continuous_usage_stats": True} if self.stream else None,  # for message_start
            user=None if self.metadata is None else self.metadata.user_id,
            **self.model_dump(include={"temperature", "top_p", "top_k", "stream", "speculation"}),
            **values,
        )


def _messages(turn: Turn, place: str) -> list[dict[str, Any]]:
    """Messages for a turn. Results of tools become messages of their own, before the user's text.

    Args:
        turn: the turn.
        place: path of its content in the body.

    Raises:
        ApiError: a user message has a call of a tool.
    """
    if isinstance(turn.content, str):
        return [{"role": turn.role, "content": turn.content}]
    found: list[dict[str, Any]] = [
        {
            "role": "tool",
            "tool_call_id": block.tool_use_id,
            "content": ("error: " if block.is_error else "") + joined(block.content),
        }
        for block in turn.content
        if isinstance(block, ToolResult)
    ]
    calls = [
        {"id": block.id, **function(block.name, arguments=json.dumps(block.input))}
        for block in turn.content
        if isinstance(block, ToolUse)
    ]
    if calls and turn.role == "user":
        raise bad_request(f"{place} has a tool_use block; only messages of the assistant have those", place)
    texts = [block.text for block in turn.content if isinstance(block, TextBlock)]
    if texts or calls:
        said = {"role": turn.role, "content": "".join(texts) if texts else None}
        found.append(said | ({"tool_calls": calls} if calls else {}))
    return found


def _names_of_tools(tools: Sequence[Tool]) -> dict[str, str]:
    names = {"function.parameters": "input_schema", "function": ""}
    return {
        f"tools[{i}].{old}": f"tools[{i}].{new}".rstrip(".") for i, _ in enumerate(tools) for old, new in names.items()
    }


class MessagesStyle(Style):
    """Objects and events of ``/v1/messages``."""

    prefix = "msg_"

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._blocks, self._open, self._last = 0, "", Piece(0)

    def whole(self, pieces: Sequence[Piece], figures: dict[str, Any]) -> dict[str, Any]:
        """The message."""
        (piece,) = pieces
        thoughts = [{"type": "thinking", "thinking": piece.thoughts, "signature": ""}] if piece.thoughts else []
        text = [{"type": "text", "text": piece.text}] if piece.text or not piece.calls else []
        calls = [_use(call) | {"input": json.loads(call["function"]["arguments"])} for call in piece.calls]
        return self._message(_usage(figures)) | _end(piece) | {"content": thoughts + text + calls}

    def stream(self, piece: Piece, first: bool, figures: dict[str, Any] | None) -> Iterator[bytes]:
        """Events for new text and complete calls."""
        if first:
            assert figures is not None  # asked for in every event, see MessagesRequest.chat
            yield _event("message_start", message=self._message(_usage(figures)))
        self._last = piece
        for kind, name, text in (("thinking", "thinking", piece.thoughts), ("text", "text", piece.text)):
            if not text:
                continue
            if self._open != kind:
                yield from self._close()
                self._open = kind
                block = {"type": kind, name: ""} | ({"signature": ""} if kind == "thinking" else {})
                yield _event("content_block_start", index=self._blocks, content_block=block)
            delta = {"type": f"{kind}_delta", name: text}
            yield _event("content_block_delta", index=self._blocks, delta=delta)
        for call in piece.calls:
            yield from self._close()
            yield _event("content_block_start", index=self._blocks, content_block=_use(call))
            delta = {"type": "input_json_delta", "partial_json": call["function"]["arguments"]}
            yield _event("content_block_delta", index=self._blocks, delta=delta)
            self._open = "tool_use"
            yield from self._close()

    def end(self, figures: dict[str, Any]) -> Iterator[bytes]:
        """Events with the reason of the end, and the figures."""
        yield from self._close()
        yield _event("message_delta", delta=_end(self._last), usage=_usage(figures))
        yield _event("message_stop")

    def failure(self, error: ApiError) -> bytes:
        """The event of an error."""
        return event(error.anthropic_body, "error")

    def _close(self) -> Iterator[bytes]:
        """End the block that is open."""
        if self._open:
            yield _event("content_block_stop", index=self._blocks)
            self._blocks, self._open = self._blocks + 1, ""

    def _message(self, usage: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": self._head["id"],
            "type": "message",
            "role": "assistant",
            "model": self._head["model"],
            "content": [],
            **_end(None),
            "usage": usage,
        }


def _event(name: str, **values: Any) -> bytes:
    return event({"type": name, **values}, name)


def _use(call: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": {}}


def _end(piece: Piece | None) -> dict[str, Any]:
    """Why a message ended; None: it has begun."""
    if piece is None or piece.finish_reason is None:
        return {"stop_reason": None, "stop_sequence": None}
    if piece.stop is not None and piece.finish_reason == "stop":
        return {"stop_reason": "stop_sequence", "stop_sequence": piece.stop}
    return {"stop_reason": REASONS.get(piece.finish_reason, "end_turn"), "stop_sequence": None}


def _usage(figures: dict[str, Any]) -> dict[str, Any]:
    cached = figures["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": figures["prompt_tokens"] - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": figures["completion_tokens"],
        "speculation": figures["speculation"],
    }

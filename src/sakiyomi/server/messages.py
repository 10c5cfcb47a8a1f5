"""Anthropic's interface, ``/v1/messages``: its blocks become messages, and a reply becomes blocks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from sakiyomi.server.errors import ApiError
from sakiyomi.server.replies import Piece, Style
from sakiyomi.server.schema import ChatRequest, Count, Speculation, Strict, chat_request
from sakiyomi.server.stream import event

__all__ = ["CountRequest", "MessagesRequest", "MessagesStyle"]

REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}


class Block(Strict):
    """A part of a message. Marks for caches are taken: what is read alike is cached here in any case."""

    cache_control: dict[str, Any] | None = None


class TextBlock(Block):
    """Text."""

    type: Literal["text"]
    text: str
    citations: list[Any] | None = None


class Thinking(Block):
    """Thoughts of an earlier reply; they are not read again."""

    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class ToolUse(Block):
    """A call that the model made before."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ToolResult(Block):
    """What a tool gave back, or, with ``is_error``, why it did not: a template has no other place for that."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[TextBlock] = ""
    is_error: bool | None = None


class Turn(Strict):
    """One message."""

    role: Literal["user", "assistant"]
    content: str | list[TextBlock | Thinking | ToolUse | ToolResult]


class Tool(Block):
    """A tool; there are none that run here."""

    type: Literal["custom"] | None = None
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    description: str | None = None
    input_schema: dict[str, Any]


class ToolChoice(Strict):
    """Whether tools are to be called: at will, one at least (any), this one (tool), or none."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class NoThinking(Strict):
    """Where the chat template knows ``enable_thinking``, it is told not to."""

    type: Literal["disabled"]


class UserName(Strict):
    """``user_id`` goes to the log."""

    user_id: str | None = Field(None, max_length=512)


class CountRequest(Strict):
    """Body of ``/v1/messages/count_tokens``."""

    model: str | None = None
    messages: Annotated[list[Turn], Field(min_length=1, max_length=4096)]
    system: str | list[TextBlock] | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: NoThinking | None = None

    def chat(self, template: str, **values: Any) -> ChatRequest:
        """The same as messages of chat completions.

        Args:
            template: that they will be written by.
            **values: further fields.

        Raises:
            RequestValidationError: there are no such messages.
        """
        messages: list[dict[str, Any]] = []
        if self.system is not None:
            messages.append({"role": "system", "content": _text(self.system)})
        for turn in self.messages:
            messages += _messages(turn)
        values |= {"model": self.model, "messages": messages}
        if self.thinking is not None and "enable_thinking" in template:
            values["chat_template_kwargs"] = {"enable_thinking": False}
        if self.tools:
            values["tools"] = [
                {
                    "type": "function",
                    "function": {"name": tool.name, "description": tool.description, "parameters": tool.input_schema},
                }
                for tool in self.tools
            ]
        if (choice := self.tool_choice) is not None:
            named = {"type": "function", "function": {"name": choice.name or ""}}
            values["tool_choice"] = {"any": "required", "tool": named}.get(choice.type, choice.type)
            values["parallel_tool_calls"] = not choice.disable_parallel_tool_use
        return chat_request(values)


class MessagesRequest(CountRequest):
    """Body of ``/v1/messages``."""

    max_tokens: Count
    temperature: Annotated[float, Field(ge=0, le=1)] | None = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] | None = 1.0
    top_k: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0
    stop_sequences: Annotated[list[str], Field(max_length=16)] | None = None
    stream: bool | None = False
    metadata: UserName | None = None
    service_tier: str | None = None
    speculation: Speculation = Speculation()

    def chat(self, template: str, **values: Any) -> ChatRequest:
        """See ``CountRequest.chat``."""
        return super().chat(
            template,
            max_completion_tokens=self.max_tokens,
            stop=self.stop_sequences or None,
            user=None if self.metadata is None else self.metadata.user_id,
            **self.model_dump(include={"temperature", "top_p", "top_k", "stream", "speculation"}),
            **values,
        )


def _messages(turn: Turn) -> list[dict[str, Any]]:
    """Messages of a turn: results of tools are messages of their own, in front of what the user says."""
    if isinstance(turn.content, str):
        return [{"role": turn.role, "content": turn.content}]
    found: list[dict[str, Any]] = [
        {
            "role": "tool",
            "tool_call_id": block.tool_use_id,
            "content": ("error: " if block.is_error else "") + _text(block.content),
        }
        for block in turn.content
        if isinstance(block, ToolResult)
    ]
    calls = [
        {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": json.dumps(block.input)}}
        for block in turn.content
        if isinstance(block, ToolUse)
    ]
    texts = [block.text for block in turn.content if isinstance(block, TextBlock)]
    if texts or calls:
        said = {"role": turn.role, "content": "".join(texts) if texts else None}
        found.append(said | ({"tool_calls": calls} if calls else {}))
    return found


def _text(content: str | list[TextBlock]) -> str:
    return content if isinstance(content, str) else "".join(block.text for block in content)


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
        return self._message() | _end(piece) | {"content": thoughts + text + calls, "usage": _usage(figures)}

    def stream(self, piece: Piece, first: bool, figures: dict[str, Any] | None) -> Iterator[bytes]:
        """What a step brings: text, and whole calls."""
        if first:
            yield _event("message_start", message=self._message())
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

    def end(self, figures: dict[str, Any], told: bool) -> Iterator[bytes]:
        """Why it ended, and the figures."""
        yield from self._close()
        yield _event("message_delta", delta=_end(self._last), usage=_usage(figures))
        yield _event("message_stop")

    def failure(self, error: ApiError) -> bytes:
        """The event of an error."""
        return _event("error", error={name: error.body["error"][name] for name in ("type", "message")})

    def _close(self) -> Iterator[bytes]:
        """End the block that is open."""
        if self._open:
            yield _event("content_block_stop", index=self._blocks)
            self._blocks, self._open = self._blocks + 1, ""

    def _message(self) -> dict[str, Any]:
        usage = {"input_tokens": 0, "output_tokens": 0}
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
    """Why a message ended."""
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

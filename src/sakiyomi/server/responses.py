"""OpenAI's newer interface, ``/v1/responses``: its items become messages, and a reply becomes items.

Responses are not stored: a client sends earlier items again.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, Tag

from sakiyomi.server.errors import ApiError, bad_request
from sakiyomi.server.fields import Count, ListOrText, Strict, Text, ToolChoice, by_type
from sakiyomi.server.replies import Piece, Style
from sakiyomi.server.schema import Arguments, ChatRequest, Common, ToolName, function, joined, read_as
from sakiyomi.server.stream import event

NAMES = {"messages": "input", "max_completion_tokens": "max_output_tokens", "response_format": "text.format"}
"""Fields of chat completions that have another name here."""
UNFINISHED = ("in_progress", "incomplete")
"""Statuses with which the last message is continued, as in vLLM."""


class InputText(Strict):
    """Text of a user, or earlier output of the model."""

    type: Literal["input_text", "output_text", "text"]
    text: Text
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class Item(Strict):
    """Part of the input. Items of a response may be sent back with any fields that clients add."""

    model_config = ConfigDict(extra="ignore", strict=True)
    id: str | None = None
    status: str | None = None


class InputMessage(Item):
    """A message."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: ListOrText[list[InputText]]


class FunctionCall(Item):
    """An earlier call of the model."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: Arguments = "{}"


class FunctionOutput(Item):
    """The result of a function."""

    type: Literal["function_call_output"]
    call_id: str
    output: ListOrText[list[InputText]]


AnyItem = Annotated[
    Annotated[InputMessage, Tag("<message>")]
    | Annotated[FunctionCall, Tag("<function_call>")]
    | Annotated[FunctionOutput, Tag("<function_call_output>")],
    by_type("message"),
]


class ResponseTool(Strict):
    """A function, the only kind of tool."""

    type: Literal["function"]
    name: ToolName
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseChoice(Strict):
    """This function must be called."""

    type: Literal["function"]
    name: str


class TextFormat(Strict):
    """As ``response_format`` of chat completions."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(Strict):
    """``format``: a grammar for the text."""

    format: TextFormat | None = None


class NoReasoning(Strict):
    """An empty object: no setting is supported."""


class ResponsesRequest(Common):
    """Body of ``/v1/responses``."""

    input: ListOrText[Annotated[list[AnyItem], Field(min_length=1, max_length=4096)]]
    instructions: Text | None = None
    max_output_tokens: Count | None = None
    tools: Annotated[list[ResponseTool], Field(max_length=128)] | None = None
    tool_choice: ToolChoice[ResponseChoice] | None = None
    parallel_tool_calls: bool = True
    text: TextOptions | None = None
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None
    include: list[Literal["reasoning.encrypted_content"]] | None = Field(None, description="There is none.")
    reasoning: NoReasoning | None = None

    def chat(self) -> ChatRequest:
        """The same request for chat completions.

        Raises:
            ApiError: chat completions cannot express it.
        """
        given = [InputMessage(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        messages: list[dict[str, Any]] = []
        if self.instructions is not None:
            messages.append({"role": "system", "content": self.instructions})
        for item in given:
            _add(messages, item)
        values: dict[str, Any] = {
            "messages": messages,
            "max_completion_tokens": self.max_output_tokens,
            "parallel_tool_calls": self.parallel_tool_calls,
            "reasoning_format": "none",
            **self.model_dump(include={*Common.model_fields}),
        }
        if self.tools:
            values["tools"] = [function(**tool.model_dump(exclude={"type"}, exclude_none=True)) for tool in self.tools]
        if (choice := self.tool_choice) is not None:
            values["tool_choice"] = choice if isinstance(choice, str) else function(choice.name)
        if self.text is not None and (wanted := self.text.format) is not None:
            values["response_format"] = {"type": wanted.type}
            if (wanted.schema_ is None) == (wanted.type == "json_schema"):
                raise bad_request(
                    "text.format.schema is sent where text.format.type is json_schema, and only there",
                    "text.format.schema",
                )
            if wanted.type == "json_schema":
                named_schema = {"name": wanted.name or "reply", "schema": wanted.schema_}
                values["response_format"]["json_schema"] = named_schema
        last = given[-1]
        if isinstance(last, InputMessage) and last.role == "assistant" and last.status in UNFINISHED:
            values |= {"continue_final_message": True, "add_generation_prompt": False}
        names = NAMES | {f"tools[{i}].function": f"tools[{i}]" for i, _ in enumerate(self.tools or ())}
        return read_as(ChatRequest, values, names)


def _add(messages: list[dict[str, Any]], item: InputMessage | FunctionCall | FunctionOutput) -> None:
    """Append an item to the messages; a call goes into the assistant message before it."""
    if isinstance(item, FunctionOutput):
        messages.append({"role": "tool", "tool_call_id": item.call_id, "content": joined(item.output)})
    elif isinstance(item, InputMessage):
        messages.append({"role": item.role, "content": joined(item.content)})
    else:
        call = {"id": item.call_id, **function(item.name, arguments=item.arguments)}
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": None})
        messages[-1].setdefault("tool_calls", []).append(call)


class ResponsesStyle(Style):
    """Objects and events of ``/v1/responses``: one item for the text, one for each call.

    Args:
        *args: of ``Style``.
        asked: the body.
        **options: of ``Style``.
    """

    prefix = "resp_"

    def __init__(self, *args: Any, asked: ResponsesRequest, **options: Any) -> None:
        super().__init__(*args, **options)
        self._asked, self._number = asked, 0
        self._item, self._so_far = "msg_" + self._ids(12), Piece(0)
        self._text_at: int | None = None
        self._items = 0  # that have begun

    def whole(self, pieces: Sequence[Piece], figures: dict[str, Any]) -> dict[str, Any]:
        """The response."""
        (piece,) = pieces
        output = [self._message(piece.text, piece)] if piece.text or not piece.calls else []
        return self._response(piece, output + list(map(_call, piece.calls)), figures)

    def stream(self, piece: Piece, first: bool, figures: dict[str, Any] | None) -> Iterator[bytes]:
        """Events for new text and complete calls."""
        if first:
            for name in ("response.created", "response.in_progress"):
                yield self._event(name, response=self._response(None, [], None))
        self._so_far.add(piece)
        if piece.text:
            if self._text_at is None:
                self._text_at, self._items = self._items, self._items + 1
                item = self._message("", None) | {"content": []}
                yield self._event("response.output_item.added", output_index=self._text_at, item=item)
                yield self._event("response.content_part.added", **self._at, part=_part(""))
            yield self._event("response.output_text.delta", **self._at, delta=piece.text, logprobs=[])
        for call in piece.calls:
            item, at, self._items = _call(call), self._items, self._items + 1
            empty = item | {"arguments": "", "status": "in_progress"}
            yield self._event("response.output_item.added", output_index=at, item=empty)
            named = {"item_id": item["id"], "output_index": at}
            yield self._event("response.function_call_arguments.delta", **named, delta=item["arguments"])
            yield self._event(
                "response.function_call_arguments.done", **named, name=item["name"], arguments=item["arguments"]
            )
            yield self._event("response.output_item.done", output_index=at, item=item)

    def end(self, figures: dict[str, Any]) -> Iterator[bytes]:
        """Events with the complete text, and the response."""
        text, calls = self._so_far.text, list(map(_call, self._so_far.calls))
        output = calls
        if self._text_at is not None:
            message = self._message(text, self._so_far)
            yield self._event("response.output_text.done", **self._at, text=text, logprobs=[])
            yield self._event("response.content_part.done", **self._at, part=_part(text))
            yield self._event("response.output_item.done", output_index=self._text_at, item=message)
            output = [*calls[: self._text_at], message, *calls[self._text_at :]]
        response = self._response(self._so_far, output, figures)
        yield self._event("response." + response["status"], response=response)

    def failure(self, error: ApiError) -> bytes:
        """The event of an error."""
        return self._event("error", **{name: error.body["error"][name] for name in ("message", "code", "param")})

    @property
    def _at(self) -> dict[str, Any]:
        return {"item_id": self._item, "output_index": self._text_at, "content_index": 0}

    def _event(self, kind: str, /, **values: Any) -> bytes:
        self._number += 1
        return event({"type": kind, "sequence_number": self._number - 1, **values}, kind)

    def _message(self, text: str, piece: Piece | None) -> dict[str, Any]:
        return {
            "id": self._item,
            "type": "message",
            "role": "assistant",
            "status": _status(piece),
            "content": [_part(text)],
        }

    def _response(
        self, piece: Piece | None, output: list[dict[str, Any]], figures: dict[str, Any] | None
    ) -> dict[str, Any]:
        asked, status = self._asked, _status(piece)
        own = {"temperature", "top_p", "user", "instructions", "max_output_tokens", "parallel_tool_calls"}
        given = asked.model_dump(include=own | {"tools", "tool_choice", "metadata"})
        return {
            "id": self._head["id"],
            "object": "response",
            "created_at": self._head["created"],
            "completed_at": None if piece is None else int(time.time()),
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self._head["model"],
            "output": output,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "text": {"format": {"type": "text"}} if asked.text is None else asked.text.model_dump(by_alias=True),
            "truncation": "disabled",
            "usage": None if figures is None else _usage(figures),
            **given,
            "metadata": asked.metadata or {},
            "tools": given["tools"] or [],
            "tool_choice": given["tool_choice"] or "auto",
        }


def _status(piece: Piece | None) -> str:
    """Status of a response or a message; None: it has begun."""
    return "in_progress" if piece is None else "incomplete" if piece.finish_reason == "length" else "completed"


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _call(call: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": "fc_" + call["id"],
        "type": "function_call",
        "status": "completed",
        "call_id": call["id"],
        **call["function"],
    }


def _usage(figures: dict[str, Any]) -> dict[str, Any]:
    return {
        "input_tokens": figures["prompt_tokens"],
        "input_tokens_details": figures["prompt_tokens_details"],
        "output_tokens": figures["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": figures["total_tokens"],
        "speculation": figures["speculation"],
    }

"""Bodies of requests: OpenAI's fields that are supported, and our own. Any other field is an error.

``bodies.py`` turns a body into jobs for the engine.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    PrivateAttr,
    Tag,
    ValidationError,
)
from pydantic_core import PydanticCustomError

from sakiyomi.server.errors import ApiError, wrong_body
from sakiyomi.server.fields import (
    BY_KIND,
    BY_TYPE,
    WHOLE,
    Count,
    Ids,
    ListOrText,
    Seed,
    Strict,
    Text,
    TokenId,
    ToolChoice,
    whole_items,
)

MOST_TEXTS = 2048
"""Most texts of a request for embeddings, as OpenAI has it. For completions ``max_n`` decides."""


def _kind(prompt: Any) -> str:
    """Which of the four kinds of prompts it is."""
    if not isinstance(prompt, list):
        return "text"
    first = prompt[0] if prompt else None
    return "texts" if isinstance(first, str) else "lists of ids" if isinstance(first, list) else "ids"


Prompt = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[list[str], Field(min_length=1, max_length=MOST_TEXTS, fail_fast=True), Tag("texts")]
    | Annotated[Ids, Tag("ids")]
    | Annotated[list[Ids], Field(min_length=1, max_length=MOST_TEXTS, fail_fast=True), Tag("lists of ids")],
    Discriminator(_kind),
]
Stop = ListOrText[Annotated[list[Text], Field(max_length=16)]]
ToolName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]


def _arguments(text: str) -> str:
    """Arguments of a call as a JSON object; "{}" for none. Invalid JSON stays as the model wrote it."""
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return text
    if value is None or value == []:
        value, text = {}, "{}"
    if not isinstance(value, dict):
        raise PydanticCustomError("arguments", "Input should be the JSON text of an object")
    return text or "{}"


Arguments = Annotated[str, AfterValidator(_arguments)]
"""Arguments of an earlier call."""


class StreamOptions(Strict):
    """``include_usage``: a last event with the figures; ``continuous_usage_stats``: in every event those so far."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


T = TypeVar("T")
AutoOr = Annotated[
    Annotated[T, Tag("<number>")] | Annotated[Literal["auto", "heuristic", "heuristic-kept"], Tag("<string>")], BY_KIND
]


class Speculation(Strict):
    """How this request speculates; its text does not depend on it.

    ``drafter`` is "off", "auto" for the server's own, or the name of that or of one of its parts.
    """

    drafter: str = "auto"
    gamma: AutoOr[Annotated[int, Field(ge=1, le=256), WHOLE]] = "auto"
    tree: Literal["auto", "chain", "best-first", "ddtree", "dynamic", "static"] = "auto"
    nodes: AutoOr[Annotated[int, Field(ge=1, le=1024), WHOLE]] = "auto"


class JsonSchema(Strict):
    """``schema`` as in OpenAI's structured outputs. It is always enforced, whether ``strict`` or not."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=())

    name: str = "reply"
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema", default_factory=dict)
    strict: bool | None = None


class ResponseFormat(Strict):
    """``text``, ``json_object`` (any JSON object) or ``json_schema``."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Common(Strict):
    """Fields that all of OpenAI's interfaces share: the model, and sampling."""

    model: str | None = Field(None, description="The server's own, if it is given.")
    stream: bool = False
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    seed: Seed | None = None
    stop: Stop | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    user: str | None = Field(None, max_length=512, description="Written to the log, and used for nothing else.")
    # Our own, named as in other servers if those have them.
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1, description="0 or -1: all tokens."), WHOLE] = 0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] = 1.0
    stop_token_ids: list[TokenId] = Field([], max_length=64)
    ignore_eos: bool = False
    speculation: Speculation = Speculation()
    kv_budget: Annotated[Annotated[int, Tag("<number>")] | Annotated[str, Tag("<string>")], BY_KIND] | None = Field(
        None, description="Must equal the server's own, which is fixed when the model is loaded."
    )
    # Fields of other servers that do not change the text.
    request_id: str | None = Field(None, max_length=512)
    metadata: dict[str, Any] | None = None
    priority: int | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    # Fields of other servers with the only value that is supported here.
    skip_special_tokens: Literal[True] = True
    spaces_between_special_tokens: Literal[True] = True
    include_stop_str_in_output: Literal[False] = False
    return_tokens_as_token_ids: Literal[False] = False
    use_beam_search: Literal[False] = False
    min_tokens: Literal[0] = 0


class Ask(Common):
    """Fields that completions and chat completions share."""

    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=128), WHOLE] = 1
    response_format: ResponseFormat | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=20), WHOLE] | None = Field(
        None, description="As in vLLM: how likely the prompt's tokens were, with so many others at each place."
    )
    trace: bool = Field(
        False, description="Return the source of every token and the draft tree of every round with the text."
    )

    _names: dict[str, str] = PrivateAttr(default_factory=dict)

    @property
    def alternatives(self) -> int | None:
        """How many other tokens are wanted beside each, with their log probabilities; None: no log probabilities."""
        raise NotImplementedError

    def named(self, error: ApiError) -> ApiError:
        """The same error with the client's names of the fields."""
        return error.renamed(self._names)


Body = TypeVar("Body", bound=BaseModel)


def function(name: str, **more: Any) -> dict[str, Any]:
    """A function as chat completions write it: a tool, a choice of one, or, beside an id, a call."""
    return {"type": "function", "function": {"name": name, **more}}


def joined(content: str | list[Any]) -> str:
    """A text, or the texts of its parts."""
    return content if isinstance(content, str) else "".join(part.text for part in content)


def read_as(kind: type[Body], values: dict[str, Any], names: dict[str, str] | None = None) -> Body:
    """A body from values of another interface.

    Args:
        kind: of the body.
        values: of its fields.
        names: the client's names of fields, by their path here.

    Raises:
        ApiError: a value is invalid.
    """
    try:
        body = kind.model_validate(values)
    except ValidationError as error:
        raise wrong_body(error.errors(), values).renamed(names or {}) from None
    if isinstance(body, Ask):
        body._names = names or {}
    return body


class CompletionRequest(Ask):
    """Body of ``/v1/completions``."""

    prompt: Prompt
    max_tokens: Annotated[int, Field(ge=0, le=2**31 - 1), WHOLE] = Field(
        16, description="0: nothing is written; with echo and logprobs the prompt is scored."
    )
    logprobs: Annotated[int, Field(ge=0, le=20), WHOLE] | None = None
    echo: bool = Field(False, description="The prompt, too, with its log probabilities if they are asked for.")
    add_special_tokens: Literal[True] = True
    best_of: Literal[1] | None = None

    @property
    def alternatives(self) -> int | None:
        """See ``Ask``."""
        return self.logprobs


class EmbeddingsRequest(Strict):
    """Body of ``/v1/embeddings``."""

    model: str | None = None
    input: Prompt
    encoding_format: Literal["float", "base64"] = Field("float", description="base64: of float32, little end first.")
    dimensions: Count | None = Field(None, description="The model's own number: its states are not made to be cut.")
    user: str | None = Field(None, max_length=512, description="Written to the log, and used for nothing else.")


class TextPart(Strict):
    """Text as one of several parts."""

    type: Literal["text"]
    text: Text


class ImageUrl(Strict):
    """``data:image/TYPE;base64,DATA``; nothing is fetched. The model's processor decides in which detail it is read."""

    url: str
    detail: Literal["auto"] | None = None


class ImagePart(Strict):
    """An image, for a model that reads them."""

    type: Literal["image_url"]
    image_url: ImageUrl


class CalledFunction(Strict):
    """Name and arguments, a JSON text."""

    name: str
    arguments: Arguments = "{}"


class ToolCall(Strict):
    """An earlier call of the model; ``index`` is its place in a stream."""

    id: str
    index: int | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


Part = Annotated[Annotated[TextPart, Tag("<text>")] | Annotated[ImagePart, Tag("<image_url>")], BY_TYPE]


class Message(Strict):
    """One message. ``annotations`` of other servers' replies are accepted and ignored."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: ListOrText[list[Part]] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = Field(
        None, description="Thoughts of an earlier reply, for templates that take them."
    )
    reasoning: str | None = Field(None, description="The same as vLLM calls it.")
    annotations: list[Any] | None = None


class Ending(Strict):
    """How the prompt ends: where a new reply begins, or inside the last message."""

    add_generation_prompt: bool = Field(
        True, description="False: the prompt ends with the last message; by default so with continue_final_message."
    )
    continue_final_message: bool = Field(
        False, description="The last message is the beginning of a reply, which the new text continues."
    )


class TokenizeRequest(Ending):
    """Body of ``/tokenize``, as vLLM has it: a prompt, or messages, which become one by the chat template."""

    model: str | None = None
    prompt: Text | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=4096)] | None = None
    add_special_tokens: bool | None = Field(None, description="Of a prompt, by default as in /v1/completions.")
    return_token_strs: bool = False


class DetokenizeRequest(Strict):
    """Body of ``/detokenize``."""

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True), BeforeValidator(whole_items)]


class Function(Strict):
    """A function that the model may call; ``parameters`` is a JSON schema, which is always enforced."""

    name: ToolName
    description: Text | None = None
    parameters: dict[str, Any] = Field({})
    strict: bool | None = None


class FunctionTool(Strict):
    """A tool, which is always a function."""

    type: Literal["function"]
    function: Function


class NamedFunction(Strict):
    """The one to call."""

    name: str


class NamedChoice(Strict):
    """This function must be called."""

    type: Literal["function"]
    function: NamedFunction


class ChatRequest(Ask, Ending):
    """Body of ``/v1/chat/completions``."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=4096)]
    max_completion_tokens: Count | None = None
    max_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20), WHOLE] | None = None
    echo: Literal[False] = False
    add_special_tokens: Literal[False] = False
    tools: Annotated[list[FunctionTool], Field(max_length=128)] | None = None
    tool_choice: ToolChoice[NamedChoice] | None = None
    parallel_tool_calls: bool = True
    reasoning_format: Literal["auto", "none", "deepseek"] = Field(
        "auto", description="none: thoughts stay in the text; otherwise they are reasoning_content."
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="As in vLLM: further arguments of the chat template, for instance enable_thinking."
    )

    @property
    def alternatives(self) -> int | None:
        """See ``Ask``."""
        return (self.top_logprobs or 0) if self.logprobs else None

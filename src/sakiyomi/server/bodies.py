"""Turns the body of a request into jobs for the engine: templates, tokens, limits, parameters.

Runs in threads: tokenizing a long text takes seconds, in which the event loop must serve other clients.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from sakiyomi.core.errors import InputError, UnsupportedError
from sakiyomi.core.images import ImagePrompt
from sakiyomi.core.params import SamplingParams
from sakiyomi.core.row_processor import RowProcessor
from sakiyomi.core.tokens import token_places
from sakiyomi.engine.chat_template import Dialogue, read_template
from sakiyomi.engine.inputs import prompt_tokens
from sakiyomi.engine.rendering import Ending, Rendering
from sakiyomi.model_executor.encoder_decoder.families import family_of
from sakiyomi.server.chat_form import ChatForm
from sakiyomi.server.config import ServerConfig
from sakiyomi.server.conversations import as_template_takes, begun_thoughts, ending_of, read_images, text_of
from sakiyomi.server.errors import ApiError, bad_request, no_model, unsupported
from sakiyomi.server.escapes import Matcher
from sakiyomi.server.grammar import Constraint, Grammars, Penalties
from sakiyomi.server.jobs import Echo, Job, Reply
from sakiyomi.server.schema import (
    Ask,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    FunctionTool,
    ImagePart,
    Message,
    NamedChoice,
    Speculation,
    TokenizeRequest,
)
from sakiyomi.server.thoughts import THINK, ends_inside
from sakiyomi.server.tools import USUAL, ToolFormat, shown

if TYPE_CHECKING:
    from sakiyomi.cache.cross_attention import Source
    from sakiyomi.engine.llm import LLM

AS_THEY_ARE = {
    "temperature", "top_p", "min_p", "seed", "stop_token_ids", "ignore_eos", "repetition_penalty",
}  # fmt: skip
"""Fields of a body that are sampling parameters of the same name."""
NAMES = {name: name for name in Ask.model_fields} | {name: f"speculation.{name}" for name in Speculation.model_fields}
"""Fields of a body by the name of the sampling parameter, which the parameter's errors begin with."""


LONG = 1 << 15  # characters


def is_long(body: Ask) -> bool:
    """Whether a body may take long to read: it has a long text, a grammar or images."""
    if body.response_format is not None and body.response_format.type != "text":
        return True
    if isinstance(body, ChatRequest):
        said = [message.content or "" for message in body.messages]
        if any(isinstance(part, ImagePart) for parts in said for part in parts):
            return True
        texts = [text for parts in said for text in ([parts] if isinstance(parts, str) else map(text_of, parts))]
        return bool(body.tools) or sum(map(len, texts)) > LONG
    assert isinstance(body, CompletionRequest)
    prompts = body.prompt if isinstance(body.prompt, list) else [body.prompt]
    return sum(1 if isinstance(prompt, int) else len(prompt) for prompt in prompts) > LONG


class Room:
    """Limits of a prompt and of new tokens, by the length of the context.

    Args:
        context: tokens.
        longest: characters of the longest token.
    """

    def __init__(self, context: int, longest: int) -> None:
        self._context, self._longest = context, longest

    def check(self, prompt: Any, field: str) -> None:
        """Refuse a prompt that is too long for the context however it is tokenized; ``field`` is to blame."""
        # Checked before tokenizing, which takes seconds for a long text.
        most = self._context * (self._longest if isinstance(prompt, str) else 1)
        if len(prompt) > most:
            kind = "characters" if isinstance(prompt, str) else "tokens"
            raise _too_long(
                f"the prompt has {len(prompt)} {kind}, and no text of more than {most} fits into the context of "
                f"{self._context} tokens; shorten it",
                field,
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
            raise _too_long(
                f"the prompt has {len(tokens)} tokens, and the context holds {self._context} with at least one "
                "new one; shorten it",
                source,
            )
        if asked is not None and asked > room:
            raise _too_long(
                f"{field} is {asked}, and after the prompt's {len(tokens)} tokens the context has room for {room}",
                field,
            )
        return room if asked is None else max(asked, 1)


def _too_long(message: str, field: str) -> ApiError:
    return bad_request(message, field, code="context_length_exceeded")


class BodyReader:
    """Turns bodies into jobs.

    Args:
        llm: has the tokenizer and the limits.
        config: of the server.

    Raises:
        UnsupportedError: the target is an encoder-decoder model for text.
    """

    def __init__(self, llm: LLM, config: ServerConfig) -> None:
        reads = llm.target.weights.encoder is not None
        self.hears = reads and family_of(llm.target.config).takes_audio  # a speech model
        if reads and not self.hears:
            raise UnsupportedError(
                f"{llm.name} has an encoder that reads text; the server takes decoder-only models and speech models"
            )
        self._llm, self._config = llm, config
        self.name = config.served_name or llm.name
        self.blind = llm.target.blind  # why the model reads no images; None: it does
        if self.blind is None and llm.processor is None:
            self.blind = "the model's folder has no image processor (preprocessor_config.json)"
        self.drafter = None if llm.draft is None else llm.draft.name
        self.parts = () if llm.draft is None else llm.draft.parts  # of which a request may choose one
        self._dialogue = Dialogue(llm.tokenizer, read_template(config.chat_template), processor=llm.processor)
        self.form = ChatForm(self._dialogue)
        channels = None if self.form.channels is None else self.form.channels.channels
        self._ends = [] if channels is None else [*shown(channels.ends, llm.tokenizer)]
        self._budget = llm.recipe()["kv_budget"]
        self._room = Room(llm.max_context, max(map(len, llm.tokenizer.get_vocab()), default=1))
        self._grammars = Grammars(llm.tokenizer, llm.vocab_size, sorted(llm.engine.stop_ids))

    def completion(self, body: CompletionRequest, *, counted: bool = True) -> list[Job]:
        """Jobs of a request for completions: sample j of prompt i is number i x n + j.

        Args:
            body: of the request.
            counted: it has no more samples than the server allows.

        Raises:
            ApiError, InputError: it cannot be met.
        """
        self._check(body)
        prompts = _prompts(body)
        if counted:
            self._check_count(len(prompts) * body.n, "n" if body.n > 1 else "prompt")
        if body.max_tokens == 0 and not body.echo and body.prompt_logprobs is None:
            raise bad_request("max_tokens is 0, which needs echo or prompt_logprobs; ask for a token", "max_tokens")
        jobs: list[Job] = []
        for i, text in enumerate(prompts):
            tokens = self._tokens(text, "prompt")
            limit = self._room.limit(tokens, body.max_tokens, "max_tokens", "prompt")
            echo = _echo(text, tokens, body, self._llm.tokenizer) if body.echo else None
            for job in self._jobs(body, tokens, limit, i, self._format(body)):
                job.index, job.echo, job.unwritten = len(jobs), echo, body.max_tokens == 0
                jobs.append(job)
        return jobs

    def chat(self, body: ChatRequest) -> list[Job]:
        """Jobs of a request for replies, one for each of its n.

        Raises:
            ApiError, InputError: it cannot be met.
        """
        self._check(body)
        field = "max_completion_tokens" if body.max_tokens is None else "max_tokens"  # its old name
        if None not in (body.max_tokens, body.max_completion_tokens):
            raise bad_request("max_tokens is the old name of max_completion_tokens; give one", "max_tokens")
        if body.top_logprobs is not None and not body.logprobs:
            raise bad_request("top_logprobs needs logprobs: true", "top_logprobs")
        self._check_count(body.n, "n")
        messages = self._messages(body.messages)
        tools, offered, matcher, form = self._tools(body)
        ending = ending_of(body, messages, in_channels=self.form.channels is not None and matcher is not None)
        given, described = self.form.in_words(messages, [tool.model_dump(exclude_none=True) for tool in tools])
        given, ending, thoughts = begun_thoughts(given, ending)
        tokens, source = self._read(given, described, body, ending, thoughts)
        limit = self._room.limit(tokens, body.max_completion_tokens or body.max_tokens, field, "messages")
        begun = str(messages[-1]["content"]) if ending == "begun" else ""
        schemas = {tool.function.name: tool.function.parameters for tool in offered}
        reasoning = self._reasoning(body, tokens, begun, thoughts)
        reply = Reply(form, schemas, reasoning, bool(begun), self.form.thoughts or THINK, self.form.text)
        jobs = self._jobs(body, tokens, limit, 0, matcher)
        for index, job in enumerate(jobs):
            job.index, job.reply, job.source = index, reply, source
        return jobs

    def _messages(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        form = self.form.calls if any(message.tool_calls for message in messages) else None
        way = USUAL if form is None or form.way is None else form.way
        return as_template_takes(messages, way, lambda: self.form.takes_parts)

    def _reasoning(self, body: ChatRequest, tokens: list[int], begun: str, thoughts: str) -> bool | None:
        """Whether the new text begins inside thoughts; None: thoughts are not separated from the reply.

        A reply under a grammar has no thoughts.
        """
        formed = body.response_format is not None and body.response_format.type != "text"
        if self.form.channels is not None:
            return None if body.reasoning_format == "none" else bool(thoughts)
        forced = body.tool_choice not in (None, "none", "auto")
        if body.reasoning_format == "none" or formed or forced or self.form.thoughts is None:
            return None
        if begun or thoughts:
            return bool(thoughts) or ends_inside(begun, self.form.thoughts) or None
        opening = self.form.thoughts.opening
        return str(self._llm.tokenizer.decode(tokens[-len(opening) - 8 :])).rstrip().endswith(opening)

    def _read(
        self, messages: Sequence[Any], tools: Sequence[Any], body: ChatRequest, ending: Ending, thoughts: str
    ) -> tuple[list[int], Source | None]:
        """Tokens of a conversation, and the model's inputs for its images."""
        how = Rendering(tools, body.chat_template_kwargs or {}, ending, nulls=True, begun=self.form.begun(thoughts))
        images = read_images(body.messages, self._config, self.blind)
        with _blaming("messages", {"options": "chat_template_kwargs"}):
            if not images:
                return self._tokens(self._dialogue.read(messages, how), "messages"), None
            text = self._dialogue.text(messages, how)
            self._room.check(text, "messages")
            params = SamplingParams(prompt_logprobs=_of_prompt(body))
            made = self._llm.engine.process(ImagePrompt(text, images), params)
            return made.tokens, made.source

    def tokenize(self, body: TokenizeRequest) -> list[int]:
        """Tokens of a prompt, or of messages up to the reply.

        Raises:
            ApiError: the body has neither of them, or both.
        """
        self.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise bad_request("give a prompt, or messages: one of them", "prompt")
        if body.messages is not None:
            if body.add_special_tokens is not None:
                raise bad_request("the chat template adds what it needs; leave it out", "add_special_tokens")
            if any(isinstance(part, ImagePart) for message in body.messages for part in message.content or ()):
                raise bad_request("an image is no text; leave it out to have the rest tokenized", "messages")
            with _blaming("messages"):
                messages = self._messages(body.messages)
                given, _ = self.form.in_words(messages)
                given, ending, thoughts = begun_thoughts(given, ending_of(body, messages))
                return self._dialogue.read(given, Rendering(ending=ending, nulls=True, begun=self.form.begun(thoughts)))
        if body.continue_final_message or not body.add_generation_prompt:
            field = "continue_final_message" if body.continue_final_message else "add_generation_prompt"
            raise bad_request(f"{field} is about messages, and this is a prompt; leave it out", field)
        with _blaming("prompt"):
            self._room.check(body.prompt, "prompt")
            special = {} if body.add_special_tokens is None else {"add_special_tokens": body.add_special_tokens}
            return list(self._llm.tokenizer(body.prompt, **special)["input_ids"])

    def detokenize(self, body: DetokenizeRequest) -> str:
        """Text of tokens.

        Raises:
            ApiError: a token is not in the vocabulary.
        """
        self.check_model(body.model)
        if wrong := [token for token in body.tokens if token >= self._llm.vocab_size]:
            raise bad_request(f"tokens has {wrong[0]}; the vocabulary has {self._llm.vocab_size} tokens", "tokens")
        return str(self._llm.tokenizer.decode(body.tokens))

    @property
    def template(self) -> str:
        """The chat template; "" without one."""
        return self._dialogue.template

    @property
    def has_template(self) -> bool:
        """Whether a chat template formats messages; without one they form one continuing text."""
        return not self._dialogue.plain

    # ------------------------------------------------------------ parts

    def check_model(self, name: str | None) -> None:
        """Refuse the name of another model."""
        if name is not None and name != self.name:
            raise no_model(name, repr(self.name))

    def _check(self, body: Ask) -> None:
        self.check_model(body.model)
        if self.hears:
            raise unsupported(f"{self.name!r} is a speech model; send sounds to /v1/audio/transcriptions")
        if body.stream_options is not None and not body.stream:
            raise bad_request("stream_options needs stream: true", "stream_options")
        if wrong := [token for token in body.stop_token_ids if token >= self._llm.vocab_size]:
            raise bad_request(
                f"stop_token_ids has {wrong[0]}; the model's vocabulary has {self._llm.vocab_size} tokens",
                "stop_token_ids",
            )
        if body.kv_budget is not None and str(body.kv_budget) != self._budget:
            raise unsupported(
                f"kv_budget is {body.kv_budget!r:.40}; it is fixed when the model is loaded, and here "
                + ("there is none" if self._budget == "None" else self._budget),
                "kv_budget",
            )

    def _check_count(self, count: int, field: str) -> None:
        if count > self._config.max_n:
            raise bad_request(f"{count} samples in one request; this server allows {self._config.max_n}", field)

    def _tokens(self, prompt: Any, field: str) -> list[int]:
        self._room.check(prompt, field)
        with _blaming(field):
            return prompt_tokens(prompt, self._llm.tokenizer, self._llm.vocab_size, sys.maxsize)

    def _jobs(self, body: Ask, tokens: list[int], limit: int, number: int, matcher: Matcher | None) -> list[Job]:
        if matcher is not None and body.ignore_eos:
            raise bad_request("with a grammar the text ends when it is complete; leave ignore_eos out", "ignore_eos")
        keys = [(number, j) if body.n > 1 else (number,) for j in range(body.n)]
        drafted, asks = _drafting(body.speculation, self.drafter, self.parts)
        with _blaming(None, NAMES):
            return [
                Job(tokens, self.params(body, tokens, limit, matcher), key, drafted, body.trace, asks=asks)
                for key in keys
            ]

    def _format(self, body: Ask) -> Matcher | None:
        """The grammar that response_format asks for."""
        wanted = body.response_format
        if wanted is None or wanted.type == "text":
            return None
        if (wanted.json_schema is None) != (wanted.type == "json_object"):
            raise bad_request(
                "response_format has a json_schema where its type is json_schema, and only there", "response_format"
            )
        schema = {"type": "object"} if wanted.json_schema is None else wanted.json_schema.schema_
        channels = self.form.channels if isinstance(body, ChatRequest) else None
        return self._grammars.of_reply(schema, channels, "response_format")

    def _tools(
        self, body: ChatRequest
    ) -> tuple[Sequence[FunctionTool], Sequence[FunctionTool], Matcher | None, ToolFormat | None]:
        """Tools in the prompt, tools that may be called, the grammar, and the format of calls."""
        if not body.tools and body.tool_choice not in (None, "none", "auto"):
            raise bad_request("tool_choice needs tools", "tool_choice")
        choice = body.tool_choice or "auto"
        if not body.tools or choice == "none":
            matcher = self._format(body)
            return body.tools or (), (), matcher, self.form.channels or (self.form.always if matcher is None else None)
        if body.response_format is not None and body.response_format.type != "text":
            raise bad_request("tools and response_format cannot be combined; send one of them", "response_format")
        if (form := self.form.calls) is None:
            raise unsupported(
                "the model has no chat template that could describe tools to it; leave tools out", "tools"
            )
        offered = body.tools
        if isinstance(choice, NamedChoice):
            offered = [tool for tool in body.tools if tool.function.name == choice.function.name]
            if not offered:
                raise bad_request(
                    f"tool_choice names {choice.function.name!r}, which is not among tools", "tool_choice"
                )
        several = body.parallel_tool_calls is not False and not isinstance(choice, NamedChoice)
        places = {f"tools.{tool.function.name}": f"tools[{i}].function.parameters" for i, tool in enumerate(body.tools)}
        with _blaming("tools", places):
            matcher = self._grammars.of_tools(offered, form, forced=choice != "auto", several=several)
        return body.tools, offered, matcher, form

    def params(self, body: Ask, tokens: list[int], limit: int, matcher: Matcher | None) -> SamplingParams:
        """The sampling parameters of a request with this prompt."""
        processors: list[RowProcessor] = []
        ends = self._ends if isinstance(body, ChatRequest) else []
        if body.presence_penalty or body.frequency_penalty:
            processors.append(Penalties(body.frequency_penalty, body.presence_penalty, len(tokens)))
        if matcher is not None:
            processors.append(Constraint(matcher.deep_copy(), len(tokens), self._llm.tokenizer))
        return SamplingParams(
            max_new_tokens=limit,
            top_k=max(0, body.top_k),
            stop=body.stop or (),
            logit_bias=_biases(body.logit_bias, self._llm.vocab_size),
            logits_processors=processors,
            logprobs=body.alternatives,
            prompt_logprobs=_of_prompt(body),
            **body.model_dump(include=AS_THEY_ARE) | {"stop_token_ids": [*body.stop_token_ids, *ends]},
            **body.speculation.model_dump(exclude={"drafter"}),
        )


@contextmanager
def _blaming(field: str | None, others: Mapping[str, str] = MappingProxyType({})) -> Iterator[None]:
    """Make errors a 400 that names this field, or the one of ``others`` that the message begins with."""
    try:
        yield
    except InputError as error:
        name = error.message.split()[0]
        raise bad_request(error.message, name if name in others else field).renamed(others) from None
    except ApiError as error:
        raise error.renamed(others) from None


def _prompts(body: CompletionRequest) -> Sequence[Any]:
    prompt: Any = body.prompt
    return [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt


def _drafting(wanted: Speculation, own: str | None, parts: tuple[str, ...]) -> tuple[bool, tuple[str, ...] | None]:
    """Whether to draft, and the drafters to use; None: all of them."""
    if wanted.drafter in ("off", "none"):
        if (wanted.gamma, wanted.tree, wanted.nodes) != ("auto", "auto", "auto"):
            raise bad_request(
                "speculation is off, so that gamma, tree and nodes have no meaning; leave them out", "speculation"
            )
        return False, None
    if wanted.drafter in parts:
        return True, (wanted.drafter,)
    if wanted.drafter not in ("auto", own):
        known = ", ".join(['"off", "auto"', *map(repr, () if own is None else (own, *parts))])
        raise unsupported(
            f"speculation.drafter is {wanted.drafter!r:.60}; this server knows {known}", "speculation.drafter"
        )
    return own is not None, None


def _echo(prompt: Any, tokens: list[int], body: CompletionRequest, tokenizer: Any) -> Echo:
    """A prompt as the reply repeats it. A character that its tokens leave incomplete belongs to the new text."""
    text = prompt if isinstance(prompt, str) else str(tokenizer.decode(prompt))
    if body.max_tokens != 0 and not isinstance(prompt, str):
        text = text.rstrip("\ufffd")
    return Echo(text, [] if body.logprobs is None else token_places(tokens, text, tokenizer))


def _of_prompt(body: Ask) -> int | None:
    """How many alternatives to give for each token of the prompt; None: the prompt is not scored."""
    asked = [body.prompt_logprobs]
    if isinstance(body, CompletionRequest) and body.echo:
        asked.append(body.logprobs)
    return max((count for count in asked if count is not None), default=None)


def _biases(given: dict[str, float] | None, vocab_size: int) -> dict[int, float] | None:
    found: dict[int, float] = {}
    if given and len(given) > vocab_size:
        raise bad_request(
            f"logit_bias has {len(given)} entries; the model's vocabulary has {vocab_size} tokens", "logit_bias"
        )
    for name, bias in (given or {}).items():
        if not (name.isascii() and name.isdigit() and int(name[:12]) < vocab_size):
            raise bad_request(
                f"logit_bias has {name!r:.40}; its keys are token ids below {vocab_size}, as texts", "logit_bias"
            )
        found[int(name)] = bias
    return found or None

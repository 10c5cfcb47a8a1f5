"""Makes replies from the engine's steps: OpenAI's objects, with ``trace`` and ``usage.speculation`` of our own.

A ``Sample`` reads the steps of one choice; a ``Style`` makes the objects of one endpoint from it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sakiyomi.core.outputs import PromptToken, Stats, Step, TokenTrace
from sakiyomi.core.text import TextStream
from sakiyomi.core.tokens import TokenNames
from sakiyomi.server.channels import single
from sakiyomi.server.errors import ApiError
from sakiyomi.server.jobs import Event, Job
from sakiyomi.server.relay import Names, Relay
from sakiyomi.server.said import TextReader
from sakiyomi.server.schema import Ask, StreamOptions
from sakiyomi.server.stream import DONE, event
from sakiyomi.server.thoughts import ChannelReader, ReasoningReader, ThoughtMarks
from sakiyomi.server.tools import ToolReader, shown

NEVER = -9999.0  # OpenAI's log probability of an impossible token


@dataclass
class Piece:
    """What one step, or all of them, added to one choice.

    Attributes:
        places: offset of each token in the choice's text, those of ``echo`` first; only with log probabilities.
    """

    index: int
    text: str = ""
    tokens: list[TokenTrace] = field(default_factory=list)
    finish_reason: str | None = None
    calls: list[dict[str, Any]] = field(default_factory=list)
    trace: list[dict[str, Any]] = field(default_factory=list)
    stop: str | None = None
    echo: str | None = None
    prompt: list[PromptToken] = field(default_factory=list)
    thoughts: str = ""
    mean: Tensor | None = None
    places: list[int] = field(default_factory=list)

    def add(self, other: Piece) -> None:
        """Append the next piece."""
        self.text += other.text
        self.thoughts += other.thoughts
        self.tokens += other.tokens
        self.calls += other.calls
        self.trace += other.trace
        self.places += other.places
        self.mean = other.mean
        self.finish_reason, self.stop = other.finish_reason, other.stop
        self.echo = other.echo if self.echo is None else self.echo
        self.prompt = self.prompt or other.prompt


class Sample:
    """Reads the steps of one choice.

    Args:
        job: of the choice.
        names: texts of single tokens.
        tokenizer: decodes tokens.
        ids: makes ids of calls.
    """

    def __init__(self, job: Job, names: TokenNames, tokenizer: Any, ids: Names) -> None:
        self._job, self._names = job, names
        self._begun = False
        told = job.traced or job.params.logprobs is not None
        self._texts = TextStream(tokenizer, job.params.stop, before=job.prompt) if told else None
        form, schemas, reasoning, begun, around, said = job.reply
        self._channels = self._tools = self._reasoning = None
        if form is not None and form.channels:
            self._channels = ChannelReader(form, ids, schemas, begun=begun, thinking=bool(reasoning))
        elif form is not None:
            self._tools = ToolReader(form, ids, schemas, begun=begun)
        if reasoning is not None and self._channels is None:
            call = "" if form is None else form.opening
            special = _special(around, [*(form.marks if form is not None else ()), *(said or ())], tokenizer)
            self._reasoning = ReasoningReader(opened=reasoning, marks=around, call=call, special=special)
        self._text = None if said is None else TextReader(said)
        self._thoughts_apart, self._called = reasoning is not None, False
        # Usual decoding drops marks that are special tokens.
        written = [*(form.marks if form is not None else ()), *(said or ()), *single(*(said or ()))]
        written += [*around, *single(*around)] if self._reasoning is not None else []
        marks = shown(written, tokenizer) if written else None
        self._marked = TextStream(tokenizer, job.params.stop, marks, job.prompt) if marks else None

    def read(self, event: Event) -> Piece:
        """One step."""
        step, request = event.step, self._job.request
        piece = Piece(self._job.index, step.text, list(step.trace), step.finish_reason)
        if not self._begun:
            self._begun = True
            if self._job.echo is not None:
                piece.echo, piece.places = self._job.echo.text, list(self._job.echo.places)
            piece.prompt = [] if request is None else request.prompt_logprobs
        over = step.finish_reason is not None
        if over and request is not None:
            piece.stop = request.text.matched
        if self._job.unwritten:
            piece.text, piece.tokens, piece.finish_reason = "", [], "length"
            if self._job.states:
                piece.mean = torch.stack(self._job.states).sum(0) / len(self._job.prompt)
            return piece
        if (marked := self._marked) is not None:
            piece.text = "" if marked.stopped else marked.push(step.token_ids)[0]
            piece.text += marked.finish() if over else ""
        if self._channels is not None:
            piece.thoughts, piece.text, piece.calls = self._channels.push(piece.text, over)
            if not self._thoughts_apart:
                piece.thoughts, piece.text = "", piece.thoughts + piece.text
        if self._reasoning is not None:
            piece.thoughts, piece.text = self._reasoning.push(piece.text, over)
        if self._tools is not None:
            piece.text, piece.calls = self._tools.push(piece.text, over)
        if self._text is not None:
            piece.text = self._text.push(piece.text, over)
        self._called = self._called or bool(piece.calls)
        if step.finish_reason == "stop" and self._called:
            piece.finish_reason = "tool_calls"
        if self._texts is not None:
            read = self._tokens(step, self._texts)
            before = 0 if self._job.echo is None else len(self._job.echo.text)
            piece.places += [before + place for _, place in read]
            if self._job.traced:
                piece.trace = [self._origins(event, [text for text, _ in read])]
        return piece

    @staticmethod
    def _tokens(step: Step, texts: TextStream) -> list[tuple[str, int]]:
        """Text that each token adds, and its offset. Joined they are the reply's text."""
        found = []
        for entry in step.trace:
            place = texts.place
            found.append(("" if texts.stopped else texts.push([entry.token_id])[0], place))
        if step.finish_reason is not None and found:
            text, place = found[-1]
            found[-1] = text + texts.finish(), place
        return found

    def _origins(self, event: Event, texts: Sequence[str]) -> dict[str, Any]:
        """Origin and text of each token, the tree of the round, and the figures so far."""
        tokens = [entry.to_dict() | {"text": text} for entry, text in zip(event.step.trace, texts, strict=True)]
        found: dict[str, Any] = {"tokens": tokens, "round": None}
        if event.tree is not None:
            found["round"] = event.tree.to_dict() | {"texts": [self._names(token)[0] for token in event.tree.tokens]}
        if event.stats is not None:
            stats = event.stats
            found["stats"] = {"tokens": stats.tokens, "seconds": stats.seconds} | _speculation(stats)
        return found


def _special(around: ThoughtMarks, others: Sequence[str], tokenizer: Any) -> list[str]:
    """Marks around thoughts, and their parts that have no other meaning, if these are special tokens."""
    parts = single(*around)
    if not parts or len(shown(parts, tokenizer)) < len(set(parts)):
        return []
    return [*around, *(part for part in parts if part not in (*around, *single(*others)))]


class Style(ABC):
    """Objects of one endpoint.

    Args:
        model: as clients call it.
        names: texts of tokens.
        body: what was asked for.
        relay: gives ids and the time of the request.

    Attributes:
        figures: which events have figures.
    """

    prefix = ""

    def __init__(self, model: str, names: TokenNames, body: Ask, relay: Relay) -> None:
        self._names, self._wanted = names, body
        self.figures = body.stream_options or StreamOptions()
        self._ids = relay.names("reply")
        self._head = {"id": self.prefix + self._ids(12), "created": relay.created, "model": model}

    @abstractmethod
    def whole(self, pieces: Sequence[Piece], figures: dict[str, Any]) -> dict[str, Any] | str:
        """The complete reply; a text is sent as it is."""

    def stream(self, piece: Piece, first: bool, figures: dict[str, Any] | None) -> Iterator[bytes]:
        """The events of a step; none, unless the endpoint streams.

        Args:
            piece: what the step added.
            first: it is the first step of its choice.
            figures: so far; None: they are not wanted in every event.
        """
        return iter(())

    def end(self, figures: dict[str, Any]) -> Iterator[bytes]:
        """The last events of a stream."""
        return iter(())

    def failure(self, error: ApiError) -> bytes:
        """The event that ends a stream by an error."""
        return event(error.body)


class ChoiceStyle(Style):
    """Objects that have a list of choices: those of completions."""

    whole_name, chunk_name = "", ""

    def whole(self, pieces: Sequence[Piece], figures: dict[str, Any]) -> dict[str, Any]:
        """The reply at once."""
        choices = [self._choice(piece) | self._body(piece) for piece in pieces]
        return {**self._head, "object": self.whole_name, "choices": choices, "usage": figures}

    def stream(self, piece: Piece, first: bool, figures: dict[str, Any] | None) -> Iterator[bytes]:
        """An event; the first one of a choice has the role."""
        choice = self._choice(piece) | self._delta(piece, first)
        usage = {"usage": figures} if self.figures != StreamOptions() else {}
        yield event({**self._head, "object": self.chunk_name, "choices": [choice]} | usage)

    def end(self, figures: dict[str, Any]) -> Iterator[bytes]:
        """The last events of a stream; one has the figures alone, where they are wanted."""
        if self.figures.include_usage:
            yield event({**self._head, "object": self.chunk_name, "choices": [], "usage": figures})
        yield DONE

    def _choice(self, piece: Piece) -> dict[str, Any]:
        found: dict[str, Any] = {"index": piece.index, "finish_reason": piece.finish_reason, "logprobs": None}
        if self._wanted.alternatives is not None:
            found["logprobs"] = self._chances(piece)
        if self._wanted.trace:
            found["trace"] = piece.trace
        if self._wanted.prompt_logprobs is not None and piece.prompt:
            found["prompt_logprobs"] = list(map(self._prompt_token, piece.prompt))
        return found

    def _prompt_token(self, token: PromptToken) -> dict[str, Any] | None:
        """By the token's id, that of the prompt first, as vLLM has it."""
        if token.logprob is None:
            return None
        ranked = [(other, rank, value) for rank, (other, value) in enumerate(token.top_logprobs, 1)]
        every = [(token.token_id, token.rank, token.logprob), *ranked]
        return {
            str(other): {"logprob": _finite(value), "rank": rank, "decoded_token": self._names(other)[0]}
            for other, rank, value in reversed(every)
        }

    @abstractmethod
    def _delta(self, piece: Piece, first: bool) -> dict[str, Any]: ...

    @abstractmethod
    def _body(self, piece: Piece) -> dict[str, Any]: ...

    @abstractmethod
    def _chances(self, piece: Piece) -> dict[str, Any]: ...


class CompletionStyle(ChoiceStyle):
    """Of ``/v1/completions``."""

    prefix, whole_name, chunk_name = "cmpl-", "text_completion", "text_completion"

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._given: dict[int, int] = {}  # characters of each choice

    def _delta(self, piece: Piece, first: bool) -> dict[str, Any]:
        return self._body(piece)

    def _body(self, piece: Piece) -> dict[str, Any]:
        return {"text": (piece.echo or "") + piece.text}

    def _chances(self, piece: Piece) -> dict[str, Any]:
        entries: list[PromptToken | TokenTrace] = [*(piece.prompt if piece.echo is not None else ()), *piece.tokens]
        given = self._given[piece.index] = self._given.get(piece.index, 0) + len(self._body(piece)["text"])
        places = piece.places
        if piece.finish_reason is not None:  # tokens of a stop string are not in the text
            places = [min(place, given) for place in places]
        return {
            "tokens": [self._name(entry.token_id) for entry in entries],
            "token_logprobs": [_finite(entry.logprob) for entry in entries],
            "top_logprobs": [
                None
                if entry.logprob is None
                else {self._name(token): _finite(value) for token, value in entry.top_logprobs}
                for entry in entries
            ],
            "text_offset": places,
        }

    def _name(self, token: int) -> str:
        """Text of a token; its bytes if it is part of a character, as in OpenAI: names are keys, and must differ."""
        text, data = self._names(token)
        return "bytes:" + "".join(f"\\x{value:02x}" for value in data) if "\ufffd" in text else text


class ChatStyle(ChoiceStyle):
    """Of ``/v1/chat/completions``."""

    prefix, whole_name, chunk_name = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def whole(self, pieces: Sequence[Piece], figures: dict[str, Any]) -> dict[str, Any]:
        """The complete reply; the prompt, which its choices share, is beside them, as in vLLM."""
        found = super().whole(pieces, figures)
        scored = [choice.pop("prompt_logprobs", None) for choice in found["choices"]]
        return found | ({"prompt_logprobs": scored[0]} if self._wanted.prompt_logprobs is not None else {})

    def _delta(self, piece: Piece, first: bool) -> dict[str, Any]:
        delta: dict[str, Any] = {"role": "assistant", "content": ""} if first else {}
        if piece.thoughts:
            delta["reasoning_content"] = piece.thoughts
        if piece.text:
            delta["content"] = piece.text
        if piece.calls:
            delta["tool_calls"] = piece.calls
        return {"delta": delta}

    def _body(self, piece: Piece) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": piece.text, "refusal": None}
        if piece.thoughts:
            message["reasoning_content"] = piece.thoughts
        if piece.calls:
            calls = [{name: value for name, value in call.items() if name != "index"} for call in piece.calls]
            message |= {"content": piece.text or None, "tool_calls": calls}
        return {"message": message}

    def _chances(self, piece: Piece) -> dict[str, Any]:
        return {
            "content": [
                self._chance(entry.token_id, entry.logprob)
                | {"top_logprobs": [self._chance(token, value) for token, value in entry.top_logprobs]}
                for entry in piece.tokens
            ]
        }

    def _chance(self, token: int, value: float | None) -> dict[str, Any]:
        text, data = self._names(token)
        return {"token": text, "logprob": _finite(value), "bytes": list(data)}


def usage(jobs: Sequence[Job]) -> dict[str, Any]:
    """Figures of a request: OpenAI's counts, and under ``speculation`` what speculation did.

    ``accepted_prediction_tokens`` are the drafted tokens that were kept, ``rejected_prediction_tokens`` the others.
    """
    requests = [(job.prompt, job.request) for job in jobs if job.request is not None]
    stats = Stats.total(request.stats for _, request in requests)
    written = 0 if any(job.unwritten for job in jobs) else stats.tokens
    asked = sum({id(job.prompt): len(job.prompt) for job in jobs}.values())
    had: dict[int, int] = {}  # by prompt, which counts once: of the sample that prefilled it for the others
    for prompt, request in requests:
        had[id(prompt)] = min(request.stats.reused, had.get(id(prompt), len(prompt)))
    return {
        "prompt_tokens": asked,
        "completion_tokens": written,
        "total_tokens": asked + written,
        "prompt_tokens_details": {"cached_tokens": sum(had.values())},
        "completion_tokens_details": {
            "accepted_prediction_tokens": stats.accepted,
            "rejected_prediction_tokens": stats.drafted - stats.accepted,
        },
        "speculation": _speculation(stats),
    }


def _speculation(stats: Stats) -> dict[str, Any]:
    names = ("rounds", "drafted", "accepted", "acceptance_rate", "tau")
    return {name: getattr(stats, name) for name in names}


def _finite(value: float | None) -> float | None:
    return value if value is None else max(value, NEVER)

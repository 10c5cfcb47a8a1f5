"""Grammars for JSON, schemas and tool calls, by llguidance, on every path of a draft's tree."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any

import numpy as np
from llguidance import LLTokenizer

from sakiyomi.core.errors import InputError
from sakiyomi.core.row_processor import RowProcessor
from sakiyomi.server.errors import ApiError, bad_request
from sakiyomi.server.escape_tables import Vocabulary
from sakiyomi.server.escapes import JSON_OUTLINE, Matcher
from sakiyomi.server.pair_rules import Value
from sakiyomi.server.reply_rules import ReplyRules, parameters_of
from sakiyomi.server.schema import FunctionTool
from sakiyomi.server.tools import ToolFormat

if TYPE_CHECKING:
    from sakiyomi.core.row_processor import Scores

# Without a limit an unsure model may write white space for ever, which no rule forbids.
LAYOUT = {"whitespace_pattern": r"[ \n\t]{1,24}"}
# Any tokens that spell a text may stand for it, and no others: a text that is forced is not encoded by the tokenizer,
# which would take what reads like a special token for that token.
HEAD = '%llguidance {"no_forcing": true}\n'
KEPT = 64  # compiled grammars
BEFORE = 3  # tokens before a forced text that are encoded with it


class Constraint(RowProcessor):
    """Masks tokens after which the text cannot satisfy the grammar.

    It follows each history that it is given, forwards and backwards: rows of a tree come in any order, from the draft
    model and from the target. Scores behind a path that breaks the grammar are left unchanged: the path is rejected
    at the token that breaks it.

    Args:
        matcher: at the beginning of the text; used by this object alone.
        prompt: tokens of every history that precede the text.
        tokenizer: of transformers.
    """

    def __init__(self, matcher: Matcher, prompt: int, tokenizer: Any) -> None:
        self._matcher, self._prompt, self._tokenizer = matcher, prompt, tokenizer
        self._read: list[int] = []

    def change(self, text: Sequence[int], path: Sequence[int], scores: Scores) -> None:
        """See ``RowProcessor``.

        Raises:
            InputError: the grammar exceeds the parser's limits.
        """
        if not self._follow([*text[self._prompt :], *path]):
            return
        allowed = self._matcher.allowed()[: len(scores)]
        if (reason := self._matcher.error().partition("\n")[0]) or not allowed.any():
            reason = reason or "no token fits"
            raise InputError(f"the grammar cannot be followed any further ({reason}); ask for something simpler")
        scores[len(allowed) :] = -np.inf
        np.copyto(scores[: len(allowed)], -np.inf, where=~allowed)

    def forced(self, history: Sequence[int]) -> Sequence[int]:
        """Tokens for the text that the grammar leaves no choice about: a draft, since others may spell it, too."""
        path = list(history[self._prompt :])
        text = self._matcher.forced().decode(errors="ignore") if self._follow(path) else ""
        if not text:
            return ()
        before = path[-BEFORE:]  # some tokenizers put a blank before a text
        tokens: list[int] = self._tokenizer.encode(self._tokenizer.decode(before) + text, add_special_tokens=False)
        if tokens[: len(before)] != before:
            tokens = [*before, *self._tokenizer.encode(text, add_special_tokens=False)]
        return tokens[len(before) :]

    def _follow(self, path: list[int]) -> bool:
        """Move the matcher to the end of this path; False if the path breaks the grammar."""
        common = min(len(self._read), len(path))
        if self._read[:common] != path[:common]:
            common = next(i for i in range(common) if self._read[i] != path[i])
        if common < len(self._read):
            self._matcher.rollback(len(self._read) - common)
            del self._read[common:]
        rest = path[common:]
        taken = self._matcher.try_consume_tokens(rest) if rest else 0
        self._read += rest[:taken]
        return taken == len(rest)


class Penalties(RowProcessor):
    """OpenAI's penalties: frequency x count + presence is taken from the logits of tokens written so far.

    Args:
        frequency: for each time.
        presence: once.
        prompt: how many tokens do not count: they were not written.
    """

    def __init__(self, frequency: float, presence: float, prompt: int) -> None:
        self._frequency, self._presence, self._prompt = frequency, presence, prompt

    def change(self, text: Sequence[int], path: Sequence[int], scores: Scores) -> None:
        """See ``RowProcessor``."""
        tokens, counts = np.unique(np.array([*text[self._prompt :], *path], np.int64), return_counts=True)
        scores[tokens] -= self._frequency * counts.astype(np.float32) + self._presence


class Grammars:
    """Makes matchers for a tokenizer.

    Args:
        tokenizer: of transformers.
        vocab_size: width of the logits.
        stop_ids: tokens that end a text.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, stop_ids: Sequence[int]) -> None:
        self._tokenizer, self._vocab_size, self._stop_ids = tokenizer, vocab_size, list(stop_ids)
        self._made: Vocabulary | None = None
        self._lock = threading.Lock()
        self._kept: dict[str, Matcher] = {}  # the last used ones are last

    def of_schema(self, schema: Mapping[str, Any], field: str) -> Matcher:
        """A matcher for JSON of a schema.

        Raises:
            ApiError: the schema cannot be enforced.
        """
        return self._keep(
            f"schema {json.dumps(schema)}", lambda: self._matcher(lambda value: f"start: {value(schema)}\n", field)
        )

    def of_reply(self, schema: dict[str, Any], form: ToolFormat | None, field: str) -> Matcher:
        """A matcher for a reply that is JSON of a schema, in its channel if the format has channels.

        Raises:
            ApiError: the schema cannot be enforced.
        """
        alone = self.of_schema(schema, field)
        if form is None or (channels := form.channels) is None:
            return alone
        marks = self._marks(field)
        return self._matcher(
            lambda value: ReplyRules(marks, form, self._stop_ids, value).channels(channels, schema=schema), field
        )

    def of_tools(self, tools: Sequence[FunctionTool], form: ToolFormat, *, forced: bool, several: bool) -> Matcher:
        """A matcher for text that may contain calls of these tools, or, ``forced``, for calls only.

        Raises:
            ApiError: the parameters of a tool cannot be enforced.
        """
        told = [(tool.function.name, tool.function.parameters) for tool in tools]
        key = f"tools {forced} {several} {form} {json.dumps(told)}"
        return self._keep(key, lambda: self._of_tools(tools, form, forced, several))

    def _of_tools(self, tools: Sequence[FunctionTool], form: ToolFormat, forced: bool, several: bool) -> Matcher:
        for tool in tools:  # so that the message names the one that is wrong
            self.of_schema(parameters_of(tool), f"tools.{tool.function.name}")
        marks = self._marks("tools")

        def write(value: Value) -> str:
            lark = ReplyRules(marks, form, self._stop_ids, value)
            if form.channels:
                return lark.channels(form.channels, tools, forced=forced, several=several)
            return lark.calls(tools, several) + lark.start(forced, several)

        return self._matcher(write, "tools")

    def _keep(self, key: str, make: Callable[[], Matcher]) -> Matcher:
        """A matcher for these rules. Compiling them takes ms, and clients send the same tools again and again."""
        with self._lock:
            found = self._kept.pop(key, None)
            if found is not None:
                self._kept[key] = found
        if found is None:
            found = make()
            with self._lock:
                self._kept[key] = found
                if len(self._kept) > KEPT:
                    del self._kept[next(iter(self._kept))]
        return found.deep_copy()

    def _marks(self, field: str) -> dict[str, int]:
        """Ids of special tokens by name; the parser treats them as symbols, not as text."""
        known = self._vocabulary(field).special
        added = getattr(self._tokenizer, "added_tokens_decoder", {})
        return {str(token): int(i) for i, token in added.items() if int(i) in known}

    def _matcher(self, write: Callable[[Value], str], field: str) -> Matcher:
        """A matcher for the rules that ``write`` makes, given a function that makes rules for schemas."""
        matcher = Matcher(self._vocabulary(field), HEAD + write(_value), HEAD + write(lambda _: "json") + JSON_OUTLINE)
        if reason := matcher.error():
            raise _refused(reason, field)
        first = matcher.deep_copy()
        if not first.allowed().any() or first.error():
            raise _refused("there is no text that does", field)
        return matcher

    def _vocabulary(self, field: str) -> Vocabulary:
        with self._lock:
            if self._made is None:
                if (found := getattr(self._tokenizer, "backend_tokenizer", None)) is None:
                    raise bad_request(
                        "this model's tokenizer does not support grammars: it has none of the package tokenizers",
                        field,
                        code=None,
                    )
                backend, ends = copy(found), self._stop_ids or [self._tokenizer.eos_token_id]
                backend.no_padding()
                backend.no_truncation()
                try:
                    known = LLTokenizer(backend.to_str(), n_vocab=self._vocab_size, eos_token=ends)
                except (ValueError, TypeError) as error:
                    raise bad_request(
                        f"this model's tokenizer does not support grammars: {error}", field, code=None
                    ) from None
                ids = range(self._vocab_size)
                special = [i for i in ids if known.is_special_token(i)]
                self._made = Vocabulary([known.decode_bytes([i]) for i in ids], special, ends)
            return self._made


def _value(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': LAYOUT})}"


# Of a parser's message: the place in our rules before it, and these rules behind it.
_OURS = re.compile(r"\Aat \d+\(\d+\): (failed to compile JSON schema: )?|\n +\d+ \| .*", re.DOTALL)


def _refused(reason: str, field: str) -> ApiError:
    if reason.startswith("panic"):  # of the compiler, with a backtrace of its own
        reason = "its grammar is too large"
    return bad_request(
        f"{field} cannot be enforced: {' '.join(_OURS.sub('', reason).split())[:300]}", field, code="invalid_schema"
    )

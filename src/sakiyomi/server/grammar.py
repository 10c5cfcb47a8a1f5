"""Texts that keep to a grammar: JSON, schemas and calls of tools, by llguidance, on every path of a draft's tree."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import llguidance.hf
import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer, StructTag
from torch import Tensor

from sakiyomi.errors import InputError
from sakiyomi.server.errors import ApiError
from sakiyomi.server.schema import FunctionTool
from sakiyomi.server.tools import ToolFormat

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

__all__ = ["Constraint", "Grammars"]

# Without a limit a model that is unsure writes spaces for ever, and never breaks a rule.
LAYOUT: JsonCompileOptions = {"whitespace_pattern": r"[ \n\t]{1,24}"}


MOST_CALLS = 16  # of a reply that must call


class Constraint:
    """A logits processor that leaves only tokens by which the text can still become what the grammar says.

    It follows the history it is given, back and forth: rows of a tree come in any order, the draft model's and the
    target's by turns. A path that has broken the grammar already is left as it is: no row above it accepts it.

    Args:
        matcher: at the beginning of the text; it is this object's own from now on.
        prompt: how many tokens of every history come before.
    """

    def __init__(self, matcher: LLMatcher, prompt: int) -> None:
        self._matcher, self._prompt = matcher, prompt
        self._read: list[int] = []

    def __call__(self, history: Tensor, scores: Tensor) -> Tensor:
        """See transformers' ``LogitsProcessor``: (1, length) and (1, V).

        Raises:
            InputError: the grammar is more than the parser's limits bear.
        """
        path = history[0, self._prompt :].tolist()
        if not self._follow(path):
            return scores
        words = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            raise InputError(f"the grammar cannot be followed any further: {self._matcher.get_error()}")
        allowed = np.zeros(scores.shape[1], bool)
        bits = np.unpackbits(words, bitorder="little")[: len(allowed)]
        allowed[: len(bits)] = bits
        return scores.masked_fill(~torch.from_numpy(allowed).to(scores.device), -torch.inf)

    def _follow(self, path: Sequence[int]) -> bool:
        """Have the matcher read this path; False where it breaks the grammar."""
        common = 0
        for known, token in zip(self._read, path, strict=False):
            if known != token:
                break
            common += 1
        if common < len(self._read):
            self._matcher.rollback(len(self._read) - common)
            del self._read[common:]
        rest = list(path[common:])
        taken = self._matcher.try_consume_tokens(rest) if rest else 0
        self._read += rest[:taken]
        return taken == len(rest)


class Grammars:
    """Makes matchers for one tokenizer.

    Args:
        tokenizer: of transformers.
        vocab_size: width of the logits.
        stop_ids: tokens that end a text.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, stop_ids: Sequence[int]) -> None:
        self._tokenizer, self._vocab_size, self._stop_ids = tokenizer, vocab_size, list(stop_ids)
        self._made: LLTokenizer | None = None
        self._lock = threading.Lock()

    def of_schema(self, schema: dict[str, Any], field: str) -> LLMatcher:
        """For a JSON text of a schema.

        Raises:
            ApiError: it is none that can be kept to.
        """
        try:
            grammar = LLMatcher.grammar_from_json_schema(schema, overrides=LAYOUT)
        except ValueError as error:
            raise _refused(str(error), field) from None
        return self._matcher(grammar, field)

    def of_tools(self, tools: Sequence[FunctionTool], form: ToolFormat, *, forced: bool, several: bool) -> LLMatcher:
        """For a text with calls of these tools in it, or, ``forced``, for calls alone.

        Raises:
            ApiError: the schema of one's parameters is none that can be kept to.
        """
        for tool in tools:  # so that the message names the one that is wrong
            self.of_schema(tool.function.parameters or {"type": "object"}, f"tools.{tool.function.name}")
        rules = [
            (form.begin(tool.function.name), tool.function.parameters or {"type": "object"}, form.end) for tool in tools
        ]
        if forced:
            calls = " | ".join(f"call_{i}" for i in range(len(rules)))
            more = f'("\\n" ({calls})){{0,{MOST_CALLS - 1}}}' if several else ""
            lark = f"%llguidance {{}}\nstart: ({calls}) {more}\n"
            for i, (begin, schema, end) in enumerate(rules):
                body = json.dumps(schema | {"x-guidance": LAYOUT})
                lark += f"call_{i}: {json.dumps(begin)} %json {body} {json.dumps(end)}\n"
        else:
            tags = [
                StructTag(trigger=form.trigger, begin=begin, grammar=schema | {"x-guidance": LAYOUT}, end=end)
                for begin, schema, end in rules
            ]
            lark = StructTag.to_grammar(tags, assume_special=False)
            if not several:
                lark = lark.replace(")* tag_end", ")? tag_end", 1)
        return self._matcher(lark, "tools")

    def _matcher(self, grammar: str, field: str) -> LLMatcher:
        with self._lock:
            if self._made is None:
                try:
                    self._made = llguidance.hf.from_tokenizer(
                        self._tokenizer, n_vocab=self._vocab_size, eos_token=self._stop_ids or None
                    )
                except (ValueError, TypeError, AttributeError) as error:
                    raise ApiError(
                        400, f"this model's tokenizer cannot keep to grammars: {error}", param=field
                    ) from None
        matcher = LLMatcher(self._made, grammar, log_level=0)
        if matcher.is_error():
            raise _refused(matcher.get_error(), field)
        return matcher


def _refused(reason: str, field: str) -> ApiError:
    return ApiError(
        400, f"{field} cannot be kept to: {' '.join(reason.split())[:300]}", param=field, code="invalid_schema"
    )

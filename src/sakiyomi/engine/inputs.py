"""Turns what users give (prompts, and words that must not be generated) into token ids."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from sakiyomi.cache.cross_attention import Source
from sakiyomi.core.audio import Audio
from sakiyomi.core.chats import is_chat
from sakiyomi.core.errors import InputError
from sakiyomi.core.images import ImagePrompt
from sakiyomi.core.params import SamplingParams
from sakiyomi.engine.chat_template import Dialogue


@dataclass(frozen=True)
class TokenizedPrompt:
    """A checked prompt.

    Attributes:
        tokens: of the prompt.
        params: of the request, with words as token ids.
        source: what the model's encoder reads; None: the model has no encoder.
    """

    tokens: list[int]
    params: SamplingParams
    source: Source | None = None


InputProcessor = Callable[[Any, SamplingParams], TokenizedPrompt]
"""Turns what a user gives into a checked prompt; raises InputError with what is wrong."""


class TextInputProcessor:
    """Prompts of decoder-only models.

    Args:
        tokenizer: of the model.
        vocab_size: width of its logits.
        max_context: most tokens of prompt and output.
        note: why they are so few, for messages.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, max_context: int, note: str = "") -> None:
        self._tokenizer, self._vocab_size, self._max_context = tokenizer, vocab_size, max_context
        self._note = note

    @cached_property
    def dialogue(self) -> Dialogue:
        """Writes chats as the model's template does."""
        return Dialogue(self._tokenizer)

    def __call__(self, prompt: Any, params: SamplingParams) -> TokenizedPrompt:
        """See ``InputProcessor``."""
        if is_chat(prompt):
            prompt = self.dialogue.prompt(prompt)
        if isinstance(prompt, Audio):
            raise InputError(f"the prompt is {prompt!r}, and the model reads text; load a speech model (whisper)")
        if isinstance(prompt, ImagePrompt):
            raise InputError(f"the prompt is {prompt!r}, and the model reads text; load a model that sees")
        tokens = prompt_tokens(prompt, self._tokenizer, self._vocab_size, self._max_context, self._note)
        return TokenizedPrompt(tokens, with_ids(params, self._tokenizer))


def prompt_tokens(
    prompt: str | Sequence[int], tokenizer: Any, vocab_size: int, max_context: int, note: str = ""
) -> list[int]:
    """The tokens of a prompt; token ids are used as they are.

    Raises:
        InputError: it is empty, is no text, has unknown tokens, or leaves no room for a new token.
    """
    if isinstance(prompt, str):
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise InputError(f"the prompt {prompt!r:.80} is no text ({error}); pass valid Unicode") from None
        tokens: list[int] = list(tokenizer(prompt)["input_ids"]) if prompt else []
        if not tokens:
            first = tokenizer.bos_token_id
            begin = "" if first is None else f", or the begin token to let the model choose: [{first}]"
            raise InputError(f"the prompt {prompt!r} is empty; give at least one word{begin}")
    else:
        try:
            tokens = [operator.index(t) for t in prompt]
        except TypeError:
            shown = " ".join(repr(prompt).split())
            raise InputError(
                f"the prompt is {shown:.80}; expected a text, a list of messages or a list of token ids"
            ) from None
        if not tokens:
            raise InputError("the prompt is an empty list of tokens; give at least one")
    wrong = next((t for t in tokens if not 0 <= t < vocab_size), None)
    if wrong is not None:
        raise InputError(f"the prompt has token {wrong}; the model's vocabulary has {vocab_size} tokens")
    if len(tokens) >= max_context:
        raise InputError(
            f"the prompt has {len(tokens)} tokens, the context holds {max_context} with at least one new one; "
            f"shorten the prompt{note}"
        )
    return tokens


def with_ids(params: SamplingParams, tokenizer: Any) -> SamplingParams:
    """Bad words as token ids, each with and without a space before it."""
    if not any(isinstance(word, str) for word in params.bad_words):
        return params
    words: list[list[int]] = []
    for word in params.bad_words:
        if isinstance(word, str):
            forms = {tuple(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in (word, " " + word)}
            words.extend(list(form) for form in sorted(forms) if form)
        else:
            words.append(list(word))
    return replace(params, bad_words=words)

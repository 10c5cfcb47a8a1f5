"""What users give, as token ids: prompts, and words that must not be written."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from sakiyomi.core.audio import Audio
from sakiyomi.core.errors import InputError
from sakiyomi.core.params import SamplingParams

if TYPE_CHECKING:
    from sakiyomi.cache.cross_attention import Source

__all__ = ["InputProcessor", "TextInputProcessor", "TokenizedPrompt", "prompt_tokens", "with_ids"]


@dataclass(frozen=True)
class TokenizedPrompt:
    """What a request begins with.

    Attributes:
        tokens: that the model goes on from.
        params: with words as token ids.
        source: what it attends to besides; None: nothing.
    """

    tokens: list[int]
    params: SamplingParams
    source: Source | None = None


class InputProcessor(Protocol):
    """Makes of what a user gives what a request begins with."""

    def __call__(self, prompt: Any, params: SamplingParams) -> TokenizedPrompt:
        """Check both.

        Raises:
            InputError: with what is wrong.
        """
        ...


class TextInputProcessor:
    """For models that go on with their prompt.

    Args:
        tokenizer: of the model.
        vocab_size: width of its logits.
        max_context: most tokens of prompt and output.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, max_context: int) -> None:
        self._tokenizer, self._vocab_size, self._max_context = tokenizer, vocab_size, max_context

    def __call__(self, prompt: Any, params: SamplingParams) -> TokenizedPrompt:
        """See ``InputProcessor``."""
        if isinstance(prompt, Audio):
            raise InputError(
                f"the prompt is {prompt!r}, and the model goes on with text; load a speech model (whisper)"
            )
        tokens = prompt_tokens(prompt, self._tokenizer, self._vocab_size, self._max_context)
        return TokenizedPrompt(tokens, with_ids(params, self._tokenizer))


def prompt_tokens(prompt: str | Sequence[int], tokenizer: Any, vocab_size: int, max_context: int) -> list[int]:
    """The tokens of a prompt; token ids are used as they are.

    Raises:
        InputError: it is empty, is no text, has unknown tokens, or leaves no room for a new one.
    """
    if isinstance(prompt, str):
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise InputError(f"the prompt {prompt!r:.80} is no text ({error}); give it as valid Unicode") from None
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
            raise InputError(f"the prompt is {shown:.80}; expected a text or a list of token ids") from None
        if not tokens:
            raise InputError("the prompt is an empty list of tokens; give at least one")
    wrong = next((t for t in tokens if not 0 <= t < vocab_size), None)
    if wrong is not None:
        raise InputError(f"the prompt has token {wrong}; the model's vocabulary has {vocab_size} tokens")
    if len(tokens) >= max_context:
        raise InputError(
            f"the prompt has {len(tokens)} tokens, the context holds {max_context} with at least one new one; "
            "shorten the prompt"
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

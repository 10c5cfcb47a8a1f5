"""Prompts with images: the model's own processor makes tokens and pixels of them."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from sakiyomi.cache.cross_attention import Source
from sakiyomi.core.chats import is_chat
from sakiyomi.core.errors import InputError, UnsupportedError
from sakiyomi.core.images import ImagePrompt
from sakiyomi.core.messages import one_line
from sakiyomi.core.params import SamplingParams
from sakiyomi.engine.chat_template import Dialogue
from sakiyomi.engine.inputs import TextInputProcessor, TokenizedPrompt, prompt_tokens, with_ids
from sakiyomi.model_executor.loading.model import Loaded
from sakiyomi.model_executor.runner import ModelRunner


class ImageInputProcessor(TextInputProcessor):
    """Prompts of models that read text and images.

    Args:
        loaded: the model's tokenizer and processor.
        target: the model as it runs.
        max_context: most tokens of prompt and output.
    """

    def __init__(self, loaded: Loaded, target: ModelRunner, max_context: int) -> None:
        super().__init__(loaded.tokenizer, target.vocab_size, max_context, target.weights.context_note)
        self._loaded, self._target = loaded, target

    @cached_property
    def dialogue(self) -> Dialogue:
        """See there."""
        return Dialogue(self._tokenizer, processor=self._loaded.extractor)

    def __call__(self, prompt: Any, params: SamplingParams) -> TokenizedPrompt:
        """See ``InputProcessor``."""
        if is_chat(prompt):
            prompt = self.dialogue.prompt(prompt)
        if not isinstance(prompt, ImagePrompt):
            return super().__call__(prompt, params)
        name, processor = self._loaded.name, self._loaded.extractor
        if (why := self._target.blind) is not None:
            raise UnsupportedError(f"{prompt!r}: {name!r} reads no images here: {why}")
        if processor is None:
            raise InputError(
                f"{prompt!r}: {name!r} has no image processor (preprocessor_config.json); copy it from the original "
                "model, or pass a (model, processor) pair"
            )
        if params.prompt_logprobs is not None:
            raise InputError(f"prompt_logprobs is {params.prompt_logprobs}, and prompts with images are not scored")
        # A chat template writes the begin token itself, as transformers' own processors assume.
        begin = getattr(self._tokenizer, "bos_token", None)
        plain = {"add_special_tokens": False} if begin and prompt.text.startswith(begin) else {}
        try:
            made = dict(processor(text=[prompt.text], images=list(prompt.images), return_tensors="pt", **plain))
        except Exception as error:  # processors raise errors of any kind
            raise InputError(f"{prompt!r}: the model's processor does not take it ({one_line(error)})") from error
        tokens = prompt_tokens(
            made["input_ids"][0].tolist(), self._tokenizer, self._vocab_size, self._max_context, self._note
        )
        return TokenizedPrompt(tokens, with_ids(params, self._tokenizer), Source(made, len(tokens)))

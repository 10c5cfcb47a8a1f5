"""transformers' own ``generate``, plain and with drafts: the reference for tokens and speed."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from sakiyomi.core.params import SamplingParams
from sakiyomi.model_executor.loading import stop_tokens

__all__ = ["Transformers", "generation_settings", "stop_tokens"]


class Transformers:
    """One way of calling ``generate``. The model's own generation settings are restored after each call.

    Args:
        model: a transformers causal language model.
        assistant: a draft model of the same tokenizer; None: plain.
        gamma: draft tokens a round, constant, with no confidence threshold: what our ``gamma=<number>`` is; None: what
            transformers does by itself.
        stop: end tokens; the model's own if not given.
        lookup: instead of a draft model: draft tokens are what followed the last tokens where they stood before.
        tokenizers: of the target and of the draft model, where they are not the same.
        cache: name of another cache (``cache_implementation``): with "static" transformers compiles its decoding passes
            on a GPU; None: its default.
        loop: a decoding loop in the place of transformers' own (``custom_generate``).
    """

    def __init__(
        self,
        model: Any,
        assistant: Any | None = None,
        gamma: int | None = 4,
        stop: Sequence[int] | None = None,
        *,
        lookup: bool = False,
        tokenizers: tuple[Any, Any] | None = None,
        cache: str | None = None,
        loop: Any = None,
    ) -> None:
        self.model, self.assistant, self.gamma, self.lookup, self.cache = model, assistant, gamma, lookup, cache
        self._more: dict[str, Any] = {} if loop is None else {"custom_generate": loop}
        if tokenizers is not None:
            self._more |= {"tokenizer": tokenizers[0], "assistant_tokenizer": tokenizers[1]}
        self.stop = list(stop_tokens(model) if stop is None else stop)
        # An offloaded model is nowhere between its passes.
        self._device = torch.device("cpu") if model.device.type == "meta" else model.device

    def generate(self, prompt: Sequence[int], params: SamplingParams) -> list[int]:
        """New tokens of one prompt.

        Of ``params`` length, temperature, top_k, top_p, seed, ignore_eos and logits_processors are read.
        """
        return self.generate_batch([prompt], params)[0]

    def generate_batch(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[list[int]]:
        """Generate for several prompts at once, padded on the left; transformers speculates for a single one only."""
        longest = max(map(len, prompts))
        padded = [[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
        mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        ids, seen = (torch.tensor(rows, device=self._device) for rows in (padded, mask))
        done = self._generated(params, input_ids=ids, attention_mask=seen)
        ends = () if params.ignore_eos else self.stop
        return [_until_end(row, ends) for row in done[:, longest:].tolist()]

    def _generated(self, params: SamplingParams, **given: Any) -> torch.Tensor:
        """What ``generate`` returns for these inputs."""
        given |= self._more
        with ExitStack() as stack:
            own = self._config(self.model, params)
            own.prompt_lookup_num_tokens = self.gamma if self.lookup else None
            own.cache_implementation = self.cache
            stack.enter_context(generation_settings(self.model, own))
            if params.logits_processors:
                from transformers import LogitsProcessorList

                given["logits_processor"] = LogitsProcessorList(params.logits_processors)
            if self.assistant is not None:
                config = self._config(self.assistant, params)
                if self.gamma is not None:
                    config.num_assistant_tokens = self.gamma
                    config.num_assistant_tokens_schedule = "constant"
                    config.assistant_confidence_threshold = 0.0
                stack.enter_context(generation_settings(self.assistant, config))
                given["assistant_model"] = self.assistant
            if not params.greedy:
                torch.manual_seed(params.seed or 0)
            with torch.no_grad():
                done: torch.Tensor = self.model.generate(**given)
        return done

    def _config(self, model: Any, params: SamplingParams) -> Any:
        """Settings that do what ``params`` says and nothing else: penalties of the model's own are left out."""
        from transformers import GenerationConfig

        config = GenerationConfig(max_new_tokens=params.max_new_tokens, do_sample=not params.greedy, use_cache=True)
        config.bos_token_id = model.generation_config.bos_token_id
        config.pad_token_id = model.generation_config.pad_token_id
        if config.pad_token_id is None:
            # Nothing is padded here; a value keeps transformers from logging that it takes one.
            config.pad_token_id = self.stop[0] if self.stop else 0
        config.eos_token_id = None if params.ignore_eos else self.stop or None
        if not params.greedy:
            config.temperature = params.temperature
            config.top_k = params.top_k
            config.top_p = params.top_p
        return config


def _until_end(tokens: list[int], ends: Sequence[int]) -> list[int]:
    """Without the padding after an end token."""
    return tokens[: next((i for i, token in enumerate(tokens, start=1) if token in ends), len(tokens))]


@contextmanager
def generation_settings(model: Any, config: Any) -> Iterator[None]:
    """The model generates with these settings while the block runs; then its own are restored."""
    before = model.generation_config
    # A copy: the heuristic schedule writes into it.
    model.generation_config = copy.deepcopy(config)
    try:
        yield
    finally:
        model.generation_config = before

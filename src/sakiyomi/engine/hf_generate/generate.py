"""``model.generate(**inputs, custom_generate=sakiyomi.custom_generate, assistant_model=draft)``.

transformers prepares prompts, settings, processors and criteria, and then calls ``custom_generate`` in place of its own
loop. This module is that loop: it turns what was prepared into requests, runs them on an engine that is kept for the
model, and returns what ``generate`` returns.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import GenerationMixin

from sakiyomi.core.errors import InputError
from sakiyomi.core.params import SamplingParams
from sakiyomi.engine.hf_generate import arguments
from sakiyomi.engine.hf_generate.engines import Assistance, Engines, Ready
from sakiyomi.engine.hf_generate.lockstep import Lockstep
from sakiyomi.engine.request import Request
from sakiyomi.model_executor.loading import has_encoder

logger = logging.getLogger("sakiyomi")
COLLECT = "_extract_generation_mode_kwargs"
"""The method of ``GenerationMixin`` that collects the arguments of a decoding loop."""


@dataclass(frozen=True)
class _Settings:
    """The options of ``using``, with the defaults of ``SamplingParams`` and ``LLM``."""

    draft: Any = "none"
    gamma: int | str = "auto"
    tree: Any = "auto"
    nodes: int | str = "auto"
    acceptance: Any = "auto"
    compile: str | bool = "auto"
    exact: bool = False

    def draft_params(self, gamma: int | None = None) -> dict[str, Any]:
        """Those of ``SamplingParams``; ``gamma`` takes the place of "auto" if it is given."""
        own = self.gamma if gamma is None or self.gamma != "auto" else int(gamma)
        return {"gamma": own, "tree": self.tree, "nodes": self.nodes, "acceptance": self.acceptance}


class CustomGenerate:
    """The decoding loop that ``generate`` of transformers is given; see ``docs/transformers.md``.

    The text is what ``generate`` would give: greedy the same tokens, sampled the same distribution. Making one wraps a
    method of transformers, once a process; see ``_receive_all_arguments``.
    """

    def __init__(self, settings: _Settings | None = None, engines: Engines | None = None) -> None:
        _receive_all_arguments()
        self._settings = settings or _Settings()
        self._engines = engines or Engines()

    def using(self, **settings: Any) -> CustomGenerate:
        """A copy with other settings, which shares the engines.

        Args:
            **settings: ``draft`` (text drafts, heads, a Drafter object: as in ``LLM``, besides ``assistant_model``);
                ``gamma``, ``tree``, ``nodes`` and ``acceptance`` as in ``SamplingParams``; ``compile`` and ``exact`` as
                in ``LLM``.

        Raises:
            InputError: there is no such setting, or it has no such value.
        """
        known = _Settings.__dataclass_fields__
        unknown = [name for name in settings if name not in known]
        if unknown:
            raise InputError(f"there is no setting {unknown[0]!r}; expected {', '.join(known)}")
        made = replace(self._settings, **settings)
        SamplingParams(**made.draft_params())  # checked now, not at the first call
        return CustomGenerate(made, self._engines)

    def prepare(
        self, model: Any, assistant_model: Any = None, *, tokenizer: Any = None, assistant_tokenizer: Any = None
    ) -> None:
        """Make the engine, its kernels and its recorded passes now; else the first calls make them.

        Args:
            model: whose ``generate`` will run this loop.
            assistant_model, tokenizer, assistant_tokenizer: as ``generate`` will be given them.

        Raises:
            InputError, UnsupportedError: they cannot work.
        """
        self._ready(model, assistant_model, tokenizer, assistant_tokenizer).wait()

    def forget(self, model: Any = None) -> None:
        """Free the packed weights and caches of a model, or of all models. The next call makes them anew."""
        self._engines.forget(model)

    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        synced_gpus: bool = False,
        streamer: Any = None,
        tokenizer: Any = None,
        assistant_model: Any = None,
        assistant_tokenizer: Any = None,
        inputs_tensor: Tensor | None = None,
        **model_kwargs: Any,
    ) -> Any:
        """Run the decoding loop; ``generate`` calls this with what it prepared.

        Returns:
            Token ids (B, length) with the prompts, or transformers' own output object where
            ``return_dict_in_generate`` is set.

        Raises:
            UnsupportedError: an argument that cannot be honoured; it is named.
            InputError, MemoryLimitError: as ``LLM.generate``.
        """
        config, encoder = generation_config, has_encoder(model.config)
        arguments.check_settings(config, model_kwargs, synced_gpus, encoder=encoder)
        params, processors = arguments.sampling(logits_processor, bool(config.do_sample))
        lookup = None if config.prompt_lookup_num_tokens is None else int(config.max_matching_ngram_size or 0)
        layers = config.assistant_early_exit
        ready = self._ready(model, assistant_model, tokenizer, assistant_tokenizer, lookup=lookup, early_exit=layers)
        limit = arguments.length_limit(stopping_criteria, config)
        params = replace(
            params,
            max_new_tokens=limit - input_ids.shape[1],
            # The generator that torch.manual_seed sets: the same seed, the same text.
            seed=None if params.greedy else int(torch.randint(2**62, ())),
            stop_token_ids=arguments.end_tokens(stopping_criteria),
            ignore_eos=True,  # the criteria say it all
            **self._settings.draft_params(None if assistant_model is not None else config.prompt_lookup_num_tokens),
        )
        prompts = arguments.prompts(
            input_ids, model_kwargs, inputs_tensor, model.config, ready.engine.target, params, processors
        )
        engine, turn = ready.engine, self._engines.turn
        requests: list[Request] = []

        def stop(request: Request) -> None:
            with turn:
                engine.remove(request.id)

        try:
            keep = bool(config.return_dict_in_generate and (config.output_scores or config.output_logits))
            with turn:
                for i, prompt in enumerate(prompts):
                    requests.append(engine.submit(prompt, key=(i,), live=False, keep_logits=keep))
            steps = Lockstep(requests, input_ids, logits_processor, stopping_criteria, config, limit, streamer, stop)
            while not steps.over:
                with turn:
                    engine.step()
                steps.advance()
        finally:
            for request in requests:
                stop(request)
        return steps.result(encoder=encoder)

    def _ready(self, model: Any, assistant: Any, tokenizer: Any, assistant_tokenizer: Any, **others: Any) -> Ready:
        own = self._settings
        # The target's tokenizer alone is for stop strings.
        read = assistant_tokenizer is not None or ":" in str(own.draft)
        tokenizers = (tokenizer if read else None, assistant_tokenizer)
        draft = tuple(own.draft) if isinstance(own.draft, list) else own.draft  # one that has a hash
        wanted = Assistance(tokenizers, draft=draft, compile=own.compile, exact=own.exact, **others)
        return self._engines.find(model, assistant, wanted)


@functools.cache
def _receive_all_arguments() -> None:
    """Have ``generate`` give our loop all that it was given.

    For a callable, transformers (seen in 5.23) builds the arguments of the decoding loop anew from the keyword
    arguments that are left, and assistant_model, tokenizer, assistant_tokenizer and streamer are lost on the way. For
    our loop they are collected as for its own; all other calls are as they were.
    """
    collect = getattr(GenerationMixin, COLLECT, None)
    if collect is None:
        logger.warning(
            "transformers %s has no GenerationMixin.%s, by which custom_generate gets what generate was given: "
            "assistant_model, tokenizer, assistant_tokenizer and streamer may be lost; bind them with "
            "functools.partial(sakiyomi.custom_generate, assistant_model=...), or use transformers 5.23",
            transformers.__version__,
            COLLECT,
        )
        return

    @functools.wraps(collect)
    def collect_all(self: Any, custom_generate: Any, *arguments: Any, **named: Any) -> Any:
        function = custom_generate.func if isinstance(custom_generate, functools.partial) else custom_generate
        ours = isinstance(function, CustomGenerate)
        return collect(self, None if ours else custom_generate, *arguments, **named)

    setattr(GenerationMixin, COLLECT, collect_all)

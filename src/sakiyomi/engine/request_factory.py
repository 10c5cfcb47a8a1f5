"""Requests from prompts and parameters: what is decided once, before any work is done."""

from __future__ import annotations

import itertools
import secrets
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from sakiyomi.core.outputs import Step
from sakiyomi.core.params import SamplingParams, as_params
from sakiyomi.core.text import TextStream
from sakiyomi.drafters.base import Context
from sakiyomi.drafters.draft_length import NO_DRAFT, make_policy
from sakiyomi.engine.inputs import InputProcessor, TokenizedPrompt
from sakiyomi.engine.request import Request, RetainedSlot
from sakiyomi.sampling.rng import RequestNoise
from sakiyomi.sampling.sampler import Sampler
from sakiyomi.sampling.verifiers import Verifier

__all__ = ["RequestFactory"]


class RequestFactory:
    """Makes the requests of one engine.

    Args:
        intake: tokenizes prompts, or takes what an encoder reads.
        verifier: the acceptance rule for given parameters.
        tokenizer: of the target.
        vocab_size: of the target.
        stop_ids: the model's end tokens.
        max_context: most tokens of prompt and output together.
        exact: nothing that other requests have computed is used again.
        depth: length of the chains of requests that leave gamma, tree and nodes to "auto"; None: what pays is weighed
            anew in every round.

    Attributes:
        intake: as given.
    """

    def __init__(
        self,
        intake: InputProcessor,
        verifier: Callable[[SamplingParams], Verifier],
        tokenizer: Any,
        *,
        vocab_size: int,
        stop_ids: frozenset[int],
        max_context: int,
        exact: bool,
        depth: int | None,
    ) -> None:
        self.intake, self._verifier, self._tokenizer = intake, verifier, tokenizer
        self._vocab_size, self._stop_ids, self._max_context = vocab_size, stop_ids, max_context
        self._exact, self._depth = exact, depth
        self._ids = itertools.count()

    def make(
        self,
        prompt: Any,
        params: SamplingParams | None,
        *,
        key: tuple[int, ...],
        rounds_trace: bool,
        live: bool,
        outbox: deque[Step] | None,
        place: RetainedSlot | None,
        shares: bool,
        drafted: bool,
        keep_logits: bool,
    ) -> Request:
        """A request that has no slot yet. Takes and raises what ``Engine.submit`` does."""
        asked = prompt if isinstance(prompt, TokenizedPrompt) else self.intake(prompt, as_params(params))
        tokens, params = asked.tokens, asked.params
        depth = self._depth if params.gamma == params.tree == params.nodes == "auto" else None
        if depth is not None:
            params = replace(params, tree="chain")
        verifier = self._verifier(params)
        seed = secrets.randbits(63) if params.seed is None else params.seed
        context = Context(
            next(self._ids),
            tokens,
            params,
            verifier.rule,
            RequestNoise(seed, *key),
            frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._stop_ids),
            shares=shares and not self._exact,
            source=asked.source,
        )
        return Request(
            context,
            len(tokens),
            Sampler(params, self._vocab_size),
            verifier,
            make_policy(params, depth) if drafted else NO_DRAFT,
            TextStream(self._tokenizer, params.stop),
            min(len(tokens) + params.max_new_tokens, self._max_context),
            keep_rounds=rounds_trace,
            keep_logits=keep_logits,
            live=live or bool(params.stop),
            outbox=outbox,
            place=place,
            shares=shares,
        )

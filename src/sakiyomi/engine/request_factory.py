"""Makes requests from prompts and parameters: everything that is decided once, before a request runs."""

from __future__ import annotations

import itertools
import secrets
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypedDict

from torch import Tensor

from sakiyomi.core.errors import InputError
from sakiyomi.core.outputs import Step
from sakiyomi.core.params import SamplingParams, as_params
from sakiyomi.core.text import TextStream
from sakiyomi.drafters.base import Context
from sakiyomi.drafters.draft_length import FixedSize, Heuristic, make_policy
from sakiyomi.engine.inputs import InputProcessor, TokenizedPrompt
from sakiyomi.engine.request import Request, RequestOptions, RetainedSlot
from sakiyomi.sampling.rng import RequestNoise
from sakiyomi.sampling.sampler import Sampler
from sakiyomi.sampling.verifiers import Verifier

TOGETHER = 4
"""Draft tokens of "auto" where processes share a target."""


class SubmitOptions(TypedDict, total=False):
    """Options of one request beside its parameters, see ``Engine.submit``; the last five are its ``RequestOptions``.

    Attributes:
        key: with ``params.seed`` the key of its randomness: the index in a list of requests, and of the sample.
        drafted: False: the request runs without drafts.
        asks: of several drafters that are merged, those that are asked for it, by name; None: all of them.
        bounded: draft lengths that its parameters fix may be shortened, so that others in the round need not wait.
        live: text is wanted with every step, not only with the last one.
        shares: what other requests have read of the same beginning is copied, and not computed again.
        given: the first tokens of its text, as another engine wrote them. They are verified like a draft and not drawn
            again. Eviction boundaries, seed and length limit are as without them.
    """

    key: tuple[int, ...]
    drafted: bool
    asks: Collection[str] | None
    bounded: bool
    live: bool
    shares: bool
    given: Sequence[int]
    rounds_trace: bool
    keep_logits: bool
    outbox: deque[Step] | None
    place: RetainedSlot | None
    states: list[Tensor] | None


@dataclass(eq=False)
class RequestFactory:
    """Makes the requests of one engine.

    Args:
        process: makes token ids of prompts, or takes what an encoder reads.
        verifier: the acceptance rule for given parameters.
        tokenizer: of the target.
        vocab_size: of the target.
        stop_ids: the model's end tokens.
        max_context: most tokens of prompt and output together.
        ids: numbers for its requests.
        exact: drafters share nothing between requests. Of the target's cache only whole chunks are used again (see
            ``SlotManager``).
        depth: fixed chain length for requests with gamma, tree and nodes "auto". None: choose a length every round from
            measured costs.
        shared: other processes run the same passes, so that nothing may depend on clocks or random numbers of this one.
    """

    process: InputProcessor
    verifier: Callable[[SamplingParams], Verifier]
    tokenizer: Any
    vocab_size: int
    stop_ids: frozenset[int]
    max_context: int
    exact: bool
    depth: int | None
    shared: bool = False
    ids: Iterator[int] = field(default_factory=itertools.count)
    _lengths: Mapping[str, Heuristic] = field(
        default_factory=lambda: {"gamma": Heuristic(), "nodes": Heuristic()}, init=False
    )

    def make(
        self,
        prompt: Any,
        params: SamplingParams | None = None,
        *,
        key: tuple[int, ...] = (0,),
        drafted: bool = True,
        asks: Collection[str] | None = None,
        bounded: bool = False,
        live: bool = True,
        shares: bool = True,
        given: Sequence[int] = (),
        **options: Any,
    ) -> Request:
        """A request that has no slot yet. Takes and raises what ``Engine.submit`` does."""
        wanted = RequestOptions(**options)
        asked = prompt if isinstance(prompt, TokenizedPrompt) else self.process(prompt, as_params(params))
        tokens, params = asked.tokens, asked.params
        if self.shared:
            params, bounded = _alike(params), False
        scored = self._scored(asked, wanted.place)
        shares = shares and not scored and wanted.states is None
        depth = self.depth if params.gamma == params.tree == params.nodes == "auto" else None
        if depth is not None:
            params = replace(params, tree="chain")
        verifier = self.verifier(params)
        if given:
            self._check_given(given, params, verifier)
        seed = secrets.randbits(63) if params.seed is None else params.seed
        noise = RequestNoise(seed, *key)
        stops = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.stop_ids)
        context = Context(
            next(self.ids), tokens, params, verifier.rule, noise, stops, source=asked.source, given=tuple(given)
        )
        context.shares = shares and not self.exact
        context.asks = None if asks is None else frozenset(asks)
        sampler = Sampler(params, self.vocab_size)
        text = TextStream(self.tokenizer, params.stop, before=tokens)
        policy = (
            make_policy(params, depth, bounded=bounded, kept=self._lengths) if drafted else FixedSize(0, 0, chain=True)
        )
        last = min(len(tokens) + params.max_new_tokens, self.max_context)
        live = live or bool(params.stop)
        return Request(context, len(tokens), sampler, verifier, policy, text, last, wanted, live=live, shares=shares)

    def _check_given(self, given: Sequence[int], params: SamplingParams, verifier: Verifier) -> None:
        """Refuse a beginning of a text that cannot be verified.

        Raises:
            InputError: the text does not follow from the seed, or the beginning is none of its.
        """
        if verifier.rule == "ratio" or not (params.greedy or params.seed is not None):
            raise InputError(
                "given is the beginning of a text that follows from its seed alone; give the seed, and "
                "acceptance='coupled', or temperature 0"
            )
        if wrong := next((token for token in given if not 0 <= token < self.vocab_size), None):
            raise InputError(f"given has token {wrong}; the model's vocabulary has {self.vocab_size} tokens")
        if len(given) > params.max_new_tokens:
            raise InputError(f"given has {len(given)} tokens and max_new_tokens is {params.max_new_tokens}")

    @staticmethod
    def _scored(asked: TokenizedPrompt, place: RetainedSlot | None) -> bool:
        """Whether the prompt's tokens are to be scored, so that all of them must be read.

        Raises:
            InputError: they cannot be.
        """
        if asked.params.prompt_logprobs is None:
            return False
        if asked.source is not None:
            raise InputError(
                "prompt_logprobs are of prompts of text, and this one is read by an encoder; leave them out"
            )
        if place is not None and (place.slot is not None or place.prefix is not None):
            raise InputError(
                "prompt_logprobs need the whole prompt to be read, and a part of it is in the cache; leave the prefix "
                "out, or use a new conversation"
            )
        return True


def _alike(params: SamplingParams) -> SamplingParams:
    """The parameters, changed so that all processes that share a target run the same passes.

    Raises:
        InputError: each would draw a seed of its own.
    """
    if not params.greedy and params.seed is None:
        raise InputError("seed is None, and processes that share this target would each draw their own; give a seed")
    if params.choices:
        return params
    if params.gamma == params.nodes == "auto" and params.tree in ("auto", "chain"):
        return replace(params, gamma=TOGETHER, tree="chain")
    gamma = TOGETHER if params.gamma == "auto" else params.gamma
    nodes = 2 * TOGETHER if params.nodes == "auto" and params.builder != "chain" else params.nodes
    return replace(params, gamma=gamma, nodes=nodes)

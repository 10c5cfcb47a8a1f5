"""The interface of drafting methods: what a drafter sees of a request, and what it returns."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from sakiyomi.core.params import SamplingParams
from sakiyomi.core.tree import Draft, DraftKind, Rule, TokenTree
from sakiyomi.drafters.draft_length import TokenValue
from sakiyomi.sampling.rng import RequestNoise

if TYPE_CHECKING:
    from torch import Tensor

    from sakiyomi.cache.cross_attention import Source
    from sakiyomi.model_executor.runner import ModelRunner

__all__ = ["Context", "Drafter", "DrafterContext", "HiddenStates", "Rule", "tell"]

logger = logging.getLogger("sakiyomi")

Ranked = tuple[Sequence[int], Sequence[float]]
"""The likeliest tokens of a row and their log probabilities at temperature 1, the likeliest first."""


@dataclass(eq=False)
class Context:
    """One request as a drafter sees it.

    Attributes:
        id: of the request.
        tokens: all committed tokens, prompt and output. Not to be changed; it only grows.
        params: what the user asked for.
        rule: how the draft is verified: "greedy" (propose the most probable tokens), "ratio" (draw tokens, and return
            the distribution) or "coupled" (propose the largest log q + noise of the token's position).
        noise: the request's randomness; position of the next token is ``len(tokens)``.
        stop_ids: tokens that end the text. Tokens behind them are not worth proposing.
        nodes: most tokens wanted in this round's tree; set before each round. As many as the depth wanted: a chain.
        worth: value of a token against the time that it costs, in rounds whose size is "auto". A drafter that knows its
            own chances may then draft fewer or more levels than asked for. None: the size is as asked for.
        slot: the request's slot in the target's cache, for drafters that run part of the target. It holds the keys and
            values of all tokens but the last. Set before each round.
        states: by layer, (hidden,) each, where the drafter's ``hidden_states`` ask for the last row: that of the last
            token that the target has processed, the one before the last in ``tokens``; empty while the prompt is read.
        shares: keys and values of another request's prompt may be copied where both begin with the same tokens. False
            with ``exact``, where a request's numbers must not depend on other requests.
        source: the encoder's input, where the target has an encoder. Drafters that look tokens up read its ``tokens``
            before the text. None: there is no encoder.
        given: first tokens of the output, as another engine has generated them. Drafters are asked only after they are
            committed.
        asks: names of the merged drafters that this request uses; None: all of them.
        memory: for the drafters' own use, by the name of the drafter.
    """

    id: int
    tokens: list[int]
    params: SamplingParams
    rule: Rule
    noise: RequestNoise
    stop_ids: frozenset[int]
    nodes: int = 1
    worth: TokenValue | None = None
    slot: int = -1
    states: Mapping[int, Tensor] = field(default_factory=dict)
    shares: bool = True
    source: Source | None = None
    given: tuple[int, ...] = ()
    asks: frozenset[str] | None = None
    memory: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class HiddenStates:
    """Hidden states of the target's passes that a drafter asks for.

    Attributes:
        layers: decoder layers, counted from 0, whose output is wanted; ``HEAD``: what the model's head reads.
        rows: "last": states of the last processed token, passed in ``Context.states`` with each call of ``propose``;
            "all": states of every token, passed once to ``Drafter.observe``; not available for ``HEAD``.
    """

    layers: tuple[int, ...]
    rows: Literal["last", "all"] = "last"


def _unavailable(*_: Any) -> Any:
    """Placeholder for callables that the drafters being made do not need."""
    raise AssertionError("refused before")


@dataclass(frozen=True)
class DrafterContext:
    """What a drafter may be built from.

    Attributes:
        target: the loaded target (``sakiyomi.model_executor.loading.Loaded``).
        packed: the target as it runs (``sakiyomi.model_executor.runner.ModelRunner``).
        vocab_size: width of the target's logits.
        load: loads another model by name with the settings of this LLM, on the device that is named.
        pack: makes a model that ``load`` returned ready to run beside the target, perhaps with its weights rounded to
            "int8" or "int4".
        quantized: makes a second copy of the target with quantized weights, ready to run beside it.
        answer: the target's own answer to a request (``drafters.oracle.Answer``).
        allow_pickle: weights may be stored as pickle.
    """

    target: Any
    packed: Any
    vocab_size: int
    load: Callable[[str, str | None], Any] = _unavailable
    pack: Callable[..., Any] = _unavailable
    quantized: Callable[[str], Any] = _unavailable
    answer: Callable[[Context], Any] = _unavailable
    allow_pickle: bool = False


class Drafter(ABC):
    """Proposes tokens that the target then verifies. Wrong proposals cost time and keep the output's distribution.

    Only wrong ``probs`` of drawn tokens change it. An object serves one engine.

    A subclass sets ``name`` and ``kind`` and implements ``propose``; every other member has a default here. One that
    ``drafters.DRAFTERS`` names also has a classmethod ``make(argument, around)``. An object
    that is no subclass is wrapped by ``as_drafter``, see ``docs/add-a-drafter.md``.

    Attributes:
        name: names the drafter in traces, and its entry in ``Context.memory``.
        kind: how its drafts are made; checked against the acceptance rule before any work is done.
        runs_model: whether proposing runs a model. Among merged drafters these are asked last.
        model: the draft model; None: there is none.
        hidden_states: hidden states of the target that it reads; None: none.
        leading: how many of the likeliest tokens of each row of the target it reads, see ``rank``; 0: none.
        prefers_coupled: whether its trees follow the noise of each token's position under the rule "coupled". Then
            acceptance "auto" chooses that rule for trees.
        members: drafters that it uses; their counters and clocks are included in its own.
        parts: names of the members that a request can select with ``Context.asks``.
    """

    name: str
    kind: DraftKind
    runs_model = False
    prefers_coupled = False
    hidden_states: HiddenStates | None = None
    leading = 0
    model: ModelRunner | None = None
    members: Sequence[Drafter] = ()
    parts: tuple[str, ...] = ()

    @property
    def passes(self) -> int:
        """Draft passes so far, one for each level of a tree; 0: they are not counted."""
        return sum(member.passes for member in self.members)

    @property
    def one_pass(self) -> bool:
        """Whether a draft of any depth takes one pass."""
        asked = [member for member in self.members if member.runs_model]
        return bool(asked) and all(member.one_pass for member in asked)

    @property
    def forward_seconds(self) -> float:
        """Seconds spent on proposals so far, those over prompts included."""
        return sum(member.forward_seconds for member in self.members)

    @property
    def prefill_seconds(self) -> float:
        """Seconds of these that were spent on prompts."""
        return sum(member.prefill_seconds for member in self.members)

    def kind_for(self, params: SamplingParams) -> DraftKind:
        """How the drafts of a request with these parameters are made.

        Raises:
            InputError: the drafter cannot do what they ask for.
        """
        return self.kind

    @abstractmethod
    def propose(self, contexts: Sequence[Context], gammas: Sequence[int]) -> list[Draft]:
        """One draft for each request, all at once.

        Args:
            contexts: the requests of this round.
            gammas: the depth wanted for each, at least 1; less is allowed, and ``Draft.empty()`` too.
        """

    def observe(self, context: Context, first: int, states: Mapping[int, Tensor]) -> None:  # noqa: B027
        """Receive hidden states of tokens that the target has processed; called if ``hidden_states`` asks for all rows.

        Args:
            context: of the request.
            first: place in ``context.tokens`` of the first of these tokens. States of earlier tokens are missing if
                they were in the cache already: from a prefix, a conversation or another request.
            states: by layer, (tokens, hidden).
        """

    def rank(self, context: Context, tree: TokenTree, rows: Sequence[Ranked]) -> None:  # noqa: B027
        """Receive the likeliest tokens after each row of the request's part of a pass; called if ``leading`` asks.

        Args:
            context: of the request, to which nothing of this pass is committed yet.
            tree: that was scored; empty where the prompt was read to its end.
            rows: behind the last token, and behind each node.
        """

    def forget(self) -> None:
        """Drop what earlier requests have taught it; measurements that write a text several times call it before."""
        for member in self.members:
            member.forget()

    def inherit(self, context: Context, earlier: Context) -> None:  # noqa: B027
        """Take over the state of a conversation's previous request, which then ends."""

    def end(self, context: Context) -> None:
        """Free the state of a request that is over, or that the next request of its conversation has replaced."""
        context.memory.pop(self.name, None)


def tell(drafter: Drafter | None, what: Literal["observe", "rank", "inherit", "end"], *about: Any) -> None:
    """Call this method of a drafter. Errors are logged and not raised: they can only make later drafts worse."""
    try:
        if drafter is not None:
            getattr(drafter, what)(*about)
    except Exception as error:
        name = getattr(drafter, "name", None)
        logger.warning("drafter %s failed in %s: %s: %s", name, what, type(error).__name__, error)

"""What a generation gives back: text, tokens, where each token came from, and what it cost.

Plain data: this module knows no model and imports no torch. Everything has ``to_dict()``, made of JSON values only.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal, NamedTuple

FinishReason = Literal["stop", "length"]
Status = Literal["accepted", "recovered", "bonus", "plain"]
SHOWN = 60  # characters of a text that stand for it


class Record:
    """A dataclass that becomes JSON.

    Attributes:
        optional: fields that are left out where they say nothing: None, False or no entries.
    """

    __slots__ = ()
    optional: ClassVar[frozenset[str]] = frozenset()

    def to_dict(self) -> dict[str, Any]:
        """JSON values of the fields, without ``optional`` ones that say nothing."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]
        return _said(found, self.optional)


class TokenTrace(NamedTuple):
    """Where one new token came from.

    A named tuple, since a round makes several: it takes a third of a frozen dataclass's time.

    Attributes:
        token_id: the token.
        source: name of the drafter that proposed it, ``"target"``, or ``"given"`` where the request began with it.
        status: "accepted" (a draft token that was accepted), "recovered" (the target's own after a rejection), "bonus"
            (the target's own after a wholly accepted draft), "plain" (nothing had been drafted).
        round: the target pass that committed it; 0 is the prefill, which gives the first token.
        target_prob: probability that the target gave it, after temperature and truncation; at temperature 0 that of
            temperature 1; None if not recorded.
        draft_prob: probability that the drafter gave it; None for the target's own tokens, and if the drafter has none.
        top_logprobs: (token id, log probability) of the most probable tokens at this place, best first, when
            ``SamplingParams.logprobs`` asked for them.
        logprob: this token's, at temperature 1 and without truncation as theirs are, when they were asked for.
        lossy: it was verified by a rule that changes the text's distribution ("typical").
    """

    token_id: int
    source: str = "target"
    status: Status = "plain"
    round: int = 0
    target_prob: float | None = None
    draft_prob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()
    lossy: bool = False
    logprob: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON values of the fields, without optional ones that say nothing."""
        return _said(self._asdict(), frozenset({"top_logprobs", "logprob", "lossy"}))


class PromptToken(NamedTuple):
    """How likely a token of a prompt was, at temperature 1 and without truncation.

    Attributes:
        token_id: the token.
        logprob: its log probability; None for the first token, before which there is nothing.
        rank: 1 if no token was more probable.
        top_logprobs: (token id, log probability) of the most probable tokens at this place, best first.
    """

    token_id: int
    logprob: float | None = None
    rank: int | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """JSON values of the fields."""
        return _said(self._asdict(), frozenset({"top_logprobs"}))


@dataclass(frozen=True, slots=True)
class RoundTrace(Record):
    """One round: the proposed tree, the accepted path, the rejected token.

    Attributes:
        round: as in ``TokenTrace.round``.
        tokens: (n) the proposed tokens, parents before children.
        parents: (n) parent node of each, -1 = hangs from the last committed token.
        target_probs: (n) what the target gave each node's token.
        draft_probs: (n) what its drafter gave it; None where the node is a point mass.
        path: accepted nodes from the root on.
        refused: the first token that the target rejected after the path; None if there was none.
        token: the target's token that follows the path.
        kind: the status of that token.
    """

    round: int
    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    target_probs: tuple[float, ...]
    draft_probs: tuple[float | None, ...]
    path: tuple[int, ...]
    refused: int | None
    token: int
    kind: Status


@dataclass(slots=True)
class Stats:
    """Counts and clocks of one generation (or of several, see ``total``). The engine fills it while it works.

    Attributes:
        tokens: new tokens in all, the one that the prefill gives included.
        rounds: target passes after the prefill.
        committed: tokens that those passes committed.
        drafted: tokens that were proposed to them.
        accepted: proposed tokens that were accepted.
        rejected: proposed tokens that the verifier looked at and rejected. Tokens behind a rejected one are neither.
        hit_rounds: rounds with at least one accepted token.
        lossy: new tokens that were verified by a rule that changes the text's distribution ("typical"); 0: lossless.
        reused: prompt tokens that were in the cache already, or were copied there from another request.
        seconds: wall clock from the request's start to its last token.
        prefill_seconds: inside forwards over prompts, the target's and the draft's; also over prompts of other requests
            while this one waited.
        draft_seconds: inside draft forwards after the prefill.
        score_seconds: inside target forwards after the prefill.
    """

    tokens: int = 0
    rounds: int = 0
    committed: int = 0
    drafted: int = 0
    accepted: int = 0
    rejected: int = 0
    hit_rounds: int = 0
    lossy: int = 0
    reused: int = 0
    seconds: float = 0.0
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    score_seconds: float = 0.0

    @property
    def tau(self) -> float:
        """Tokens committed per target pass after the prefill."""
        return _ratio(self.committed, self.rounds)

    @property
    def acceptance_rate(self) -> float:
        """Accepted per drafted token."""
        return _ratio(self.accepted, self.drafted)

    @property
    def hit_rate(self) -> float:
        """Share of rounds with at least one accepted token."""
        return _ratio(self.hit_rounds, self.rounds)

    @property
    def alpha(self) -> float:
        """Accepted / (accepted + rejected): tokens after a rejected one were not verified and do not count."""
        return _ratio(self.accepted, self.accepted + self.rejected)

    @property
    def overhead_seconds(self) -> float:
        """Wall clock outside every forward. Not cut at 0: a negative value would show clocks that overlap."""
        return self.seconds - self.prefill_seconds - self.draft_seconds - self.score_seconds

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second of wall clock, prefill included."""
        return _ratio(self.tokens, self.seconds)

    def to_dict(self) -> dict[str, Any]:
        """Fields and derived figures, as JSON values."""
        values: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        derived = ("tau", "acceptance_rate", "hit_rate", "alpha", "overhead_seconds", "tokens_per_second")
        values.update((name, getattr(self, name)) for name in derived)
        return values

    @classmethod
    def total(cls, parts: Iterable[Stats]) -> Stats:
        """Sum over generations that ran one after another; of concurrent ones the clocks would count time twice."""
        result = cls()
        for part in parts:
            for f in fields(cls):
                setattr(result, f.name, getattr(result, f.name) + getattr(part, f.name))
        return result


@dataclass(frozen=True, slots=True)
class Step(Record):
    """What one round added to one request.

    Attributes:
        text: the new text that is certain; "" while a character or a possible stop string is incomplete.
        token_ids: the new tokens.
        trace: one entry per new token.
        finish_reason: None until the last step of the request.
        request: the id that ``Engine.add`` gave.
        stats: the request's figures, on its last step.
        error: what ended the request instead of its text; such a step is its last, and has no tokens.
    """

    optional = frozenset({"stats", "error"})
    text: str
    token_ids: tuple[int, ...] = ()
    trace: tuple[TokenTrace, ...] = ()
    finish_reason: FinishReason | None = None
    request: int = 0
    stats: Stats | None = None
    error: Exception | None = None


@dataclass(frozen=True, slots=True, repr=False)
class Generation(Record):
    """A finished generation.

    Attributes:
        text: the new text, cut before a stop string.
        token_ids: the new tokens only; the end token is among them, as in transformers, and after a stop string they
            end with the token that completed it.
        prompt_tokens: length of the prompt in tokens; of a source, the places that its encoder has for it.
        finish_reason: "stop" (end token or stop string) or "length".
        trace: one entry per new token.
        stats: counts and clocks.
        rounds_trace: one entry per round after the prefill, if it was asked for.
        prompt_logprobs: one entry per token of the prompt, if they were asked for.
    """

    optional = frozenset({"rounds_trace", "prompt_logprobs"})
    text: str
    token_ids: list[int]
    prompt_tokens: int
    finish_reason: FinishReason
    trace: list[TokenTrace] = field(default_factory=list)
    stats: Stats = field(default_factory=Stats)
    rounds_trace: list[RoundTrace] | None = None
    prompt_logprobs: list[PromptToken] | None = None

    def __repr__(self) -> str:
        start = self.text if len(self.text) <= SHOWN else self.text[:SHOWN] + "..."
        speed = f"{self.stats.tokens_per_second:.0f} tokens/s, {self.stats.tau:.2f} tokens a pass"
        return f"Generation({start!r}, {len(self.token_ids)} tokens, {self.finish_reason}, {speed})"


def _ratio(part: float, whole: float) -> float:
    """Part / whole, 0.0 when there is no whole: a generation of one token has no rounds."""
    return part / whole if whole else 0.0


def _said(values: dict[str, Any], optional: frozenset[str]) -> dict[str, Any]:
    """JSON values, without optional ones that are None, False or empty."""
    nothing = {name for name, value in values.items() if value is None or value is False or value == ()}
    return {name: _json(value) for name, value in values.items() if name not in nothing or name not in optional}


def _json(value: Any) -> Any:
    if isinstance(value, Record | Stats | TokenTrace | PromptToken):
        return value.to_dict()
    if isinstance(value, list | tuple):
        return [_json(part) for part in value]
    return str(value) if isinstance(value, Exception) else value

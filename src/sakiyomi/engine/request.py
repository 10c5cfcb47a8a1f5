"""One request while it runs: its tokens, cache slot, random numbers and statistics."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from sakiyomi.cache.prefix import Prefix, alike
from sakiyomi.core.errors import DivergedError, DraftError
from sakiyomi.core.outputs import FinishReason, Generation, PromptToken, RoundTrace, Stats, Status, Step, TokenTrace
from sakiyomi.core.text import TextStream
from sakiyomi.core.tree import Draft, Draw, Verdict
from sakiyomi.drafters.base import Context
from sakiyomi.drafters.draft_length import DraftLengthPolicy
from sakiyomi.model_executor.kernel_rounds import Committed
from sakiyomi.sampling.rows import as_row
from sakiyomi.sampling.sampler import Sampler
from sakiyomi.sampling.verifiers import Rows, Verifier

GIVEN = "given"  # the source of tokens that were not drafted, but begun with
SCORED_TOGETHER = 64  # rows of a prompt: each takes the vocabulary's size several times
_LEAST = 1e-45  # float32 has no smaller probability; a logarithm of 0 would be no JSON


@dataclass(eq=False)
class RetainedSlot:
    """A cache slot that a conversation keeps between two of its requests; empty while one of them runs.

    Attributes:
        prefix: is restored for a request when nothing else is held.
        beginning: the text is only the beginning of other prompts, so that its end is not read like a question.
        shareable: other requests may copy what is kept, and take the slot over if they continue the whole text.
        slot: in the target's cache; None: nothing is kept.
        held: the tokens whose keys and values lie there.
        prompt: how many of them were its request's prompt.
        whole: how many of them were computed in whole chunks of a prompt, as any prompt with that beginning would be.
        base: where chunks are counted from: behind a prefix that had eviction boundaries of its own, else 0.
        border: what lay there at the last eviction boundary that any prompt which begins alike has, too; None: none
            was kept, or nothing is evicted.
        context: of the last request, with the drafter's own memory.
    """

    prefix: Prefix | None = None
    beginning: bool = False
    shareable: bool = False
    slot: int | None = None
    held: list[int] = field(default_factory=list)
    prompt: int = 0
    whole: int = 0
    base: int = 0
    border: Prefix | None = None
    context: Context | None = None

    @property
    def lends(self) -> bool:
        """Whether any prompt with these tokens may use what it holds: not with a prefix or an image."""
        return not self.base and (self.context is None or self.context.source is None)

    def shared(self, tokens: Sequence[int]) -> int:
        """How many of these tokens, from the first on, are held."""
        return alike(self.held, tokens)


@dataclass(frozen=True)
class RequestOptions:
    """What the caller wants of a ``Request`` beside its text.

    Attributes:
        rounds_trace: keep every round's tree.
        keep_logits: keep the raw logits of every new token, in ``Request.logits``, (V,) float32 each.
        outbox: also gets every step, for a caller that does not run the rounds itself.
        place: of the conversation that it belongs to; takes the slot over when the request is over.
        states: gets a sum for each chunk of the prompt, (hidden,) float32: of what the head of the target read for its
            tokens; None: they are not wanted.
    """

    rounds_trace: bool = False
    keep_logits: bool = False
    outbox: deque[Step] | None = None
    place: RetainedSlot | None = None
    states: list[Tensor] | None = None


@dataclass(eq=False)
class Request:
    """The state of one sample of one prompt.

    Attributes:
        context: what drafters see; its tokens are the only record of what was committed.
        prompt_tokens: how many of the tokens are the prompt.
        sampler, verifier, policy: made from the parameters once.
        text: turns tokens into text as they come.
        last: most tokens that prompt and output may have together.
        options: what its caller wants beside the text.
        live: text is wanted as it comes, not only at the end.
        prompt_logprobs: of the prompt's tokens so far, if they were asked for.
        shares: what others have read of its prompt's beginning is not computed again, and they may copy from it.
        error: what ended the request, if it was not its text: a processor of the user's that raised, its removal.
        slot: place in the target's cache; None while waiting.
        cached: tokens whose keys and values the target has computed.
        base: eviction boundaries are counted from here: the length of a prefix that had its own, else 0.
        boundary: where something of them may be dropped next, in tokens; no round goes beyond it.
        followed: the drafter has read the request's text.
        undrafted: the request runs without the drafter, which failed for it.
        fault: the drafter's failure, if it ends the request (``strict``).
    """

    context: Context
    prompt_tokens: int
    sampler: Sampler
    verifier: Verifier
    policy: DraftLengthPolicy
    text: TextStream
    last: int
    options: RequestOptions
    live: bool = True
    shares: bool = True
    slot: int | None = None
    cached: int = 0
    base: int = 0
    boundary: int = 0
    followed: bool = False
    undrafted: bool = False
    fault: DraftError | None = None
    finish_reason: FinishReason | None = None
    error: Exception | None = None
    stats: Stats = field(default_factory=Stats)
    trace: list[TokenTrace] = field(default_factory=list)
    rounds: list[RoundTrace] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    prompt_logprobs: list[PromptToken] = field(default_factory=list)
    began: float = field(default_factory=time.perf_counter)

    @property
    def id(self) -> int:
        """As in ``Step.request``."""
        return self.context.id

    @property
    def seat(self) -> int:
        """The slot of a request that is not waiting."""
        assert self.slot is not None, "it waits"
        return self.slot

    @property
    def tokens(self) -> list[int]:
        """Prompt and output."""
        return self.context.tokens

    @property
    def output(self) -> list[int]:
        """New tokens so far."""
        return self.context.tokens[self.prompt_tokens :]

    @property
    def over(self) -> bool:
        """Whether nothing more will come."""
        return self.finish_reason is not None or self.error is not None

    @property
    def decoding(self) -> bool:
        """Whether the first new token is committed, so that passes are rounds."""
        return len(self.tokens) > self.prompt_tokens

    @property
    def repeats(self) -> bool:
        """Whether not all given tokens are committed yet."""
        return len(self.tokens) - self.prompt_tokens < len(self.context.given)

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether the prompt's tokens are to be scored, too."""
        return self.context.params.prompt_logprobs is not None

    def add_prompt_logprobs(self, logits: Tensor, start: int) -> None:
        """Score tokens of the prompt.

        Args:
            logits: (rows, V) of a chunk; each is about the token behind its own.
            start: place of the chunk's first token.
        """
        most = self.context.params.prompt_logprobs or 0
        tokens = self.tokens[: self.prompt_tokens]
        if not self.prompt_logprobs:
            self.prompt_logprobs.append(PromptToken(tokens[0]))
        del self.prompt_logprobs[start + 1 :]  # what is read again
        for block in logits[: len(tokens) - start - 1].split(SCORED_TOGETHER):
            at = len(self.prompt_logprobs)
            self.prompt_logprobs += score_tokens(block, tokens[at : at + len(block)], most)

    @property
    def prefilled(self) -> bool:
        """Whether the prompt is in the cache, so that decoding rounds may begin."""
        return self.cached >= self.prompt_tokens

    def commit(self, draft: Draft, verdict: Verdict, rows: Rows) -> Step:
        """Append what the target decided: tokens up to a stop or the length limit, their trace and their text.

        Raises:
            DivergedError: it is not what was given.
        """
        tokens = [draft.tree.tokens[node] for node in verdict.path] + [verdict.token]
        repeated = self.repeats
        if repeated:
            self._compare(tokens)
        used, reason = self._until_end(tokens)
        text = ""
        if self.live:
            text, stopped = self.text.push(tokens[:used])
            if stopped is not None:
                used, reason = stopped, "stop"
        tokens = tokens[:used]
        # Row i + 1 follows node i: token i of the path was judged in its parent's row.
        places = [0, *(node + 1 for node in verdict.path)][:used]
        entries = [] if repeated else self._entries(draft, verdict, rows, places, tokens)
        if repeated:
            entries = [TokenTrace(token, GIVEN, lossy=not self.verifier.lossless) for token in tokens]
            self.stats.tokens += used
        else:
            self._count(len(draft.tree.tokens), len(verdict.path), len(verdict.refused), used)
        if self.options.keep_logits:  # copies: the next pass may write to the same place
            self.logits.extend(rows.raw[place].to(torch.float32, copy=True) for place in places)
        if self.options.rounds_trace and self.stats.rounds and not repeated:
            self.rounds.append(self._round(draft, verdict, rows))
        return self._take(tokens, entries, text, reason)

    def commit_round(self, found: Committed, drafters: Sequence[str]) -> Step:
        """As ``commit``, for a round that the kernels ran; `drafters` proposed the accepted tokens."""
        tokens, used, reason, text = found.tokens, found.used, found.reason, ""
        if self.live:
            text, stopped = self.text.push(tokens[:used])
            if stopped is not None:
                used, reason = stopped, "stop"
        accepted, probs, chances = len(found.path), found.probs, found.chances
        number = self.stats.rounds + 1
        entries = [
            TokenTrace(tokens[i], drafters[i], "accepted", number, chances[i], probs[i])
            for i in range(min(accepted, used))
        ]
        if used > accepted:
            entries.append(TokenTrace(tokens[accepted], "target", found.kind, number, chances[accepted]))
        if self.context.params.logprobs is not None:
            entries = [entry._replace(logprob=_log(chance)) for entry, chance in zip(entries, chances, strict=False)]
        self._count(found.nodes, accepted, len(found.refused), used)
        return self._take(tokens[:used], entries, text, reason)

    def _take(self, tokens: list[int], entries: list[TokenTrace], text: str, reason: FinishReason | None) -> Step:
        """Append what a round has brought."""
        self.context.tokens.extend(tokens)
        self.trace.extend(entries)
        if reason is not None:
            if not self.live:
                text = self.text.push(self.output)[0]
            text += self.text.finish()
            self.stats.seconds = time.perf_counter() - self.began
        step = Step(text, tuple(tokens), tuple(entries), reason, self.context.id, self.stats if reason else None)
        self._post(step)
        self.finish_reason = reason
        return step

    def fail(self, error: Exception) -> Step:
        """End without the rest of the text."""
        self.stats.seconds = time.perf_counter() - self.began
        step = self._post(Step("", request=self.id, stats=self.stats, error=error))
        self.error = error
        return step

    def _post(self, step: Step) -> Step:
        """Append a step to the outbox, before the request counts as over: a waiting caller then finds it."""
        if self.options.outbox is not None:
            self.options.outbox.append(step)
        return step

    def _compare(self, tokens: Sequence[int]) -> None:
        """Compare the next tokens with the given ones, as long as there are some.

        Raises:
            DivergedError: they are not.
        """
        at = len(self.output)
        expected = self.context.given[at : at + len(tokens)]
        same = alike(tokens, expected)
        if same < len(expected):
            raise DivergedError(
                f"token {at + same} of the text is {tokens[same]} here and {expected[same]} in what was given; texts "
                "are equal with the same model, seed and parameters, in float32 or with exact=True"
            )

    def _until_end(self, tokens: Sequence[int]) -> tuple[int, FinishReason | None]:
        """How many of the new tokens count, and why the text ends there if it does."""
        room = self.last - len(self.tokens)
        for used, token in enumerate(tokens[:room], start=1):
            if token in self.context.stop_ids:
                return used, "stop"
        return min(len(tokens), room), "length" if len(tokens) >= room else None

    def _count(self, drafted: int, accepted: int, refused: int, used: int) -> None:
        stats = self.stats
        stats.tokens += used
        stats.lossy += 0 if self.verifier.lossless else used
        if not self.trace:
            return  # the prefill's own token: no round
        stats.rounds += 1
        stats.committed += used
        stats.drafted += drafted
        stats.accepted += min(accepted, used)  # a stop may lie within the path
        stats.rejected += refused if used > accepted else 0  # behind the end nothing was judged
        stats.hit_rounds += accepted > 0

    def _entries(
        self, draft: Draft, verdict: Verdict, rows: Rows, places: Sequence[int], tokens: Sequence[int]
    ) -> list[TokenTrace]:
        number = self.stats.rounds + 1 if self.trace else 0
        lossy = not self.verifier.lossless
        chances = verdict.chances or self._chances(rows, places, tokens)
        entries = []
        draws: Sequence[Draw] | dict[int, Draw] = draft.draws
        if not draft.sound:  # else node i has draw i
            draws = {draw.node: draw for draw in reversed(draft.draws)}  # of several of a node the first
        most = self.context.params.logprobs
        plain: Sequence[float] = ()
        if most is not None:
            plain = chances if self.sampler.greedy else self._plain_chances(rows, places, tokens)
        for i, (row, token) in enumerate(zip(places, tokens, strict=True)):
            draw = draws[verdict.path[i]] if i < len(verdict.path) else None
            status: Status = "accepted" if draw else verdict.kind
            source, prob = (draw.drafter, draw.prob) if draw else ("target", None)
            top = _top_logprobs(rows, row, most) if most else ()
            logprob = _log(plain[i]) if plain else None
            entries.append(TokenTrace(token, source, status, number, chances[i], prob, top, lossy, logprob))
        return entries

    def _chances(self, rows: Rows, places: Sequence[int], tokens: Sequence[int]) -> list[float]:
        """Probability of each token in its row; at temperature 0 as if it were 1, since that says more than 1.0."""
        if not self.sampler.greedy:
            return [float(rows.row(row)[token]) for row, token in zip(places, tokens, strict=True)]
        return self._plain_chances(rows, places, tokens)

    @staticmethod
    def _plain_chances(rows: Rows, places: Sequence[int], tokens: Sequence[int]) -> list[float]:
        """Probability of each token in its row at temperature 1."""
        if rows.on_cpu:
            return [rows.chance(row, token) for row, token in zip(places, tokens, strict=True)]
        logits = torch.stack([rows.processed(row) for row in places]).float()
        chosen = logits.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0]
        return (chosen - logits.logsumexp(-1)).exp().tolist()

    def _round(self, draft: Draft, verdict: Verdict, rows: Rows) -> RoundTrace:
        tree = draft.tree
        end = verdict.path[-1] if verdict.path else -1
        refused = [node for node in verdict.refused if tree.parents[node] == end]
        rejected = tree.tokens[refused[0]] if refused else None
        targets = self._chances(rows, [parent + 1 for parent in tree.parents], tree.tokens) if len(tree) else ()
        known = {draw.node: draw.prob for draw in draft.draws}
        drafts = tuple(known.get(node) for node in range(len(tree)))
        number, path, token = self.stats.rounds, verdict.path, verdict.token
        return RoundTrace(
            number, tree.tokens, tree.parents, tuple(targets), drafts, path, rejected, token, verdict.kind
        )

    def generation(self) -> Generation:
        """The result, when the request is over; raises what ended it, if that was not its text."""
        if self.error is not None:
            raise self.error
        assert self.finish_reason is not None
        source, rounds = self.context.source, self.rounds if self.options.rounds_trace else None
        length = self.prompt_tokens if source is None else source.length
        scored = self.prompt_logprobs if self.wants_prompt_logprobs else None
        return Generation(
            self.text.text, self.output, length, self.finish_reason, self.trace, self.stats, rounds, scored
        )


def score_tokens(logits: Tensor, tokens: Sequence[int], most: int) -> list[PromptToken]:
    """How likely tokens are, at temperature 1.

    Args:
        logits: (n, V), one row for each token.
        tokens: n of them.
        most: how many of the most probable tokens of each row are given, too.
    """
    chances = logits.float().log_softmax(-1)
    chosen = chances.gather(1, torch.tensor(tokens, device=chances.device)[:, None])
    ranks = (chances > chosen).sum(-1).add(1).tolist()
    values, best = chances.topk(min(most, chances.shape[1]))
    tops = [tuple(zip(*row, strict=True)) for row in zip(best.tolist(), values.tolist(), strict=True)]
    return list(map(PromptToken, tokens, chosen[:, 0].tolist(), ranks, tops))


def _log(chance: float) -> float:
    return math.log(max(chance, _LEAST))


def _top_logprobs(rows: Rows, row: int, most: int) -> tuple[tuple[int, float], ...]:
    logits = as_row(rows.processed(row))
    top = logits.max()
    total = float(np.log(np.exp(logits - top).sum(dtype=np.float64))) + float(top)
    best = np.argsort(-logits, kind="stable")[:most]
    return tuple((int(token), float(logits[token]) - total) for token in best)

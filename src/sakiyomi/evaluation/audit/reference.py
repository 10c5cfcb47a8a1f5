"""Judges texts by the logits that transformers, or the engine's own passes, compute for them.

Two correct programs may give different tokens at a near-tie, because a pass over five rows rounds differently than a
pass over one. So a difference is judged by its gap: by how much the expected token leads the other one, compared with
the noise that the reference itself shows when it computes the same logits in passes of other shapes.

Transformers' reference knows nothing of our engine, cache or kernels. The engine's own is for quantized weights and
evicting caches, which transformers does not have: it tells whether a drafted text is the one that the same weights
write without a draft. It cannot tell how good the quantized weights are, nor find an error that all passes share:
perplexity and ``ModelRunner.quantization`` do that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from sakiyomi.core.hf_names import cache_argument, cache_of
from sakiyomi.core.params import SamplingParams
from sakiyomi.kernels.batch import SequenceRows
from sakiyomi.model_executor.runner import ModelRunner
from sakiyomi.sampling.rng import RequestNoise
from sakiyomi.sampling.sampler import Sampler

TOLERANCE = 4.0
"""A gap above this many times the measured noise is no near-tie."""
_CHUNK = 5
_MEASURED = 64
_NO_TOKEN = -1

Scores = Callable[[Tensor, int], Tensor]
"""(n, V) logits and the absolute position that the first row predicts in, (n, V) out; the largest is right."""


@dataclass(frozen=True)
class Divergence:
    """The first place where a text is not the expected one.

    Attributes:
        text: index of the text.
        position: index in its new tokens.
        expected, got: token ids; -1 where a text had ended.
        gap: how far the score of the expected token lies above the other's.
        top2_gap: how far the best score lies above the second best.
        limit: the largest gap that rounding explains.
        defect: the difference is not explained.
    """

    text: int
    position: int
    expected: int
    got: int
    gap: float
    top2_gap: float
    limit: float
    defect: bool

    def to_dict(self) -> dict[str, Any]:
        """JSON values; an infinite gap is null."""
        return {name: None if value == math.inf else value for name, value in asdict(self).items()}


def greedy_scores(logits: Tensor, position: int) -> Tensor:
    """The most probable token wins."""
    return logits


def coupled_scores(params: SamplingParams, *key: int) -> Scores:
    """The token with the largest log p + Gumbel noise wins: the coupled rule of the request with this key."""
    noise = RequestNoise(params.seed or 0, *key)

    def scores(logits: Tensor, position: int) -> Tensor:
        sampler = Sampler(params, logits.shape[1])
        rows = [noise.gumbel(position + i, logits.shape[1]) for i in range(len(logits))]
        return sampler.probs(logits).log() + torch.stack(rows).to(logits.device)

    return scores


class HFReference:
    """Judges texts of one model.

    Args:
        model: a transformers causal language model; its own attention and cache are used.

    Attributes:
        noise: the largest change of a top-2 gap, in logits, between passes of other shapes; at least the rounding of
            one logit. ``measure`` raises it.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.noise = 0.0

    @torch.no_grad()
    def measure(self, prompt: Sequence[int], tokens: Sequence[int]) -> float:
        """Compute one text in one pass, token by token and in chunks; the noise seen so far comes back."""
        tokens = tokens[:_MEASURED]
        whole = self.logits(prompt, tokens)
        best = whole.topk(2, dim=-1)
        gap = best.values[:, 0] - best.values[:, 1]
        for step in (1, _CHUNK):
            found = self._stepped(prompt, tokens, step).gather(1, best.indices)
            self.noise = max(self.noise, float((found[:, 0] - found[:, 1] - gap).abs().max()))
        rounding = torch.finfo(self.model.dtype).eps * float(best.values.abs().max())
        self.noise = max(self.noise, rounding)
        return self.noise

    @torch.no_grad()
    def logits(self, prompt: Sequence[int], tokens: Sequence[int]) -> Tensor:
        """(len(tokens), V) float32: row i predicts ``tokens[i]``; one pass."""
        ids = torch.tensor([[*prompt, *tokens[:-1]]], device=self.model.device)
        logits: Tensor = self.model(input_ids=ids, use_cache=False).logits
        return logits[0, len(prompt) - 1 :].float()

    def _stepped(self, prompt: Sequence[int], tokens: Sequence[int], step: int) -> Tensor:
        ids = torch.tensor([[*prompt, *tokens[:-1]]], device=self.model.device)
        done = self.model(input_ids=ids[:, : len(prompt)], use_cache=True)
        rows, name = [done.logits[0, -1:]], cache_argument(self.model)
        for start in range(len(prompt), ids.shape[1], step):
            done = self.model(input_ids=ids[:, start : start + step], **{name: cache_of(done)}, use_cache=True)
            rows.append(done.logits[0])
        return torch.cat(rows).float()

    def limit(self, temperature: float = 0.0) -> float:
        """The largest gap of two scores that rounding explains. Below temperature 1 logits are stretched."""
        return TOLERANCE * self.noise / (temperature or 1.0)

    def compare(
        self,
        text: int,
        prompt: Sequence[int],
        expected: Sequence[int],
        got: Sequence[int],
        *,
        scores: Scores = greedy_scores,
        limit: float | None = None,
    ) -> Divergence | None:
        """Where ``got`` leaves ``expected``; None if it is the same text.

        Args:
            text: named in the answer.
            prompt: token ids before both.
            expected, got: new tokens.
            scores: what decides which token is right.
            limit: the largest gap that is explained; by default by the measured noise, 0 explains none.
        """
        if list(expected) == list(got):
            return None
        limit = self.limit() if limit is None else limit
        place = next((i for i, pair in enumerate(zip(expected, got, strict=False)) if pair[0] != pair[1]), None)
        if place is None:
            # One text continues where the other has ended: rounding cannot explain that.
            place = min(len(expected), len(got))
            rest = (*expected[place : place + 1], _NO_TOKEN)[0], (*got[place : place + 1], _NO_TOKEN)[0]
            return Divergence(text, place, *rest, math.inf, math.inf, limit, defect=True)
        row = scores(self.logits(prompt, expected[: place + 1])[-1:], len(prompt) + place)[0]
        return self._judge(text, place, expected[place], got[place], row, limit)

    def follow(
        self, text: int, prompt: Sequence[int], tokens: Sequence[int], *, scores: Scores, limit: float
    ) -> Divergence | None:
        """The worst token of a text that no other is there to compare with: each has to be the best in its place.

        None if none is further from the best than the limit.
        """
        if not tokens:
            return None
        table = scores(self.logits(prompt, tokens), len(prompt))
        chosen = torch.tensor([list(tokens)], device=table.device).T
        gaps = table.max(-1).values - table.gather(1, chosen)[:, 0]
        place = int(gaps.argmax())
        if float(gaps[place]) <= limit:
            return None
        return self._judge(text, place, int(table[place].argmax()), int(tokens[place]), table[place], limit)

    @staticmethod
    def _judge(text: int, place: int, expected: int, got: int, row: Tensor, limit: float) -> Divergence:
        first, second = (float(value) for value in row.topk(2).values)
        gap = abs(float(row[expected] - row[got]))
        # Both must be among the best: two equally bad tokens have a small gap too.
        gap = max(gap, first - float(row[expected]), first - float(row[got]))
        return Divergence(text, place, expected, got, gap, first - second, limit, defect=not gap <= limit)


class EngineReference(HFReference):
    """Judges texts by the logits of a ``ModelRunner``.

    Args:
        model: lends a slot of its cache, so that requests must not hold all of them.
    """

    model: ModelRunner

    @torch.no_grad()
    def logits(self, prompt: Sequence[int], tokens: Sequence[int]) -> Tensor:
        """(len(tokens), V) float32: row i predicts ``tokens[i]``; a pass from one eviction boundary to the next."""
        return self._walk(prompt, tokens)

    def _stepped(self, prompt: Sequence[int], tokens: Sequence[int], step: int) -> Tensor:
        return self._walk(prompt, tokens, step)

    def _walk(self, prompt: Sequence[int], tokens: Sequence[int], step: int | None = None) -> Tensor:
        """Logits by passes of so many tokens after the prompt; the cache evicts as it does in generation."""
        ids, eviction = [*prompt, *tokens[:-1]], self.model.eviction
        rows: list[Tensor] = []
        with self.model.cache.lent(len(ids)) as slot:
            eviction.begin(slot)
            at = 0
            while at < len(ids):
                behind = step is not None and at >= len(prompt)
                far = len(ids) if step is None else at + step if behind else len(prompt)
                end = min(len(ids), far, eviction.boundary(slot, len(prompt)))
                # Rows of a prompt may be computed otherwise; but after it no row sees a part of the text only.
                prompt_rows = at < len(prompt) or (not behind and eviction.sparse is None)
                rows.append(self.model.score([SequenceRows(slot, at, ids[at:end], prompt=prompt_rows)]).logits.clone())
                if eviction.needs_log_probs:
                    eviction.add_prompt_log_probs(slot, rows[-1], ids, at, end)
                at = end if behind else eviction.reread_from(slot, len(prompt), end)
                rows[-1] = rows[-1][: len(rows[-1]) - (end - at)]
                eviction.evict(slot, len(prompt), at)
            eviction.end(slot)
        return torch.cat(rows)[len(prompt) - 1 :].float()

"""From logits to the distribution that a token is drawn from: the one place for temperature, top-k, top-p and min-p.

The order is transformers' own: bias, repetition penalty, bad words, the user's processors (these see the history), then
temperature, top-k, top-p, min-p. Target and draft go through the same code.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from sakiyomi.errors import InputError
from sakiyomi.numerics import (
    Row,
    Tokens,
    as_bits,
    as_row,
    draw,
    draw_distinct,
    from_bits,
    keep_top_p,
    largest,
    nucleus,
    top_tokens,
    without_spare,
)
from sakiyomi.params import SamplingParams
from sakiyomi.tree import TokenTree

if TYPE_CHECKING:
    from transformers import LogitsProcessor

__all__ = ["Sampler", "SamplingParams", "as_row", "draw", "draw_distinct", "to_probs", "top_tokens"]


class Sampler:
    """Sampling parameters made ready for one vocabulary.

    Args:
        params: what the user asked for; ``bad_words`` as token ids by now.
        vocab_size: width of the logits.
        draft: the logits are a drafter's, whose vocabulary may be smaller: options about tokens that it lacks are left
            out there instead of refused.

    Attributes:
        greedy: temperature 0: the distribution is the first largest logit.
        needs_history: some option looks at the tokens before, so that ``process`` must be told them.
        edits: ``process`` changes logits at all.

    Raises:
        InputError: an option names a token that does not exist.
    """

    def __init__(self, params: SamplingParams, vocab_size: int, *, draft: bool = False) -> None:
        self.params = params
        self.vocab_size = vocab_size
        self.greedy = params.greedy
        # Where the vocabulary is smaller than top_k, all tokens are kept.
        self._top_k = params.top_k if 0 < params.top_k < vocab_size else 0
        self._bias = self._make_bias(draft)
        self._processors = self._make_processors(draft)
        self.needs_history = bool(self._processors)
        self.edits = self.needs_history or self._bias is not None

    def _make_bias(self, draft: bool) -> Tensor | None:
        chosen = dict(self.params.logit_bias or {})
        unknown = [token for token in chosen if token >= self.vocab_size]
        if unknown and not draft:
            raise InputError(f"logit_bias names token {unknown[0]}; the vocabulary has {self.vocab_size} tokens")
        known = {token: bias for token, bias in chosen.items() if token < self.vocab_size}
        if not known:
            return None
        bias = torch.zeros(self.vocab_size)
        bias[list(known)] = torch.tensor(list(known.values()), dtype=torch.float32)
        return bias

    def _make_processors(self, draft: bool) -> list[LogitsProcessor]:
        processors: list[LogitsProcessor] = []
        params = self.params
        if params.repetition_penalty != 1.0:
            from transformers import RepetitionPenaltyLogitsProcessor

            processors.append(RepetitionPenaltyLogitsProcessor(float(params.repetition_penalty)))
        banned: list[list[int]] = []
        for word in params.bad_words:
            if isinstance(word, str):
                raise InputError(f"bad_words has the text {word!r} in it; without a tokenizer give lists of token ids")
            if max(word) < self.vocab_size:
                banned.append(list(word))
            elif not draft:
                raise InputError(f"bad_words names token {max(word)}; the vocabulary has {self.vocab_size} tokens")
        if banned:
            from transformers import NoBadWordsLogitsProcessor

            processors.append(NoBadWordsLogitsProcessor(banned))
        processors.extend(params.logits_processors)
        return processors

    def process(
        self, logits: Tensor, paths: Sequence[Sequence[int]] = (), committed: Sequence[int] | Tensor = ()
    ) -> Tensor:
        """Bias, penalties, bans and the user's processors: every row with its own history.

        Args:
            logits: (R, V) of any float type; not changed.
            paths: R token lists, the history of each row behind ``committed``; not read unless ``needs_history``.
            committed: tokens that all rows have in common, prompt included; a list, or (length,) int64.

        Returns:
            (R, V) float32, or ``logits`` itself where no such option is set.

        Raises:
            InputError: a processor gave back another shape.
        """
        if not self.edits:
            return logits
        scores = logits.to(torch.float32, copy=True)
        if self._bias is not None:
            scores += self._bias.to(scores.device)
        if self.needs_history:
            common = torch.as_tensor(committed, dtype=torch.int64, device=scores.device)
            for row, path in enumerate(paths):
                history = torch.cat([common, common.new_tensor(list(path))])[None] if len(path) else common[None]
                scores[row] = self._call(history, scores[row : row + 1])
        return scores

    def _call(self, history: Tensor, scores: Tensor) -> Tensor:
        for processor in self._processors:
            # A copy each time: a processor may write into what it is given.
            changed = processor(history, scores.clone())
            if changed.shape != scores.shape:
                raise InputError(
                    f"logits processor {type(processor).__name__} gave scores of shape {tuple(changed.shape)}; "
                    f"expected {tuple(scores.shape)}, one row as it was given"
                )
            scores = changed
        return scores[0]

    def probs(self, logits: Tensor, out: Tensor | None = None) -> Tensor:
        """Temperature, top-k, top-p and min-p: the distributions that tokens are drawn from.

        On the CPU each row is computed alone and without a sort of V; elsewhere all at once.

        Args:
            logits: (R, V) of any float type, processed; not changed.
            out: (R, V) float32 on the same device to write to.

        Returns:
            (R, V) float32, rows sum to 1; at temperature 0 one-hot at the first largest logit.

        Raises:
            InputError: a row has no token left, or is not a number.
        """
        if out is None:
            out = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
        if logits.device.type != "cpu":
            return out.copy_(reference_probs(logits, self.params))
        rows = out.numpy()
        for i in range(rows.shape[0]):
            self.fill(logits[i], rows[i])
        return out

    def fill(self, logits: Tensor, out: Row) -> Tokens | None:
        """``probs`` of one row of logits (V,), into ``out``, (V,) float32 in numpy.

        Returns:
            The tokens of positive probability, ascending, where they are known to be few; None: take all for possible.

        Raises:
            InputError: no token is left, or the row is not a number.
        """
        params = self.params
        if self.greedy:
            token = best_token(logits)
            out.fill(0.0)
            out[token] = 1.0
            return np.array([token])
        if self._top_k:
            return self._fill_top_k(logits, out)
        flat = torch.from_numpy(out)
        flat.copy_(logits)
        if params.temperature != 1.0:
            if params.temperature < _COLD:
                out -= out.max()
            out /= np.float32(params.temperature)
        torch.softmax(flat, -1, out=flat)
        require_number(out)
        support = keep_top_p(out, params.top_p) if params.top_p < 1.0 else None
        if params.min_p > 0.0:
            support = (out >= out.max() * np.float32(params.min_p)).nonzero()[0]
            values = out[support]
            out.fill(0.0)
            out[support] = values / values.sum(dtype=np.float64)
        return support

    def _fill_top_k(self, logits: Tensor, out: Row) -> Tokens:
        """Top-k, and what may follow it, on the few logits that are left."""
        params = self.params
        tokens, values = _large_logits(logits, self._top_k)
        if tokens.size > self._top_k:
            # As in transformers, all that equal the k-th stay.
            keep = values >= np.partition(values, -self._top_k)[-self._top_k]
            tokens, values = tokens[keep], values[keep]
        peak = values.max() if values.size else -np.inf
        if not math.isfinite(peak):
            raise InputError(_NOTHING_LEFT)
        if params.temperature < _COLD:
            values = values - peak
        if params.temperature != 1.0:
            values = values / np.float32(params.temperature)
        weights = np.exp(values.astype(np.float64) - values.max())
        if params.top_p < 1.0:
            total = float(weights.sum())
            keep = without_spare(weights, *nucleus(weights, params.top_p * total, total))
            tokens, weights = tokens[keep], weights[keep]
        if params.min_p > 0.0:
            # The largest weight is 1, so that this is the share of it.
            keep = weights >= params.min_p
            tokens, weights = tokens[keep], weights[keep]
        out.fill(0.0)
        out[tokens] = weights / weights.sum()
        return tokens


# Below this, logits / temperature may overflow float32; above it they are what transformers computes, to the bit.
_COLD = 1e-3


def _large_logits(logits: Tensor, count: int) -> tuple[Tokens, Row]:
    """Tokens among which are the ``count`` of largest logit, and their logits as float32."""
    bits = as_bits(logits)
    if bits is not None:
        tokens = largest(bits, count)
        values = from_bits(bits[tokens])
        # Bits are in the order of the numbers only above 0, where large logits mostly are.
        if values.min() > 0.0:
            return tokens, values
    row = as_row(logits)
    tokens = largest(row, count)
    return tokens, row[tokens]


_NOTHING_LEFT = (
    "no token is left to choose: every logit is -inf or not a number; loosen bad_words, logit_bias or "
    "logits_processors, or look for an overflow in the model (float16 weights?)"
)


def require_number(probs: Row) -> None:
    """Refuse a row that came out of a softmax as not a number: then all of it did, and the first entry tells.

    Raises:
        InputError: it did.
    """
    if probs[0] != probs[0]:
        raise InputError(_NOTHING_LEFT)


def best_token(logits: Tensor) -> int:
    """The first largest of one row, (V,) of any float type.

    Raises:
        InputError: the row is not a number, or has no token left.
    """
    bits = as_bits(logits)
    if bits is not None:
        token = int(bits.argmax())
        # 0x7F80 is infinity; what lies above is not a number.
        if 0 < bits[token] <= 0x7F80:
            return token
    row = as_row(logits)
    token = int(row.argmax())
    # numpy takes the first NaN for the largest.
    if not row[token] > -np.inf:
        raise InputError(_NOTHING_LEFT)
    return token


def reference_probs(logits: Tensor, params: SamplingParams) -> Tensor:
    """The clear form of ``Sampler.probs``, on any device, by full sorts: oracle of the fast one.

    Args:
        logits: (R, V) of any float type, processed.
        params: only temperature, top_k, top_p and min_p are read.

    Returns:
        (R, V) float32, rows sum to 1.
    """
    scores = logits.to(torch.float32)
    if params.greedy:
        return torch.zeros_like(scores).scatter_(-1, scores.argmax(-1, keepdim=True), 1.0)
    if params.temperature < _COLD:
        scores = scores - scores.amax(-1, keepdim=True)
    scores = scores / params.temperature
    if 0 < params.top_k < scores.shape[-1]:
        scores = scores.masked_fill(scores < scores.topk(params.top_k).values[..., -1:], -torch.inf)
    if params.top_p < 1.0:
        # Ascending and stable, as transformers sorts: of equal tokens at the border the lower ids are dropped.
        probs, order = scores.softmax(-1).sort(stable=True)
        above = probs.double().flip(-1).cumsum(-1).flip(-1) - probs
        # Dropped is what begins where the mass is already reached: the token that crosses the border stays.
        drop = above >= params.top_p
        drop[..., -1] = False
        scores = scores.masked_fill(torch.zeros_like(drop).scatter_(-1, order, drop), -torch.inf)
    if params.min_p > 0.0:
        probs = scores.softmax(-1)
        scores = scores.masked_fill(probs < params.min_p * probs.amax(-1, keepdim=True), -torch.inf)
    return scores.softmax(-1)


def to_probs(logits: Tensor, tree: TokenTree, committed: Sequence[int], params: SamplingParams) -> Tensor:
    """Distributions of one scoring pass, each node seeing its own path: the clear composition of the above.

    Args:
        logits: (n + 1, V) raw; row 0 follows the last committed token, row i + 1 follows node i.
        tree: n nodes.
        committed: all tokens before, prompt included.
        params: as the user gave them, ``bad_words`` as token ids.

    Returns:
        (n + 1, V) float32, rows sum to 1.
    """
    sampler = Sampler(params, logits.shape[-1])
    paths = [tree.path_tokens(node) for node in range(-1, len(tree))]
    return sampler.probs(sampler.process(logits, paths, committed))

"""From logits to the distribution that a token is drawn from: the one place for temperature, top-k, top-p and min-p.

The order is transformers' own: bias, repetition penalty, bad words, the user's processors (these see the history), then
temperature, top-k, top-p, min-p. Target and draft go through the same code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sakiyomi.core.errors import InputError
from sakiyomi.core.params import SamplingParams
from sakiyomi.core.row_processor import RowProcessor
from sakiyomi.sampling.native_edits import NativeEdits
from sakiyomi.sampling.probs import fill_row, reference_probs
from sakiyomi.sampling.rows import Row, Tokens

if TYPE_CHECKING:
    from transformers import LogitsProcessor


class _Processors:
    """Processors, called for one row after another.

    Args:
        each: in their order.
    """

    def __init__(self, each: Sequence[LogitsProcessor | RowProcessor]) -> None:
        self.each = each
        self._of: Sequence[int] | None = None
        self._held, self._count = torch.empty(0, dtype=torch.int64), 0

    def changed(self, text: Sequence[int] | Tensor, path: Sequence[int], scores: Tensor) -> Tensor:
        """Scores (V,) float32 behind a text and these tokens, which processors may change in place.

        Raises:
            InputError: a processor gave back another shape.
        """
        history: Tensor | None = None
        own = True  # what somebody else's processor gave is not to be changed
        for processor in self.each:
            if isinstance(processor, RowProcessor):
                if not own:
                    scores, own = torch.empty_like(scores, dtype=torch.float32).copy_(scores), True
                host = scores.cpu()
                processor.change(text.tolist() if isinstance(text, Tensor) else text, path, host.numpy())
                scores.copy_(host)  # nothing, if it is the same tensor
                continue
            if history is None:
                common = self._tensor(text).to(scores.device)
                history = torch.cat([common, common.new_tensor(list(path))])[None] if len(path) else common[None]
            # A copy each time: a processor may write into what it is given.
            given = processor(history, scores.clone()[None])
            if not isinstance(given, Tensor) or given.shape != (1, *scores.shape):
                found = f"scores of shape {tuple(given.shape)}" if isinstance(given, Tensor) else repr(given)
                raise InputError(
                    f"logits processor {type(processor).__name__} gave {found:.80}; expected scores of shape "
                    f"{(1, *scores.shape)}, one row as it was given"
                )
            scores, own = given[0].detach(), False
        return scores

    def _tensor(self, tokens: Sequence[int] | Tensor) -> Tensor:
        """(length,) int64, which grows with the list: to convert all of it takes ms in a long text. The same list is
        expected to be longer than at the call before, or equal.
        """
        if isinstance(tokens, Tensor):
            return tokens
        count = len(tokens)
        if tokens is not self._of or count < self._count:
            self._of, self._count = tokens, 0
        if count > len(self._held):
            more = torch.empty(2 * count, dtype=torch.int64)
            more[: self._count] = self._held[: self._count]
            self._held = more
        if count > self._count:
            self._held[self._count : count] = torch.tensor(tokens[self._count :])
            self._count = count
        return self._held[:count]


class Sampler:
    """Sampling parameters prepared for one vocabulary.

    Args:
        params: what the user asked for; ``bad_words`` as token ids by now.
        vocab_size: width of the logits.

    Attributes:
        greedy: temperature 0: the distribution is the first largest logit.
        needs_history: whether some option reads the tokens before, so that ``process`` needs them.
        edits: whether ``process`` changes logits at all.
        forced: of tokens so far, those that a processor leaves hardly another choice than; None: no processor knows.

    Raises:
        InputError: an option names a token that does not exist.
    """

    def __init__(self, params: SamplingParams, vocab_size: int) -> None:
        self.params = params
        self.vocab_size = vocab_size
        self.greedy = params.greedy
        self._bias, self._others = self._make_bias(), self._make_processors()
        self._processors = _Processors([*self._make_penalty(), *self._others])
        self.needs_history = bool(self._processors.each)
        self.edits = self.needs_history or self._bias is not None
        known = (getattr(each, "forced", None) for each in self._processors.each)
        self.forced: Callable[[Sequence[int]], Sequence[int]] | None = next((each for each in known if each), None)

    def _make_bias(self) -> Tensor | None:
        chosen = dict(self.params.logit_bias or {})
        if not chosen:
            return None
        if max(chosen) >= self.vocab_size:
            raise InputError(f"logit_bias names token {max(chosen)}; the vocabulary has {self.vocab_size} tokens")
        bias = torch.zeros(self.vocab_size)
        bias[list(chosen)] = torch.tensor(list(chosen.values()), dtype=torch.float32)
        return bias

    def _make_penalty(self) -> list[LogitsProcessor]:
        if self.params.repetition_penalty == 1.0:
            return []
        from transformers import RepetitionPenaltyLogitsProcessor

        return [RepetitionPenaltyLogitsProcessor(float(self.params.repetition_penalty))]

    def _make_processors(self) -> list[LogitsProcessor | RowProcessor]:
        """All but the repetition penalty."""
        processors: list[LogitsProcessor | RowProcessor] = []
        params = self.params
        banned: list[list[int]] = []
        for word in params.bad_words:
            if isinstance(word, str):
                raise InputError(f"bad_words has the text {word!r} in it; without a tokenizer give lists of token ids")
            if max(word) >= self.vocab_size:
                raise InputError(f"bad_words names token {max(word)}; the vocabulary has {self.vocab_size} tokens")
            banned.append(list(word))
        if banned:
            from transformers import NoBadWordsLogitsProcessor

            processors.append(NoBadWordsLogitsProcessor(banned))
        processors.extend(params.logits_processors)
        return processors

    def process(
        self, logits: Tensor, paths: Sequence[Sequence[int]] = (), committed: Sequence[int] | Tensor = ()
    ) -> Tensor:
        """Apply bias, penalties, bans and the user's processors, to every row with its own history.

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
            for row, path in enumerate(paths):
                scores[row] = self._processors.changed(committed, path, scores[row])
        return scores

    @cached_property
    def native_edits(self) -> NativeEdits:
        """For the kernels, what ``process`` does; they know the text behind which they ask for it by ``follow``."""
        changed = _Processors(self._others).changed if self._others else None
        return NativeEdits(self.vocab_size, self._bias, float(self.params.repetition_penalty), changed)

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
        """``probs`` of one row of logits, (V,) processed, into ``out``, (V,) float32 in numpy.

        Returns:
            The tokens of positive probability, ascending, where they are known to be few; None: take all for possible.

        Raises:
            InputError: no token is left, or the row is not a number.
        """
        return fill_row(logits, out, self.params)

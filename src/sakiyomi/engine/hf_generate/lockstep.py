"""Reports the tokens of rows that advance at different speeds step by step, as transformers' ``generate`` does.

Its stopping criteria see all rows after every token, its streamers get every token of all rows, and finished rows are
padded. So a step is reported when every unfinished row has its token; tokens of rows that are ahead wait in their
requests.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput

from sakiyomi.engine.request import Request

logger = logging.getLogger("sakiyomi")
_OWN = (transformers.MaxLengthCriteria, transformers.EosTokenCriteria)
"""Criteria that requests apply by themselves."""


class Lockstep:
    """What has been reported so far.

    Args:
        requests: one for each row.
        ids: (B, L) the prompts, padding included.
        processors, criteria: the lists that ``generate`` made.
        config: its GenerationConfig.
        limit: most tokens of a row.
        streamer: gets each step's tokens; None: there is none.
        stop: called with the request of a row that a criterion ended.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        ids: Tensor,
        processors: Any,
        criteria: Any,
        config: Any,
        limit: int,
        streamer: Any,
        stop: Callable[[Request], object],
    ) -> None:
        self._requests, self._processors, self._criteria = requests, processors, criteria
        self._streamer, self._stop = streamer, stop
        self._prompt = self._length = ids.shape[1]
        # Without an end token finished rows are continued until all rows are finished, as transformers does.
        self._pads = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
        self._pad = 0 if config._pad_token_tensor is None else int(config._pad_token_tensor)
        self._ids = ids.new_full((ids.shape[0], limit), self._pad)
        self._ids[:, : self._length] = ids
        self._unfinished = torch.ones(ids.shape[0], dtype=torch.long, device=ids.device)
        self._open = [True] * len(requests)
        full = bool(config.return_dict_in_generate)
        self._scores: tuple[Tensor, ...] | None = () if full and config.output_scores else None
        self._logits: tuple[Tensor, ...] | None = () if full and config.output_logits else None
        self._full = full
        self._keeps_logits = self._scores is not None or self._logits is not None
        self._reports = (
            streamer is not None or self._keeps_logits or any(type(criterion) not in _OWN for criterion in criteria)
        )
        self.over = False

    def advance(self) -> None:
        """Report every step that is complete.

        Raises:
            Exception: what ended a row's request instead of its text.
        """
        for request, going_on in zip(self._requests, self._open, strict=True):
            if going_on and request.error is not None:
                raise request.error
        if not self._reports:
            self.over = all(request.over for request in self._requests)
            return
        while not self.over and self._ready():
            self._report()

    def _has(self, row: int) -> bool:
        request = self._requests[row]
        return request.prompt_tokens + self._length - self._prompt < len(request.tokens)

    def _ready(self) -> bool:
        """Whether each row has its next token or never will."""
        rows = range(len(self._requests))
        return all(self._has(row) or self._requests[row].over or (self._pads and not self._open[row]) for row in rows)

    def _report(self) -> None:
        step = self._length - self._prompt
        given = [self._has(row) and (self._open[row] or not self._pads) for row in range(len(self._requests))]
        if not any(given):  # the requests ended by the context before a criterion did
            self.over = True
            return
        before = self._ids[:, : self._length]
        if self._keeps_logits:
            some = self._requests[given.index(True)].logits[step]
            rows = [
                r.logits[step] if here else torch.zeros_like(some)
                for r, here in zip(self._requests, given, strict=True)
            ]
            logits = torch.stack(rows).to(before.device)
            if self._logits is not None:
                self._logits += (logits,)
            if self._scores is not None:
                self._scores += (self._processors(before, logits.clone()),)
        pairs = zip(self._requests, given, strict=True)
        chosen = [r.tokens[r.prompt_tokens + step] if here else self._pad for r, here in pairs]
        tokens = torch.tensor(chosen, device=before.device)
        self._ids[:, self._length] = tokens
        self._length += 1
        self._unfinished &= ~self._criteria(self._ids[:, : self._length], self._scores)
        if self._streamer is not None:
            self._streamer.put(tokens.cpu())
        for row, goes_on in enumerate(self._unfinished.tolist()):
            if self._open[row] and not goes_on:
                self._open[row] = False
                if self._pads:
                    self._stop(self._requests[row])
        self.over = not any(self._open)

    def result(self, *, encoder: bool) -> Any:
        """What ``generate`` returns.

        Args:
            encoder: whether the model has an encoder.
        """
        if not self._reports:
            for row, request in enumerate(self._requests):
                self._ids[row, self._prompt : self._prompt + len(request.output)] = torch.tensor(request.output)
                self._length = max(self._length, self._prompt + len(request.output))
        if self._streamer is not None:
            self._streamer.end()
        most = self._ids.shape[1]
        if any(r.finish_reason == "length" and self._prompt + len(r.output) < most for r in self._requests):
            logger.warning("the text ends at the model's context, before max_length=%d", most)
        sequences = self._ids[:, : self._length].clone()
        if not self._full:
            return sequences
        kind: Any = GenerateEncoderDecoderOutput if encoder else GenerateDecoderOnlyOutput
        return kind(sequences=sequences, scores=self._scores, logits=self._logits)

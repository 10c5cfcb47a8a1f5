"""transformers' ``generate`` on a target of any kind, with text or sound; and the judge of greedy answers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sakiyomi.core.audio import Audio
from sakiyomi.core.params import SamplingParams
from sakiyomi.evaluation.audit.reference import HFReference
from sakiyomi.evaluation.bench.models import NearTies
from sakiyomi.evaluation.bench.peers import Transformers
from sakiyomi.evaluation.bench.runner import Judge
from sakiyomi.model_executor.loading import Loaded
from sakiyomi.model_executor.loading.families import has_encoder

Row = Callable[[int, Sequence[int]], Tensor]
"""Logits (V,) of what follows these tokens of the answer to a question, by the question's number."""


class Peer(Transformers):
    """Calls ``generate`` with the model's own generation settings except for length and sampling.

    Args:
        target: as transformers runs it.
        assistant: a draft model; None: plain.
        gamma: draft tokens a round, see ``Transformers``.
    """

    def __init__(self, target: Loaded, assistant: Any = None, gamma: int = 4) -> None:
        super().__init__(target.model, assistant, gamma)
        self._target = target

    def question(self, prompt: str | Audio | Sequence[int]) -> dict[str, Any]:
        """What ``generate`` is given."""
        if isinstance(prompt, Audio):
            extractor = self._target.extractor
            sound = prompt.resampled(int(extractor.sampling_rate))
            made = extractor(sound.samples, sampling_rate=sound.sampling_rate, return_tensors="pt")
            return {"input_features": made["input_features"].to(self._device, self.model.dtype)}
        ids = self._target.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else list(prompt)
        tokens = torch.tensor([ids], device=self._device)
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}

    def __call__(self, prompt: str | Audio | Sequence[int], params: SamplingParams) -> list[int]:
        """New tokens; among them may be the end token and tokens that force a language or a task."""
        given = self.question(prompt)
        language = getattr(prompt, "language", None)
        done = self._generated(params, **given, **({} if language is None else {"language": language}))[0].tolist()
        if not has_encoder(self.model.config):
            return list(done[given["input_ids"].shape[1] :])
        return list(done[done[:1] == [self.model.config.decoder_start_token_id] :])

    @torch.no_grad()
    def row(self, prompt: str | Audio | Sequence[int], begin: Sequence[int], answer: Sequence[int]) -> Tensor:
        """Logits (V,) float32 of what follows a part of an answer.

        Args:
            prompt: of the question.
            begin: tokens that a decoder begins with; a causal model's prompt is its beginning.
            answer: the part.
        """
        given = self.question(prompt)
        given.pop("attention_mask", None)
        name = "decoder_input_ids" if has_encoder(self.model.config) else "input_ids"
        before = torch.tensor([begin], device=self._device) if name not in given else given[name]
        behind = torch.tensor([list(answer)], dtype=torch.long, device=self._device)
        given[name] = torch.cat([before.long(), behind], 1)
        found: Tensor = self.model(**given, use_cache=False).logits[0, -1].float()
        return found

    def _config(self, model: Any, params: SamplingParams) -> Any:
        settings, usual = copy.deepcopy(model.generation_config), super()._config(model, params)
        settings.max_length = None
        names = ("max_new_tokens", "do_sample", *(() if params.greedy else ("temperature", "top_k", "top_p")))
        for name in (*names, "pad_token_id"):
            setattr(settings, name, getattr(usual, name))
        settings.num_beams = 1
        return settings


class _Rounding(HFReference):
    """Judges texts by logits from a function; two tokens are a near-tie within the rounding error of a logit.

    Args:
        row: gives logits, by the number of the text.
        dtype: of its rows.
    """

    def __init__(self, row: Row, dtype: torch.dtype) -> None:
        super().__init__(None)
        self._row, self._dtype = row, dtype

    def measure(self, prompt: Sequence[int], tokens: Sequence[int]) -> float:
        """Rounding error of the largest logit at the beginning of the text, the maximum over texts."""
        self.noise = max(self.noise, torch.finfo(self._dtype).eps * float(self.logits(prompt, tokens[:1]).abs().max()))
        return self.noise

    def logits(self, prompt: Sequence[int], tokens: Sequence[int]) -> Tensor:
        """(1, V): the row that predicts the last token."""
        return self._row(prompt[0], tokens[:-1])[None].float()


def judged(row: Row, dtype: torch.dtype, end: int, texts: int) -> Judge:
    """Compares answers: equal, or different where the target's two likeliest tokens are a near-tie in its dtype.

    Args:
        row: asks the target.
        dtype: of its rows.
        end: the token after an answer that ended.
        texts: how many there are.
    """
    ties = NearTies(_Rounding(row, dtype), [[number] for number in range(texts)])
    return lambda expected, got: ties(*([(*text, end) for text in texts] for texts in (expected, got)))

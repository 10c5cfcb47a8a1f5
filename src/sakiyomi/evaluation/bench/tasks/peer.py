"""transformers' ``generate`` on a target of any kind, alone or with an assistant; and what it thinks of two texts."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from sakiyomi.core.audio import Audio
from sakiyomi.core.params import SamplingParams
from sakiyomi.evaluation.bench.peers import generation_settings
from sakiyomi.evaluation.bench.runner import Agreement, Outputs, same_tokens
from sakiyomi.model_executor.loading import Loaded
from sakiyomi.model_executor.loading.families import has_encoder

NEAR_TIE = 4.0
"""Two tokens are a near-tie if their logits are apart by so many steps of the dtype at the largest logit."""

Row = Callable[[int, Sequence[int]], Tensor]
"""Logits (V,) of what follows these tokens of the answer to a question, by the question's number."""


class Peer:
    """One way of calling ``generate``, with the model's own settings but for length, sampling and penalties of ours.

    Args:
        target: as transformers runs it.
        assistant: a draft model; None: plain.
        gamma: draft tokens a round, constant, without a confidence threshold: what our ``gamma`` is.
    """

    def __init__(self, target: Loaded, assistant: Any = None, gamma: int = 4) -> None:
        self._target, self._assistant, self._gamma = target, assistant, gamma

    @property
    def _device(self) -> torch.device:
        """Where inputs lie: an offloaded model is nowhere between its passes."""
        own: torch.device = self._target.model.device
        return torch.device("cpu") if own.type == "meta" else own

    def question(self, prompt: str | Audio | Sequence[int]) -> dict[str, Any]:
        """What ``generate`` is given."""
        model, extractor = self._target.model, self._target.extractor
        device = self._device
        if isinstance(prompt, Audio):
            sound = prompt.resampled(int(extractor.sampling_rate))
            made = extractor(sound.samples, sampling_rate=sound.sampling_rate, return_tensors="pt")
            return {"input_features": made["input_features"].to(device, model.dtype)}
        ids = self._target.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else list(prompt)
        tokens = torch.tensor([ids], device=device)
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}

    def __call__(self, prompt: str | Audio | Sequence[int], params: SamplingParams) -> list[int]:
        """New tokens, the end token and what forces a language or a task perhaps among them."""
        given = self.question(prompt)
        extra: dict[str, Any] = {}
        if isinstance(prompt, Audio) and prompt.language is not None:
            extra["language"] = prompt.language
        with ExitStack() as stack, torch.no_grad():
            stack.enter_context(generation_settings(self._target.model, _settings(self._target.model, params)))
            if self._assistant is not None:
                own = _settings(self._assistant, params)
                own.num_assistant_tokens, own.num_assistant_tokens_schedule = self._gamma, "constant"
                own.assistant_confidence_threshold = 0.0
                stack.enter_context(generation_settings(self._assistant, own))
                extra["assistant_model"] = self._assistant
            if not params.greedy:
                torch.manual_seed(params.seed or 0)
            done: list[int] = self._target.model.generate(**given, **extra)[0].tolist()
        if not has_encoder(self._target.model.config):
            return done[given["input_ids"].shape[1] :]
        return done[1:] if done[:1] == [self._target.model.config.decoder_start_token_id] else done

    @torch.no_grad()
    def row(self, prompt: str | Audio | Sequence[int], begin: Sequence[int], answer: Sequence[int]) -> Tensor:
        """Logits (V,) float32 of what follows a part of an answer.

        Args:
            prompt: of the question.
            begin: tokens that a decoder begins with; a causal model's prompt is its beginning.
            answer: the part.
        """
        given, model = self.question(prompt), self._target.model
        if has_encoder(model.config):
            given.pop("attention_mask", None)
            given["decoder_input_ids"] = torch.tensor([[*begin, *answer]], device=self._device)
        else:
            behind = torch.tensor([list(answer)], dtype=torch.long, device=self._device)
            given = {"input_ids": torch.cat([given["input_ids"], behind], 1)}
        found: Tensor = model(**given, use_cache=False).logits[0, -1].float()
        return found


def _settings(model: Any, params: SamplingParams) -> Any:
    settings = copy.deepcopy(model.generation_config)
    settings.max_length, settings.max_new_tokens = None, params.max_new_tokens
    settings.do_sample, settings.num_beams = not params.greedy, 1
    if not params.greedy:
        settings.temperature, settings.top_k, settings.top_p = params.temperature, params.top_k, params.top_p
    if settings.pad_token_id is None:
        ends = settings.eos_token_id
        settings.pad_token_id = ends[0] if isinstance(ends, list) else ends if ends is not None else 0
    return settings


def judged(row: Row, dtype: torch.dtype, end: int) -> Callable[[Outputs, Outputs], Agreement]:
    """Compares answers: equal, or different where the target's two likeliest tokens are a near-tie in its dtype.

    Args:
        row: asks the target.
        dtype: of its rows.
        end: the token behind an answer that ended.
    """

    def judge(expected: Outputs, got: Outputs) -> Agreement:
        found = same_tokens(expected, got)
        if found.equal or len(expected) != len(got):
            return found
        apart = []
        for number, (right, text) in enumerate(zip(expected, got, strict=True)):
            if right != text:
                one, other = [*right, end], [*text, end]
                place = next(i for i, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1])
                logits = row(number, one[:place]).float()
                limit = NEAR_TIE * float(logits.abs().max()) * torch.finfo(dtype).eps
                gap = abs(float(logits[one[place]] - logits[other[place]]))
                apart.append((gap - limit, gap, limit))
        defects = [one for one in apart if one[0] > 0]
        _, gap, limit = max(defects or apart)
        what = "no near-tie" if defects else "near-ties"
        note = f"{len(apart)} of {len(got)} texts part ({what}): gap {gap:.2g}, explained up to {limit:.2g}"
        return Agreement(False, not defects, note)

    return judge

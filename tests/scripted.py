"""A model that writes given replies: the real engine and grammar, with the next token of a text made likely."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from sakiyomi.server.bodies import BodyReader
from sakiyomi.server.jobs import Job
from sakiyomi.server.schema import ChatRequest


def script(patch: pytest.MonkeyPatch, said: Callable[[ChatRequest], str], ends: int) -> None:
    """From now on chats in this process have these replies, as far as their grammar lets them.

    Args:
        patch: undoes it.
        said: the reply to a request.
        ends: the token that ends a text.
    """
    real = BodyReader.chat

    def chat(reader: BodyReader, body: ChatRequest) -> list[Job]:
        jobs = real(reader, body)
        tokens = [*reader._llm.tokenizer(said(body), add_special_tokens=False)["input_ids"], ends]
        for job in jobs:
            favour = Favour(tokens, len(job.prompt))
            job.params = dataclasses.replace(job.params, logits_processors=[*job.params.logits_processors, favour])
        return jobs

    patch.setattr(BodyReader, "chat", chat)


class Favour:
    """A logits processor: what the grammar forbids stays forbidden."""

    def __init__(self, tokens: list[int], prompt: int) -> None:
        self._tokens, self._prompt = tokens, prompt

    def __call__(self, history: Tensor, scores: Tensor) -> Tensor:
        place = history.shape[1] - self._prompt
        if place < len(self._tokens):
            scores = scores + torch.zeros_like(scores).index_fill_(1, torch.tensor([self._tokens[place]]), 1e4)
        return scores

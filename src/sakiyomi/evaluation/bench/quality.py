"""The quality of contenders: perplexity of their weights on a held-out text, and right answers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sakiyomi.core.errors import InputError
from sakiyomi.core.prompts import read_text
from sakiyomi.evaluation.bench.config import BenchConfig
from sakiyomi.evaluation.bench.runner import Contender

TOKENS = 2048
CHUNK = 256
"""Tokens that see each other; each chunk is a text of its own."""
CHARACTERS = 16
"""More of a text than this a token are not looked at: a large file is not tokenized to its end."""

Logits = Callable[[Sequence[int], Sequence[int]], Tensor]
"""(prompt, tokens) -> (len(tokens), V): row i predicts ``tokens[i]``; see ``audit.reference``."""


@torch.no_grad()
def perplexity(logits: Logits, texts: Iterable[tuple[Sequence[int], Sequence[int]]]) -> float:
    """The exponential of the mean loss per token; a text is a prompt and the tokens after it, which count."""
    loss, count = 0.0, 0
    for prompt, tokens in texts:
        rows = logits(prompt, tokens).float()
        loss += float(F.cross_entropy(rows, torch.tensor(list(tokens), device=rows.device), reduction="sum"))
        count += len(tokens)
    return math.exp(loss / count)


class Quality:
    """Measures perplexity on the held-out text and right answers to the prompts, if the settings name any.

    Args:
        config: names the held-out text and the prompts, which may carry references.
        tokenizer: of the pair.
        context: most tokens that the target can see.

    Raises:
        LoadError, InputError: the held-out text cannot be read, or is too short.
    """

    def __init__(self, config: BenchConfig, tokenizer: Any, context: int = CHUNK) -> None:
        self._tokenizer, self._references = tokenizer, config.references()
        self.chunks: list[list[int]] = []
        self.conditions: dict[str, Any] = {}
        if config.quality is None:
            return
        text, size = read_text(config.quality)[: CHARACTERS * TOKENS], min(CHUNK, context)
        ids = tokenizer(text).input_ids[:TOKENS]
        self.chunks = [chunk for i in range(0, len(ids), size) if len(chunk := ids[i : i + size]) > 1]
        if not self.chunks:
            raise InputError(f"the held-out text {config.quality!r} has {len(ids)} tokens; give it a longer one")
        name = Path(config.quality).name
        self.conditions = {"perplexity_of": f"{name}, {sum(map(len, self.chunks))} tokens in chunks of {size}"}

    def grade(self, contenders: Sequence[Contender], logits: Logits) -> list[Contender]:
        """Contenders of one model's weights, with ``perplexity`` and ``match`` among their figures."""
        chunks = [(chunk[:1], chunk[1:]) for chunk in self.chunks]
        constant = {"perplexity": perplexity(logits, chunks)} if chunks else {}
        return [contender.figured(lambda run: constant | self.matches(run.outputs)) for contender in contenders]

    def matches(self, outputs: Sequence[Sequence[int]]) -> dict[str, float]:
        """Share of the texts with a reference that begin with it, leading spaces aside; nothing without references.

        Only the beginning counts, because a model may write more after a right answer. Outputs may repeat the
        prompts in order.
        """
        found = [
            self._tokenizer.decode(output, skip_special_tokens=True).strip().startswith(reference)
            for output, reference in zip(outputs, itertools.cycle(self._references), strict=False)
            if reference
        ]
        return {"match": sum(found) / len(found)} if found else {}

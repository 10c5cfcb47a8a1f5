"""The prompts that drafts are measured on: those of the user, else instructions, or beginnings of stories."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sakiyomi.core.chats import Chat
from sakiyomi.engine.chat_template import has_template
from sakiyomi.evaluation.tuning.config import PairConfig
from sakiyomi.train.answers import as_asked, instructions


def beginnings(count: int) -> list[str]:
    """Prompts of about 30 words, each another one. Neighbours share no sentence, and of the even and the odd ones both
    have all: the numbers of sentences are odd, and have no common divisor.

    Args:
        count: how many are wanted; there are 2717.
    """
    parts = list(tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")).values())
    most = math.lcm(*map(len, parts))
    return [" ".join(part[i % len(part)] for part in parts) for i in range(min(count, most))]


def prompts_of(config: PairConfig, tokenizer: Any, texts: Sequence[str | Chat] | None) -> list[list[int]]:
    """Token ids of the prompts; without any those of the package that no draft is trained on."""
    if texts is None:
        chats = has_template(tokenizer)
        texts = (instructions(held_out=True) if chats else beginnings(config.count))[: config.count]
    return [as_asked(tokenizer, text, config.prompt_tokens) for text in texts]

"""How often a model answers right: the greedy answer, of many prompts at once, by one pass without any decoding."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

from sakiyomi.train.long_tasks import TASKS, named
from sakiyomi.train.long_tasks.filler import NOISE, Filler

ASKED = ("passkey", "number", "kv", "kv-dense", "multikey")
"""Tasks of one answer that stands in the text as it is."""

PASS_TOKENS = 16384
"""Tokens of one pass at most, but for a single prompt that is longer."""


@torch.inference_mode()
def accuracy(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    task: str,
    length: int,
    *,
    prompts: int,
    query_first: bool = False,
    filler: Filler = NOISE,
    seed: int = 0,
) -> float:
    """Share of the prompts whose greedy answer begins with the right one.

    The greedy answer is right where each of its tokens is the likeliest behind the right ones before it: so the answer
    is read with the prompt, in one pass.

    Args:
        model, tokenizer: what answers.
        task: one of `ASKED`.
        length: most tokens of a prompt.
        prompts: how many; their depths are spread evenly from 0 to 1.
        query_first: see `Example.prompt`.
        filler: of the tasks that have one.
        seed: of the prompts.
    """
    made = TASKS[task] if TASKS[task].filler is None else named(task, filler)
    rows: list[tuple[list[int], int]] = []
    for number in range(prompts):
        depth = (number + 0.5) / prompts
        example = made.make(np.random.default_rng((seed, number)), length, tokenizer, depth)
        prompt = example.prompt(query_first)
        text = prompt + ("" if prompt.endswith('"') else " ") + example.answers[0]
        before = len(tokenizer(prompt)["input_ids"])
        rows.append((list(tokenizer(text)["input_ids"]), before))
    training = model.training
    model.eval()
    right = 0
    at_once = max(1, PASS_TOKENS // length)
    for begin in range(0, prompts, at_once):
        right += _right(model, rows[begin : begin + at_once])
    model.train(training)
    return right / prompts


def _right(model: Any, rows: list[tuple[list[int], int]]) -> int:
    longest = max(len(ids) for ids, _ in rows)
    # Padding stands behind the answers, where no causal model sees it.
    inputs = torch.tensor([ids + [0] * (longest - len(ids)) for ids, _ in rows], device=model.device)
    with torch.autocast(model.device.type, dtype=torch.bfloat16):
        hidden = model.model(input_ids=inputs, use_cache=False).last_hidden_state
        count = 0
        for number, (ids, before) in enumerate(rows):
            guessed = model.lm_head(hidden[number, before - 1 : len(ids) - 1]).argmax(-1).tolist()
            count += guessed == ids[before:]
    return count

"""The target's own continuations as training text of a draft: kept in a file, extended when a run is repeated.

A draft is asked about text that the target writes, not about text that people wrote; what it learns here counts.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sakiyomi.train.config import DraftConfig
from sakiyomi.train.data import Ids, TextSpec, encode_documents, read_documents
from sakiyomi.train.report import Reporter
from sakiyomi.train.schedule import LONGEST_STEP_SECONDS


@torch.inference_mode()
def sample_continuations(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    *,
    new_tokens: int,
    temperature: float,
    seed: int = 0,
) -> list[list[int]]:
    """Continue each prompt with the model, all in one batch.

    Args:
        model: a causal LM.
        tokenizer: its tokenizer; the end token is read from it.
        prompts: token ids, any lengths; equal lengths need no padding and run fastest.
        new_tokens: at most so many new tokens each.
        temperature: 0 is greedy.
        seed: of the sampling; torch's global generator is put back afterwards.

    Returns:
        New tokens of each prompt, the end token included where it was reached.
    """
    end = tokenizer.eos_token_id
    longest = max(map(len, prompts))
    ids = torch.full((len(prompts), longest), end)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    options = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
    with torch.random.fork_rng(enabled=temperature > 0):
        torch.manual_seed(seed)
        output = model.generate(  # type: ignore[operator]
            ids.to(model.device),
            attention_mask=mask.to(model.device),
            max_new_tokens=new_tokens,
            eos_token_id=end,
            pad_token_id=end,
            **({"do_sample": False} | options),
        )
    rows: list[list[int]] = output[:, longest:].tolist()
    return [row[: row.index(end) + 1] if end in row else row for row in rows]


def extend_samples(
    config: DraftConfig,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[TextSpec],
    path: Path,
    reporter: Reporter,
) -> int:
    """Append continuations to `path` until it holds `config.samples`, or `config.sample_minutes` are spent.

    Each line holds `tokens` (prompt and continuation), `prompt` (its length) and `temperature`. Batch b depends on the
    seed and b alone, so that a run that was stopped goes on where it was.

    Returns:
        Samples in the file.
    """
    pools = [encode_documents(list(read_documents(spec.path)), tokenizer) for spec in prompts]
    shares = np.array([spec.decay for spec in prompts], dtype=float)
    path.parent.mkdir(parents=True, exist_ok=True)
    have = _whole_lines(path)
    spent = 0.0
    with path.open("a", encoding="utf-8") as file:
        while have < config.samples and spent < config.sample_minutes * 60:
            began = time.monotonic()
            batch = have // config.sample_batch
            rng = np.random.default_rng((config.seed, batch))
            chosen = draw_prompts(pools, shares / shares.sum(), config.sample_batch, rng)
            temperature = config.temperatures[batch % len(config.temperatures)]
            texts = sample_continuations(
                model, tokenizer, chosen, new_tokens=config.sample_tokens, temperature=temperature, seed=batch
            )
            for prompt, text in zip(chosen, texts, strict=True):
                record = {"tokens": prompt + text, "prompt": len(prompt), "temperature": temperature}
                file.write(json.dumps(record) + "\n")
            file.flush()
            have += len(texts)
            spent += min(time.monotonic() - began, LONGEST_STEP_SECONDS)
            reporter.note(f"samples: {have} of {config.samples}, {spent / 60:.1f} min")
    return have


def draw_prompts(
    pools: Sequence[Sequence[Ids]], shares: np.ndarray, count: int, rng: np.random.Generator
) -> list[list[int]]:
    """Beginnings of documents, all of one length between 8 and 96 tokens so that a batch needs no padding."""
    length = int(rng.integers(8, 97))
    found: list[list[int]] = []
    for pool in rng.choice(len(pools), size=count, p=shares):
        documents = pools[pool]
        document = documents[int(rng.integers(len(documents)))]
        for _ in range(100):
            if len(document) > length:
                break
            document = documents[int(rng.integers(len(documents)))]
        found.append(document[:length].tolist())
    return found


def _whole_lines(path: Path) -> int:
    """Lines in the file after a last half-written one, if any, was cut off."""
    if not path.exists():
        return 0
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        with path.open("r+b") as file:
            file.truncate(whole)
    return content.count(b"\n")

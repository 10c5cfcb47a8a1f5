"""Which labels of retaining heads bring answers back from a cache that was cut: a small model, seconds a row.

    python benchmarks/retaining_labels.py [--model weights.pt] [--budgets 14,20,30]

A Llama of two layers learns to find three values behind a key among random tokens (minutes on one core; kept in the
file of --model, and read from there the next time). Then heads are trained on it with each kind of label, the text
before the question is cut to as many tokens in every layer and KV head as the budget says, and the answers are counted.
The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, LlamaConfig, LlamaForCausalLM

from sakiyomi.cache.policies.retaining.heads import RetainingHeads, RetainingShape
from sakiyomi.cache.policies.retaining.raw import Raw
from sakiyomi.train.commands import TrainRetaining
from sakiyomi.train.retaining import HeadsLoss
from sakiyomi.train.retaining_labels import kv_heads_of

MARK, ASK, FACTS, TEXT = 78, 79, 6, 100
Row = tuple[Tensor, int]
Kept = list[Tensor] | None
kept: Kept = None


def texts(rows: int, length: int, rng: torch.Generator, facts: int = FACTS) -> Tensor:
    """Random tokens with facts (mark, key, three values) among them, and behind them a question for each fact."""
    ids = torch.randint(0, 40, (rows, length), generator=rng)
    keys = torch.stack([torch.randperm(16, generator=rng)[:facts] for _ in range(rows)]) + 40
    values = torch.randint(56, 72, (rows, facts, 3), generator=rng)
    places = torch.stack([torch.randperm(length // 5, generator=rng)[:facts] for _ in range(rows)]) * 5
    each = torch.arange(rows)[:, None]
    ids[each, places], ids[each, places + 1] = MARK, keys
    for i in range(3):
        ids[each, places + 2 + i] = values[:, :, i]
    asked = torch.cat([torch.full((rows, facts, 1), ASK), keys[:, :, None], values], 2)
    return torch.cat([ids, asked[:, torch.randperm(facts, generator=rng)].flatten(1)], 1)


def new_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 80, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=True, bos_token_id=None, pad_token_id=0))


def learn_to_find(model: LlamaForCausalLM, steps: int = 6000) -> None:
    """Until long texts are answered without a mistake, or so many steps are over."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.98), weight_decay=0.01)
    rng, right = torch.Generator().manual_seed(1), 0
    for step in range(steps):
        length = (20, 40, 80, TEXT)[step % 4] if step > 1500 else (30, 15)[step % 2]
        ids = texts(32, length, rng, min(FACTS, length // 5))
        logits = model(input_ids=ids).logits[:, length - 1 : -1]
        counted = torch.arange(logits.shape[1]) % 5 > 1
        loss = F.cross_entropy(logits[:, counted].transpose(1, 2), ids[:, length:][:, counted])
        optimizer.param_groups[0]["lr"] = 3e-3 * min(1.0, step / 200)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        right += float(loss) < 0.01 and length == TEXT
        if step % 250 == 0:
            print(f"step {step} loss {float(loss):.3f}", flush=True)
        if right > 20:
            break


def questions(count: int, seed: int) -> list[Row]:
    """Texts with one question each: the row, and where its prompt ends."""
    rows = texts(count, TEXT, torch.Generator().manual_seed(seed))
    return [(row[: TEXT + 5], TEXT + 2) for row in rows]


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float | None = None, **_: Any
) -> tuple[Tensor, None]:
    """Attention in which the rows behind the text see only what was kept of it."""
    group, length = query.shape[1] // key.shape[1], query.shape[2]
    logits = query @ key.repeat_interleave(group, 1).mT * (scaling or query.shape[-1] ** -0.5)
    seen = torch.ones(length, length, dtype=torch.bool).tril()[None].repeat(query.shape[1], 1, 1)
    if kept is not None:
        seen[:, TEXT:, :TEXT] &= kept[module.layer_idx].repeat_interleave(group, 0)[:, None]
    out = logits.masked_fill(~seen, -torch.inf).softmax(-1) @ value.repeat_interleave(group, 1)
    return out.transpose(1, 2).contiguous(), None


@torch.no_grad()
def answered(
    model: LlamaForCausalLM, rows: list[Row], score: Callable[[int, Tensor], Tensor] | None, budget: int
) -> float:
    """Share of the questions answered in full, with so many tokens of the text kept; without a score with all."""
    global kept
    right, raw = 0, Raw(model)
    for row, prompt in rows:
        kept = None
        if score is not None:
            with raw:
                model.model(input_ids=row[None], use_cache=False)
                scores = [score(layer, read[:TEXT]).T for layer, read in enumerate(raw.read) if read is not None]
            none = [torch.zeros_like(each, dtype=torch.bool) for each in scores]
            kept = [no.scatter_(1, each.topk(budget, 1).indices, True) for no, each in zip(none, scores, strict=True)]
        model.set_attn_implementation("kept")
        guesses = model(input_ids=row[None]).logits[0, prompt - 1 : -1].argmax(-1)
        model.set_attn_implementation("sdpa")
        right += torch.equal(guesses, row[prompt:])
    return right / len(rows)


def trained(model: LlamaForCausalLM, labels: str, queries: str, seed: int, steps: int = 150) -> RetainingHeads:
    config = TrainRetaining.of(target="-", out="-", data=("-",), labels=labels, queries=queries, precision="no")
    torch.manual_seed(seed)
    heads = RetainingHeads(RetainingShape(Raw(model).widths, kv_heads_of(model), 64))
    loss, rows = HeadsLoss(config, model, heads), questions(8 * steps, seed)
    optimizer = torch.optim.AdamW(heads.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.01)
    with loss.hooks():
        for step in range(steps):
            optimizer.param_groups[0]["lr"] = 3e-3 * min(1, (step + 1) / 15) * (1 - step / steps)
            loss(rows[8 * step : 8 * step + 8])
            torch.nn.utils.clip_grad_value_(heads.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    return heads


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="file of the model's weights")
    parser.add_argument("--budgets", default="14,20,30", help="tokens kept of 100, 30 of which belong to facts")
    parser.add_argument("--count", type=int, default=100, help="questions")
    given = parser.parse_args()
    AttentionInterface.register("kept", attend)
    AttentionMaskInterface.register("kept", lambda *args, **kwargs: None)
    model = new_model()
    if given.model and given.model.exists():
        model.load_state_dict(torch.load(given.model, weights_only=True))
    else:
        learn_to_find(model)
        if given.model:
            torch.save(model.state_dict(), given.model)
    model.eval().requires_grad_(False)
    budgets, rows = [int(budget) for budget in given.budgets.split(",")], questions(given.count, 77)
    found: dict[str, Any] = {"budgets": budgets, "full": answered(model, rows, None, 0)}
    print(f"everything kept: {found['full']:.2f}", flush=True)
    found["random"] = [
        answered(model, rows, lambda layer, read: torch.rand(len(read), 2), budget) for budget in budgets
    ]
    print(f"random scores, budgets {budgets}: {found['random']}", flush=True)
    for labels in ("logits", "chances"):
        for queries in ("answer", "writing"):
            heads = [trained(model, labels, queries, seed) for seed in (3, 4)]
            shares = [[answered(model, rows, one, budget) for budget in budgets] for one in heads]
            found[f"{labels} {queries}"] = shares
            print(f"--labels {labels} --queries {queries}, budgets {budgets}, two seeds: {shares}", flush=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main()

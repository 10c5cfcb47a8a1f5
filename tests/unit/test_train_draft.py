"""Distillation: loss, labels, samples, acceptance, and a tiny run end to end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from sakiyomi.errors import InputError, LoadError
from sakiyomi.train.acceptance import distinct_ngrams, speculate
from sakiyomi.train.draft import load_target, train_draft
from sakiyomi.train.labels import SoftLabels
from sakiyomi.train.losses import distillation_loss
from sakiyomi.train.samples import sample_continuations
from sakiyomi.train.target import train_target
from train_toys import draft_config, target_config, tiny_target


def slow_divergence(p: list[float], q: list[float], kept: list[int]) -> float:
    """KL over the kept tokens and one bucket of all others, in plain Python."""
    from math import log

    total = sum(p[token] * log(p[token] / q[token]) for token in kept)
    rest = [token for token in range(len(p)) if token not in kept]
    p_rest, q_rest = sum(p[token] for token in rest), sum(q[token] for token in rest)
    return total + (p_rest * log(p_rest / q_rest) if p_rest > 1e-6 else 0.0)


@pytest.mark.parametrize("top", [1, 3, 7])
@pytest.mark.parametrize("greedy_weight", [0.0, 0.5])
def test_distillation_loss_equals_the_slow_sum(top: int, greedy_weight: float) -> None:
    generator = torch.Generator().manual_seed(top)
    hidden, head = torch.randn(2, 3, 5, generator=generator), torch.randn(7, 5, generator=generator)
    target = torch.randn(2, 3, 7, generator=generator).softmax(-1)
    chosen = target.topk(top, dim=-1)
    draft = (hidden @ head.T).softmax(-1)
    expected = 0.0
    for batch in range(2):
        for position in range(3):
            p, q = target[batch, position].tolist(), draft[batch, position].tolist()
            kept = chosen.indices[batch, position].tolist()
            expected += slow_divergence(p, q, kept) - greedy_weight * float(draft[batch, position, kept[0]].log())
    got = distillation_loss(hidden, head, chosen.indices, chosen.values, greedy_weight)
    assert float(got) == pytest.approx(expected / 6, abs=1e-5)


def test_distillation_loss_is_zero_for_the_target_itself() -> None:
    hidden, head = torch.randn(1, 4, 5), torch.randn(9, 5)
    top = (hidden @ head.T).softmax(-1).topk(4, dim=-1)
    assert float(distillation_loss(hidden, head, top.indices, top.values)) == pytest.approx(0.0, abs=1e-5)


def test_labels_are_the_targets_likeliest_tokens_and_are_kept(tmp_path: Path) -> None:
    model, _ = load_target(tiny_target(tmp_path))
    labels = SoftLabels(model, top=5, limit_bytes=8 * 5 * 6)
    ids = torch.arange(16).view(2, 8)
    tokens, probs = labels(ids)
    expected = model(input_ids=ids).logits.float().softmax(-1).topk(5, dim=-1)
    assert torch.equal(tokens, expected.indices)
    assert torch.allclose(probs, expected.values, atol=1e-3)
    # The limit holds one of the two rows; the other is computed again, in a chunk of its own, and is the same.
    calls: list[int] = []
    hook = model.register_forward_pre_hook(
        lambda _, args, kwargs: calls.append(int(kwargs["input_ids"].any(dim=1).sum())), with_kwargs=True
    )
    again = labels(ids)
    hook.remove()
    assert calls == [1]
    assert torch.equal(again[0], tokens)
    assert torch.equal(again[1], probs)


def test_samples_are_the_models_own_greedy_tokens_whatever_the_padding(tmp_path: Path) -> None:
    model, tokenizer = load_target(tiny_target(tmp_path))
    model.float()
    prompts = [[0, 70, 71, 72], [0, 80], [0, 90, 91]]
    together = sample_continuations(model, tokenizer, prompts, new_tokens=6, temperature=0.0)
    alone = [sample_continuations(model, tokenizer, [prompt], new_tokens=6, temperature=0.0)[0] for prompt in prompts]
    assert together == alone
    sampled = [
        sample_continuations(model, tokenizer, prompts, new_tokens=6, temperature=1.0, seed=seed) for seed in (1, 1, 2)
    ]
    assert sampled[0] == sampled[1] != sampled[2]


def test_speculate_counts_rounds_as_an_engine_does() -> None:
    assert speculate([True] * 11, 4) == (8, 8, 2)
    assert speculate([False] * 5, 4) == (0, 3 + 2 + 1 + 0, 4)
    assert speculate([False, True, True, False, True, True], 2) == (3, 3, 2)
    assert speculate([True], 4) == (0, 0, 0)


def test_distinct_ngrams() -> None:
    assert distinct_ngrams([[1, 2, 3, 4, 5]]) == 1.0
    assert distinct_ngrams([[1, 1, 1, 1, 1, 1], [1, 2]]) == pytest.approx(1 / 3)


def test_a_tiny_draft_from_end_to_end(tmp_path: Path) -> None:
    config = draft_config(tmp_path, tiny_target(tmp_path))
    summary = train_draft(config, "sakiyomi train draft")
    assert summary["finished"]
    measures = summary["held_out"]["stories"]
    assert {
        "greedy_agreement",
        "acceptance_rate",
        "alpha",
        "expected_speedup_greedy",
        "target_distinct_4grams",
    } <= measures.keys()
    assert 0 <= measures["acceptance_rate"] <= 1
    model, tokenizer = load_target(Path(summary["model"]))
    assert model.config.vocab_size == 300
    assert model.config.num_hidden_layers == 2
    assert tokenizer.eos_token_id == model.config.eos_token_id
    lines = Path(config.out, "samples.jsonl").read_text().splitlines()
    assert len(lines) == config.samples
    record = json.loads(lines[0])
    assert len(record["tokens"]) > record["prompt"] >= 8


def test_a_draft_starts_from_a_model_of_the_same_vocabulary(tmp_path: Path) -> None:
    target = tiny_target(tmp_path)
    config = target_config(tmp_path, out=str(tmp_path / "start"), tokenizer=str(target), hidden=16, layers=1)
    start = train_target(config)
    summary = train_draft(draft_config(tmp_path, target, init=start["model"], tokens=64))
    assert summary["layers"] == 1
    before, _ = load_target(Path(start["model"]))
    after, _ = load_target(Path(summary["model"]))
    change = (before.lm_head.weight - after.lm_head.weight).abs().max()
    assert 0 < change < 0.02, "one warm-up step away from where it began"
    other = train_target(target_config(tmp_path, out=str(tmp_path / "other"), vocab=299, tokens=128))
    with pytest.raises(LoadError, match="another vocabulary"):
        train_draft(draft_config(tmp_path, target, init=other["model"]))


def test_samples_cut_short_are_completed(tmp_path: Path) -> None:
    target = tiny_target(tmp_path)
    config = draft_config(tmp_path, target)
    train_draft(config)
    path = Path(config.out, "samples.jsonl")
    whole = path.read_bytes()
    half = whole.splitlines(keepends=True)[: config.sample_batch]
    path.write_bytes(b"".join(half) + b'{"tokens": [0, 7')
    train_draft(config)
    assert path.read_bytes() == whole


def test_errors_of_the_draft_command(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="is no folder"):
        train_draft(draft_config(tmp_path, tmp_path / "nowhere"))
    with pytest.raises(InputError, match="row_tokens"):
        draft_config(tmp_path, tmp_path, row_tokens=(16, 32))

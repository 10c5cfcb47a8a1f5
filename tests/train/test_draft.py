"""Distillation: loss, labels, samples, acceptance, and a tiny run end to end."""

from __future__ import annotations

import json
import shutil
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from sakiyomi import LLM, SamplingParams, theory
from sakiyomi.core.draft_specs import split_spec
from sakiyomi.core.embedded import folder_of
from sakiyomi.core.errors import InputError, LoadError, UnsupportedError
from sakiyomi.core.outputs import Generation
from sakiyomi.core.preflight import check_drafts
from sakiyomi.train import taught
from sakiyomi.train.acceptance import continuations, distinct_ngrams, speculate
from sakiyomi.train.checkpoint import load_checkpoint
from sakiyomi.train.commands import DraftSizes
from sakiyomi.train.draft import Speed, expected, given_speed, train_draft, verdict
from sakiyomi.train.hidden import SoftLabels
from sakiyomi.train.llama import draft_sizes, new_llama
from sakiyomi.train.losses import distillation_loss, next_token_loss
from sakiyomi.train.samples import sample_continuations
from sakiyomi.train.target import train_target
from sakiyomi.train.taught import load_target
from toys import tiny_tokenizer
from train_toys import draft_config, losses, stop_at, stories, target_config, tiny_gpt2, tiny_target


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
    model, _ = load_target(str(tiny_target(tmp_path)))
    labels = SoftLabels(model, top=5, limit_bytes=8 * 5 * 6)
    ids = torch.arange(16).view(2, 8)
    tokens, probs = labels(ids, ids)
    expected = model(input_ids=ids).logits.float().softmax(-1).topk(5, dim=-1)
    assert torch.equal(tokens, expected.indices)
    assert torch.allclose(probs, expected.values, atol=1e-3)
    # The limit holds one of the two rows; the other is computed again, in a chunk of its own, and is the same.
    calls: list[int] = []
    hook = model.register_forward_pre_hook(
        lambda _, args, kwargs: calls.append(int(kwargs["input_ids"].any(dim=1).sum())), with_kwargs=True
    )
    again = labels(ids, ids)
    hook.remove()
    assert calls == [1]
    assert torch.equal(again[0], tokens)
    assert torch.equal(again[1], probs)


def test_a_target_with_little_room_behind_a_prompt_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class MeasuredError(Exception):
        pass

    def measure(llm: LLM, prompts: list[list[int]], **more: Any) -> None:
        raise MeasuredError(f"{list(map(len, prompts))} of {llm.max_context}")

    monkeypatch.setattr(taught, "continuations", measure)
    target, valid = tiny_target(tmp_path, positions=66), tmp_path / "long.jsonl"
    valid.write_text(json.dumps({"tokens": [5] * 80}), encoding="utf-8")
    with pytest.raises(MeasuredError, match=r"\[64\] of 66"):
        train_draft(draft_config(tmp_path, target, samples=0, valid=(f"long={valid}",)))


def test_rows_without_time_for_labels_learn_the_text(tmp_path: Path) -> None:
    """With the loss of the text's own next token, times 1 + greedy_weight."""
    model, _ = load_target(str(tiny_target(tmp_path)))
    labels = SoftLabels(model, top=5, limit_bytes=1 << 20, share=0.0)
    ids = torch.arange(16 * 9).remainder(300).view(16, 9)
    labels(ids[:4, :-1], ids[:4, 1:])  # some labels, without which there is nothing to compare the time with
    tokens, probs = labels(ids[4:, :-1], ids[4:, 1:])
    assert torch.equal(tokens[..., 0], ids[4:, 1:]) and torch.equal(probs.sum(-1), torch.ones(12, 8))
    hidden, head = torch.randn(12, 8, 6), torch.randn(300, 6)
    loss = distillation_loss(hidden, head, tokens, probs, 0.5)
    assert torch.allclose(loss, 1.5 * next_token_loss(hidden, head, ids[4:, 1:]), rtol=1e-4)
    assert not torch.equal(labels(ids[:4, :-1], ids[:4, 1:])[0][..., 0], ids[:4, 1:]), "known labels are used again"


def test_a_draft_is_smaller_than_its_target(tmp_path: Path) -> None:
    target, _ = load_target(str(tiny_target(tmp_path)))
    whole = sum(weight.numel() for weight in target.parameters())
    sizes = draft_sizes(DraftSizes(), target)
    assert sizes.hidden <= target.config.hidden_size // 2 and sizes.layers < target.config.num_hidden_layers
    draft = new_llama(sizes, tiny_tokenizer(), vocab=300, max_positions=64)
    assert sum(weight.numel() for weight in draft.parameters()) < whole / 2
    asked = draft_sizes(DraftSizes(hidden=48, heads=3, layers=2, intermediate=64), target)
    assert (asked.hidden, asked.heads, asked.layers, asked.intermediate) == (48, 3, 2, 64)


def test_samples_are_the_models_own_greedy_tokens_whatever_the_padding(tmp_path: Path) -> None:
    model, tokenizer = load_target(str(tiny_target(tmp_path)))
    model.float()
    prompts = [[0, 70, 71, 72], [0, 80], [0, 90, 91]]
    llm = LLM((model, tokenizer), "none", compile=False)
    together = sample_continuations(llm, prompts, new_tokens=6, temperature=0.0)
    alone = [sample_continuations(llm, [prompt], new_tokens=6, temperature=0.0)[0] for prompt in prompts]
    assert together == alone
    sampled = [sample_continuations(llm, prompts, new_tokens=6, temperature=1.0, seed=seed) for seed in (1, 1, 2)]
    assert sampled[0] == sampled[1] != sampled[2]


def test_speculate_counts_rounds_as_an_engine_does() -> None:
    def count(guesses: list[int], text: list[int], gamma: int, limit: int) -> tuple[int, int, int]:
        return speculate(guesses, text, gamma, limit=limit, ends=frozenset({9}))

    assert count([1] * 11, [1] * 11, 4, limit=11) == (8, 8, 2)
    assert count([2] * 5, [1] * 5, 4, limit=5) == (0, 3 + 2 + 1 + 0, 4)
    assert count([2, 1, 1, 2, 1, 1], [1] * 6, 2, limit=6) == (3, 3, 2)
    assert count([1], [1], 4, limit=8) == (0, 0, 0)
    # The engine does not know that the text ends: it drafts on, and may accept the end token itself.
    assert count([1, 1, 1, 9], [1, 1, 1, 9], 4, limit=12) == (3, 3, 1)
    assert count([1, 1, 1, 2], [1, 1, 1, 9], 4, limit=12) == (2, 4, 1)
    assert count([1, 1, 1, 9], [1, 1, 1, 9], 2, limit=12) == (2, 2, 1)
    # A draft stops at an end token that it guesses, be it right or wrong.
    assert count([1, 1, 9, 1, 1], [1] * 5, 4, limit=5) == (1 + 1, 2 + 1, 2)
    assert count([1, 2, 9, 1, 1], [1] * 5, 3, limit=5) == (0 + 0 + 1, 3 + 1 + 1, 3)


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
    model, tokenizer = load_target(summary["model"])
    assert model.config.vocab_size == 300
    assert model.config.num_hidden_layers == 1, "half of the target's"
    assert tokenizer.eos_token_id == model.config.eos_token_id
    lines = Path(config.loop.out, "samples.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(lines) == config.sampling.samples
    record = json.loads(lines[0])
    assert len(record["tokens"]) > record["prompt"] >= 8


@pytest.mark.thorough
def test_a_draft_starts_from_a_model_of_the_same_vocabulary(tmp_path: Path) -> None:
    target = tiny_target(tmp_path)
    config = target_config(tmp_path, out=str(tmp_path / "start"), tokenizer=str(target), hidden=16, layers=1)
    start = train_target(config)
    summary = train_draft(draft_config(tmp_path, target, init=start["model"], tokens=64))
    assert summary["layers"] == 1
    before, _ = load_target(start["model"])
    after, _ = load_target(summary["model"])
    change = (before.lm_head.weight - after.lm_head.weight).abs().max()
    assert 0 < change < 0.02, "one warm-up step away from where it began"
    other = train_target(target_config(tmp_path, out=str(tmp_path / "other"), vocab=299, tokens=128))
    with pytest.raises(LoadError, match="another vocabulary"):
        train_draft(draft_config(tmp_path, target, out=str(tmp_path / "new"), init=other["model"]))


@pytest.mark.thorough
def test_the_card_tells_how_the_start_was_made(tmp_path: Path) -> None:
    target = tiny_target(tmp_path)
    first = target_config(
        tmp_path, out=str(tmp_path / "start"), tokenizer=str(target), hidden=16, layers=1, tokens=128, note=("Tales",)
    )
    start = train_target(first, "sakiyomi train target --out start")
    second = train_draft(
        draft_config(tmp_path, target, out=str(tmp_path / "second"), init=start["model"], tokens=64, samples=0),
        "sakiyomi train draft --out second",
    )
    third = train_draft(
        draft_config(tmp_path, target, out=str(tmp_path / "third"), init=second["model"], tokens=64, samples=0), "third"
    )
    text = Path(third["model"], "README.md").read_text(encoding="utf-8")
    begin = text.index("## Start")
    for part in ("sakiyomi train draft --out second", "sakiyomi train target --out start", "- Tales", "1 steps"):
        assert part in text[begin:]
    assert third["init"]["init"]["config"]["hidden"] == 16


def test_a_start_without_a_card_is_named(tmp_path: Path) -> None:
    target = tiny_target(tmp_path)
    summary = train_draft(draft_config(tmp_path, target, init=str(target), tokens=64, samples=0))
    assert f"`{target}`, which has no card" in Path(summary["model"], "README.md").read_text(encoding="utf-8")


@pytest.mark.thorough
def test_samples_cut_short_are_completed(tmp_path: Path) -> None:
    target = tiny_target(tmp_path)
    config = draft_config(tmp_path, target)
    train_draft(config)
    shutil.rmtree(Path(config.loop.out, "checkpoints"))
    path = Path(config.loop.out, "samples.jsonl")
    whole = path.read_bytes()
    half = whole.splitlines(keepends=True)[: config.sampling.sample_batch]
    path.write_bytes(b"".join(half) + b'{"tokens": [0, 7')
    train_draft(config)
    assert path.read_bytes() == whole


@pytest.mark.thorough
def test_samples_of_another_target_or_of_other_settings_are_refused(tmp_path: Path) -> None:
    target = tiny_target(tmp_path)
    config = draft_config(tmp_path, target, tokens=64)
    train_draft(config)
    shutil.rmtree(Path(config.loop.out, "checkpoints"))
    whole = Path(config.loop.out, "samples.jsonl").read_bytes()
    for changes, name in (
        ({"sample_tokens": 9}, "sample_tokens 8, and this run has 9"),
        ({"temperatures": (1.0,)}, "temperatures"),
        ({"seed": 2}, "seed"),
        ({"sample_batch": 2}, "sample_batch"),
        ({"valid": ()}, "held_back"),
        ({"prompts": config.loop.valid and (config.loop.valid[0].partition("=")[2],)}, "prompts"),
    ):
        with pytest.raises(InputError, match=name):
            train_draft(draft_config(tmp_path, target, tokens=64, **changes))
    weights = load_file(target / "model.safetensors")
    name = "model.layers.1.self_attn.q_proj.weight"
    save_file(weights | {name: weights[name] + 1}, target / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"written with target .* delete the file"):
        train_draft(config)
    Path(config.loop.out, "samples.json").unlink()
    with pytest.raises(InputError, match=r"no samples\.json beside it"):
        train_draft(config)
    assert Path(config.loop.out, "samples.jsonl").read_bytes() == whole


@pytest.mark.thorough
def test_a_resumed_draft_run_has_the_rows_of_its_first_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target(tmp_path)
    # Half of the samples that were asked for: a second part that went on writing would train on other rows.
    settings: dict[str, Any] = {"samples": 8, "sample_minutes": 1e-9, "sample_share": 0.9}
    whole = draft_config(tmp_path, target, out=str(tmp_path / "whole"), **settings)
    train_draft(whole)
    cut = draft_config(tmp_path, target, out=str(tmp_path / "cut"), **settings)
    with monkeypatch.context() as patch:
        stop_at(patch, 3, signal.SIGINT)
        assert not train_draft(cut)["finished"]
    assert len(Path(cut.loop.out, "samples.jsonl").read_text(encoding="utf-8").splitlines()) == 4
    resumed = cut.changed(resume=True)
    assert train_draft(resumed)["finished"]
    assert losses(cut.loop.out) == losses(whole.loop.out)
    weights = [load_checkpoint(Path(out) / "checkpoints")["model"] for out in (cut.loop.out, whole.loop.out)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[1])
    Path(cut.loop.out, "samples.jsonl").unlink()
    with pytest.raises(LoadError, match=r"samples\.jsonl is gone"):
        train_draft(resumed)


def test_without_held_out_text_some_training_text_is_held_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[Any] = []
    original = taught.FixedRows

    def watch(documents: Any, *args: Any, **options: Any) -> Any:
        trained.extend(tuple(document[:64].tolist()) for document in documents)
        return original(documents, *args, **options)

    measured: list[Any] = []
    monkeypatch.setattr(taught, "FixedRows", watch)
    monkeypatch.setattr(
        taught, "continuations", lambda *args, **options: measured.extend(args[1]) or continuations(*args, **options)
    )
    config = draft_config(tmp_path, tiny_target(tmp_path), valid=(), samples=0, eval_prompts=4)
    summary = train_draft(config)
    assert summary["held_back"] == len(measured) == 4
    assert not set(map(tuple, measured)) & set(trained)
    assert {"alpha", "expected_speedup_greedy", "expected_speedup_sampled"} <= summary["held_out"]["held_back"].keys()
    assert "4 documents of the training text, held back" in Path(summary["model"], "README.md").read_text(
        encoding="utf-8"
    )
    Path(config.text.text[0]).write_text(json.dumps({"text": stories(1)[0]}) + "\n", encoding="utf-8")
    with pytest.raises(InputError, match="--valid NAME=FILE"):
        train_draft(config.changed(out=str(tmp_path / "other")))


def test_the_speed_up_follows_from_the_costs() -> None:
    measured = {"alpha": 0.7, "greedy_agreement": 0.8}
    found = expected(measured, 4, given_speed(0.1))
    assert found["expected_speedup_sampled"] == pytest.approx(theory.speedup(0.7, 4, 0.1))
    assert found["optimal_gamma_greedy"] == theory.optimal_gamma(0.8, 0.1)
    slower = expected(measured, 4, Speed(0.1, {1: 1.0, 4: 1.2, 8: 1.6}, "measured"))
    tokens = theory.expected_tokens(0.7, 4)
    assert slower["expected_speedup_sampled"] == pytest.approx(tokens / (4 * 0.1 + 1.3))
    assert set(expected(measured, 4, Speed(None, {1: 1.0}, "no"))) == {
        "expected_tokens_sampled",
        "expected_tokens_greedy",
    }


@pytest.mark.thorough
def test_a_target_of_another_architecture_and_measured_costs(tmp_path: Path) -> None:
    summary = train_draft(draft_config(tmp_path, tiny_gpt2(tmp_path), cost="measured", samples=4))
    assert summary["cost"] > 0
    assert summary["cost_source"].startswith("measured on ")
    values = summary["held_out"]["stories"]
    assert 0 < values["expected_speedup_greedy"] < 5
    card = Path(summary["model"], "README.md").read_text(encoding="utf-8")
    assert f"c): {summary['cost']:.3g}, measured on" in card
    assert summary["measured"]["speedup"] > 0 and summary["verdict"] in card
    assert f"--draft model:{tmp_path / 'draft'}" in summary["verdict"]
    out = str(tmp_path / "draft")  # what was given with --out
    assert folder_of(out) == Path(summary["model"]) and split_spec(out) == [f"model:{out}"]
    check_drafts(f"model:{out}")


@pytest.mark.parametrize(("speedup", "said"), [(1.4, "the draft makes it faster"), (0.2, "not worth it")])
def test_the_end_says_what_to_expect(tmp_path: Path, speedup: float, said: str) -> None:
    measured = {"plain_tokens_per_second": 10.0, "tokens_per_second": 14.0, "speedup": speedup, "tau": 2.0, "texts": 8}
    text = verdict(draft_config(tmp_path, tmp_path), measured)
    assert said in text and f"{speedup:.2f} times, 2.00 tokens a pass" in text and "sakiyomi generate" in text


@pytest.mark.thorough
def test_costs_that_cannot_be_measured_do_not_lose_the_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise UnsupportedError("no attention of ours")

    monkeypatch.setattr("sakiyomi.train.draft.LLM", refuse)
    summary = train_draft(draft_config(tmp_path, tiny_target(tmp_path), cost="measured", samples=0, tokens=64))
    assert summary["cost"] is None
    assert "not measured: no attention of ours" in Path(summary["model"], "README.md").read_text(encoding="utf-8")


def test_targets_are_found_and_checked_as_everywhere(tmp_path: Path) -> None:
    model, tokenizer = load_target("tales")
    assert model.dtype == torch.bfloat16
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert tokenizer.eos_token_id == 0
    folder = tiny_target(tmp_path)
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-100])
    with pytest.raises(LoadError, match="is cut off"):
        load_target(str(folder))
    weights.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"anything")
    with pytest.raises(LoadError, match="pickle"):
        load_target(str(folder))


def test_a_targets_own_generation_settings_do_not_bend_its_text(tmp_path: Path) -> None:
    folder = tiny_target(tmp_path)
    plain, tokenizer = load_target(str(folder))
    prompts = [[0, 70, 71, 72]]
    llm = LLM((plain, tokenizer), "none", compile=False)
    expected_text = sample_continuations(llm, prompts, new_tokens=12, temperature=0.0)
    settings = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))
    settings |= {"repetition_penalty": 5.0, "eos_token_id": [0, expected_text[0][4]]}
    (folder / "generation_config.json").write_text(json.dumps(settings), encoding="utf-8")
    bent, _ = load_target(str(folder))
    llm = LLM((bent, tokenizer), "none", compile=False)
    assert sample_continuations(llm, prompts, new_tokens=12, temperature=0.0) == [
        expected_text[0][: expected_text[0].index(expected_text[0][4]) + 1]
    ]


def test_errors_of_the_draft_command(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="no folder"):
        train_draft(draft_config(tmp_path, tmp_path / "nowhere"))
    with pytest.raises(InputError, match="row_tokens"):
        draft_config(tmp_path, tmp_path, row_tokens=(16, 32))
    target = tiny_target(tmp_path)
    short = tmp_path / "short.txt"
    short.write_text("Once upon a time.", encoding="utf-8")
    ids = tmp_path / "ids.jsonl"
    ids.write_text('{"tokens": [5, 300]}', encoding="utf-8")
    for changes, kind, message in (
        ({"valid": (f"short={short}",)}, InputError, "no document of more than 64 tokens"),
        ({"valid": (f"a={tmp_path / 'typo.txt'}",)}, LoadError, "typo.txt"),
        ({"valid": (f"a={short}", f"a={short}")}, InputError, "twice"),
        ({"text": (str(ids),)}, LoadError, "from 5 to 300, the model knows 300 tokens"),
        ({"prompts": (f"{short}@0",)}, InputError, "--prompts sum to 0"),
        ({"init": str(tmp_path / "none")}, LoadError, "none"),
        ({"row_tokens": (256,), "step_tokens": 256}, InputError, "--row-tokens"),
        ({"sample_tokens": 100}, InputError, "--sample-tokens"),
    ):
        with pytest.raises(kind, match=message):
            train_draft(draft_config(tmp_path, target, **changes))
    assert not (tmp_path / "draft" / "samples.jsonl").exists(), "nothing was written before the error"


@pytest.mark.thorough
def test_the_count_is_the_engines(tmp_path: Path) -> None:
    """Guesses along the target's text against rounds of the engine, with an end token within accepted runs."""
    folders = [tiny_target(tmp_path), tmp_path / "noisy"]
    shutil.copytree(*folders)
    generator = torch.Generator().manual_seed(1)
    # Wide weights, so that texts vary; a little noise makes of them a draft that is often right.
    wide = {name: 10 * value for name, value in load_file(folders[0] / "model.safetensors").items() if value.ndim == 2}
    noisy = {name: value + 0.15 * torch.randn(value.shape, generator=generator) * value for name, value in wide.items()}
    for folder, weights in zip(folders, (wide, noisy), strict=True):
        content = load_file(folder / "model.safetensors") | {name: value.bfloat16() for name, value in weights.items()}
        save_file(content, folder / "model.safetensors", metadata={"format": "pt"})
    guesser = AutoModelForCausalLM.from_pretrained(folders[1], dtype=torch.float32)
    prompts = [[0, 60 + 3 * n, 70 + n, 80 + 2 * n] for n in range(16)]

    def compare(ends: frozenset[int]) -> list[Generation]:
        llm = LLM(str(folders[0]), draft=f"model:{folders[1]}", dtype="float32", compile=False)
        results = llm.generate(prompts, SamplingParams(max_new_tokens=14, gamma=4, ignore_eos=not ends))
        for prompt, result in zip(prompts, results, strict=True):
            text, stats = result.token_ids, result.stats
            with torch.no_grad():
                logits = guesser(torch.tensor([prompt + text])).logits[0, len(prompt) - 1 : -1]
            counts = speculate(logits.argmax(-1).tolist(), text, 4, limit=14, ends=ends)
            assert counts[::2] == (stats.accepted, stats.rounds)
            # An end token behind a wrong guess cuts the engine's draft short; it is not seen along the text.
            assert counts[1] >= stats.drafted if ends else counts[1] == stats.drafted
        return results

    firsts = Counter(
        entry.token_id
        for result in compare(frozenset())
        for place, entry in enumerate(result.trace)
        if entry.status == "accepted" and entry.token_id not in result.token_ids[:place]
    )
    end = firsts.most_common(1)[0][0]
    settings = json.loads((folders[0] / "generation_config.json").read_text(encoding="utf-8")) | {"eos_token_id": end}
    (folders[0] / "generation_config.json").write_text(json.dumps(settings), encoding="utf-8")
    stopped = [result for result in compare(frozenset({end})) if result.finish_reason == "stop"]
    assert any(result.trace[-1].status == "accepted" for result in stopped)
    assert any(result.trace[-1].status != "accepted" for result in stopped)


@pytest.mark.thorough
def test_compiling_before_the_clock_starts_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch that is compiled with comes again, and so do the random numbers."""
    target, runs = tiny_target(tmp_path), []
    for place in ("train.draft", "train.loop"):
        monkeypatch.setattr(f"sakiyomi.{place}.compile_layers", lambda *_: None)
    monkeypatch.setattr("sakiyomi.train.draft.compiled_loss", lambda loss, wanted: loss)
    monkeypatch.setattr("sakiyomi.train.loop.compiler_found", lambda: True)
    for compile in (False, True):
        config = draft_config(tmp_path, target, out=str(tmp_path / str(compile)), samples=0, compile=compile)
        train_draft(config)
        runs.append(losses(config.loop.out))
    assert runs[0] == runs[1]

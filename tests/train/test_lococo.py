"""Training of merging convolutions: passes that are those of the cache, what is learnt, and what is refused."""

from __future__ import annotations

import json
import signal
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf

from architectures import VOCAB, model_of, prompt
from sakiyomi import LLM, InputError, SamplingParams, UnsupportedError, embedded
from sakiyomi.cache.policies.merging.convolutions import Convolutions, MergingShape
from sakiyomi.cache.policies.merging.formats import read_merging, write_merging
from sakiyomi.cache.policies.retaining.formats import write_heads
from sakiyomi.cache.policies.retaining.heads import RetainingHeads, RetainingShape
from sakiyomi.cache.policies.retaining.raw import Raw
from sakiyomi.train.answered import TaskRows
from sakiyomi.train.commands import TrainLococo
from sakiyomi.train.compressed import Compressed, policy_of
from sakiyomi.train.lococo import MergingLoss, train_lococo
from toys import character_tokenizer
from train_toys import losses, question_file, stop_at, wide_target

TOKENIZER = character_tokenizer("".join(map(chr, range(0x3041, 0x3041 + VOCAB - 2))))
BUDGET, CHUNK = 24, 16
H2O = "h2o[local=4]"


def lococo_config(folder: Path, target: Path, **changes: Any) -> TrainLococo:
    """Three merged pairs of twelve, and a budget of a few steps."""
    settings: dict[str, Any] = {
        "out": str(folder / "lococo"),
        "target": str(target),
        "data": (str(question_file(folder / "train.jsonl")),),
        "valid": (f"questions={question_file(folder / 'valid.jsonl', 10, 1)}",),
        "steps": 6,
        "scores": "h2o[local=2]",
        "kv_budget": 12,
        "merged": 3,
        "chunk_size": 16,
        "kernel": 5,
        "row_tokens": (96,),
        "step_tokens": 192,
        "eval_rows": 3,
        "threads": 1,
        "device": "cpu",
    }
    return TrainLococo.of(**(settings | changes))


@cache
def convolutions(name: str) -> Convolutions:
    """Of random weights."""
    shapes = Compressed(model_of(name), policy_of(H2O, BUDGET, 5), BUDGET, CHUNK).shapes
    dims = tuple((shape.key_dim, shape.value_dim) for shape in shapes)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Convolutions(MergingShape(dims, tuple(shape.heads for shape in shapes), 5))


def expected(name: str, policy: Any, budget: int, merger: Convolutions | None, tokens: list[int], first: int) -> Any:
    """Log-probabilities of the rows behind the prompt, by passes of training."""
    passes = Compressed(model_of(name), policy, budget, CHUNK)
    head = model_of(name).get_output_embeddings()
    with torch.no_grad(), passes.hooks():
        hidden = torch.cat([rows for _, rows in passes(torch.tensor(tokens), first, merger)])
        logits = head(hidden[first - 1 : -1])
    cap = getattr(model_of(name).config, "final_logit_softcapping", None)
    return (cap * torch.tanh(logits / cap) if cap else logits).log_softmax(-1)


# ---------------------------------------------------------------- passes


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
def test_passes_that_drop_nothing_are_the_models_own(name: str) -> None:
    tokens = prompt(70)
    found = expected(name, policy_of(H2O, BUDGET, 0), 0, None, tokens, 50)
    with torch.no_grad():
        wanted = model_of(name)(torch.tensor([tokens])).logits[0, 49:-1].log_softmax(-1)
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.few(1)
@pytest.mark.parametrize("scores", ["h2o", "locret", "streaming"])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_passes_are_those_of_the_cache(name: str, scores: str, tmp_path: Path) -> None:
    """What a model writes behind a prompt whose pairs were merged at five borders: same tokens, same probabilities."""
    model, merger = model_of(name), convolutions(name)
    write_merging(merger, tmp_path / "merging")
    spec = f"{scores}[local=4]"
    if scores == "locret":
        torch.manual_seed(0)
        shape = RetainingShape(Raw(model).widths, merger.shape.kv_heads, 24)
        write_heads(RetainingHeads(shape), tmp_path / "heads")
        spec = f"locret:{tmp_path / 'heads'}[local=4]"
    cache = f"{spec}+lococo:{tmp_path / 'merging'}"
    llm = LLM((model, TOKENIZER), "none", cache=cache, kv_budget=BUDGET, chunk_size=CHUNK, compile=False)
    tokens = prompt(70)
    (out,) = llm.generate([tokens], SamplingParams(max_new_tokens=30, ignore_eos=True))
    rows = expected(name, policy_of(spec, BUDGET, 5), BUDGET, merger, [*tokens, *out.token_ids], len(tokens))
    assert rows.argmax(-1).tolist() == out.token_ids
    for row, entry in zip(rows, out.trace, strict=True):
        assert float(row.max().exp()) == pytest.approx(entry.target_prob, abs=2e-4)
    dropped = expected(name, policy_of(spec, BUDGET, 0), BUDGET, None, [*tokens, *out.token_ids], len(tokens))
    assert not torch.allclose(rows, dropped, atol=1e-2), "nothing was merged"


def test_the_loss_and_its_gradient() -> None:
    """Of the counted tokens alone, against a loss over all rows at once; nothing reaches the target."""
    model, merger = model_of("llama"), convolutions("llama")
    config = TrainLococo.of(target="x", out="x", data=("x",), chunk_size=CHUNK, text_weight=0.5)
    loss = MergingLoss(config, Compressed(model, policy_of(H2O, BUDGET, 5), BUDGET, CHUNK), merger)
    ids, first = np.array(prompt(70)), 50
    marked = ids.copy()
    marked[55:60] = ~marked[55:60]
    batch = [(torch.from_numpy(marked), first)]
    weights = torch.ones(70)
    weights[: CHUNK + 1], weights[CHUNK + 1 : first], weights[55:60] = 0.0, 0.5, 0.0
    model.requires_grad_(False).zero_grad()  # the model is shared with other tests
    try:
        with loss.passes.hooks():
            found = loss(batch)
            mine = [parameter.grad.clone() for parameter in merger.parameters() if parameter.grad is not None]
            merger.zero_grad()
            hidden = torch.cat([rows for _, rows in loss.passes(torch.from_numpy(ids), first, merger)])
            logs = model.get_output_embeddings()(hidden[:-1]).log_softmax(-1)
            nats = -logs.gather(1, torch.from_numpy(ids[1:])[:, None])[:, 0]
            wanted = (nats * weights[1:]).sum() / weights.sum()
            wanted.backward()
        assert all(parameter.grad is None for parameter in model.parameters())
    finally:
        model.requires_grad_(True)
    assert float(found) == pytest.approx(float(wanted.detach()), rel=1e-5)
    assert len(mine) == len(list(merger.parameters()))
    for own, parameter in zip(mine, merger.parameters(), strict=True):
        torch.testing.assert_close(own, parameter.grad, atol=1e-6, rtol=1e-4)
        assert own.abs().max() > 0
    merger.zero_grad()


def test_further_questions_are_marked() -> None:
    """What is asked nobody can know; what is answered counts."""
    tokenizer = hf.AutoTokenizer.from_pretrained(embedded("retriever"))
    plain, marked = (
        TaskRows("multikey", tokenizer, False, marked=marked).make(np.random.default_rng(0), 900)
        for marked in (False, True)
    )
    assert plain.prompt.tolist() == marked.prompt.tolist()
    assert np.where(marked.answer < 0, ~marked.answer, marked.answer).tolist() == plain.answer.tolist()
    counted = tokenizer.decode(marked.answer[marked.answer >= 0])
    assert "Question" in tokenizer.decode(plain.answer) and "Question" not in counted
    assert counted.count(".") == tokenizer.decode(plain.answer).count("Question") + 1


# ---------------------------------------------------------------- a run


@pytest.mark.thorough
def test_from_end_to_end(tmp_path: Path, pictures: None) -> None:
    """The loss falls, the target stays as it is, and what is left behind can be used at once."""
    target = wide_target(tmp_path)
    before = {path.name: path.read_bytes() for path in target.iterdir()}
    config = lococo_config(tmp_path, target, steps=30, lr=0.02, text_weight=1.0)
    summary = train_lococo(config, "the command")
    assert summary["finished"]
    assert before == {path.name: path.read_bytes() for path in target.iterdir()}
    found = read_merging(summary["model"])
    assert found.convolutions.shape == MergingShape(((16, 16),) * 2, (1, 1), 3, 5)
    assert (found.base, found.recipe["scores"], found.recipe["kv_budget"]) == (str(target), "h2o[local=2]", 12)
    assert found.fingerprint.keys() == {"tokenizer", "weights"}
    card = (Path(summary["model"]) / "README.md").read_text(encoding="utf-8")
    for words in ("Convolutions (LoCoCo)", "the command", "dropped", "into 3 pairs of each head"):
        assert words in card, words
    assert {"loss.png", "card.json"} <= {path.name for path in Path(summary["model"]).iterdir()}
    measures = summary["held_out"]["questions"]
    assert measures.keys() == {"nats_per_token", "dropped", "full"}
    idle = train_lococo(lococo_config(tmp_path, target, out=str(tmp_path / "idle"), steps=1, lr=0.0, text_weight=1.0))
    assert measures["nats_per_token"] < idle["held_out"]["questions"]["nats_per_token"] - 0.005
    assert idle["held_out"]["questions"]["full"] == measures["full"]
    llm = LLM(str(target), "none", cache=f"lococo:{summary['model']}", kv_budget=30, chunk_size=20, compile=False)
    text = "Once upon a time Tom had a ball. One day Mia saw the cat and said, Look at my boat! " * 2
    assert llm.generate(text, SamplingParams(max_new_tokens=8)).token_ids


@pytest.mark.thorough
def test_a_resumed_run_ends_as_an_uninterrupted_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = wide_target(tmp_path)
    train_lococo(lococo_config(tmp_path, target, out=str(tmp_path / "whole")))
    with monkeypatch.context() as patch:
        stop_at(patch, 3, signal.SIGINT)
        stopped = train_lococo(lococo_config(tmp_path, target, out=str(tmp_path / "parts")))
    assert not stopped["finished"] and stopped["step"] == 4
    summary = train_lococo(lococo_config(tmp_path, target, out=str(tmp_path / "parts"), resume=True))
    assert summary["finished"]
    assert losses(str(tmp_path / "parts")) == losses(str(tmp_path / "whole"))
    one, other = (read_merging(tmp_path / name / "model").convolutions for name in ("whole", "parts"))
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
    assert json.loads((tmp_path / "whole/model/card.json").read_text(encoding="utf-8"))["tokens"] == summary["tokens"]
    with pytest.raises(InputError, match="merged is 4"):
        train_lococo(lococo_config(tmp_path, target, out=str(tmp_path / "parts"), merged=4, resume=True))


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data": ()}, "data is .* a file of prompts with answers, or --tasks"),
        ({"kernel": 4}, "kernel is 4, expected an odd number"),
        ({"merged": 12}, "merged is 12, expected less than kv_budget 12"),
        ({"chunk_size": 96}, "chunk_size is 96, expected less than the shortest row, 96"),
        ({"precision": "fp16"}, "precision is 'fp16'"),
    ],
)
def test_settings_out_of_range(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=words):
        lococo_config(tmp_path, tmp_path, **changes)


@pytest.mark.parametrize(
    ("scores", "words"),
    [
        ("full", "scores is 'full'; expected a policy"),
        ("infllm", "scores is 'infllm'"),
        ("sirllm", "scores is 'sirllm'"),
        ("expected", "scores is 'expected'"),
        ("h2o[local=2,positions=reassigned]", "positions are kept in training"),
        ("h2o[local=10]", "h2o keeps 13 in any case, 3 merged ones among them"),
        ("nothing", "expected full, or at most one policy"),
    ],
)
def test_scores_that_cannot_be_trained_with(scores: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=words):
        train_lococo(lococo_config(tmp_path, tmp_path / "none", scores=scores))


def test_a_target_with_its_own_attention_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="FalconForCausalLM keeps its own attention"):
        Compressed(model_of("falcon"), policy_of(H2O, BUDGET, 5), BUDGET, CHUNK)

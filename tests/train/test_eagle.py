"""Training of EAGLE heads: what is learnt, what a run leaves behind, and what it refuses."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from eagle_toys import rows
from sakiyomi import LLM, InputError, SamplingParams
from sakiyomi.core.outputs import Stats
from sakiyomi.drafters.eagle_heads.formats import EagleFile, read_eagle
from sakiyomi.drafters.eagle_heads.module import EagleOptions
from sakiyomi.model_executor.loading import load_model
from sakiyomi.train.acceptance import CHAIN, DEPTH, Continuations, measured
from sakiyomi.train.commands import TrainEagle
from sakiyomi.train.data import TextSpec
from sakiyomi.train.draft_vocab import frequent
from sakiyomi.train.eagle import UnrolledHead, new_head, train_eagle
from sakiyomi.train.half import HalfCopy
from sakiyomi.train.head_recipe import rank_continuations
from sakiyomi.train.hidden import Lessons, TargetStates, layer_config
from sakiyomi.train.kept_rows import KeptRows
from sakiyomi.train.losses import soft_loss
from sakiyomi.train.unrolled_attention import attend
from toys import tiny_llama
from train_toys import draw_nothing, losses, stop_at, story_file, tiny_gpt2, tiny_target


def eagle_config(folder: Path, target: Path, **changes: Any) -> TrainEagle:
    """Three steps on features of the head's own, and a budget of a few steps of the optimizer."""
    text = story_file(folder / "train.jsonl")
    valid = story_file(folder / "valid.jsonl", count=6, seed=1)
    settings: dict[str, Any] = {
        "out": str(folder / "eagle"),
        "target": str(target),
        "text": (str(text),),
        "valid": (f"stories={valid}",),
        "unroll": 3,
        "tokens": 8 * 64,
        "row_tokens": (32,),
        "step_tokens": 64,
        "warmup_steps": 2,
        "eval_prompts": 2,
        "samples": 0,
        "speed": False,
        "compile": False,
        "threads": 1,
    }
    return TrainEagle.of(**(settings | changes))


def some_head(model: Any, tokens: Tensor | None = None) -> tuple[UnrolledHead, EagleFile]:
    """A head with random weights, and the same as a file."""
    torch.manual_seed(0)
    layers = int(model.config.num_hidden_layers)
    options = EagleOptions(layers=(0, layers - 2, layers - 1), target_size=model.config.hidden_size)
    config = layer_config(model, intermediate=40)
    head = new_head(model, config, options, tokens)
    with torch.no_grad():
        for weight in head.parameters():
            if weight.requires_grad:
                weight.normal_(0, 0.3).add_(weight.dim() == 1)
    named = {f"layers.0.{name}": weight for name, weight in head.layers[1].named_parameters()}
    outer = {"fc.weight": head.layers[0].weight, "norm.weight": head.norm.weight, "lm_head.weight": head.head.weight}
    tensors = {name: weight.detach() for name, weight in {**named, **outer}.items()}
    return head, EagleFile(config, options, tensors, tokens, "some")


# ---------------------------------------------------------------- what is learnt


@torch.no_grad()
def test_a_step_is_what_drafting_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row by row: tokens with the target's features, and behind them so many draft tokens with the head's own."""
    model = tiny_llama()
    head, file = some_head(model)
    ids = torch.randint(0, 320, (1, 14), generator=torch.Generator().manual_seed(1))
    joined, _ = TargetStates(model, file.options.layers)(ids)
    features = joined[0] @ file.tensors["fc.weight"].T
    embedding = model.get_input_embeddings().weight

    def furthest() -> float:
        worst = 0.0
        for step, hidden in enumerate(head(ids[:, 1:], joined[:, :-1], 4)):
            logits = head.head(hidden)[0]
            for row in range(step, 13):
                known, own = ids[0, 1 : row + 2 - step].tolist(), features[: row + 1 - step]
                found, fed = rows(file, embedding, known, own)
                for token in ids[0, row + 2 - step : row + 2].tolist():
                    known, own = [*known, token], torch.cat([own, fed[-1:]])
                    found, fed = rows(file, embedding, known, own)
                worst = max(worst, float((logits[row] - found[-1]).abs().max()))
        return worst

    assert furthest() < 1e-4
    with monkeypatch.context() as patch:  # tokens that the head has drafted itself, read as the target's
        patch.setattr("sakiyomi.train.head_recipe.attend", lambda q, k, v, keys, values: attend(q, k, v, [], []))
        assert furthest() > 1e-2
    with monkeypatch.context() as patch:  # each token with its own feature
        patch.setattr("sakiyomi.train.eagle.behind", lambda rows, count: rows)
        assert furthest() > 1e-2


def test_gradients_of_attention_in_steps_are_the_slow_ones() -> None:
    """Against one that gathers, for each row of each step, the keys and values that it sees."""
    torch.manual_seed(0)
    heads, kv_heads, length, width, steps = 4, 2, 7, 3, 4
    shapes = [(2, heads, length, width), (2, kv_heads, length, width), (2, kv_heads, length, width)]
    parts = [[torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes] for _ in range(steps)]
    keys: list[Tensor] = []
    values: list[Tensor] = []
    found = [attend(q, k, v, keys, values)[:, :, step:] for step, (q, k, v) in enumerate(parts)]
    expected = []
    for step in range(steps):
        rows = []
        for row in range(step, length):
            sources = [(0, column) for column in range(row - step + 1)]
            sources += [(own, row - step + own) for own in range(1, step + 1)]
            seen = [torch.stack([parts[at][i][:, :, column] for at, column in sources], 2) for i in (1, 2)]
            k, v = (each.repeat_interleave(heads // kv_heads, 1) for each in seen)
            q = parts[step][0][:, :, row, None]
            rows.append(torch.softmax(q @ k.transpose(2, 3), -1) @ v)
        expected.append(torch.cat(rows, 2))
    flat = [part for each in parts for part in each]
    grads = [
        torch.autograd.grad(sum(mixed.sin().sum() for mixed in some), flat, allow_unused=True)
        for some in (found, expected)
    ]
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other)
    for one, other in zip(*grads, strict=True):
        assert torch.allclose(one, torch.zeros_like(one) if other is None else other)


def _slow(kind: str, features: Tensor, head: Tensor, wanted: Tensor, weights: Tensor) -> Tensor:
    probs = torch.softmax(features @ head.T, 1)
    each = {
        "ce": -(wanted * probs.log()).sum(1),
        "tv": 0.5 * (probs - wanted).abs().sum(1),
        "lk": -torch.minimum(probs, wanted).sum(1).log(),
    }[kind]
    return (each * weights).sum() / weights.sum()


@pytest.mark.parametrize("kind", ["ce", "tv", "lk"])
def test_the_losses_are_the_slow_ones(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    features, head = torch.randn(50, 8, requires_grad=True), torch.randn(30, 8, requires_grad=True)
    wanted, weights = torch.softmax(2 * torch.randn(50, 30), 1), torch.rand(50).round()
    expected = _slow(kind, features, head, wanted, weights)
    slow = torch.autograd.grad(3 * expected, (features, head))
    for size in (1 << 20, 60):
        monkeypatch.setattr("sakiyomi.train.losses.LOGITS_AT_ONCE", size)
        loss = soft_loss(features, head, wanted, weights, kind)
        assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
        for one, other in zip(torch.autograd.grad(3 * loss, (features, head)), slow, strict=True):
            assert torch.allclose(one, other, atol=1e-6)


@pytest.mark.parametrize("kind", ["ce", "tv", "lk"])
def test_a_loss_with_few_labels_is_that_with_all(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What has no label has probability 0; rows that do not count are left out, wherever they stand."""
    torch.manual_seed(0)
    features, head = torch.randn(50, 8, requires_grad=True), torch.randn(30, 8, requires_grad=True)
    few, weights = torch.softmax(2 * torch.randn(50, 6), 1), torch.rand(50).round()
    tokens = torch.stack([torch.randperm(30)[:6] for _ in range(50)])
    wide = torch.zeros(50, 30).scatter_(1, tokens, few)
    whole = soft_loss(features, head, wide, weights, kind)
    monkeypatch.setattr("sakiyomi.train.losses.LOGITS_AT_ONCE", 60)
    loss = soft_loss(features, head, few, weights, kind, tokens=tokens)
    assert loss.item() == pytest.approx(whole.item(), rel=1e-6)
    slow = torch.autograd.grad(whole, (features, head))
    for one, other in zip(torch.autograd.grad(loss, (features, head)), slow, strict=True):
        assert torch.allclose(one, other, atol=1e-6)


@pytest.mark.parametrize("kind", ["ce", "tv"])
def test_a_loss_with_a_part_added_beside_a_frozen_head(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with one head of both parts, at places that come more than once; the frozen part has no gradient."""
    torch.manual_seed(0)
    features, more = torch.randn(50, 8, requires_grad=True), torch.randn(50, 3, requires_grad=True)
    head, table = torch.randn(30, 8), torch.randn(30, 3, requires_grad=True)
    wanted, weights, places = torch.softmax(2 * torch.randn(9, 30), 1), torch.rand(50), torch.arange(50) % 9
    expected = _slow(kind, torch.cat([features, more], 1), torch.cat([head, table], 1), wanted[places], weights)
    slow = torch.autograd.grad(expected, (features, more, table))
    monkeypatch.setattr("sakiyomi.train.losses.LOGITS_AT_ONCE", 210)
    loss = soft_loss(features, head, wanted, weights, kind, places=places, added=(more, table))
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    for one, other in zip(torch.autograd.grad(loss, (features, more, table)), slow, strict=True):
        assert torch.allclose(one, other, atol=1e-6)


@torch.no_grad()
def test_what_a_head_reads_and_begins_with() -> None:
    model = tiny_llama()
    options = EagleOptions(layers=(0, 0, 1), target_size=model.config.hidden_size)
    tokens = torch.tensor([3, 9, 200])
    head = new_head(model, layer_config(model), options, tokens)
    ids, width = torch.arange(1, 9)[None], model.config.hidden_size
    joined, last = TargetStates(model, options.layers)(ids)
    found = model(input_ids=ids, output_hidden_states=True)
    assert torch.allclose(joined[..., :width], found.hidden_states[1])
    assert torch.allclose(last, found.hidden_states[-1])
    assert torch.equal(head.head.weight, model.get_output_embeddings().weight[tokens])
    assert torch.equal(head.norm.weight, model.model.norm.weight)
    places, probs, known = TargetStates(model, options.layers).likeliest(last[0], tokens, 9)
    wanted = found.logits[0, :, tokens].softmax(-1).sort(descending=True)
    assert torch.allclose(probs.float(), wanted.values, atol=1e-3) and torch.equal(places.long(), wanted.indices)
    assert known.tolist() == [token in tokens.tolist() for token in found.logits[0].argmax(-1).tolist()]


def test_a_later_epoch_needs_no_pass_of_the_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read again is what was computed; a row beyond the limit is computed each time.

    Passes are filled up to four rows, but not beyond those of a step.
    """
    states = TargetStates(tiny_llama(), (0, 1))
    passes: list[int] = []
    monkeypatch.setattr(
        TargetStates,
        "__call__",
        lambda self, ids, call=TargetStates.__call__: passes.append(len(ids)) or call(self, ids),
    )
    ids = torch.randint(0, 320, (5, 16))
    plain = Lessons(states, None, 8, KeptRows(tmp_path, 0))(ids)
    row = 16 * (2 * 32 * 4 + 8 * (4 + 2) + 1)
    lessons = Lessons(states, None, 8, KeptRows(tmp_path, 3 * row))
    passes.clear()
    for some, computed in ([0, 1, 2], [3]), ([2, 0, 0], []), ([3, 1], [2]), ([4], [1]), ([3, 4, 0, 1, 2], [4]):
        passes.clear()
        found = lessons(ids[some])
        assert passes == computed
        for name in ("joined", "places", "probs", "counts"):
            assert torch.equal(getattr(found, name), getattr(plain, name)[some])
    lessons.close()
    assert not list(tmp_path.iterdir()), "the file goes with the process"


def test_a_copy_in_bfloat16_learns_in_place_of_its_module() -> None:
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2).bfloat16().requires_grad_(False))
    half = HalfCopy(module)
    assert half.module[1].weight.data_ptr() == module[1].weight.data_ptr(), "what is frozen is shared"
    with torch.no_grad():
        module[0].weight.copy_(torch.eye(4))
    half.take()
    assert torch.equal(half.module[0].weight, torch.eye(4).bfloat16())
    for _ in range(2):
        half.module(torch.ones(1, 4).bfloat16()).sum().backward()
        half.give()
    grad = module[0].weight.grad
    assert grad is not None and grad.dtype == torch.float32
    assert torch.allclose(grad, 2 * module[1].weight.float().sum(0)[:, None].expand(4, 4), atol=1e-2)


def test_norms_of_a_copy_are_those_of_the_module() -> None:
    """Values and gradients, within what bfloat16 rounds."""
    torch.manual_seed(0)
    norm = LlamaRMSNorm(32, 1e-5)
    torch.nn.init.normal_(norm.weight, 1, 0.3)
    half = HalfCopy(torch.nn.Sequential(norm))
    half.take()
    states = torch.randn(2, 50, 32)
    grad = torch.randn(2, 50, 32)
    found = []
    for module, dtype in ((norm, torch.float32), (half.module, torch.bfloat16)):
        own = states.clone().to(dtype).requires_grad_()
        mixed = module(own)
        mixed.backward(grad.to(dtype))
        found.append((mixed, own.grad, next(module.parameters()).grad))
    for one, other in zip(*found, strict=True):
        assert one is not None and other is not None and other.dtype == torch.bfloat16
        assert (one - other).norm() < 0.01 * one.norm()


def test_tokens_to_propose_are_those_of_what_is_learnt() -> None:
    """By the shares of the files, and not by their sizes; prompts (marked) do not count."""
    few = [np.array([~7, ~7, ~7, 1, 2])]
    many = [np.array([3] * 90 + [4] * 10)]
    sources = [TextSpec(Path("a"), 1, 0.9), TextSpec(Path("b"), 1, 0.1)]
    assert frequent(2, sources, [few, many], 10).tolist() == [1, 2]
    assert frequent(3, sources, [few, many], 10).tolist() == [1, 2, 3]
    assert frequent(0, sources, [few, many], 10) is None and frequent(-1, sources, [few, many], 10) is None
    assert len(frequent(-1, sources, [few, many], 40_000)) == 8192


@pytest.mark.thorough
@pytest.mark.parametrize("some", [False, True])
def test_tau_from_ranks_is_that_of_the_engine(some: bool, tmp_path: Path) -> None:
    """Rounds counted along the target's text are those of greedy chains."""
    config = eagle_config(tmp_path, tiny_target(tmp_path), draft_vocab=200 if some else 0, tokens=30 * 64)
    folder = Path(train_eagle(config)["model"])
    llm = LLM(config.target, f"eagle:{folder}", compile=False, strict=True, dtype="float32")
    torch.manual_seed(0)
    prompts = [list(range(5, 25)), list(range(40, 60))]
    params = SamplingParams(max_new_tokens=40, gamma=CHAIN, tree="chain", ignore_eos=True)
    done = llm.generate(prompts, params)
    texts = Continuations(prompts, [out.token_ids for out in done], [], 40, frozenset())
    model = load_model(config.target, dtype="float32", device="cpu").model
    file = read_eagle(folder, 2)
    head = new_head(model, file.config, file.options, file.tokens)
    weights = {f"layers.1.{n.removeprefix('layers.0.')}": t for n, t in file.tensors.items() if n.startswith("layers")}
    weights |= {"layers.0.weight": file.tensors["fc.weight"], "norm.weight": file.tensors["norm.weight"]}
    head.load_state_dict(weights | {"head.weight": file.tensors["lm_head.weight"]}, strict=False)
    ranks = rank_continuations(head, TargetStates(model, file.options.layers), file.tokens, texts)
    found = measured(ranks)
    # The last rounds of a text draft no further than its length limit, which changes no round's tokens.
    assert found[f"tau_chain_{CHAIN}"] == pytest.approx(Stats.total(out.stats for out in done).tau)
    assert found[f"position_{DEPTH}"] <= 1


# ---------------------------------------------------------------- a run


@pytest.mark.thorough
@pytest.mark.parametrize("loss", ["ce", "tv", "lk"])
def test_from_end_to_end(loss: str, tmp_path: Path, pictures: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head gets better, the target stays as it is, and what is left behind can be used at once. Once with speeds
    and pictures.
    """
    if loss != "ce":
        draw_nothing(monkeypatch)
    target = tiny_target(tmp_path)
    before = {path.name: path.read_bytes() for path in target.iterdir()}
    more = {"draft_vocab": 150, "samples": 4, "sample_batch": 4, "sample_tokens": 8} if loss == "ce" else {}
    config = eagle_config(tmp_path, target, loss=loss, tokens=40 * 64, speed=loss == "ce", **more)
    summary = train_eagle(config, "the command")
    assert summary["finished"]
    assert before == {path.name: path.read_bytes() for path in target.iterdir()}
    folder = Path(summary["model"])
    card = (folder / "README.md").read_text(encoding="utf-8")
    for words in ("An EAGLE-3 head", "the command", "position 7", f"--draft eagle:{folder}"):
        assert words in card, words
    assert ("speedup greedy" in card) == (loss == "ce")
    steps = losses(config.loop.out)
    assert sum(steps[-8:]) < sum(steps[:8])
    found = read_eagle(folder, 2)
    assert (found.tokens is None) == (loss != "ce")
    assert json.loads((folder / "config.json").read_text(encoding="utf-8"))["eagle_aux_hidden_state_layer_ids"] == [
        2,
        1,
        1,
    ]
    texts = [
        LLM(str(target), draft, compile=False, strict=True, dtype="float32")
        .generate("Once upon a time", SamplingParams(max_new_tokens=20, gamma=2))
        .token_ids
        for draft in ("none", str(folder))
    ]
    assert texts[0] == texts[1]


@pytest.mark.thorough
def test_a_target_of_another_architecture(tmp_path: Path) -> None:
    summary = train_eagle(eagle_config(tmp_path, tiny_gpt2(tmp_path), own_head=True))
    assert summary["held_out"]["stories"]["tokens"] > 0


@pytest.mark.thorough
def test_a_resumed_run_ends_as_an_uninterrupted_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target(tmp_path)
    train_eagle(eagle_config(tmp_path, target, out=str(tmp_path / "whole")))
    parts = eagle_config(tmp_path, target, out=str(tmp_path / "parts"))
    with monkeypatch.context() as patch:
        stop_at(patch, 3, signal.SIGINT)
        assert not train_eagle(parts)["finished"]
    assert train_eagle(parts.changed(resume=True))["finished"]
    assert losses(str(tmp_path / "parts")) == losses(str(tmp_path / "whole"))
    logs = [(tmp_path / name / "steps.jsonl").read_text(encoding="utf-8").splitlines() for name in ("whole", "parts")]
    assert {json.loads(line)["step"]: line for line in logs[1]} == dict(enumerate(logs[0]))
    one, other = (read_eagle(tmp_path / name / "model", 2).tensors for name in ("whole", "parts"))
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"reads": (0, 5)}, r"reads is \(0, 5\).*2 layers"),
        ({"draft_vocab": 5000}, "draft_vocab is 5000"),
        ({"kv_heads": 3}, "kv_heads is 3"),
        ({"loss": "l2"}, "loss is 'l2'"),
        ({"unroll": 40, "row_tokens": (32,)}, "unroll"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(wrong: dict[str, Any], said: str, tmp_path: Path) -> None:
    target = tiny_target(tmp_path)
    with pytest.raises(InputError, match=said):
        train_eagle(eagle_config(tmp_path, target, **wrong))

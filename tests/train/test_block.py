"""Training of block drafters: what a block sees, what a run leaves behind, and what it refuses."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import block_toys
from sakiyomi import LLM, InputError, SamplingParams
from sakiyomi.core.outputs import Stats
from sakiyomi.drafters.block_heads.formats import BlockFile, BlockOptions, read_block, usual_layers
from sakiyomi.model_executor.loading import load_model
from sakiyomi.train.acceptance import CHAIN, Continuations, measured
from sakiyomi.train.block import BlockHead, new_block, rank_blocks, train_block
from sakiyomi.train.commands import TrainBlock
from sakiyomi.train.config import TextOptions
from sakiyomi.train.hidden import TargetStates, layer_config
from toys import tiny_llama
from train_toys import draw_nothing, losses, stop_at, story_file, tiny_target


def block_config(folder: Path, target: Path, **changes: Any) -> TrainBlock:
    """Four guesses a pass, and a budget of a few steps of the optimizer."""
    text = story_file(folder / "train.jsonl")
    valid = story_file(folder / "valid.jsonl", count=6, seed=1)
    settings: dict[str, Any] = {
        "out": str(folder / "block"),
        "target": str(target),
        "text": (str(text),),
        "valid": (f"stories={valid}",),
        "guesses": 4,
        "anchors": 8,
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
    return TrainBlock.of(**(settings | changes))


def some_block(model: Any, **options: Any) -> BlockHead:
    """A drafter with random weights."""
    torch.manual_seed(0)
    layers = int(model.config.num_hidden_layers)
    named = BlockOptions(**({"layers": (0, layers - 1), "size": 4, "mask": 9} | options))
    sizes = layer_config(model, intermediate=40) | {"model_type": "qwen3", "num_hidden_layers": 2}
    head = new_block(model, sizes | {"attention_bias": False}, named)
    with torch.no_grad():
        for weight in head.parameters():
            if weight.requires_grad:
                weight.normal_(0, 0.3).add_(weight.dim() == 1)
    return head


def filled(model: Any, file: BlockFile) -> BlockHead:
    """The drafter in a file, as it learns."""
    markov = file.tensors.get("markov_head.markov_w1.weight")
    head = new_block(model, file.config, file.options, 0 if markov is None else markov.shape[1], file.tokens)
    named = {n: t for n, t in file.tensors.items() if not n.startswith(("fc.", "layers."))}
    named |= {f"layers.{int(n[7]) + 1}{n[8:]}": t for n, t in file.tensors.items() if n.startswith("layers.")}
    named |= {"head.weight": named.pop("lm_head.weight")} if "lm_head.weight" in named else {}
    left = head.load_state_dict(named | {"layers.0.weight": file.tensors["fc.weight"]}, strict=False)
    assert {name.partition(".")[0] for name in left.missing_keys} == {"embed"} | (
        {"head"} if file.tokens is None else set()
    )
    return head


# ---------------------------------------------------------------- what is learnt


@pytest.mark.few(1)
@torch.no_grad()
@pytest.mark.parametrize(
    "options", [{}, {"anchored": True}, {"causal": True}, {"anchored": True, "markov": "gated"}], ids=str
)
def test_guesses_are_those_of_the_method(options: dict[str, Any]) -> None:
    """Behind every place at once, as a plain computation behind one; wrong ones are noticed."""
    model = tiny_llama(layers=8)  # the last one is read behind a norm by the plain computation
    file = block_toys.new_block(model, **options)
    head = filled(model, file)
    ids = torch.randint(0, 320, (1, 16), generator=torch.Generator().manual_seed(2))
    joined, _ = TargetStates(model, file.options.layers)(ids)
    hidden, before, found = head(ids, joined, torch.arange(2, 16))[0], ids[0, 2:], []
    for ahead in range(4):
        before = head.logits(hidden[:, ahead], before).argmax(-1)
        found.append(before.tolist())
    found = [list(guesses) for guesses in zip(*found, strict=True)]

    def expected(**wrong: Any) -> list[list[int]]:
        return [block_toys.guessed(model, file, ids[0, : 3 + i].tolist(), 4, **wrong) for i in range(len(found))]

    assert found == expected()
    wrongs = [{"off": -1}, {"turned": True}, {"mixed": True}, {"causal": not file.options.causal}]
    for wrong in [*wrongs, {"markov": ""}] if file.options.markov else wrongs:
        assert found != expected(**wrong)


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, {"anchored": True}, {"causal": True}], ids=str)
def test_blocks_of_a_row_do_not_see_each_other(options: dict[str, Any]) -> None:
    """Each is what it is alone, behind a text that ends there; and neither later states nor tokens matter."""
    model = tiny_llama()
    head = some_block(model, **options)
    ids = torch.randint(10, 320, (2, 14), generator=torch.Generator().manual_seed(1))
    joined, _ = TargetStates(model, head.options.layers)(ids)
    anchors = torch.tensor([1, 4, 5, 13])
    together = head(ids, joined, anchors)
    assert together.shape[:3] == (2, 4, head.options.guesses)
    for place, anchor in enumerate(anchors.tolist()):
        cut, states = ids[:, : anchor + 1], joined[:, : anchor + 1].clone()
        states[:, anchor:] = 100.0  # not known yet
        alone = head(cut, states, torch.tensor([anchor]))
        assert torch.allclose(together[:, place], alone[:, 0], atol=1e-5)
    states = joined.clone()
    states[:, 3] += 1.0
    other = head(ids, states, anchors)
    assert torch.allclose(other[:, 0], together[:, 0], atol=1e-5)
    assert not torch.allclose(other[:, 1], together[:, 1], atol=1e-3)


@torch.no_grad()
def test_masks_see_what_is_behind_them_unless_the_block_is_causal() -> None:
    model = tiny_llama()
    ids = torch.arange(10, 22)[None]
    found = {}
    for causal in (False, True):
        for size in (4, 6):
            head = some_block(model, causal=causal, size=size)
            joined, _ = TargetStates(model, head.options.layers)(ids)
            found[causal, size] = head(ids, joined, torch.tensor([7]))[:, :, :3]
    assert torch.allclose(found[True, 4], found[True, 6], atol=1e-5)
    assert not torch.allclose(found[False, 4], found[False, 6], atol=1e-3)


def test_layers_that_are_read_are_those_of_the_method() -> None:
    """1, 9, 17, 25 and 33 of 36, as in the published drafters of Qwen3-8B."""
    assert usual_layers(36) == (1, 9, 17, 25, 33)
    assert usual_layers(12) == (1, 3, 5, 7, 9)


# ---------------------------------------------------------------- a run


@pytest.mark.thorough
@pytest.mark.parametrize(
    "options",
    [{"markov": 5, "draft_vocab": 150}, {"anchored": True, "causal": True, "layers": 1, "markov": 6}, {}],
    ids=str,
)
def test_from_end_to_end(
    options: dict[str, Any], tmp_path: Path, pictures: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gets better; what is written is what was measured; the engine counts the same tau, and drafts exactly. Once
    with speeds and pictures.
    """
    if options:
        draw_nothing(monkeypatch)
    target = tiny_target(tmp_path)
    before = {path.name: path.read_bytes() for path in target.iterdir()}
    config = block_config(tmp_path, target, tokens=40 * 64, speed=not options, **options)
    summary = train_block(config, "the command")
    assert before == {path.name: path.read_bytes() for path in target.iterdir()}
    steps = losses(config.loop.out)
    assert sum(steps[-8:]) < sum(steps[:8])
    folder = Path(summary["model"])
    card = (folder / "README.md").read_text(encoding="utf-8")
    for words in ("A block drafter", "the command", "position 4", f"--draft block:{folder}"):
        assert words in card, words
    assert ("speedup greedy" in card) == (not options)
    llm = LLM(config.target, str(folder), compile=False, strict=True, dtype="float32")
    prompts = [list(range(5, 25)), list(range(40, 60))]
    params = SamplingParams(max_new_tokens=40, gamma=CHAIN, tree="chain", ignore_eos=True)
    done = llm.generate(prompts, params)
    plain = LLM(config.target, "none", compile=False, dtype="float32").generate(prompts, params)
    assert [out.token_ids for out in done] == [out.token_ids for out in plain]
    model = load_model(config.target, dtype="float32", device="cpu").model
    file = read_block(folder, 2)
    texts = Continuations(prompts, [out.token_ids for out in done], [], 40, frozenset())
    assert (file.tokens is None) == ("draft_vocab" not in options)
    ranks = rank_blocks(filled(model, file), TargetStates(model, file.options.layers), file.tokens, texts)
    found = measured(ranks)
    assert found[f"tau_chain_{CHAIN}"] == pytest.approx(Stats.total(out.stats for out in done).tau)


@pytest.mark.parametrize("options", [{}, {"anchored": True, "causal": True, "markov": 5}], ids=str)
def test_a_cut_vocabulary(options: dict[str, Any], tmp_path: Path) -> None:
    """Only the kept tokens are drafted, the text stays the target's, and other tools get the same drafter."""
    target = tiny_target(tmp_path)
    summary = train_block(block_config(tmp_path, target, draft_vocab=40, **options))
    folder = Path(summary["model"])
    assert "40 of its tokens are proposed" in summary["about"]
    file = read_block(folder, 2)
    assert file.tokens is not None and len(file.tokens) == len(file.tensors["lm_head.weight"]) == 40
    model = load_model(str(target), dtype="float32", device="cpu")
    rows = model.model.get_output_embeddings().weight[file.tokens]
    assert torch.equal(file.tensors["lm_head.weight"], rows.bfloat16())
    prompts = [list(range(5, 25)), list(range(40, 60))]
    llm = LLM(str(target), str(folder), compile=False, strict=True, dtype="float32")
    plain = LLM(str(target), "none", compile=False, dtype="float32")
    sizes: list[dict[str, Any]] = [{"tree": "chain"}, {"tree": "best-first", "nodes": 8}]
    for size in sizes:
        for temperature in (0.0, 1.0):
            params = SamplingParams(
                max_new_tokens=24, gamma=4, temperature=temperature, seed=3, ignore_eos=True, **size
            )
            done = llm.generate(prompts, params, rounds_trace=True)
            drafted = {node for out in done for entry in out.rounds_trace or () for node in entry.tokens}
            assert drafted and drafted <= set(file.tokens.tolist())
            if not temperature:
                assert [out.token_ids for out in done] == [out.token_ids for out in plain.generate(prompts, params)]


@pytest.mark.parametrize(("multiplies", "dtype"), [(True, torch.bfloat16), (False, torch.float32)], ids=str)
def test_the_target_is_read_in_what_the_processor_multiplies(
    multiplies: bool, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def states(target: Any, layers: Any) -> None:
        raise InputError(str(target.dtype))

    monkeypatch.setattr("sakiyomi.train.config.multiplies_bf16", lambda: multiplies)
    monkeypatch.setattr("sakiyomi.train.head_recipe.TargetStates", states)
    with pytest.raises(InputError, match=str(dtype)):
        train_block(block_config(tmp_path, tiny_target(tmp_path)))


@pytest.mark.parametrize(("flags", "multiplies"), [("avx2", False), ("avx512f avx512_bf16", True), ("", False)])
def test_processors_that_multiply_bfloat16(flags: str, multiplies: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sakiyomi.kernels.variants.features", lambda: frozenset(flags.split()))
    assert TextOptions().passes == ("bf16" if multiplies else "no")
    assert TextOptions(precision="bf16").passes == "bf16"


@pytest.mark.thorough
def test_a_resumed_run_ends_as_an_uninterrupted_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sakiyomi.train.head_recipe.worth", lambda *_: {})
    target = tiny_target(tmp_path)
    train_block(block_config(tmp_path, target, out=str(tmp_path / "whole")))
    parts = block_config(tmp_path, target, out=str(tmp_path / "parts"))
    with monkeypatch.context() as patch:
        stop_at(patch, 3, signal.SIGINT)
        assert not train_block(parts)["finished"]
    assert train_block(parts.changed(resume=True))["finished"]
    assert losses(str(tmp_path / "parts")) == losses(str(tmp_path / "whole"))
    logs = [(tmp_path / name / "steps.jsonl").read_text(encoding="utf-8").splitlines() for name in ("whole", "parts")]
    assert {json.loads(line)["step"]: line for line in logs[1]} == dict(enumerate(logs[0]))
    one, other = (read_block(tmp_path / name / "model", 2).tensors for name in ("whole", "parts"))
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"reads": (0, 5)}, r"reads is \(0, 5\).*2 layers"),
        ({"guesses": 32, "row_tokens": (32,)}, "more than guesses 32"),
        ({"mask": 300}, "mask is 300.*300 tokens"),
        ({"kv_heads": 3}, "kv_heads is 3"),
        ({"draft_vocab": 5000}, "draft_vocab is 5000.*300 tokens.*0 for all"),
        ({"draft_vocab": -2}, "draft_vocab is -2"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(wrong: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=said):
        train_block(block_config(tmp_path, tiny_target(tmp_path), **wrong))

"""Training of layers for further tokens: what is learnt, what a run leaves behind, and what it refuses."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mtp_toys import TARGETS, MtpToy, guessed, new_toy, target_folder
from read_ahead import TOKENIZER
from sakiyomi import LLM, InputError, LoadError, SamplingParams, UnsupportedError
from sakiyomi.core.outputs import Stats
from sakiyomi.drafters import heads_beside
from sakiyomi.drafters.mtp_layer import make_mtp, new_mtp, read_mtp
from sakiyomi.model_executor.gguf.export import write_gguf
from sakiyomi.model_executor.loading import load_model
from sakiyomi.train.acceptance import CHAIN, Continuations, measured
from sakiyomi.train.commands import TrainMtp
from sakiyomi.train.head_recipe import rank_continuations
from sakiyomi.train.hidden import TargetStates
from sakiyomi.train.mtp import MtpHead, train_mtp
from sakiyomi.train.target import train_target
from sakiyomi.train.unrolled_attention import attend
from toys import tiny_llama
from train_toys import losses, stop_at, stories, story_file, target_config, tiny_gpt2, tiny_target


def mtp_config(folder: Path, target: Path, **changes: Any) -> TrainMtp:
    """Three steps on what the layer gave itself, and a budget of a few steps of the optimizer."""
    text = story_file(folder / "train.jsonl")
    valid = story_file(folder / "valid.jsonl", count=6, seed=1)
    settings: dict[str, Any] = {
        "out": str(folder / "mtp"),
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
    return TrainMtp.of(**(settings | changes))


def head_of(folder: Path, target: Any, layers: int) -> MtpHead:
    """The layer in a folder as it learns."""
    form, tensors = read_mtp(folder, layers)
    return MtpHead(form, make_mtp(form, tensors, target, "some"), target.get_output_embeddings().weight.detach()).eval()


# ---------------------------------------------------------------- what is learnt


@torch.no_grad()
def chain(head: MtpHead, toy: MtpToy, tokens: list[int]) -> list[int]:
    """Guesses behind these tokens, of which the target has read all but the last: step by step the last row's."""
    known, count = list(tokens), len(tokens)
    states, _ = TargetStates(toy.model, ())(torch.tensor([known]))
    states = states[:, :-1]
    for step in range(3):
        hidden = list(head(torch.tensor([known[1:]]), states, step + 1))[step]
        known.append(int((hidden[0, -1] @ head.weight().T).argmax()))
        states = torch.cat([states, torch.full_like(states[:, :1], 9.0)], 1)  # of a drafted token: never read
    return known[count:]


@pytest.mark.few(1)
@pytest.mark.parametrize("name", TARGETS)
def test_a_step_is_what_drafting_computes(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draft tokens see text that the target has read, and each other with what the layer gave itself."""
    toy = new_toy(name)
    folder = target_folder(tmp_path / "target", toy, TOKENIZER)
    head = head_of(folder, toy.model, toy.model.config.num_hidden_layers)
    generator = torch.Generator().manual_seed(1)
    texts = torch.randint(0, toy.model.config.vocab_size, (12, 9), generator=generator).tolist()
    wanted = [guessed(toy, text, 3) for text in texts]
    assert [chain(head, toy, text) for text in texts] == wanted
    if name == "qwen3_5":

        def counted(q: Tensor, k: Tensor, v: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
            keys.append(k)  # which the head counts
            return attend(q, k, v, [], [])

        wrong: dict[str, Any] = {  # each token with its own state, or drafted tokens as if the target had read them
            "mtp.behind": lambda rows, count: rows,
            "head_recipe.attend": lambda q, k, v, keys, values: counted(q, k, v, keys, values),
        }
        for name, other in wrong.items():
            with monkeypatch.context() as patch:
                patch.setattr(f"sakiyomi.train.{name}", other)
                assert [chain(head, toy, text) for text in texts] != wanted


def test_a_new_layer() -> None:
    """Its last norm is a copy of the target's, and the embedding, which both share, does not learn."""
    model = tiny_llama()
    form, module = new_mtp(model)
    assert form.prefix == "mtp."
    assert torch.equal(module.model.norm.weight, model.model.norm.weight)
    assert module.model.norm.weight is not model.model.norm.weight
    head = MtpHead(form, module, model.get_output_embeddings().weight.detach())
    trained = {name for name, weight in head.named_parameters() if weight.requires_grad}
    assert "layers.0.weight" in trained and not any("embed.weight" in name for name in trained)


@pytest.mark.thorough
def test_tau_from_ranks_is_that_of_the_engine(tmp_path: Path) -> None:
    """Rounds counted along the target's text are those of greedy chains."""
    config = mtp_config(tmp_path, tiny_target(tmp_path), tokens=30 * 64)
    folder = Path(train_mtp(config)["model"])
    llm = LLM(config.target, f"mtp:{folder}", compile=False, strict=True, dtype="float32")
    prompts = [list(range(5, 25)), list(range(40, 60))]
    params = SamplingParams(max_new_tokens=40, gamma=CHAIN, tree="chain", ignore_eos=True)
    done = llm.generate(prompts, params)
    texts = Continuations(prompts, [out.token_ids for out in done], [], 40, frozenset())
    model = load_model(config.target, dtype="float32", device="cpu").model
    ranks = rank_continuations(head_of(folder, model, 2), TargetStates(model, ()), None, texts)
    assert measured(ranks)[f"tau_chain_{CHAIN}"] == pytest.approx(Stats.total(out.stats for out in done).tau)


# ---------------------------------------------------------------- a run


@pytest.mark.thorough
def test_from_end_to_end(tmp_path: Path, pictures: None) -> None:
    """Loss falls and acceptance rises, the target stays as it is, and what is left behind can be used at once."""
    target = Path(train_target(target_config(tmp_path, tokens=300 * 128))["model"])
    before = {path.name: path.read_bytes() for path in target.iterdir()}
    still = {"out": str(tmp_path / "still"), "tokens": 64, "muon_lr": 0.0, "adam_lr": 0.0}
    first = train_mtp(mtp_config(tmp_path, target, **still))
    more = {"samples": 4, "sample_batch": 4, "sample_tokens": 8}
    config = mtp_config(tmp_path, target, tokens=60 * 64, speed=True, **more)
    summary = train_mtp(config, "the command")
    assert summary["finished"]
    assert before == {path.name: path.read_bytes() for path in target.iterdir()}
    steps = losses(config.loop.out)
    assert sum(steps[-8:]) < 0.5 * sum(steps[:8])
    held = [each["held_out"]["stories"]["position_1"] for each in (first, summary)]
    assert held[1] > held[0] + 0.3
    folder = Path(summary["model"])
    card = (folder / "README.md").read_text(encoding="utf-8")
    for words in ("further tokens (MTP)", "the command", "position 7", "speedup greedy", f"--draft mtp:{folder}"):
        assert words in card, words
    assert json.loads((folder / "config.json").read_text(encoding="utf-8"))["hidden_size"] == 32
    texts = [
        LLM(str(target), draft, compile=False, strict=True, dtype="float32")
        .generate("Once upon a time", SamplingParams(max_new_tokens=20, gamma=2))
        .token_ids
        for draft in ("none", str(folder))
    ]
    assert texts[0] == texts[1]
    with pytest.raises(InputError, match=r"holds an MTP layer and no model; give draft='mtp:"):
        LLM(str(folder), "none")
    beside = target / "mtp"
    folder.rename(beside)
    assert heads_beside(target) == [f"mtp:{beside}"]


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["glm4_moe", "qwen3_5"])
def test_a_target_s_own_layer_goes_on(name: str, tmp_path: Path) -> None:
    """What is written without a change is what the target's files hold, experts and all; with one it is used."""
    toy = new_toy(name)
    target = target_folder(tmp_path / "target", toy, TOKENIZER)
    text = tmp_path / "long.jsonl"
    text.write_text("".join(json.dumps({"text": 3 * story}) + "\n" for story in stories(6)), encoding="utf-8")
    still = {"tokens": 64, "muon_lr": 0.0, "adam_lr": 0.0, "valid": (f"stories={text}",)}
    folder = Path(train_mtp(mtp_config(tmp_path, target, **still))["model"])
    layers = toy.model.config.num_hidden_layers
    own, written = read_mtp(target, layers), read_mtp(folder, layers)
    assert own[0] == written[0]
    copies = {"embed_tokens.weight", "shared_head.head.weight"}
    assert set(own[1]) - copies == set(written[1])
    assert all(torch.equal(own[1][key].bfloat16(), tensor) for key, tensor in written[1].items())


@pytest.mark.thorough
def test_a_resumed_run_ends_as_an_uninterrupted_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target(tmp_path)
    train_mtp(mtp_config(tmp_path, target, out=str(tmp_path / "whole")))
    parts = mtp_config(tmp_path, target, out=str(tmp_path / "parts"))
    with monkeypatch.context() as patch:
        stop_at(patch, 3, signal.SIGINT)
        assert not train_mtp(parts)["finished"]
    assert train_mtp(parts.changed(resume=True))["finished"]
    assert losses(str(tmp_path / "parts")) == losses(str(tmp_path / "whole"))
    one, other = (read_mtp(tmp_path / name / "model", 2)[1] for name in ("whole", "parts"))
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@pytest.mark.thorough
def test_a_gguf_file_gets_a_new_layer(tmp_path: Path) -> None:
    loaded, file = load_model(tiny_target(tmp_path)), tmp_path / "target.gguf"
    write_gguf(file, loaded.model, loaded.tokenizer, "F32")
    summary = train_mtp(mtp_config(tmp_path, file, tokens=64))
    assert summary["finished"]
    texts = [
        LLM(file, draft, strict=True).generate("Once", SamplingParams(max_new_tokens=8)).token_ids
        for draft in ("none", summary["model"])
    ]
    assert texts[0] == texts[1]


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    target = tiny_target(tmp_path)
    with pytest.raises(LoadError, match="init is 'nowhere'"):
        train_mtp(mtp_config(tmp_path, target, init="nowhere"))
    with pytest.raises(LoadError, match="holds no MTP layer"):
        train_mtp(mtp_config(tmp_path, target, init=str(target)))
    with pytest.raises(UnsupportedError, match=r"norm model\.norm"):
        train_mtp(mtp_config(tmp_path, tiny_gpt2(tmp_path)))
    with pytest.raises(InputError, match="unroll"):
        train_mtp(mtp_config(tmp_path, target, unroll=16, row_tokens=(16,)))

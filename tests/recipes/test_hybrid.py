"""The recipe of hybrids: what of a Llama the new model keeps, and a run of a few steps from start to card."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from hybrid import HybridConfig, hybrid_of, train_hybrid
from sakiyomi import LLM, SamplingParams
from sakiyomi.cli.train import helps
from sakiyomi.core.errors import LoadError
from train_toys import flags, losses, story_file, tiny_gpt2, tiny_target


def config(folder: Path, **changes: Any) -> HybridConfig:
    settings: dict[str, Any] = {
        "out": str(folder / "hybrid"),
        "target": str(tiny_target(folder)),
        "text": (str(story_file(folder / "text.jsonl")),),
        "tokens": 6 * 128,
        "row_tokens": (64,),
        "step_tokens": 128,
        "warmup_steps": 1,
        "compile": False,
        "threads": 1,
        "every": 2,
        "eval_prompts": 2,
    }
    return HybridConfig.of(**(settings | changes))


def test_the_start_keeps_what_it_can(tmp_path: Path) -> None:
    """Embeddings, MLPs and norms; attention in every second layer, and its projections in the delta nets."""
    llama = AutoModelForCausalLM.from_pretrained(tiny_target(tmp_path), dtype=torch.float32)
    model = hybrid_of(llama, 2)
    assert model.config.layer_types == ["linear_attention", "full_attention"]
    assert model.config.eos_token_id == llama.config.eos_token_id
    assert torch.equal(model.model.embed_tokens.weight, llama.model.embed_tokens.weight)
    rows = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    for old, new in zip(llama.model.layers, model.model.layers, strict=True):
        torch.testing.assert_close(new.mlp(rows), old.mlp(rows))
        torch.testing.assert_close(new.input_layernorm(rows), old.input_layernorm(rows))
    net, attention = model.model.layers[0].linear_attn, llama.model.layers[0].self_attn
    projected = net.in_proj_qkv(rows)
    assert torch.equal(projected[:, :32], attention.q_proj(rows))
    keys = attention.k_proj(rows)  # of one head, for both query heads
    torch.testing.assert_close(projected[:, 32:64], torch.cat([keys, keys], 1))
    assert torch.equal(net.out_proj.weight, attention.o_proj.weight)


@pytest.mark.thorough
def test_a_run_from_start_to_card(tmp_path: Path) -> None:
    """The loss falls, a resumed run goes on from the checkpoint, and the model is served as transformers has it."""
    chosen = config(tmp_path)
    summary = train_hybrid(chosen, "the command")
    assert summary["finished"] and summary["architecture"] == "Qwen3_5" and summary["layers"] == 2
    found = losses(chosen.loop.out)
    assert len(found) == 6 and found[-1] < found[0]
    assert json.loads((Path(summary["model"]) / "card.json").read_text(encoding="utf-8"))["command"] == "the command"
    again = train_hybrid(chosen.changed(resume=True))
    assert again["steps"] == 6 and losses(chosen.loop.out) == found
    tokens = [5, 6, 7, 8, 9]
    model = AutoModelForCausalLM.from_pretrained(summary["model"], dtype=torch.float32)
    wanted = model.generate(torch.tensor([tokens]), max_new_tokens=12, eos_token_id=-1, do_sample=False)
    llm = LLM(summary["model"], f"model:{tmp_path / 'tiny'}", dtype="float32", compile=False)
    done = llm.generate([tokens], SamplingParams(max_new_tokens=12, ignore_eos=True, gamma=2))
    assert done[0].token_ids == wanted[0, len(tokens) :].tolist()


def test_another_kind_of_target_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="GPT2LMHeadModel, expected a LlamaForCausalLM"):
        train_hybrid(config(tmp_path, target=str(tiny_gpt2(tmp_path))))


def test_flags(tmp_path: Path) -> None:
    arguments = flags(config(tmp_path))
    assert "--every" in arguments and all(helps(HybridConfig)[flag.name] for flag in HybridConfig.flags())

"""`sakiyomi export speculators`: what is written says the same as what was read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from architectures import VOCAB
from block_toys import deepspec_folder, dflash_folder, new_block
from block_toys import speculators_folder as block_folder
from eagle_toys import first_folder, new_head, original_folder
from read_ahead import TOKENIZER, deep_target
from sakiyomi.cli import app
from sakiyomi.drafters import parse_drafters
from sakiyomi.drafters.block_heads.formats import BlockFile, read_block, write_block
from sakiyomi.drafters.eagle_heads.formats import read_eagle
from toys import save_model


def as_trained(folder: Path, file: BlockFile) -> Path:
    """A block drafter as `train block` writes it."""
    write_block(folder, file, "the target", 8)
    return folder


CASES: dict[str, tuple[str, Callable[..., Path], Any]] = {
    "plain": ("eagle3", original_folder, lambda model: new_head(model)),
    "some tokens": ("eagle3", original_folder, lambda model: new_head(model, tokens=range(3, VOCAB, 2), kind="qwen3")),
    "parallel": ("peagle", original_folder, lambda model: new_head(model, mask=5, depth=2)),
    "block": ("dflash", dflash_folder, lambda model: new_block(model)),
    "cut block": ("dflash", as_trained, lambda model: new_block(model, tokens=range(3, VOCAB, 2))),
    "cut, corrected": (
        "dspark",
        as_trained,
        lambda model: new_block(model, tokens=range(3, VOCAB, 2), anchored=True, markov="gated"),
    ),
    "second": ("dflash2", block_folder, lambda model: new_block(model, kernel=2, group=8, selected=4)),
    "corrected": (
        "dspark",
        deepspec_folder,
        lambda model: new_block(model, anchored=True, markov="rnn", confident=True),
    ),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("target"), deep_target(), TOKENIZER)


def exported(head: Path, out: Path, *more: str) -> Any:
    return CliRunner().invoke(app, ["export", "speculators", str(head), str(out), *more])


@pytest.mark.few(5)
@pytest.mark.parametrize("name", CASES)
def test_what_was_written_is_what_was_read(name: str, target: Path, tmp_path: Path) -> None:
    kind, write, make = CASES[name]
    head, out = write(tmp_path / "head", make(deep_target())), tmp_path / "out"
    done = exported(head, out, "--target", str(target))
    assert done.exit_code == 0, done.output
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    assert config["speculators_model_type"] == kind == config["speculators_config"]["algorithm"]
    assert config["speculators_config"]["verifier"] == {
        "name_or_path": str(target),
        "architectures": ["LlamaForCausalLM"],
    }
    assert ("enable_confidence_head" in config) == (kind == "dspark")
    assert parse_drafters(str(out)) == [f"{'eagle' if 'eagle' in kind else 'block'}:{out}"]
    read = read_eagle if "eagle" in kind else read_block
    before, after = read(head, 8), read(out, 8)
    assert before.options == after.options
    assert before.tensors.keys() == after.tensors.keys()
    assert all(torch.equal(tensor, after.tensors[part]) for part, tensor in before.tensors.items())
    assert before.tokens is after.tokens is None or torch.equal(before.tokens, after.tokens)
    sizes = ("hidden_size", "head_dim", "num_attention_heads", "num_key_value_heads", "rms_norm_eps", "vocab_size")
    assert [before.config[size] for size in sizes] == [after.config[size] for size in sizes]
    assert after.config["rope_parameters"]["rope_theta"] == before.config["rope_theta"]


def test_what_cannot_be_written_is_said(target: Path, tmp_path: Path) -> None:
    causal = dflash_folder(tmp_path / "causal", new_block(deep_target(), causal=True))
    first = first_folder(tmp_path / "first", new_head(deep_target(), first=True, layers=(7,)))
    plain = original_folder(tmp_path / "plain", new_head(deep_target()))
    for head, more, words in (
        (causal, ["--target", str(target)], "causal True"),
        (first, ["--target", str(target)], "EAGLE-1 or 2"),
        (plain, [], "the target is None"),
        (plain, ["--target", str(tmp_path / "none")], "none"),
        (tmp_path / "none", ["--target", str(target)], "no EAGLE head"),
    ):
        done = exported(head, tmp_path / "out", *more)
        assert done.exit_code != 0
        assert words in done.output + str(done.exception), done.output
    assert not (tmp_path / "out").exists()

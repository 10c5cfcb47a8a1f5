"""Inflated models: the same function at another size, and nothing left behind where that fails."""

from __future__ import annotations

import copy
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import inflating
from block_toys import deepspec_folder, new_block
from block_toys import speculators_folder as block_folder
from eagle_toys import new_head, speculators_folder
from inflate import InflateConfig, Llama, inflate, parse_count
from inflate import app as script
from medusa_toys import new_heads
from mtp_toys import with_layer
from read_ahead import drafted
from sakiyomi import LLM
from sakiyomi.cli import app
from sakiyomi.core import memory
from sakiyomi.core.errors import InputError, LoadError, MemoryLimitError, SakiyomiError, UnsupportedError
from sakiyomi.drafters.medusa_heads.backbone import Backbone
from sakiyomi.drafters.medusa_heads.formats import read_heads, write_heads
from sakiyomi.drafters.mtp_layer import FORMS, write_mtp
from sakiyomi.evaluation.bench.config import silent
from sakiyomi.evaluation.bench.models import inflated
from toys import save_model, tiny_llama, tiny_tokenizer

PARAMS = {True: "200K", False: "220K"}  # the tiny model has 29K or 39K


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """The tiny model, with tied embeddings and without."""
    folder = tmp_path_factory.mktemp("models")
    return {
        tied: save_model(folder / str(tied), tiny_llama(tie_word_embeddings=tied).bfloat16(), tiny_tokenizer())
        for tied in (True, False)
    }


@pytest.fixture
def deep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny models grow in both directions: theirs are not the proportions of large ones."""
    monkeypatch.setattr(inflating, "ASPECT", 16)


@pytest.mark.few(1)
@pytest.mark.usefixtures("deep")
@pytest.mark.parametrize("tied", [True, False])
def test_the_same_function(folders: dict[bool, Path], tmp_path: Path, tied: bool) -> None:
    out = tmp_path / "new" / "large"
    found = inflate(InflateConfig(str(out), PARAMS[tied], str(folders[tied])), silent)
    small, large = (AutoModelForCausalLM.from_pretrained(path, dtype="float32") for path in (folders[tied], out))
    assert abs(found["parameters"] / parse_count(PARAMS[tied]) - 1) < 0.1
    assert found["parameters"] == sum(parameter.numel() for parameter in large.parameters())
    assert large.config.hidden_size > small.config.hidden_size
    assert len(large.model.layers) > len(small.model.layers)
    assert large.config.sakiyomi_inflated == {"from": str(folders[tied]), "params": found["parameters"]}
    ids = torch.randint(320, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert (small(ids).logits - large(ids).logits).abs().max() < 1e-4
    assert found["largest_logit_difference"] < 1e-4
    assert 0 < found["random_to_real_activations"] < 0.6
    assert sorted(path.name for path in out.parent.iterdir()) == ["large"]
    with pytest.raises(InputError, match="not an empty folder"):
        inflate(InflateConfig(str(out), PARAMS[tied], str(folders[tied])), silent)


@pytest.mark.usefixtures("deep")
def test_random_weights_are_there_and_smaller_than_real_ones(folders: dict[bool, Path], tmp_path: Path) -> None:
    inflate(InflateConfig(str(tmp_path / "large"), "220K", str(folders[False])), silent)
    small, large = (
        AutoModelForCausalLM.from_pretrained(path, dtype="float32") for path in (folders[False], tmp_path / "large")
    )
    # The last layers belong together.
    old, new = small.model.layers[-1], large.model.layers[-1]
    for part, name in (("self_attn", "q_proj"), ("self_attn", "v_proj"), ("mlp", "up_proj")):
        real, made = (getattr(getattr(layer, part), name).weight for layer in (old, new))
        rows, columns = real.shape
        assert torch.equal(made[:rows, :columns], real)
        assert made[:, columns:].std() > 0
        assert (made[:rows, columns:].abs().amax(1) < real.abs().amax(1)).all()
        assert made[rows:].abs().max() < real.abs().max()
    assert not new.mlp.down_proj.weight[:, old.mlp.down_proj.in_features :].any()
    assert sum(not layer.self_attn.o_proj.weight.any() for layer in large.model.layers) == len(
        large.model.layers
    ) - len(small.model.layers)


@pytest.mark.parametrize(("text", "count"), [("134M", 134_000_000), ("1.5b", 1_500_000_000), (" 500 ", 500)])
def test_counts(text: str, count: int) -> None:
    assert parse_count(text) == count


@pytest.mark.parametrize("text", ["", "0M", "-3M", "many", "1e9", "3T"])
def test_counts_that_cannot_be_meant(text: str) -> None:
    with pytest.raises(InputError, match="134M"):
        parse_count(text)


@pytest.mark.few(3)
@pytest.mark.parametrize("params", ["20456832", "134M", "500M", "1B", "7B"])
def test_shapes_are_those_of_real_models(params: str) -> None:
    shape, count = Llama.load("tales").wider(parse_count(params))
    assert abs(count / parse_count(params) - 1) < 0.02
    assert shape.num_attention_heads // shape.num_key_value_heads == 3
    if params != "20456832":
        assert 20 < shape.hidden_size / shape.num_hidden_layers < 130
        assert 2 < shape.intermediate_size / shape.hidden_size < 4


def test_what_cannot_be_inflated_is_refused(
    folders: dict[bool, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(params: str, target: Path = folders[True]) -> None:
        inflate(InflateConfig(str(tmp_path / "out"), params, str(target)), silent)

    with pytest.raises(InputError, match="has 28,832 already"):
        run("26K")
    biased = save_model(tmp_path / "biased", tiny_llama(attention_bias=True), tiny_tokenizer())
    with pytest.raises(UnsupportedError, match="without biases"):
        run("1M", biased)
    with monkeypatch.context() as patch, pytest.raises(MemoryLimitError, match="the largest that can be made"):
        patch.setattr(memory, "available_bytes", lambda device="cpu": 700_000)
        run("200K")
    with monkeypatch.context() as patch, pytest.raises(LoadError, match="make room"):
        patch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
        run("200K")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("fault", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_nothing_half_written_stays(
    folders: dict[bool, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: BaseException
) -> None:
    def fails(*_: object) -> None:
        raise fault

    monkeypatch.setattr(inflating.Inflatable, "compare", fails)
    expected = LoadError if isinstance(fault, OSError) else KeyboardInterrupt
    with pytest.raises(expected):
        inflate(InflateConfig(str(tmp_path / "out"), "200K", str(folders[True])), silent)
    assert not list(tmp_path.iterdir())


def test_a_result_that_is_another_function_is_refused(
    folders: dict[bool, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def noisy(weight: torch.Tensor, columns: int, factor: int, real: bool) -> torch.Tensor:
        return torch.full((factor * weight.shape[0], columns), 0.1)

    monkeypatch.setattr(inflating, "writer", noisy)
    with pytest.raises(SakiyomiError, match="not the same function"):
        inflate(InflateConfig(str(tmp_path / "out"), "200K", str(folders[True])), silent)
    assert not list(tmp_path.iterdir())


@pytest.mark.thorough
def test_the_script_and_a_row_that_uses_its_model(folders: dict[bool, Path], tmp_path: Path) -> None:
    runner, out = CliRunner(), tmp_path / "large"
    arguments = [str(out), "--params", "200K", "--target", str(folders[True])]
    result = runner.invoke(script, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout.splitlines()[-1])["equal_greedy_tokens"] == 32
    arguments = ["bench", "--rows", "stories", "--target", str(out), "--draft", f"model:{folders[True]}"]
    arguments += ["--repeats", "1", "--max-new-tokens", "6", "--count", "1", "--gamma", "2", "--no-compile"]
    result = runner.invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert f"inflated {folders[True]} at 0M parameters" in result.stdout
    assert inflated(tiny_llama().config) is None


@pytest.mark.thorough
def test_the_script_takes_heads_of_several_kinds(tmp_path: Path) -> None:
    model = tiny_llama(layers=4, seed=3)
    small = save_model(tmp_path / "small", model.bfloat16(), tiny_tokenizer())
    block, mtp = (_beside(kind, tmp_path / kind, model.float()) for kind in ("block", "mtp"))
    arguments = [str(tmp_path / "large"), "--params", "400K", "--target", str(small), "--heads"]
    result = CliRunner().invoke(script, [*arguments, f"block:{block}+mtp:{mtp}"])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "large" / "block").is_dir()
    assert (tmp_path / "large" / "mtp").is_dir()
    with pytest.raises(SakiyomiError, match=re.escape(f"there is no folder '{tmp_path / 'none'}' with heads")):
        CliRunner().invoke(script, [*arguments, f"block:{block}+mtp:{tmp_path / 'none'}"], catch_exceptions=False)


def test_flags_before_the_name_of_the_command_are_refused() -> None:
    result = CliRunner().invoke(app, ["bench", "--gamma", "3", "card", "x"])
    assert result.exit_code == 2
    assert "--gamma stands before 'card'" in result.output


@pytest.mark.few(1)
@pytest.mark.usefixtures("deep")
@pytest.mark.parametrize("own", [False, True])
def test_heads_become_as_wide(folders: dict[bool, Path], tmp_path: Path, own: bool) -> None:
    """The large target's heads guess what the small one's do, block behind block."""
    small = AutoModelForCausalLM.from_pretrained(folders[True], dtype="float32")
    heads = new_heads(small, heads=2, layers=2, own=own)
    write_heads(heads, tmp_path / "heads")
    out = tmp_path / "large"
    inflate(InflateConfig(str(out), PARAMS[True], str(folders[True]), str(tmp_path / "heads")), silent)
    large = AutoModelForCausalLM.from_pretrained(out, dtype="float32")
    wide = read_heads(out / "medusa").heads
    assert wide.shape.hidden_size == large.config.hidden_size
    ids = torch.randint(320, (1, 30), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        backbones = [Backbone(model) for model in (small, large)]
        guesses = [
            each(backbone(ids)[0], backbone.weight) for each, backbone in zip((heads, wide), backbones, strict=True)
        ]
    assert (guesses[0] - guesses[1]).abs().max() < 1e-3 * guesses[0].abs().max()
    assert wide.weights[0, 0, : heads.shape.hidden_size, heads.shape.hidden_size :].std() > 0, "random, not zero"
    with pytest.raises(UnsupportedError, match="another model"):
        inflate(InflateConfig(str(tmp_path / "x"), "220K", str(folders[True]), str(out / "medusa")), silent)
    assert not (tmp_path / "x").exists()


def _beside(kind: str, folder: Path, model: Any) -> Path:
    """Something random that was trained beside a model, in weights of 16 bits as its own are."""
    if kind == "mtp":
        toy = with_layer(copy.deepcopy(model), "Qwen3-Next")
        own = {n.removeprefix("model."): t for n, t in toy.inner.state_dict().items() if n.startswith("model.layers.")}
        norms = {
            "norm": toy.inner.model.norm,
            "pre_fc_norm_embedding": toy.norms[0],
            "pre_fc_norm_hidden": toy.norms[1],
        }
        own |= {f"{name}.weight": norm.weight.data for name, norm in norms.items()} | {"fc.weight": toy.project}
        write_mtp(folder, FORMS["Qwen3-Next"], {name: t.bfloat16() for name, t in own.items()}, 4, "toy")
        return folder
    if kind.startswith("block"):
        markov = kind.partition(", ")[2]
        file = new_block(model, layers=(1, 2, 3), anchored=True, sharp=3.0, markov=markov)
        return deepspec_folder(folder, replace(file, tensors={n: t.bfloat16() for n, t in file.tensors.items()}))
    head = new_head(
        model, layers=(0, 1, 3), fc_norm=kind == "eagle, norms", norm_before_fc=kind == "eagle, norms", depth=2
    )
    return speculators_folder(folder, replace(head, tensors={n: t.bfloat16() for n, t in head.tensors.items()}))


@pytest.mark.thorough
@pytest.mark.usefixtures("deep")
@pytest.mark.parametrize("kind", ["eagle", "eagle, norms", "block", "block, gated", "block, rnn", "mtp"])
def test_what_reads_hidden_states_becomes_as_wide(tmp_path: Path, kind: str) -> None:
    """Round by round the large pair guesses what the small one does."""
    tokenizer, model = tiny_tokenizer(), tiny_llama(layers=4, seed=3)
    small = save_model(tmp_path / "small", model.bfloat16(), tokenizer)
    beside, out = _beside(kind, tmp_path / "head", model.float()), tmp_path / "large"
    inflate(InflateConfig(str(out), "400K", str(small), str(beside)), silent)
    kind = kind.partition(",")[0]
    pairs = [(small, beside), (out, out / kind)]
    found = [
        drafted(LLM(str(target), f"{kind}:{head}", dtype="float32", compile=False, strict=True))
        for target, head in pairs
    ]
    assert found[0] == found[1]
    assert len({tuple(guess) for _, guess in found[0]}) > 3, "guesses differ"
    large = LLM(str(out), compile=False, dtype="float32")
    assert large.draft.name.startswith(kind), "auto finds it beside the target"


def test_what_cannot_become_as_wide(folders: dict[bool, Path], tmp_path: Path) -> None:
    model = tiny_llama(layers=4)
    small = save_model(tmp_path / "small", model.bfloat16(), tiny_tokenizer())

    def run(heads: object) -> None:
        inflate(InflateConfig(str(tmp_path / "out"), "400K", str(small), str(heads)), silent)

    for options in ({"norm_output": True}, {"norm_before_residual": True}, {"mask": 5}):
        head = speculators_folder(tmp_path / "-".join(options), new_head(model.float(), layers=(0, 1, 3), **options))
        with pytest.raises(UnsupportedError, match="widened alone"):
            run(head)
    convolved = new_block(model, layers=(1, 2, 3), kernel=2, group=8, selected=4)
    with pytest.raises(UnsupportedError, match="convolutions"):
        run(block_folder(tmp_path / "convolved", convolved))
    eagle = speculators_folder(tmp_path / "eagle", new_head(model, layers=(0, 1, 3)))
    with pytest.raises(InputError, match="given twice"):
        run(f"{eagle}+eagle:{eagle}")
    with pytest.raises(InputError, match="is none of medusa, eagle, block, mtp"):
        run(folders[True])
    wide = speculators_folder(tmp_path / "wide", new_head(tiny_llama(layers=4, dim=48), layers=(0, 1, 3)))
    with pytest.raises(UnsupportedError, match="another model"):
        run(wide)
    assert not (tmp_path / "out").exists()

"""Medusa heads: what they compute, and their files as other tools have them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from sakiyomi.core.errors import InputError, LoadError
from sakiyomi.drafters.medusa_heads.formats import FORMATS, read_heads, write_heads
from sakiyomi.drafters.medusa_heads.heads import HeadsShape, MedusaHeads
from toys import save_model, tiny_llama, tiny_tokenizer

H, V = 16, 40
SHAPES = {
    "version 1": HeadsShape(3, 2, H, V, own=3),
    "version 2": HeadsShape(2, 1, H, None, own=0),
    "one for all": HeadsShape(3, 1, H, V, own=1),
    "without biases": HeadsShape(2, 2, H, V, own=2, bias=False),
}


def heads_of(shape: HeadsShape, seed: int = 0, dtype: torch.dtype = torch.float32) -> MedusaHeads:
    heads = MedusaHeads(shape, dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return heads


def same(one: MedusaHeads, other: MedusaHeads) -> bool:
    mine, others = one.state_dict(), other.state_dict()
    return mine.keys() == others.keys() and all(torch.equal(mine[name], others[name]) for name in mine)


def by_hand(heads: MedusaHeads, head: int, x: Tensor, shared: Tensor) -> Tensor:
    """A head as the paper writes it, one after the other."""
    for layer in range(heads.shape.layers):
        bias = None if heads.biases is None else heads.biases[layer, head]
        x = x + F.silu(F.linear(x, heads.weights[layer, head], bias))
    if heads.own is None:
        return F.linear(x, shared)
    return F.linear(x, heads.own[head if heads.shape.own > 1 else 0])


@pytest.mark.parametrize("kind", SHAPES)
def test_all_heads_at_once_are_what_each_is_by_itself(kind: str) -> None:
    heads = heads_of(SHAPES[kind])
    hidden, shared = torch.randn(5, H), torch.randn(V, H)
    logits = heads(hidden, shared)
    assert logits.shape == (heads.shape.heads, 5, V)
    for head, mine in enumerate(logits):
        torch.testing.assert_close(mine, by_hand(heads, head, hidden, shared), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(logits[0], logits[1])


def test_fresh_heads_say_what_the_target_says() -> None:
    shared, hidden = torch.randn(V, H), torch.randn(4, H)
    for shape in (SHAPES["version 1"], SHAPES["version 2"], SHAPES["one for all"]):
        heads = MedusaHeads(shape)
        heads.begin_from(shared)
        logits = heads(hidden, shared)
        assert all(torch.allclose(mine, hidden @ shared.T, atol=1e-6) for mine in logits)


def test_heads_that_need_the_targets_say_so() -> None:
    with pytest.raises(InputError, match="target's own head"):
        heads_of(SHAPES["version 2"])(torch.randn(1, H))
    for wrong in ((0, 1, H, V, 0), (2, 1, H, V, 3), (2, 1, H, None, 2), (2, 0, H, V, 2)):
        with pytest.raises(InputError, match="describes no heads"):
            HeadsShape(*wrong)


# ---------------------------------------------------------------- files


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["version 1", "version 2"])
def test_medusa_files_come_back_to_the_byte(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    heads = heads_of(SHAPES[kind], dtype=dtype)
    write_heads(heads, tmp_path / "a", base="some/model")
    found = read_heads(tmp_path / "a")
    assert same(found.heads, heads) and found.format == "medusa" and found.base == "some/model"
    assert found.heads.shape == heads.shape
    write_heads(found.heads, tmp_path / "b", base=found.base)
    for name in ("medusa_lm_head.safetensors", "config.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["config.json", "medusa_lm_head.safetensors"]


def test_names_and_keys_are_those_of_the_tools(tmp_path: Path) -> None:
    """Written down from what text-generation-inference and vLLM read, not from our own code."""
    heads = heads_of(SHAPES["version 1"])
    write_heads(heads, tmp_path / "a", base="b")
    tensors = load_file(tmp_path / "a" / "medusa_lm_head.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items() if name.startswith("2.")} == {
        "2.0.linear.weight": (H, H),
        "2.0.linear.bias": (H,),
        "2.1.linear.weight": (H, H),
        "2.1.linear.bias": (H,),
        "2.2.weight": (V, H),
    }
    assert len(tensors) == 15
    assert torch.equal(tensors["1.0.linear.weight"], heads.weights[0, 1])
    config = json.loads((tmp_path / "a" / "config.json").read_text(encoding="utf-8"))
    assert config == {"base_model_name_or_path": "b", "medusa_num_heads": 3, "medusa_num_layers": 2}
    write_heads(heads_of(SHAPES["version 2"]), tmp_path / "b")
    config = json.loads((tmp_path / "b" / "config.json").read_text(encoding="utf-8"))
    assert config == {"medusa_num_heads": 2, "medusa_num_layers": 1, "version": "2"}

    write_heads(heads, tmp_path / "c", "vllm")
    tensors = load_file(tmp_path / "c" / "model.safetensors")
    assert {name for name in tensors if ".1." in name or name.endswith("1.weight")} >= {
        "blocks.1.layers.0.weight",
        "blocks.1.layers.0.bias",
        "blocks.1.layers.1.weight",
        "lm_heads.1.weight",
    }
    config = json.loads((tmp_path / "c" / "config.json").read_text(encoding="utf-8"))
    assert config["model_type"] == "medusa" and config["architectures"] == ["MedusaModel"]
    assert (config["num_heads"], config["num_hidden_layers"], config["medusa_fc_bias"]) == (3, 2, True)
    # There a key with "num" and "heads" is the number of heads, whatever else it says.
    assert [key for key in config if "num" in key and "heads" in key] == ["num_heads"]
    assert [key for key in config if "num" in key and "layers" in key] == ["num_hidden_layers"]


@pytest.mark.parametrize("kind", SHAPES)
def test_vllm_files(kind: str, tmp_path: Path) -> None:
    heads, shared = heads_of(SHAPES[kind]), torch.randn(V, H)
    write_heads(heads, tmp_path / "a", "vllm", head=shared)
    found = read_heads(tmp_path / "a")
    assert found.format == "vllm"
    hidden = torch.randn(3, H)
    assert torch.equal(found.heads(hidden), heads(hidden, shared))
    write_heads(found.heads, tmp_path / "b", "vllm")
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    tensors = load_file(tmp_path / "a" / "model.safetensors")
    save_file(
        {f"medusa_heads.{name}": tensor for name, tensor in tensors.items()}, tmp_path / "a" / "model.safetensors"
    )
    assert same(read_heads(tmp_path / "a").heads, found.heads)


def test_heads_about_some_tokens(tmp_path: Path) -> None:
    heads = heads_of(HeadsShape(2, 1, H, 10, own=2))
    heads.token_map = torch.arange(3, 33, 3)
    write_heads(heads, tmp_path, "vllm")
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert config["truncated_vocab_size"] == 10 < config["vocab_size"]
    found = read_heads(tmp_path).heads
    assert found.token_map is not None and torch.equal(found.token_map, heads.token_map) and same(found, heads)
    with pytest.raises(InputError, match="10 of the target's tokens can only be written as 'vllm'"):
        write_heads(heads, tmp_path / "other")


@pytest.mark.parametrize("kind", ["version 1", "version 2"])
def test_a_model_with_its_heads_in_it(kind: str, tmp_path: Path) -> None:
    target = save_model(tmp_path / "base", tiny_llama(dim=H), tiny_tokenizer())
    heads = heads_of(SHAPES[kind])
    write_heads(heads, tmp_path / "both", "merged", base=target)
    found = read_heads(tmp_path / "both")
    assert found.format == "merged" and same(found.heads, heads)
    own, both = load_file(target / "model.safetensors"), load_file(tmp_path / "both" / "model.safetensors")
    assert all(torch.equal(both[name], tensor) for name, tensor in own.items())
    assert all(name in own or name.startswith("medusa_head.") for name in both)
    config = json.loads((tmp_path / "both" / "config.json").read_text(encoding="utf-8"))
    assert config["medusa_num_heads"] == heads.shape.heads and config["architectures"] == ["LlamaForCausalLM"]
    with pytest.raises(InputError, match="belong to another model"):
        write_heads(heads_of(HeadsShape(2, 1, H + 2, None, own=0)), tmp_path / "wrong", "merged", base=target)
    with pytest.raises(InputError, match="needs its folder"):
        write_heads(heads, tmp_path / "wrong", "merged", base="some/model")
    assert not (tmp_path / "wrong").exists()


def test_from_one_format_to_the_others_and_back(tmp_path: Path) -> None:
    heads = heads_of(SHAPES["version 1"])
    target = save_model(tmp_path / "base", tiny_llama(dim=H), tiny_tokenizer())
    for first in FORMATS:
        write_heads(heads, tmp_path / f"{first}1", first, base=target)
        found = read_heads(tmp_path / f"{first}1").heads
        for second in FORMATS:
            write_heads(found, tmp_path / f"{first}2{second}", second, base=target)
            assert same(read_heads(tmp_path / f"{first}2{second}").heads, heads)


def test_biases_that_a_format_expects_are_zeros(tmp_path: Path) -> None:
    heads, hidden = heads_of(SHAPES["without biases"]), torch.randn(3, H)
    write_heads(heads, tmp_path)
    found = read_heads(tmp_path).heads
    assert found.shape.bias and torch.equal(found(hidden), heads(hidden))


def test_a_configuration_that_is_wrong_about_the_heads(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As published ones are: it says 2, the file has 3."""
    write_heads(heads_of(SHAPES["version 1"]), tmp_path)
    file = tmp_path / "medusa_lm_head.safetensors"
    save_file(load_file(file), file)  # of another tool, without digests
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps(config | {"medusa_num_heads": 2}), encoding="utf-8")
    assert read_heads(tmp_path).heads.shape.heads == 3
    assert "speaks of 2 heads and the file holds 3" in caplog.text
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    assert read_heads(tmp_path).heads.shape == SHAPES["version 1"]


def test_pickled_heads_are_read_when_they_are_trusted(tmp_path: Path) -> None:
    heads = heads_of(SHAPES["version 1"])
    write_heads(heads, tmp_path)
    torch.save(load_file(tmp_path / "medusa_lm_head.safetensors"), tmp_path / "medusa_lm_head.pt")
    (tmp_path / "medusa_lm_head.safetensors").unlink()
    with pytest.raises(LoadError, match="allow_pickle=True"):
        read_heads(tmp_path)
    assert same(read_heads(tmp_path, allow_pickle=True).heads, heads)
    (tmp_path / "medusa_lm_head.pt").write_bytes(b"nonsense")
    with pytest.raises(LoadError, match="cannot be read"):
        read_heads(tmp_path, allow_pickle=True)


def test_what_is_no_heads_is_refused(tmp_path: Path) -> None:
    heads = heads_of(SHAPES["version 1"])

    def broken(change: Any) -> Path:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        write_heads(heads, folder)
        file = folder / "medusa_lm_head.safetensors"
        with safe_open(file, framework="pt") as opened:
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        change(tensors)
        save_file(tensors, file)
        return folder

    def refuse(folder: Path, *words: str) -> None:
        with pytest.raises(LoadError) as caught:
            read_heads(folder)
        assert all(word in str(caught.value) for word in words), str(caught.value)

    refuse(tmp_path / "nowhere", "no Medusa heads", "nowhere")
    refuse(broken(lambda tensors: tensors.pop("1.0.linear.bias")), "3 heads of 2 layers", "1.0.linear.bias")
    refuse(broken(lambda tensors: tensors.pop("1.2.weight")), "1.2.weight is missing")
    refuse(broken(lambda tensors: tensors.update({"x": torch.zeros(2)})), "'x'")
    refuse(broken(lambda tensors: tensors.update({"0.0.linear.weight": torch.zeros(H, H + 1)})), "differ in shape")
    refuse(broken(lambda tensors: tensors.update({"0.2.weight": torch.zeros(V, H).half()})), "dtype")
    refuse(broken(lambda tensors: tensors.update({n: torch.zeros(0, 0) for n in tensors})), "no weight of a head")
    refuse(broken(lambda tensors: tensors.update({n: t.int() for n, t in tensors.items()})), "no weight of a head")
    cut = broken(lambda tensors: None)
    file = cut / "medusa_lm_head.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    refuse(cut, "medusa_lm_head.safetensors")
    target = save_model(tmp_path / "base", tiny_llama(dim=H), tiny_tokenizer())
    refuse(target, "holds no Medusa heads")
    with pytest.raises(InputError, match="no format 'tgi'"):
        write_heads(heads, tmp_path / "x", "tgi")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="only be written as 'vllm'"):
        write_heads(heads_of(SHAPES["one for all"]), tmp_path / "x")
    with pytest.raises(InputError, match="pass its weight as head"):
        write_heads(heads_of(SHAPES["version 2"]), tmp_path / "x", "vllm")
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(LoadError, match="cannot write"):
        write_heads(heads, tmp_path / "file")

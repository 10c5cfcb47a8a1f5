"""Every architecture that is read from GGUF files: written by our writer, its text is that of transformers' model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import causal_models
from architectures import greedy, prompt
from gguf_toys import KINDS, model_of
from sakiyomi import LLM, InputError, SamplingParams, UnsupportedError
from sakiyomi.core.gguf import read_gguf
from sakiyomi.model_executor.gguf.architectures import ARCHITECTURES
from sakiyomi.model_executor.gguf.config import architecture_of, build_config
from sakiyomi.model_executor.gguf.export import write_gguf
from sakiyomi.model_executor.gguf.weights import weights_of
from toys import character_tokenizer, tiny_llama, tiny_tokenizer


def test_all_architectures_are_here() -> None:
    assert {name for name, _ in KINDS.values()} | {"mistral3"} == set(ARCHITECTURES)


@pytest.mark.few(6)
@pytest.mark.parametrize("kind", KINDS)
def test_tensors_and_configuration_come_back(kind: str, tmp_path: Path) -> None:
    model = model_of(kind)
    path = tmp_path / "m.gguf"
    write_gguf(path, model, tiny_tokenizer(), "F32")
    file = read_gguf(path)
    assert file.metadata["general.architecture"] == KINDS[kind][0]
    config = build_config(file)
    weights, unused = weights_of(file, architecture_of(file), config)
    assert not unused
    found, wanted = {weight.name: weight.numbers(config, torch.float32) for weight in weights}, model.state_dict()
    assert set(found) <= set(wanted)
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, wanted[name], atol=2e-6, rtol=1e-6)
    made = AutoModelForCausalLM.from_config(config).eval()
    assert not made.load_state_dict(found, strict=False).unexpected_keys
    made.tie_weights()
    ids = torch.tensor([prompt(60)])
    with torch.no_grad():
        torch.testing.assert_close(made(ids, use_cache=False).logits, model(ids, use_cache=False).logits)


@pytest.mark.few(3)
@pytest.mark.parametrize("kind", KINDS)
def test_the_text_is_that_of_the_model(kind: str, tmp_path: Path) -> None:
    model, tokens = model_of(kind), prompt(40)
    path = tmp_path / "m.gguf"
    write_gguf(path, model, tiny_tokenizer(), "F32")
    (out,) = LLM(str(path), "none").generate([tokens], SamplingParams(max_new_tokens=12, ignore_eos=True))
    assert out.token_ids == greedy(model, tokens, 12)


@pytest.mark.few(4)
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_of_every_kind(kind: str, tmp_path: Path) -> None:
    """Both starts; a model of which everything is in blocks, too."""
    write_gguf(tmp_path / "m.gguf", model_of(kind), tiny_tokenizer(), "Q8_0")
    found = [generated(tmp_path / "m.gguf") for _ in range(2)]
    assert found[0] == found[1] and len(found[0]) == 12


def generated(path: Path) -> list[int]:
    (out,) = LLM(str(path), "none").generate([prompt(40)], SamplingParams(max_new_tokens=12, ignore_eos=True))
    return out.token_ids


def test_what_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="'Q9_9'; expected F32"):
        write_gguf(tmp_path / "m.gguf", tiny_llama(), tiny_tokenizer(), "Q9_9")
    with pytest.raises(UnsupportedError, match="kind WordLevel is not written as GGUF"):
        write_gguf(tmp_path / "m.gguf", tiny_llama(vocab=60), character_tokenizer("abc"), "F32")
    other = AutoModelForCausalLM.from_config(causal_models.config("bloom"))
    with pytest.raises(UnsupportedError, match="type 'bloom' is not written as GGUF; expected"):
        write_gguf(tmp_path / "m.gguf", other, tiny_tokenizer(), "F32")
    with pytest.raises(UnsupportedError, match="do not hold this model's settings: hidden_act='gelu'"):
        write_gguf(tmp_path / "m.gguf", tiny_llama(hidden_act="gelu"), tiny_tokenizer(), "F32")
    assert not list(tmp_path.iterdir())

"""Models whose layers are in the block formats of GGUF files: they run as the same numbers in float32 do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf import quants
from torch import Tensor, nn

from architectures import prompt
from sakiyomi import UnsupportedError
from sakiyomi.kernels.batch import SequenceRows
from sakiyomi.kernels.native import PackedEmbedding, PackedLayer, PackedWeights
from sakiyomi.model_executor.build import build_runner
from sakiyomi.model_executor.gguf.blocks import add_embedding, add_linear, dequantize, share_embedding
from sakiyomi.model_executor.head_rows import HeadRows
from sakiyomi.model_executor.loading import packed as packed_copies
from sakiyomi.model_executor.loading.packed import put_layers, read_about, read_layers, save_packed
from sakiyomi.model_executor.loading.prepared import Prepared
from sakiyomi.model_executor.runner import ModelRunner
from toys import tiny_llama, tiny_tokenizer

pytestmark = pytest.mark.skipif(PackedWeights.create() is None, reason="the C++ kernels cannot be compiled here")


def blocks_of(weight: Tensor, name: str) -> Tensor:
    """A weight as a file would hold it, uint8 (rows, bytes)."""
    return torch.from_numpy(quants.quantize(weight.detach().float().numpy(), gguf.GGMLQuantizationType[name]))


def in_blocks(model: Any, name: str = "Q4_1", *, rounded: bool = False) -> tuple[Any, Prepared, Any]:
    """A model with layers in blocks, what is known of it, and the same with these numbers in float32."""
    plain, table = copy.deepcopy(model), PackedWeights.create()
    assert table is not None
    layers: dict[str, PackedLayer] = {}
    tied = model.config.tie_word_embeddings
    for own, module in plain.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            data = blocks_of(module.weight, name)
            if isinstance(module, nn.Linear):
                layers[own] = add_linear(table, name, data, module.bias, model.dtype, rounded=rounded)
            elif not tied:
                layers[own] = add_embedding(table, name, data, model.dtype)
            if not (tied and own == "lm_head"):
                module.weight.data = dequantize(name, data).to(model.dtype)
    if tied:
        layers["model.embed_tokens"] = share_embedding(table, layers["lm_head"])  # type: ignore[arg-type]
    put_layers(model, layers)
    return model, Prepared(table, None, None, []), plain


def runner_of(model: Any, prepared: Prepared | None, **options: Any) -> ModelRunner:
    """As `LLM` builds it."""
    return build_runner(model, owned=True, prepared=prepared, max_slots=4, **{"compile": False, **options})


def logits(runner: ModelRunner, tokens: list[int]) -> Tensor:
    """Of all tokens of a prompt, in one pass."""
    with runner.cache.lent(len(tokens)) as slot:
        found: Tensor = runner.score([SequenceRows(slot, 0, tokens)]).logits.float().clone()
    return found


Make = Callable[[], tuple[ModelRunner, Any]]


@pytest.fixture(params=[False, True], ids=["own embedding", "tied"])
def make(request: pytest.FixtureRequest) -> Make:
    """Builds a runner of a model in blocks, and the same model in float32."""

    def build(**options: Any) -> tuple[ModelRunner, Any]:
        model, prepared, plain = in_blocks(tiny_llama(dim=64, tie_word_embeddings=request.param))
        return runner_of(model, prepared, **options), plain

    return build


def test_logits_are_those_of_the_numbers(make: Make) -> None:
    """Of prompts and of passes that are recorded."""
    tokens = prompt(40)
    for options in ({}, {"compile": "auto"}):
        runner, plain = make(**options)
        expected = plain(torch.tensor([tokens])).logits[0]
        assert (logits(runner, tokens) - expected).abs().max() < 1e-4
        if options:
            runner.record()
            assert runner.recorded()
            assert (logits(runner, tokens[:4]) - expected[:4]).abs().max() < 1e-4


def test_layers_that_read_the_same_rows_are_joined(make: Make) -> None:
    """Queries, keys and values, and both layers of an MLP."""
    runner, _ = make()
    groups = {tuple(name.rpartition(".")[2] for name in group) for group in runner.weights.siblings}
    assert groups == {("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")}


def test_rows_in_bytes_are_close() -> None:
    """As close as 8 bits are."""
    model, prepared, plain = in_blocks(tiny_llama(dim=64), rounded=True)
    expected = plain(torch.tensor([prompt(40)])).logits[0].detach().log_softmax(-1)
    found = logits(runner_of(model, prepared), prompt(40)).log_softmax(-1)
    assert float((expected.exp() * (expected - found)).sum(-1).mean()) < 0.02


def test_copies_are_read_as_they_were_written(make: Make, tmp_path: Path) -> None:
    """Layers, embedding and siblings; a tied embedding's numbers are there once."""
    runner, _ = make()
    expected = logits(runner, prompt(40))
    place = tmp_path / "copy"
    assert save_packed(runner, place, None, "key", runner.module.config, tiny_tokenizer())
    layers, prepared = read_layers(place, read_about(place, "key"))
    assert prepared.siblings == runner.weights.siblings
    embedding = layers["model.embed_tokens"]
    assert isinstance(embedding, PackedEmbedding)
    shared = embedding.tensors()["data"].data_ptr() == layers["lm_head"].tensors()["data"].data_ptr()
    assert shared == runner.module.config.tie_word_embeddings
    other = tiny_llama(dim=64, tie_word_embeddings=shared)
    put_layers(other, layers)
    assert torch.equal(logits(runner_of(other, prepared), prompt(40)), expected)
    assert packed_copies.same_layers(place, layers)


@pytest.mark.parametrize("wrong", [{"in": 96}, {"out": 96}, {"bits": 8}, {"blocks": ["Q4_0", False]}])
def test_copies_with_other_sizes_are_refused(make: Make, tmp_path: Path, wrong: dict[str, Any]) -> None:
    """The kernels would read beyond the end."""
    runner, _ = make()
    place = tmp_path / "copy"
    assert save_packed(runner, place, None, "key", runner.module.config, tiny_tokenizer())
    about = read_about(place, "key")
    about["layers"]["model.layers.0.mlp.up_proj"] |= wrong
    with pytest.raises(Exception, match="other sizes"):
        read_layers(place, about)


def test_heads_in_blocks_have_no_rows_to_write(make: Make) -> None:
    """As heads of 8 bits."""
    with pytest.raises(UnsupportedError, match="quantized weights"):
        HeadRows(make()[0])

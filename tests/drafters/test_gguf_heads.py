"""`sakiyomi export gguf` of heads: what llama.cpp's loader asks for, with the head's own numbers, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import block_toys
import eagle_toys
from sakiyomi.cli import app
from sakiyomi.core.errors import UnsupportedError
from sakiyomi.core.gguf import GgufFile, read_gguf
from sakiyomi.drafters.block_heads.formats import BlockFile
from sakiyomi.drafters.eagle_heads.formats import EagleFile
from sakiyomi.drafters.gguf_heads import write_head
from toys import save_model, tiny_llama, tiny_tokenizer

VOCAB, WIDTH, HEADS, OWN = 320, 32, 4, 8
SOME = range(3, VOCAB, 2)
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16, "rope_theta": 10000.0}  # fmt: skip
LAYER = {
    "attn_norm": (WIDTH,), "ffn_norm": (WIDTH,), "ffn_gate": (2 * WIDTH, WIDTH), "ffn_up": (2 * WIDTH, WIDTH),
    "ffn_down": (WIDTH, 2 * WIDTH), "attn_output": (WIDTH, HEADS * OWN),
}  # fmt: skip
NORMS = {"attn_q_norm": (OWN,), "attn_k_norm": (OWN,)}
SIZES = {
    "context_length": 512, "embedding_length": WIDTH, "feed_forward_length": 2 * WIDTH, "vocab_size": VOCAB,
    "attention.head_count": HEADS, "attention.head_count_kv": 2, "attention.key_length": OWN,
    "attention.value_length": OWN, "rope.freq_base": 10000.0,
}  # fmt: skip


def target(**more: Any) -> Any:
    return tiny_llama(layers=8, seed=3, **more)


def layer(number: int, read: int, **more: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Shapes of a decoder layer, by the names that llama.cpp's loader asks for; rows first."""
    attention = {"attn_q": (HEADS * OWN, read), "attn_k": (2 * OWN, read), "attn_v": (2 * OWN, read)}
    return {f"blk.{number}.{part}.weight": shape for part, shape in (LAYER | attention | more).items()}


def written(head: EagleFile | BlockFile, path: Path, kind: str = "F32") -> tuple[str, GgufFile]:
    called = write_head(path, head, target().config, tiny_tokenizer(), kind)
    return called, read_gguf(path)


def told(file: GgufFile, name: str) -> dict[str, Any]:
    """The metadata of the architecture, but for two that are compared roughly or never read."""
    assert file.metadata["general.architecture"] == name
    prefix, found = f"{name}.", {}
    for key, value in file.metadata.items():
        if key.startswith(prefix):
            found[key.removeprefix(prefix)] = value.tolist() if isinstance(value, np.ndarray) else value
    assert found.pop("attention.layer_norm_rms_epsilon") == pytest.approx(1e-6)
    found.pop("rope.dimension_count", None)
    return found


def values(file: GgufFile, name: str) -> Tensor:
    tensor = file.tensors[name]
    kind = {"F32": "<f4", "I64": "<i8"}[tensor.kind]
    return torch.from_numpy(tensor.bytes().view(kind).reshape(tensor.shape).copy())


def turned(tensor: Tensor, heads: int) -> Tensor:
    """Rows of each head: halves of a pair become neighbours, which is how llama.cpp turns Llama's heads."""
    rows = tensor.view(heads, 2, OWN // 2, -1)
    return torch.stack([rows[:, half, pair] for pair in range(OWN // 2) for half in (0, 1)], 1).view(tensor.shape)


# --- EAGLE-3 ----------------------------------------------------------------------------------------------------------


def test_an_eagle_head_has_what_the_loader_asks_for(tmp_path: Path) -> None:
    head = eagle_toys.new_head(target(), tokens=SOME, norm_before_residual=True, norm_before_fc=True)
    called, file = written(head, tmp_path / "head.gguf")
    assert called == "draft-eagle3"
    assert told(file, "eagle3") == SIZES | {
        "block_count": 1, "target_layers": [layer + 1 for layer in head.options.layers], "target_hidden_size": WIDTH,
        "norm_before_residual": True, "norm_before_fc": True,
    }  # fmt: skip
    assert len(file.metadata["tokenizer.ggml.tokens"]) == VOCAB  # the target's, also where the head knows some of them
    shapes = layer(0, 2 * WIDTH, attn_norm_2=(WIDTH,))
    assert {name: tensor.shape for name, tensor in file.tensors.items()} == shapes | {
        "fc.weight": (WIDTH, 3 * WIDTH), "enc.output_norm.weight": (3 * WIDTH,), "output_norm.weight": (WIDTH,),
        "output.weight": (len(SOME), WIDTH), "d2t": (len(SOME),),
    }  # fmt: skip
    own = head.tensors
    for name, wanted in {
        "d2t": torch.tensor(SOME), "fc.weight": own["fc.weight"], "output.weight": own["lm_head.weight"],
        "enc.output_norm.weight": own["input_norm.weight"], "output_norm.weight": own["norm.weight"],
        "blk.0.attn_norm_2.weight": own["layers.0.hidden_norm.weight"],
        "blk.0.attn_q.weight": turned(own["layers.0.self_attn.q_proj.weight"], HEADS),
        "blk.0.attn_k.weight": turned(own["layers.0.self_attn.k_proj.weight"], 2),
        "blk.0.attn_v.weight": own["layers.0.self_attn.v_proj.weight"],
        "blk.0.ffn_norm.weight": own["layers.0.post_attention_layernorm.weight"],
    }.items():  # fmt: skip
        assert torch.equal(values(file, name), wanted), name


def test_positions_and_an_embedding_of_its_own(tmp_path: Path) -> None:
    head = eagle_toys.new_head(target())
    config = {**head.config, "rope_scaling": LLAMA3, "max_position_embeddings": 64}
    own = torch.randn(VOCAB, WIDTH)
    _, file = written(replace(head, config=config, tensors=head.tensors | {"embed_tokens.weight": own}), tmp_path / "f")
    assert file.tensors["rope_freqs.weight"].shape == (OWN // 2,)
    assert torch.equal(values(file, "token_embd.weight"), own)
    assert "d2t" not in file.tensors
    assert file.metadata["eagle3.context_length"] == 64  # scaled positions are not stretched


# --- block drafters ---------------------------------------------------------------------------------------------------


def block_shapes(head: BlockFile, **more: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    read = len(head.options.layers) * WIDTH
    shapes = {"fc.weight": (WIDTH, read), "enc.output_norm.weight": (WIDTH,), "output_norm.weight": (WIDTH,)}
    return shapes | layer(0, WIDTH, **NORMS, **more) | layer(1, WIDTH, **NORMS, **more)


def test_a_block_drafter_has_what_the_loader_asks_for(tmp_path: Path) -> None:
    head = block_toys.new_block(target(), causal=True, logit_scale=0.5, softcap=30.0, embedding_scale=2.0)
    called, file = written(head, tmp_path / "block.gguf")
    assert called == "draft-dflash"
    assert told(file, "dflash") == SIZES | {
        "block_count": 2, "target_layers": [2, 4, 6, 7], "block_size": 6, "attention.causal": True,
        "logit_scale": 0.5, "final_logit_softcapping": 30.0, "embedding_scale": 2.0,
    }  # fmt: skip
    assert file.metadata["tokenizer.ggml.mask_token_id"] == VOCAB - 1
    assert {name: tensor.shape for name, tensor in file.tensors.items()} == block_shapes(head)
    own = head.tensors
    for name, wanted in {
        "enc.output_norm.weight": own["hidden_norm.weight"], "output_norm.weight": own["norm.weight"],
        "blk.1.attn_q.weight": own["layers.1.self_attn.q_proj.weight"],
        "blk.1.attn_k_norm.weight": own["layers.1.self_attn.k_norm.weight"],
    }.items():  # fmt: skip
        assert torch.equal(values(file, name), wanted), name


def test_a_cut_vocabulary(tmp_path: Path) -> None:
    head = block_toys.new_block(target(), tokens=SOME)
    called, file = written(head, tmp_path / "block.gguf")
    assert called == "draft-dflash"
    assert {name: tensor.shape for name, tensor in file.tensors.items()} == block_shapes(head) | {
        "output.weight": (len(SOME), WIDTH), "d2t": (len(SOME),),
    }  # fmt: skip
    assert values(file, "d2t").tolist() == list(SOME)


@pytest.mark.parametrize("anchored", [False, True])
def test_a_markov_head(anchored: bool, tmp_path: Path) -> None:
    head = block_toys.new_block(target(), anchored=anchored, markov="vanilla", confident=True, tokens=SOME)
    called, file = written(head, tmp_path / "block.gguf")
    assert called == "draft-dspark"
    found, rank = told(file, "dflash"), block_toys.RANK
    assert (found["sample_from_anchor"], found["has_confidence_head"]) == (anchored, True)
    assert {name: tensor.shape for name, tensor in file.tensors.items()} == block_shapes(head) | {
        "markov_w1.weight": (VOCAB, rank), "markov_w2.weight": (len(SOME), rank), "output.weight": (len(SOME), WIDTH),
        "conf_proj.weight": (1, WIDTH + rank), "conf_proj.bias": (1,), "d2t": (len(SOME),),
    }  # fmt: skip
    assert torch.equal(values(file, "markov_w2.weight"), head.tensors["markov_head.markov_w2.weight"])
    assert values(file, "d2t").tolist() == list(SOME)


def test_the_first_row_guesses_without_a_markov_head(tmp_path: Path) -> None:
    """llama.cpp reads the first row of files with a Markov head alone: this one adds nothing."""
    called, file = written(block_toys.new_block(target(), anchored=True), tmp_path / "block.gguf")
    assert called == "draft-dspark"
    assert told(file, "dflash")["sample_from_anchor"] is True
    for name in ("markov_w1.weight", "markov_w2.weight"):
        assert values(file, name).shape == (VOCAB, 1)
        assert not values(file, name).any()


def test_convolutions_and_a_selector(tmp_path: Path) -> None:
    head = block_toys.new_block(target(), kernel=2, group=8, selected=4)
    called, file = written(head, tmp_path / "block.gguf", "Q8_0")
    found, rank, projected = told(file, "dflash"), block_toys.RANK, 2 * 2 * WIDTH // 8
    assert called == "draft-dflash"
    named = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": rank, "selector_top_k": 4}
    assert named.items() <= found.items()
    shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
    base = {f"blk.{i}.{part}_conv_base": (2, 2, WIDTH) for i in (0, 1) for part in ("attn", "ffn")}
    project = {f"{part}_conv_proj": (projected, WIDTH) for part in ("attn", "ffn")}
    assert shapes == block_shapes(head, **project) | base | {
        "selector_predecessor.weight": (VOCAB, rank), "selector_successor.weight": (VOCAB, rank),
        "selector_hidden.weight": (rank, WIDTH),
    }  # fmt: skip
    assert torch.equal(values(file, "blk.1.ffn_conv_base"), head.tensors["layers.1.mlp_conv.base_kernel"])
    assert file.tensors["blk.1.ffn_conv_proj.weight"].kind == "Q8_0"


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("target"), target(), tiny_tokenizer())


def exported(head: Path, out: Path, *more: str) -> Any:
    return CliRunner().invoke(app, ["export", "gguf", str(head), str(out), *more])


def test_the_command_writes_heads_in_any_type(place: Path, tmp_path: Path) -> None:
    head = eagle_toys.speculators_folder(tmp_path / "head", eagle_toys.new_head(target(), tokens=SOME))
    done = exported(head, tmp_path / "head.gguf", "--target", str(place), "--type", "q8_0")
    assert done.exit_code == 0, done.output
    file = read_gguf(tmp_path / "head.gguf")
    assert {file.tensors[name].kind for name in ("fc.weight", "output.weight", "blk.0.attn_q.weight")} == {"Q8_0"}
    assert file.tensors["d2t"].kind == "I64"
    block = block_toys.dflash_folder(tmp_path / "block", block_toys.new_block(target()))
    assert exported(block, tmp_path / "block.gguf", "--target", str(place)).exit_code == 0
    assert read_gguf(tmp_path / "block.gguf").metadata["general.architecture"] == "dflash"


EAGLES: dict[str, Callable[[], EagleFile]] = {
    "EAGLE-1": lambda: eagle_toys.new_head(target(), first=True, layers=(7,)),
    "P-EAGLE": lambda: eagle_toys.new_head(target(), mask=5),
    "2 layers": lambda: eagle_toys.new_head(target(), depth=2),
    "fc_norm": lambda: eagle_toys.new_head(target(), fc_norm=True),
    "norm_output": lambda: eagle_toys.new_head(target(), norm_output=True),
    "norms of queries": lambda: eagle_toys.new_head(target(), kind="qwen3"),
    "last layer": lambda: eagle_toys.new_head(target(), layers=(1, 3, 7)),
}
BLOCKS: dict[str, Callable[[], BlockFile]] = {
    "'gated'": lambda: block_toys.new_block(target(), anchored=True, markov="gated"),
    "'rnn'": lambda: block_toys.new_block(target(), anchored=True, markov="rnn"),
    "confidence": lambda: block_toys.new_block(target(), markov="vanilla", confident=True, trusts_tokens=False),
    "confidence head": lambda: block_toys.new_block(target(), anchored=True, confident=True),
    "scaled logits": lambda: block_toys.new_block(target(), markov="vanilla", logit_scale=0.5),
    "first row": lambda: block_toys.new_block(target(), anchored=True, kernel=2, group=8, selected=4),
    "vocabulary": lambda: block_toys.new_block(target(), tokens=SOME, kernel=2, group=8, selected=4),
    "candidates": lambda: block_toys.new_block(target(), kernel=2, group=8, selected=6),
}


def test_a_head_of_another_target_is_refused(tmp_path: Path) -> None:
    for head in (eagle_toys.new_head(target()), block_toys.new_block(target())):
        for other, words in ((target(dim=64), "64"), (target(vocab=300), "300")):
            strange = replace(
                head,
                tokens=torch.tensor(SOME),
                tensors=head.tensors | {"lm_head.weight": torch.zeros(len(SOME), WIDTH)},
            )
            with pytest.raises(UnsupportedError, match=words):
                write_head(tmp_path / "head.gguf", strange, other.config, tiny_tokenizer(), "F32")


@pytest.mark.parametrize("name", [*EAGLES, *BLOCKS])
def test_what_llama_cpp_cannot_read_is_refused(name: str, tmp_path: Path) -> None:
    head = (EAGLES | BLOCKS)[name]()
    with pytest.raises(UnsupportedError) as caught:
        written(head, tmp_path / "head.gguf")
    assert name in str(caught.value)
    assert not (tmp_path / "head.gguf").exists()


def test_what_the_command_refuses(place: Path, tmp_path: Path) -> None:
    head = eagle_toys.original_folder(tmp_path / "head", eagle_toys.new_head(target()))
    for model, more, words in (
        (head, [], "the target is None"),
        (head, ["--target", str(place), "--type", "Q1"], "the type is 'Q1'"),
        (place, ["--target", str(place)], "leave out --target"),
    ):
        done = exported(model, tmp_path / "out.gguf", *more)
        assert done.exit_code != 0
        assert words in done.output + str(done.exception), done.output
    assert not (tmp_path / "out.gguf").exists()

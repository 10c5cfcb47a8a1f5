"""Heads against the code of those who made them, where it is installed (extra ``reference``)."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config

from architectures import VOCAB, prompt
from block_toys import dflash_folder, new_block
from sakiyomi.drafters.block import BlockDrafter
from sakiyomi.model_executor.build import build_runner
from toys import tiny_llama

BOUND = 1e-5  # of the largest logit
TEXT = prompt(37, 5)


@cache
def target() -> Any:
    return tiny_llama(vocab=VOCAB, layers=8, seed=3)


@pytest.mark.parametrize("causal", [False, True])
def test_blocks_are_those_of_dflash(causal: bool, tmp_path: Path) -> None:
    model = pytest.importorskip("dflash.model")
    file = new_block(target(), causal=causal, logit_scale=0.7, softcap=9.0)
    options = file.options
    with torch.no_grad():
        states = target()(input_ids=torch.tensor([TEXT]), output_hidden_states=True).hidden_states
        ids = torch.tensor([[TEXT[-1]] + [options.mask] * (options.size - 1)])
        made = Qwen3Config(
            **file.config, is_causal=causal, block_size=options.size, num_target_layers=8,
            dflash_config={
                "target_layer_ids": list(options.layers), "mask_token_id": options.mask,
                "output_multiplier": 0.7, "final_logit_softcapping": 9.0,
            },
        )  # fmt: skip
        reference = model.DFlashDraftModel(made).eval()
        reference.load_state_dict(file.tensors)
        hidden = reference(
            target_hidden=model.extract_context_feature(states, reference.target_layer_ids)[:, :-1],
            noise_embedding=target().get_input_embeddings()(ids),
            position_ids=torch.arange(len(TEXT) - 1 + options.size)[None],
        )
        wanted = reference.compute_logits(hidden[0, 1:], target().get_output_embeddings())
    runner = build_runner(target(), compile=False)
    folder = str(dflash_folder(tmp_path, file))
    own = BlockDrafter.load(folder, runner, lambda loaded: build_runner(loaded.model, owned=True, compile=False)).runner
    slot = own.model.cache.take()
    own.model.cache.reserve(slot, len(TEXT) + options.size)
    own.write(slot, 0, {layer: states[layer + 1][0, :-1] for layer in options.layers})
    logits, _ = own.guess([(slot, len(TEXT) - 1, TEXT[-1])], options.guesses)
    assert (logits[0] - wanted).abs().max() < BOUND * wanted.abs().max()

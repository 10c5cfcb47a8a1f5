"""The Llama models that the commands train: made from sizes, written as Hugging Face folders."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from sakiyomi.train.config import LlamaSizes


def new_llama(
    sizes: LlamaSizes,
    tokenizer: PreTrainedTokenizerBase,
    *,
    vocab: int,
    max_positions: int,
    layers: int | None = None,
) -> LlamaForCausalLM:
    """A Llama with random weights; `layers` replaces the depth of `sizes`, special tokens are the tokenizer's."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocab,
            hidden_size=sizes.hidden,
            intermediate_size=sizes.intermediate,
            num_hidden_layers=layers or sizes.layers,
            num_attention_heads=sizes.heads,
            num_key_value_heads=sizes.kv_heads,
            head_dim=sizes.hidden // sizes.heads,
            max_position_embeddings=max_positions,
            rope_parameters={"rope_type": "default", "rope_theta": sizes.rope_theta},
            tie_word_embeddings=True,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def save_model(folder: Path, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write weights in bf16, configuration, generation configuration and tokenizer."""
    plain: Any = LlamaForCausalLM(copy.deepcopy(model.config))
    plain.to(torch.bfloat16)
    plain.load_state_dict(model.state_dict())
    plain.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    # The weights are written through a private temporary file; a model folder is there to be read by others.
    for path in folder.glob("*.safetensors"):
        path.chmod(0o644)

"""Random Llamas of any size, with a stand-in for the tokenizer, and random prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sakiyomi.model_executor.loading.model import parse_device

__all__ = ["MEDIUM", "Numbers", "described", "random_llama", "random_prompts"]

MEDIUM = (768, 12, 12, 2048, 32000)  # of random_llama: 134M parameters


class Numbers:
    """Stands in for the tokenizer of a random model: the text of a token is its number."""

    eos_token_id = None
    bos_token_id = None
    all_special_ids: tuple[int, ...] = ()

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Numbers, each with a space before it."""
        return "".join(f" {token}" for token in token_ids)


def random_llama(
    dim: int,
    layers: int,
    heads: int,
    hidden: int,
    vocab_size: int,
    dtype: torch.dtype,
    *,
    spread: float = 3.0,
    seed: int = 0,
    device: str = "cpu",
    positions: int = 2048,
) -> Any:
    """A Llama with random weights, no end token, and logits whose standard deviation is ``spread``.

    Flat logits (a spread of 0.5, as fresh models have) would make top-p keep nearly all tokens and greedy search one
    near-tie after the other; those of trained models spread by 2 to 4.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=dim,
        intermediate_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=positions,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model: Any = LlamaForCausalLM(config)
        # The last norm has unit rows, so that a logit is a sum of dim products.
        model.lm_head.weight.normal_(0.0, spread / dim**0.5)
    return model.to(parse_device(device), dtype).eval()


def described(model: Any) -> str:
    """A random model, for the conditions."""
    config, size = model.config, sum(parameter.numel() for parameter in model.parameters())
    return (
        f"random Llama, {size / 1e6:.0f}M parameters, {config.num_hidden_layers} layers, dim {config.hidden_size}, "
        f"vocabulary {config.vocab_size}"
    )


def random_prompts(count: int, length: int, vocab_size: int) -> list[list[int]]:
    """Token ids, always the same ones."""
    generator = torch.Generator().manual_seed(0)
    table: list[list[int]] = torch.randint(vocab_size, (count, length), generator=generator).tolist()
    return table

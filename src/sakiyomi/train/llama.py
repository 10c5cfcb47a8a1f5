"""The Llama models that the commands train: made from sizes, grown in depth, written as Hugging Face folders.

A model grows in depth during training, for shallow steps at the start cost a fraction of deep ones. Between the trained
layers come copies of the nearest one whose output projections are zero. They add nothing at first, so that the grown
model is the same function and the loss does not jump. (Splitting each layer x + f(x) into n layers f / n was tried
first: it cost 0.8 nats a token, which took some 15 steps to win back.)
"""

from __future__ import annotations

import copy
import dataclasses
import re
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from sakiyomi.train.config import LlamaSizes

_LAYER = re.compile(r"(model\.layers\.)(\d+)(\..+)")
_OUTPUTS = ("self_attn.o_proj.weight", "mlp.down_proj.weight")


def new_llama(
    sizes: LlamaSizes, tokenizer: PreTrainedTokenizerBase, *, vocab: int, max_positions: int, layers: int | None = None
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


def draft_sizes(given: LlamaSizes, target: Any) -> LlamaSizes:
    """Sizes of a draft, those that are 0 from its target's: half as wide at most and of a sixth of its parameters.

    Args:
        given: sizes that were asked for.
        target: a transformers model.
    """
    config = target.config.get_text_config()
    vocab, wide = int(target.get_output_embeddings().weight.shape[0]), int(config.hidden_size)
    most = sum(weight.numel() for weight in target.parameters()) / 6
    depth = given.layers or min(2, max(1, int(config.num_hidden_layers) // 2))
    widths = [width for width in (192, 160, 128, 96, 64, 48, 32, 16) if width <= max(wide // 2, 16)]
    hidden = given.hidden or next((w for w in widths if w * vocab + depth * 11 * w * w <= most), widths[-1])
    heads = given.heads or max(1, hidden // 64)
    if hidden % heads or hidden // heads % 2:
        heads = 1
    intermediate = given.intermediate or -(-hidden * 8 // 3 // 16) * 16
    return dataclasses.replace(given, hidden=hidden, layers=depth, heads=heads, intermediate=intermediate)


def grow(model: LlamaForCausalLM, layers: int) -> tuple[LlamaForCausalLM, dict[str, str]]:
    """A model of `layers` layers, a multiple of the present depth, that computes the same function.

    Returns:
        The new model (own tensors) and a map new parameter name -> old parameter name.
    """
    config = copy.deepcopy(model.config)
    depth = config.num_hidden_layers
    factor, rest = divmod(layers, depth)
    assert not rest, "checked by the configuration"
    config.num_hidden_layers = layers
    deep = LlamaForCausalLM(config)
    old = dict(model.named_parameters())
    source: dict[str, str] = {}
    with torch.no_grad():
        for name, parameter in deep.named_parameters():
            match = _LAYER.fullmatch(name)
            source[name] = name
            if match:
                # The nearest layer, not the one below for all: equal copies side by side would learn the same.
                nearest = min((2 * int(match[2]) + factor) // (2 * factor), depth - 1)
                source[name] = f"{match[1]}{nearest}{match[3]}"
            parameter.copy_(old[source[name]])
            if match and int(match[2]) % factor and name.endswith(_OUTPUTS):
                parameter.zero_()
    return deep, source


def save_model(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write weights in bf16, configuration, generation configuration and tokenizer."""
    plain: Any = type(model)(copy.deepcopy(model.config))
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

"""A hybrid model out of a Llama: gated delta nets take the place of its attention in all but every n-th layer.

Embeddings, MLPs, norms and the layers that keep their attention start as the Llama has them; queries, keys, values and
outputs of a delta net start from the projections of the attention that it replaces. The Llama then teaches it, by the
recipe of drafts (`sakiyomi train draft`).

python recipes/hybrid.py --out runs/hybrid --target tales --text stories.jsonl
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaForCausalLM, Qwen3_5ForCausalLM, Qwen3_5TextConfig

from sakiyomi.cli.train import script
from sakiyomi.core.errors import LoadError
from sakiyomi.train.commands import TrainDraft
from sakiyomi.train.config import LoopOptions, SampleOptions, TextOptions
from sakiyomi.train.draft import train_draft
from sakiyomi.train.llama import save_model
from sakiyomi.train.settings import setting
from sakiyomi.train.taught import load_target

__all__ = ["HybridConfig", "hybrid_of", "train_hybrid"]

KERNEL = 4
"""Tokens that the convolution of a delta net sees."""
STEPS = (0.001, 0.1)
"""Range of the heads' first decays a token, as in Mamba: the slowest head forgets after some thousand tokens."""
PROBE_TOKENS = 256


@dataclass(frozen=True, kw_only=True)
class HybridConfig(TrainDraft):
    """A hybrid that learns from the Llama it is made of.

    Attributes:
        target: The Llama that the hybrid is made of and learns from: embedded name (tales), folder or hub id.
        init: A hybrid to start from instead of a new one.
        every: Every n-th layer keeps its attention.
    """

    loop: LoopOptions = field(
        default=LoopOptions(minutes=60.0, decay_share=0.5, row_tokens=(256,), step_tokens=1024, eval_minutes=30.0)
    )
    text: TextOptions = field(default=TextOptions(muon_lr=0.0, adam_lr=0.0015))
    sampling: SampleOptions = field(default=SampleOptions(samples=0))
    cost: str = setting("1", resume=True)
    every: int = setting(4, least=1)


def train_hybrid(config: HybridConfig, command: str = "") -> dict[str, Any]:
    """Make OUT/start from the Llama, if no hybrid to start from is given, and train it.

    Returns:
        See `train_draft`.
    """
    if not config.init:
        start = Path(config.loop.out) / "start"
        if not config.loop.resume:
            target, tokenizer = load_target(config.target)
            torch.manual_seed(config.loop.seed)
            save_model(start, hybrid_of(target, config.every), tokenizer)
        config = config.changed(init=str(start))
    return train_draft(config, command)


@torch.no_grad()
def hybrid_of(llama: Any, every: int) -> Qwen3_5ForCausalLM:
    """The hybrid with the Llama's weights wherever it has a place for them.

    Raises:
        LoadError: the model is no Llama.
    """
    if not isinstance(llama, LlamaForCausalLM):
        raise LoadError(f"the target is a {type(llama).__name__}, expected a LlamaForCausalLM; give another --target")
    old: Any = llama.config
    heads, width = old.num_attention_heads, old.head_dim
    model = Qwen3_5ForCausalLM(
        Qwen3_5TextConfig(
            vocab_size=old.vocab_size,
            hidden_size=old.hidden_size,
            intermediate_size=old.intermediate_size,
            num_hidden_layers=old.num_hidden_layers,
            num_attention_heads=heads,
            num_key_value_heads=old.num_key_value_heads,
            head_dim=width,
            max_position_embeddings=old.max_position_embeddings,
            rms_norm_eps=old.rms_norm_eps,
            tie_word_embeddings=old.tie_word_embeddings,
            rope_parameters={**old.rope_parameters, "partial_rotary_factor": 1.0},
            linear_conv_kernel_dim=KERNEL,
            linear_key_head_dim=width,
            linear_value_head_dim=width,
            linear_num_key_heads=heads,
            linear_num_value_heads=heads,
            layer_types=[
                "linear_attention" if (i + 1) % every else "full_attention" for i in range(old.num_hidden_layers)
            ],
            bos_token_id=old.bos_token_id,
            eos_token_id=old.eos_token_id,
            pad_token_id=old.pad_token_id,
        )
    )
    lengths = _lengths(llama)
    weights = {name: weight.float() for name, weight in llama.state_dict().items()}
    for name, weight in model.named_parameters():
        if name in weights and weight.shape == weights[name].shape:
            # A norm of this family multiplies by 1 + weight.
            weight.copy_(weights[name] - 1 if name.endswith("norm.weight") else weights[name])
    layers: Any = model.model.layers
    for index, layer in enumerate(layers):
        old_layer: Any = llama.model.layers[index]
        q, k, v, o = (getattr(old_layer.self_attn, f"{part}_proj").weight.float() for part in "qkvo")
        if (index + 1) % every == 0:
            own = layer.self_attn
            # Each head's queries and the gate of its output side by side: a gate of 0 halves the output.
            both = torch.stack([q.view(heads, width, -1), torch.zeros(heads, width, q.shape[1])], 1)
            own.q_proj.weight.copy_(both.reshape(2 * heads * width, -1))
            own.o_proj.weight.copy_(2 * o)
            for norm, length in zip((own.q_norm, own.k_norm), lengths[index], strict=True):
                norm.weight.fill_(length - 1)
        else:
            _start_delta_net(layer.linear_attn, (q, _repeated(k, q, width), _repeated(v, q, width)), o)
    return model


def _start_delta_net(net: Any, projections: tuple[Tensor, ...], output: Tensor) -> None:
    """Projections of the attention, a convolution that passes the token on, and slow decays."""
    net.in_proj_qkv.weight.copy_(torch.cat(projections))
    net.out_proj.weight.copy_(output)
    net.conv1d.weight.zero_()
    net.conv1d.weight[:, 0, -1] = 1
    net.A_log.zero_()
    first, last = map(math.log, STEPS)
    steps = torch.linspace(first, last, int(net.num_v_heads)).exp()
    net.dt_bias.copy_(steps + torch.log(-torch.expm1(-steps)))  # the inverse of softplus


def _repeated(weight: Tensor, queries: Tensor, width: int) -> Tensor:
    """Rows of the key/value heads for each query head."""
    return weight.view(-1, width, weight.shape[1]).repeat_interleave(len(queries) // len(weight), 0).flatten(0, 1)


def _lengths(llama: LlamaForCausalLM) -> list[tuple[float, float]]:
    """Root mean squares of each layer's queries and keys over some tokens: what norms in their place start with."""
    found: list[list[float]] = [[0.0, 0.0] for _ in llama.model.layers]
    hooks = [
        getattr(layer.self_attn, name).register_forward_hook(
            lambda module, args, output, row=row, place=place: row.__setitem__(
                place, float(output.float().pow(2).mean().sqrt())
            )
        )
        for layer, row in zip(llama.model.layers, found, strict=True)
        for place, name in enumerate(("q_proj", "k_proj"))
    ]
    try:
        ids = torch.randint(llama.config.vocab_size, (1, PROBE_TOKENS), generator=torch.Generator().manual_seed(0))
        llama(input_ids=ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return [(row[0], row[1]) for row in found]


if __name__ == "__main__":
    script(
        HybridConfig,
        train_hybrid,
        "Make a hybrid of gated delta nets and attention out of a Llama, which then teaches it on TEXT.",
    )

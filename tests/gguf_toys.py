"""A tiny model of every architecture that GGUF files are read and written in."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM

import causal_models

VOCAB = 320
_LINEAR = {"layer_types": ["linear_attention"] * 3 + ["full_attention"], "num_hidden_layers": 4}
_FULL = {"layer_types": ["full_attention"] * 3, "sliding_window": None}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "mistral": ("llama", {"sliding_window": None}),  # these files do not hold the first Mistral's window
    "mixtral": ("llama", {}),
    "qwen2": ("qwen2", _FULL | {"use_sliding_window": False}),
    "qwen2_moe": ("qwen2moe", {}),
    "qwen3": ("qwen3", {}),
    "qwen3_moe": ("qwen3moe", {"norm_topk_prob": True}),
    "qwen3_5_text": ("qwen35", _LINEAR),
    "qwen3_5_moe_text": ("qwen35moe", _LINEAR),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 12}),
    "gemma3_text": ("gemma3", {"query_pre_attn_scalar": 8}),
    "gemma4_text": ("gemma4", {"vocab_size_per_layer_input": VOCAB}),
    "phi3": ("phi3", {}),
    "granite": ("granite", {}),
    "falcon": ("falcon", {"bias": False}),
    "starcoder2": ("starcoder2", {"sliding_window": None}),
    "gpt_oss": ("gpt-oss", {}),
    "lfm2": ("lfm2", {}),
    "deepseek_v2": ("deepseek2", {}),
    "deepseek_v3": ("deepseek2", {}),
    "cohere": ("command-r", {}),
    "cohere2": ("cohere2", {}),
    "olmo": ("olmo", {}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo2", {}),
    "smollm3": ("smollm3", {}),
    "mamba": ("mamba", {}),
    "stablelm": ("stablelm", {"qk_layernorm": False}),
    "nemotron": ("nemotron", {}),
    "gpt2": ("gpt2", {}),
    "minimax_m2": ("minimax-m2", {}),
}
"""By model type: its name in the file, and what such files do not hold."""


def model_of(kind: str) -> Any:
    """A tiny model with random weights, norms and decays too."""
    config = causal_models.config(kind)
    for name, value in ({"vocab_size": VOCAB} | KINDS[kind][1]).items():
        setattr(config, name, value)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if name.endswith("A_log"):
                tensor.copy_(torch.rand_like(tensor) + 0.1)
            elif tensor.numel() > 1:
                tensor.copy_(torch.randn_like(tensor) * 0.3 + float("norm" in name))
    return model

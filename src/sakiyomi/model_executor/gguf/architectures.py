"""Architectures of GGUF files: which model of transformers each is, and how keys and tensors are called there.

A tensor's name in a file is "blk.3.attn_q.weight": the layer, the part, the suffix. ``parts`` says what a part is
called in the model; a part with a suffix is looked for first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sakiyomi.model_executor.gguf import special
from sakiyomi.model_executor.gguf.changes import (
    DECAY,
    EXPERTS,
    GROUPED,
    INTERLEAVED,
    INTERLEAVED_BIAS,
    KEYS,
    LATENT,
    NUMBERS,
    PLUS_ONE,
    QKV_CONVOLUTION,
    QKV_ROWS,
    QUERIES,
    ROW,
    SQUEEZED,
    TURNED,
    VALUE_COLUMNS,
    VALUE_DECAY,
    VALUE_HEADS,
    VALUE_ROWS,
    Change,
)


@dataclass(frozen=True)
class Architecture:
    """An architecture.

    Attributes:
        model_type: of the configuration.
        parts: names of tensors in the model by those in the file.
        keys: names in the configuration by those of the metadata; a dot leads into a dictionary.
        fixed: what the configuration says besides.
        changes: by the name of the part in the file.
        joins: tensors of the model that are made of several, by their names there: the parts, and how.
        settle: completes the configuration where the tables above cannot say it.
        tell: metadata for such a configuration that the tables do not say.
        renamed: parts that have another name in the model, by its configuration.
        layers: where the layers are in the model.
        unused: metadata that say nothing new.
    """

    model_type: str
    parts: Mapping[str, str]
    keys: Mapping[str, str]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    changes: Mapping[str, Change] = field(default_factory=dict)
    joins: Mapping[str, tuple[tuple[str, ...], Change]] = field(default_factory=dict)
    settle: Callable[[special.Facts, dict[str, Any]], None] = lambda facts, config: None
    tell: Callable[[Any], Mapping[str, Any]] = lambda config: {}
    renamed: Callable[[Any], Mapping[str, str]] = lambda config: {}
    layers: str = "model.layers"
    unused: tuple[str, ...] = ()


_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ATTENTION = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}  # fmt: skip
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_LLAMA = _TOP | _ATTENTION | _MLP | _NORMS
_ROUTED = {"ffn_gate_inp": "mlp.gate", "ffn_down_exps.weight": "mlp.experts.down_proj"}
_EXPERTS = {"mlp.experts.gate_up_proj": (("ffn_gate_exps.weight", "ffn_up_exps.weight"), EXPERTS)}

_SIZES = {
    "context_length": "max_position_embeddings", "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers", "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads", "attention.head_count_kv": "num_key_value_heads",
    "vocab_size": "vocab_size",
}  # fmt: skip
_ROTARY = {"rope.freq_base": "rope_parameters.rope_theta"}
_RMS = {"attention.layer_norm_rms_epsilon": "rms_norm_eps"}
_WIDTH = {"attention.key_length": "head_dim"}
_NARROW = _SIZES | _ROTARY | _RMS
_BASE = _NARROW | _WIDTH
_ROUTING = {
    "expert_count": "num_experts", "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}  # fmt: skip
_TURNED_HEADS = {"attn_q": QUERIES, "attn_k": KEYS}
_GEMMA_NORMS = dict.fromkeys(
    ("attn_norm", "ffn_norm", "output_norm", "post_attention_norm", "post_ffw_norm", "attn_q_norm", "attn_k_norm"),
    PLUS_ONE,
)

# ---------------------------------------------------------------- the architectures

_QWEN3_MOE = Architecture(
    "qwen3_moe", _LLAMA | _HEAD_NORMS | _ROUTED, _BASE | _ROUTING, {"norm_topk_prob": True},
    joins=_EXPERTS, settle=special.qwen2_moe,
)  # fmt: skip
_SHARED = {
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj", "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj", "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}  # fmt: skip
_LINEAR_ATTENTION = {
    "attn_qkv": "linear_attn.in_proj_qkv", "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a", "ssm_beta": "linear_attn.in_proj_b",
    "ssm_conv1d": "linear_attn.conv1d", "ssm_norm": "linear_attn.norm", "ssm_out": "linear_attn.out_proj",
    "ssm_a": "linear_attn.A_log", "ssm_dt.bias": "linear_attn.dt_bias",
}  # fmt: skip
_QWEN35 = Architecture(
    "qwen3_5_text",
    _LLAMA | _HEAD_NORMS | _LINEAR_ATTENTION | {"post_attention_norm": "post_attention_layernorm"},
    _BASE | {
        "ssm.conv_kernel": "linear_conv_kernel_dim", "ssm.state_size": "linear_key_head_dim",
        "ssm.group_count": "linear_num_key_heads", "ssm.time_step_rank": "linear_num_value_heads",
    },
    changes=_GEMMA_NORMS | {
        "attn_qkv": QKV_ROWS, "attn_gate": VALUE_ROWS, "ssm_alpha": VALUE_HEADS, "ssm_beta": VALUE_HEADS,
        "ssm_conv1d": QKV_CONVOLUTION, "ssm_out": VALUE_COLUMNS, "ssm_a": VALUE_DECAY, "ssm_dt": VALUE_HEADS,
    },
    settle=special.qwen35, tell=special.tell_qwen35,
)  # fmt: skip
_GEMMA = Architecture("gemma", _LLAMA, _BASE, changes=_GEMMA_NORMS)
_GEMMA2 = Architecture(
    "gemma2",
    _TOP | _ATTENTION | _MLP | {
        "attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm", "post_ffw_norm": "post_feedforward_layernorm",
    },
    _BASE | {
        "attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping",
        "attention.sliding_window": "sliding_window",
    },
    changes=_GEMMA_NORMS, settle=special.gemma2, tell=special.tell_gemma2,
)  # fmt: skip
_LATENT_ATTENTION = {
    "attn_q_a": "self_attn.q_a_proj", "attn_q_a_norm": "self_attn.q_a_layernorm", "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa", "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
}  # fmt: skip
_BLOCK = {
    "attn_norm": "ln_1", "ffn_norm": "ln_2", "attn_qkv": "attn.c_attn", "attn_output": "attn.c_proj",
    "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj",
}  # fmt: skip

ARCHITECTURES = {
    "llama": Architecture(
        "llama", _LLAMA | _ROUTED, _BASE, changes=_TURNED_HEADS, joins=_EXPERTS, settle=special.llama,
        tell=special.tell_llama
    ),
    "mistral3": Architecture("ministral3", _LLAMA, _BASE, changes=_TURNED_HEADS),
    "qwen2": Architecture("qwen2", _LLAMA, _BASE),
    "qwen2moe": Architecture(
        "qwen2_moe", _LLAMA | _ROUTED | _SHARED,
        _BASE | _ROUTING | {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
        {"norm_topk_prob": False}, changes={"ffn_gate_inp_shexp": ROW}, joins=_EXPERTS, settle=special.qwen2_moe,
    ),
    "qwen3": Architecture("qwen3", _LLAMA | _HEAD_NORMS, _BASE, settle=special.biases),
    "qwen3moe": _QWEN3_MOE,
    "qwen35": _QWEN35,
    "qwen35moe": Architecture(
        "qwen3_5_moe_text", dict(_QWEN35.parts) | _ROUTED | _SHARED,
        dict(_QWEN35.keys) | _ROUTING | {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
        changes=dict(_QWEN35.changes) | {"ffn_gate_inp_shexp": ROW}, joins=_EXPERTS, settle=special.qwen35,
        tell=special.tell_qwen35,
    ),
    "gemma": _GEMMA,
    "gemma2": _GEMMA2,
    "gemma3": Architecture(
        "gemma3_text", dict(_GEMMA2.parts) | _HEAD_NORMS, dict(_GEMMA2.keys), changes=_GEMMA_NORMS,
        settle=special.gemma3, tell=special.tell_gemma3,
    ),
    "gemma4": Architecture(
        "gemma4_text",
        dict(_GEMMA2.parts) | _HEAD_NORMS | {
            "layer_output_scale.weight": "layer_scalar", "inp_gate": "per_layer_input_gate",
            "proj": "per_layer_projection", "post_norm": "post_per_layer_input_norm",
            "per_layer_token_embd": "model.embed_tokens_per_layer",
            "per_layer_model_proj": "model.per_layer_model_projection",
            "per_layer_proj_norm": "model.per_layer_projection_norm",
            "ffn_gate_inp": "router.proj", "ffn_gate_inp.scale": "router.scale",
            "ffn_down_exps.scale": "router.per_expert_scale", "ffn_down_exps.weight": "experts.down_proj",
            "pre_ffw_norm_2": "pre_feedforward_layernorm_2", "post_ffw_norm_1": "post_feedforward_layernorm_1",
            "post_ffw_norm_2": "post_feedforward_layernorm_2", "ffn_gate_up_exps.weight": "experts.gate_up_proj",
        },
        _NARROW | {
            "attention.sliding_window": "sliding_window", "final_logit_softcapping": "final_logit_softcapping",
            "attention.shared_kv_layers": "num_kv_shared_layers",
            "embedding_length_per_layer_input": "hidden_size_per_layer_input",
        },
        joins={"experts.gate_up_proj": (("ffn_gate_exps.weight", "ffn_up_exps.weight"), EXPERTS)},
        settle=special.gemma4, tell=special.tell_gemma4,
        unused=("attention.value_length", "attention.value_length_swa"),
    ),
    "phi3": Architecture(
        "phi3", _TOP | _NORMS | {
            "attn_qkv": "self_attn.qkv_proj", "attn_output": "self_attn.o_proj", "ffn_up": "mlp.gate_up_proj",
            "ffn_down": "mlp.down_proj",
        }, _BASE, settle=special.phi3, tell=special.tell_phi3,
    ),
    "granite": Architecture(
        "granite", _LLAMA, _BASE | {
            "attention.scale": "attention_multiplier", "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier", "logit_scale": "logits_scaling",
        }, changes=_TURNED_HEADS, settle=special.biases,
    ),
    "falcon": Architecture(
        "falcon", {
            "token_embd": "transformer.word_embeddings", "output_norm": "transformer.ln_f", "output": "lm_head",
            "attn_norm": "input_layernorm", "attn_norm_2": "ln_attn", "attn_qkv": "self_attention.query_key_value",
            "attn_output": "self_attention.dense", "ffn_up": "mlp.dense_h_to_4h", "ffn_down": "mlp.dense_4h_to_h",
        },
        _SIZES | _ROTARY | {"attention.layer_norm_epsilon": "layer_norm_epsilon"},
        changes={"attn_qkv": GROUPED}, settle=special.falcon,
        tell=special.tell_falcon, layers="transformer.h", unused=("tensor_data_layout",),
        renamed=lambda config: {"attn_norm": "ln_mlp"} if config.new_decoder_architecture else {},
    ),
    "starcoder2": Architecture(
        "starcoder2", _TOP | _ATTENTION | _NORMS | {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        _SIZES | _ROTARY | {"attention.layer_norm_epsilon": "norm_epsilon"}, settle=special.starcoder2,
    ),
    "gpt-oss": Architecture(
        "gpt_oss", _TOP | _ATTENTION | _NORMS | {
            "post_attention_norm": "post_attention_layernorm", "attn_sinks.weight": "self_attn.sinks",
            "ffn_gate_inp": "mlp.router", "ffn_down_exps.weight": "mlp.experts.down_proj",
            "ffn_down_exps.bias": "mlp.experts.down_proj_bias",
        },
        _BASE | {
            "expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok",
            "attention.sliding_window": "sliding_window", "expert_feed_forward_length": "intermediate_size",
        },
        changes={"ffn_down_exps.weight": TURNED},
        joins={
            "mlp.experts.gate_up_proj": (("ffn_gate_exps.weight", "ffn_up_exps.weight"), INTERLEAVED),
            "mlp.experts.gate_up_proj_bias": (("ffn_gate_exps.bias", "ffn_up_exps.bias"), INTERLEAVED_BIAS),
        },
        settle=special.gpt_oss, tell=special.tell_gpt_oss,
    ),
    "lfm2": Architecture(
        "lfm2", {
            "token_embd": "model.embed_tokens", "token_embd_norm": "model.embedding_norm", "output": "lm_head",
            "attn_norm": "operator_norm", "ffn_norm": "ffn_norm", "attn_q": "self_attn.q_proj",
            "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.out_proj",
            "attn_q_norm": "self_attn.q_layernorm", "attn_k_norm": "self_attn.k_layernorm",
            "ffn_gate": "feed_forward.w1", "ffn_up": "feed_forward.w3", "ffn_down": "feed_forward.w2",
            "shortconv.in_proj": "conv.in_proj", "shortconv.out_proj": "conv.out_proj", "shortconv.conv": "conv.conv",
        },
        _SIZES | _ROTARY | {
            "attention.layer_norm_rms_epsilon": "norm_eps", "shortconv.l_cache": "conv_L_cache",
        },
        {"block_auto_adjust_ff_dim": False}, changes={"shortconv.conv": SQUEEZED}, settle=special.lfm2,
        tell=special.tell_lfm2,
    ),
    "deepseek2": Architecture(
        "deepseek_v2", _LLAMA | _LATENT_ATTENTION | _ROUTED | {
            "ffn_gate_shexp": "mlp.shared_experts.gate_proj", "ffn_up_shexp": "mlp.shared_experts.up_proj",
            "ffn_down_shexp": "mlp.shared_experts.down_proj", "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
        },
        _NARROW | {
            "attention.kv_lora_rank": "kv_lora_rank", "attention.q_lora_rank": "q_lora_rank",
            "expert_count": "n_routed_experts", "expert_used_count": "num_experts_per_tok",
            "expert_shared_count": "n_shared_experts", "expert_feed_forward_length": "moe_intermediate_size",
            "leading_dense_block_count": "first_k_dense_replace", "expert_weights_scale": "routed_scaling_factor",
        },
        changes={"attn_kv_b": NUMBERS},
        joins=_EXPERTS | {"self_attn.kv_b_proj.weight": (("attn_k_b.weight", "attn_v_b.weight"), LATENT)},
        settle=special.deepseek2,
        tell=special.tell_deepseek2, unused=("attention.value_length", "attention.key_length"),
    ),
    "command-r": Architecture(
        "cohere", _LLAMA | _HEAD_NORMS,
        _SIZES | _ROTARY | {"attention.layer_norm_epsilon": "layer_norm_eps", "logit_scale": "logit_scale"},
        settle=special.cohere, tell=special.tell_cohere,
    ),
    "cohere2": Architecture(
        "cohere2", _LLAMA,
        _SIZES | _ROTARY | {
            "attention.layer_norm_epsilon": "layer_norm_eps", "logit_scale": "logit_scale",
            "attention.sliding_window": "sliding_window",
        },
        settle=special.cohere2, tell=special.tell_cohere2,
    ),
    "olmo": Architecture(
        "olmo", _LLAMA, _SIZES | _ROTARY | {"attention.clamp_kqv": "clip_qkv"}, changes=_TURNED_HEADS,
        unused=("attention.layer_norm_epsilon",),
    ),
    "olmo2": Architecture(
        "olmo2", _TOP | _ATTENTION | _MLP | _HEAD_NORMS | {
            "post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm",
        },
        _BASE, settle=special.olmo2, tell=special.tell_olmo2,
    ),
    "smollm3": Architecture("smollm3", _LLAMA, _BASE, changes=_TURNED_HEADS, settle=special.smollm3),
    "mamba": Architecture(
        "mamba", {
            "token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f", "output": "lm_head",
            "attn_norm": "norm", "ssm_in": "mixer.in_proj", "ssm_conv1d": "mixer.conv1d", "ssm_x": "mixer.x_proj",
            "ssm_dt": "mixer.dt_proj", "ssm_out": "mixer.out_proj", "ssm_a": "mixer.A_log", "ssm_d": "mixer.D",
        },
        {
            "embedding_length": "hidden_size", "block_count": "num_hidden_layers", "vocab_size": "vocab_size",
            "attention.layer_norm_rms_epsilon": "layer_norm_epsilon", "ssm.conv_kernel": "conv_kernel",
            "ssm.state_size": "state_size", "ssm.time_step_rank": "time_step_rank",
        },
        changes={"ssm_conv1d.weight": SQUEEZED, "ssm_a": DECAY, "ssm_dt": NUMBERS}, settle=special.mamba,
        tell=special.tell_mamba, layers="backbone.layers",
    ),
    "stablelm": Architecture(
        "stablelm", _LLAMA, _SIZES | _ROTARY | {"attention.layer_norm_epsilon": "layer_norm_eps"},
        settle=special.stablelm, tell=special.tell_stablelm,
    ),
    "nemotron": Architecture(
        "nemotron", _LLAMA, _SIZES | _ROTARY | {"attention.layer_norm_epsilon": "norm_eps"},
        {"hidden_act": "relu2"}, unused=("attention.layer_norm_rms_epsilon",),
        changes={"attn_norm.weight": PLUS_ONE, "ffn_norm.weight": PLUS_ONE, "output_norm.weight": PLUS_ONE},
        settle=special.partial, tell=special.tell_partial,
    ),
    "gpt2": Architecture(
        "gpt2", _BLOCK | {
            "token_embd": "transformer.wte", "position_embd": "transformer.wpe", "output_norm": "transformer.ln_f",
            "output": "lm_head",
        },
        {
            "context_length": "n_positions", "embedding_length": "n_embd", "block_count": "n_layer",
            "attention.head_count": "n_head", "attention.layer_norm_epsilon": "layer_norm_epsilon",
            "vocab_size": "vocab_size",
        },
        changes=dict.fromkeys(
            ("attn_qkv.weight", "attn_output.weight", "ffn_up.weight", "ffn_down.weight"), TURNED
        ),
        settle=special.gpt2, tell=special.tell_gpt2, layers="transformer.h", unused=("attention.head_count_kv",),
    ),
    "minimax-m2": Architecture(
        "minimax_m2", _LLAMA | _HEAD_NORMS | _ROUTED | {"exp_probs_b.bias": "mlp.e_score_correction_bias"},
        _BASE | {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"},
        {"use_routing_bias": True}, joins=_EXPERTS, settle=special.partial, tell=special.tell_partial,
        unused=("expert_feed_forward_length", "expert_gating_func"),
    ),
}  # fmt: skip
"""By ``general.architecture``."""

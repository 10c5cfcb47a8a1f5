"""What tables cannot say of the architectures of GGUF files: configurations completed, and told in metadata again.

Each function completes the configuration of an architecture by facts of the file; ``tell_...`` gives the
metadata that it reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sakiyomi.core.errors import UnsupportedError

_FULL, _SLIDING = "full_attention", "sliding_attention"


class Facts(dict[str, Any]):
    """Metadata of an architecture by their names without it; those that are asked for are known to be used."""

    def __init__(self, held: Mapping[str, Any], tensors: Mapping[str, Any]) -> None:
        super().__init__(held)
        self.tensors = tensors
        self.used: set[str] = set()

    def take(self, key: str, default: Any = None) -> Any:
        """A value, or the default."""
        self.used.add(key)
        return self.get(key, default)

    def has(self, part: str) -> bool:
        """Whether some layer has this tensor, such as "attn_q.bias"."""
        return any(name.endswith(f".{part}") for name in self.tensors)


def width_of(config: Any) -> int:
    """Width of a head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def biases(facts: Facts, config: dict[str, Any]) -> None:
    """Whether there are biases."""
    config["attention_bias"] = facts.has("attn_q.bias")
    config["mlp_bias"] = facts.has("ffn_up.bias")


def llama(facts: Facts, config: dict[str, Any]) -> None:
    """Llama, Mistral and, where there are experts, Mixtral."""
    biases(facts, config)
    if facts.take("expert_count"):
        config |= {"model_type": "mixtral", "num_local_experts": facts.take("expert_count")}
        config["num_experts_per_tok"] = facts.take("expert_used_count", 2)


def tell_llama(config: Any) -> dict[str, Any]:
    """Metadata of Llama and of Mixtral."""
    told = {"rope.dimension_count": width_of(config)}
    if getattr(config, "num_local_experts", None):
        told |= {"expert_count": config.num_local_experts, "expert_used_count": config.num_experts_per_tok}
    return told


def partial(facts: Facts, config: dict[str, Any]) -> None:
    """The share of a head's width that positions turn."""
    width = facts.take("attention.key_length") or config["hidden_size"] // config["num_attention_heads"]
    turned = facts.take("rope.dimension_count", width)
    config["rope_parameters"]["partial_rotary_factor"] = turned / width


def tell_partial(config: Any) -> dict[str, Any]:
    """The width of a head that positions turn."""
    share = (config.rope_parameters or {}).get("partial_rotary_factor", 1.0)
    return {"rope.dimension_count": int(width_of(config) * share)}


def pattern(facts: Facts, config: dict[str, Any], every: int) -> None:
    """Kinds of layers: sliding windows, and every so many layers the whole text."""
    given = facts.take("attention.sliding_window_pattern")
    count = config["num_hidden_layers"]
    if given is None or isinstance(given, int):
        every = given or every
        sliding = [bool((layer + 1) % every) for layer in range(count)]
    else:
        sliding = [bool(each) for each in given]
    config["layer_types"] = [_SLIDING if each else _FULL for each in sliding]


def tell_pattern(config: Any) -> dict[str, Any]:
    """Which layers see a window."""
    return {"attention.sliding_window_pattern": [kind == _SLIDING for kind in config.layer_types]}


def gemma2(facts: Facts, config: dict[str, Any]) -> None:
    """Gemma 2: windows in every second layer."""
    width = config["hidden_size"] // config["num_attention_heads"]
    config["query_pre_attn_scalar"] = width if config["num_hidden_layers"] == 46 else config["head_dim"]  # 46: of 27B
    pattern(facts, config, 2)


def tell_gemma2(config: Any) -> dict[str, Any]:
    """Metadata of Gemma 2, which llama.cpp knows besides."""
    return {"attention.value_length": config.head_dim}


def gemma3(facts: Facts, config: dict[str, Any]) -> None:
    """Gemma 3: windows in five of six layers, whose positions turn by another base."""
    config.setdefault("head_dim", 256)
    width = config["hidden_size"] // config["num_attention_heads"]
    config["query_pre_attn_scalar"] = width if config["num_hidden_layers"] == 62 else config["head_dim"]  # 62: of 27B
    pattern(facts, config, 6)
    theta = config["rope_parameters"].pop("rope_theta", 1e6)
    full = {"rope_type": "default", "rope_theta": theta}
    factor = facts.take("rope.scaling.factor")
    if facts.take("rope.scaling.type") == "linear" and factor:
        full |= {"rope_type": "linear", "factor": factor}
    local = {"rope_type": "default", "rope_theta": facts.take("rope.freq_base_swa", 10000.0)}
    config["rope_parameters"] = {_FULL: full, _SLIDING: local}


def tell_gemma3(config: Any) -> dict[str, Any]:
    """Positions of both kinds of layers."""
    full, local = config.rope_parameters[_FULL], config.rope_parameters[_SLIDING]
    told = {"rope.freq_base": full["rope_theta"], "rope.freq_base_swa": local["rope_theta"]}
    if full.get("rope_type") == "linear":
        told |= {"rope.scaling.type": "linear", "rope.scaling.factor": full["factor"]}
    return told | {"attention.value_length": config.head_dim} | tell_pattern(config)


def gemma4(facts: Facts, config: dict[str, Any]) -> None:
    """Layers of two kinds differ in the width of heads, positions and the number of keys; the last share keys."""
    pattern(facts, config, 6)
    kinds, wide = config["layer_types"], facts.take("attention.key_length")
    narrow = facts.take("attention.key_length_swa", wide)
    config |= {"head_dim": narrow, "global_head_dim": wide}
    groups = config["num_key_value_heads"]
    if not isinstance(groups, int):
        by_kind = dict(zip(kinds, (int(each) for each in groups), strict=False))
        config["num_key_value_heads"] = by_kind.get(_SLIDING, int(groups[0]))
        if _FULL in by_kind:
            config["num_global_key_value_heads"] = by_kind[_FULL]
    inner = config["intermediate_size"]
    if not isinstance(inner, int):
        config["intermediate_size"] = int(inner[0])
        config["use_double_wide_mlp"] = int(max(inner)) == 2 * int(inner[0])
    config["attention_k_eq_v"] = any(
        f"blk.{layer}.attn_k.weight" in facts.tensors and f"blk.{layer}.attn_v.weight" not in facts.tensors
        for layer in range(config["num_hidden_layers"])
    )
    if (table := facts.tensors.get("per_layer_token_embd.weight")) is not None:
        config["vocab_size_per_layer_input"] = table.shape[0]
    if facts.take("expert_count"):
        config |= {"enable_moe_block": True, "num_experts": facts.take("expert_count")}
        config["top_k_experts"] = facts.take("expert_used_count")
        config["moe_intermediate_size"] = facts.take("expert_feed_forward_length")
    freqs = facts.take("rope_freqs.weight")
    theta = config["rope_parameters"].pop("rope_theta", 1e6)
    full = {"rope_type": "proportional", "rope_theta": theta, "partial_rotary_factor": 1.0}
    if freqs is not None:
        full["partial_rotary_factor"] = sum(each == 1.0 for each in freqs) / len(freqs)
    turned = facts.take("rope.dimension_count_swa", narrow)
    local: dict[str, Any] = {"rope_type": "default", "rope_theta": facts.take("rope.freq_base_swa", 10000.0)}
    if turned != narrow:
        local["partial_rotary_factor"] = turned / narrow
    config["rope_parameters"] = {_FULL: full, _SLIDING: local}
    facts.take("rope.dimension_count")


def of_full_layers(held: Mapping[str, Any], name: str) -> Any:
    """What Gemma 4's layers that see the whole text have for this name, in its configuration as a dictionary."""
    own, kinds = held.get("per_layer_config") or {}, held["layer_types"]
    found = [one[name] for layer, one in own.items() if kinds[int(layer)] == _FULL and name in one]
    return next(iter(found), held[name])


def tell_gemma4(config: Any) -> dict[str, Any]:
    """Metadata of Gemma 4: two kinds of layers, the last of which share keys."""
    held = config.to_dict()  # the configuration itself refuses to say what differs between layers
    full, local = held["rope_parameters"][_FULL], held["rope_parameters"][_SLIDING]
    groups, width, kinds = held["num_key_value_heads"], held["head_dim"], held["layer_types"]
    wide, all_groups = of_full_layers(held, "head_dim"), of_full_layers(held, "num_key_value_heads")
    own, inner = len(kinds) - held["num_kv_shared_layers"], held["intermediate_size"]
    told = {
        "rope.freq_base": full["rope_theta"], "rope.freq_base_swa": local["rope_theta"],
        "attention.key_length": wide, "attention.value_length": wide, "rope.dimension_count": wide,
        "attention.key_length_swa": width, "attention.value_length_swa": width,
        "rope.dimension_count_swa": int(width * local.get("partial_rotary_factor", 1.0)),
        "attention.head_count_kv": groups,
    }  # fmt: skip
    if all_groups != groups:
        told["attention.head_count_kv"] = [all_groups if kind == _FULL else groups for kind in kinds]
    if held["use_double_wide_mlp"]:
        told["feed_forward_length"] = [inner if layer < own else 2 * inner for layer in range(len(kinds))]
    return told | tell_pattern(config)


def phi3(facts: Facts, config: dict[str, Any]) -> None:
    """Phi 3."""
    partial(facts, config)
    config["sliding_window"] = facts.take("attention.sliding_window") or None


def tell_phi3(config: Any) -> dict[str, Any]:
    """Metadata of Phi 3."""
    return tell_partial(config) | {"attention.sliding_window": config.sliding_window or 0}


def falcon(facts: Facts, config: dict[str, Any]) -> None:
    """Falcon, of its first and its second form."""
    groups, heads = config.pop("num_key_value_heads", 1), config["num_attention_heads"]
    new = facts.has("attn_norm_2.weight")
    config |= {"new_decoder_architecture": new, "num_kv_heads": groups if new else heads}
    config |= {"multi_query": groups == 1 and not new, "parallel_attn": True, "alibi": False}
    config["ffn_hidden_size"] = config.pop("intermediate_size", 4 * config["hidden_size"])
    config["bias"] = facts.has("attn_qkv.bias")


def tell_falcon(config: Any) -> dict[str, Any]:
    """Metadata of Falcon."""
    groups = config.num_kv_heads if config.new_decoder_architecture else 1 if config.multi_query else 0
    inner = getattr(config, "ffn_hidden_size", None) or 4 * config.hidden_size
    return {
        "attention.head_count_kv": groups or config.num_attention_heads, "feed_forward_length": inner,
        "tensor_data_layout": "jploski", "context_length": getattr(config, "max_position_embeddings", 2048),
    }  # fmt: skip


def starcoder2(facts: Facts, config: dict[str, Any]) -> None:
    """StarCoder 2."""
    config["use_bias"] = facts.has("attn_q.bias")
    config["sliding_window"] = facts.take("attention.sliding_window") or None


def gpt_oss(facts: Facts, config: dict[str, Any]) -> None:
    """gpt-oss: windows in every second layer, positions of YaRN."""
    config["attention_bias"] = facts.has("attn_q.bias")
    pattern(facts, config, 2)
    facts.take("feed_forward_length")
    if facts.take("rope.scaling.type") == "yarn":
        given = {
            name: facts.take(f"rope.scaling.{key}", default)
            for key, name, default in (
                ("factor", "factor", 32.0), ("yarn_beta_fast", "beta_fast", 32.0), ("yarn_beta_slow", "beta_slow", 1.0),
                ("original_context_length", "original_max_position_embeddings", 4096),
            )
        }  # fmt: skip
        config["rope_parameters"] |= {"rope_type": "yarn", "truncate": False, **given}


def tell_gpt_oss(config: Any) -> dict[str, Any]:
    """Metadata of gpt-oss: positions of YaRN, windows in every second layer."""
    return tell_pattern(config)


def lfm2(facts: Facts, config: dict[str, Any]) -> None:
    """LFM2: layers without keys are convolutions."""
    groups = [int(each) for each in config["num_key_value_heads"]]
    config["num_key_value_heads"] = max(groups)
    config["layer_types"] = [_FULL if each else "conv" for each in groups]
    config["conv_bias"] = facts.has("shortconv.in_proj.bias")


def tell_lfm2(config: Any) -> dict[str, Any]:
    """Metadata of LFM2: layers without attention have no keys."""
    groups = [config.num_key_value_heads if kind == _FULL else 0 for kind in config.layer_types]
    inner, step = config.intermediate_size, config.block_multiple_of
    if config.block_auto_adjust_ff_dim:
        inner = int((config.block_ffn_dim_multiplier or 1.0) * int(2 * inner / 3))
        inner = -(-inner // step) * step
    return {"attention.head_count_kv": groups, "feed_forward_length": inner}


def qwen35(facts: Facts, config: dict[str, Any]) -> None:
    """Linear attention with full attention every few layers."""
    values = config["linear_num_value_heads"]
    config["linear_value_head_dim"] = facts.take("ssm.inner_size") // values
    sections = [int(each) for each in facts.take("rope.dimension_sections", []) if each]
    if sections:
        config["rope_parameters"] |= {"mrope_section": sections, "mrope_interleaved": True}
    partial(facts, config)
    every, given = facts.take("full_attention_interval", 4), facts.take("attention.recurrent_layers")
    count = config["num_hidden_layers"]
    linear = [bool((layer + 1) % every) for layer in range(count)] if given is None else given[:count]
    config["layer_types"] = ["linear_attention" if each else _FULL for each in linear]


def tell_qwen35(config: Any) -> dict[str, Any]:
    """Metadata of Qwen 3.5."""
    rope = config.rope_parameters
    sections = [*rope.get("mrope_section", []), 0, 0, 0, 0][:4]
    told = {"rope.dimension_sections": sections} if any(sections) else {}
    linear = [kind == "linear_attention" for kind in config.layer_types]
    return told | tell_partial(config) | {
        "ssm.inner_size": config.linear_num_value_heads * config.linear_value_head_dim,
        "full_attention_interval": linear.index(False) + 1 if False in linear else len(linear) + 1,
        "attention.recurrent_layers": linear,
    }  # fmt: skip


def deepseek2(facts: Facts, config: dict[str, Any]) -> None:
    """Latent attention; version 3 chooses experts by a corrected sigmoid."""
    turned = facts.take("rope.dimension_count")
    latent = facts.take("attention.key_length_mla") is not None
    whole = facts.take("attention.key_length_mla" if latent else "attention.key_length")
    config |= {"qk_rope_head_dim": turned, "qk_nope_head_dim": whole - turned}
    config["v_head_dim"] = facts.take("attention.value_length_mla" if latent else "attention.value_length")
    config["num_key_value_heads"] = config["num_attention_heads"]
    config.setdefault("q_lora_rank", None)
    config["norm_topk_prob"] = bool(facts.take("expert_weights_norm", False))
    third = facts.take("expert_gating_func", 1) == 2 or facts.has("exp_probs_b.bias")
    config["model_type"] = "deepseek_v3" if third else "deepseek_v2"
    config["n_group"] = facts.take("expert_group_count", 1)
    config["topk_group"] = facts.take("expert_group_used_count", 1)
    if not third:
        config["topk_method"] = "group_limited_greedy" if config["n_group"] > 1 else "greedy"
    config["attention_bias"] = facts.has("attn_kv_a_mqa.bias")
    if (mixed := facts.take("rope.scaling.yarn_log_multiplier")) is not None:  # llama.cpp keeps a tenth of one of two
        config["rope_parameters"] |= {"mscale": 10 * mixed, "mscale_all_dim": 10 * mixed}


def tell_deepseek2(config: Any) -> dict[str, Any]:
    """Metadata of DeepSeek 2 and 3: attention over latents, with one group of keys."""
    turned, latent = config.qk_rope_head_dim, config.kv_lora_rank
    told = {
        "rope.dimension_count": turned, "attention.head_count_kv": 1, "attention.key_length": latent + turned,
        "attention.value_length": latent, "attention.key_length_mla": config.qk_nope_head_dim + turned,
        "attention.value_length_mla": config.v_head_dim, "expert_weights_norm": bool(config.norm_topk_prob),
        "expert_gating_func": 2 if config.model_type == "deepseek_v3" else 1,
    }  # fmt: skip
    if (config.n_group or 1) > 1:
        told |= {"expert_group_count": config.n_group, "expert_group_used_count": config.topk_group}
    return told


def cohere(facts: Facts, config: dict[str, Any]) -> None:
    """Cohere's Command R."""
    config["attention_bias"] = facts.has("attn_q.bias")
    config["use_qk_norm"] = facts.has("attn_q_norm.weight")


def tell_cohere(config: Any) -> dict[str, Any]:
    """Metadata of Cohere's models."""
    return {"rope.scaling.type": "none", "rope.dimension_count": width_of(config)}


def cohere2(facts: Facts, config: dict[str, Any]) -> None:
    """Cohere's Command R7B: windows in three of four layers."""
    config["attention_bias"] = facts.has("attn_q.bias")
    pattern(facts, config, 4)


def olmo2(facts: Facts, config: dict[str, Any]) -> None:
    """OLMo 2, and OLMo 3 where there are windows."""
    config["attention_bias"] = facts.has("attn_q.bias")
    if facts.take("attention.sliding_window"):
        config |= {"model_type": "olmo3", "sliding_window": facts.take("attention.sliding_window")}
        theta = facts.take("rope.freq_base_swa")
        if theta not in (None, config["rope_parameters"].get("rope_theta")):
            raise UnsupportedError(f"windows whose positions turn by {theta}, and not as the other layers' do")
        pattern(facts, config, 4)


def tell_olmo2(config: Any) -> dict[str, Any]:
    """Metadata of OLMo 2 and 3; the latter has windows."""
    if config.model_type != "olmo3":
        return {}
    full, local = config.rope_parameters[_FULL], config.rope_parameters[_SLIDING]
    told = {"rope.freq_base": full["rope_theta"], "rope.freq_base_swa": local["rope_theta"]}
    return told | {"attention.sliding_window": config.sliding_window} | tell_pattern(config)


def smollm3(facts: Facts, config: dict[str, Any]) -> None:
    """SmolLM3: every fourth layer has no positions."""
    biases(facts, config)
    config |= {"no_rope_layer_interval": 4, "use_sliding_window": False}


def mamba(facts: Facts, config: dict[str, Any]) -> None:
    """Mamba."""
    config.pop("max_position_embeddings", None)
    config["expand"] = facts.take("ssm.inner_size") // config["hidden_size"]
    config["use_conv_bias"] = facts.has("ssm_conv1d.bias")
    for key in ("feed_forward_length", "attention.head_count", "ssm.dt_b_c_rms", "context_length"):
        facts.take(key)


def tell_mamba(config: Any) -> dict[str, Any]:
    """Metadata of Mamba, and those that llama.cpp wants although they mean nothing there."""
    return {
        "ssm.inner_size": config.intermediate_size, "context_length": 1 << 20, "feed_forward_length": 0,
        "attention.head_count": 0,
    }  # fmt: skip


def stablelm(facts: Facts, config: dict[str, Any]) -> None:
    """StableLM."""
    partial(facts, config)
    config["use_qkv_bias"] = facts.has("attn_q.bias")
    config["use_parallel_residual"] = bool(facts.take("use_parallel_residual", True)) and not facts.has(
        "ffn_norm.weight"
    )
    config["qk_layernorm"] = facts.has("attn_q_norm.weight")


def tell_stablelm(config: Any) -> dict[str, Any]:
    """Metadata of StableLM."""
    return tell_partial(config) | {"use_parallel_residual": bool(config.use_parallel_residual)}


def gpt2(facts: Facts, config: dict[str, Any]) -> None:
    """GPT-2."""
    config["n_inner"] = facts.take("feed_forward_length")


def tell_gpt2(config: Any) -> dict[str, Any]:
    """Metadata of GPT-2."""
    return {"feed_forward_length": config.n_inner or 4 * config.n_embd, "attention.head_count_kv": config.n_head}


def qwen2_moe(facts: Facts, config: dict[str, Any]) -> None:
    """Qwen 2 and 3 with experts in every layer."""
    config |= {"decoder_sparse_step": 1, "mlp_only_layers": []}


def tell_cohere2(config: Any) -> dict[str, Any]:
    """Metadata of Cohere's models with windows."""
    return tell_cohere(config) | tell_pattern(config)

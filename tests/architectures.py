"""One tiny model of each architecture that must work, and configurations of those that must be refused.

Weights are random and wide, biases and norms too: transformers starts biases at 0 and norms at 1, where a bias that is
forgotten or a norm that is left out would go unseen. So argmaxes are clear, and near-ties do not blur an equality.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

from sakiyomi import LLM
from sakiyomi.kernels.build import native

VOCAB = 120
WINDOW = 7
"""Sliding windows are that short, so that every test is longer than its window."""

_SIZES: dict[str, object] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_GROUPED = _SIZES | {"num_key_value_heads": 2}
_SLIDING = ("sliding_attention", "full_attention", "sliding_attention")
_FALCON = {k: v for k, v in _SIZES.items() if k != "intermediate_size"} | {"bias": True, "alibi": False}


def _sliding(layers: Sequence[str] = _SLIDING) -> dict[str, object]:
    return {"layer_types": list(layers), "sliding_window": WINDOW}


def _gpt2(**values: object) -> hf.GPT2Config:
    sizes = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 256}
    return hf.GPT2Config(**(sizes | {"bos_token_id": None, "eos_token_id": None} | values))


CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: hf.LlamaConfig(**_GROUPED),
    "mistral": lambda: hf.MistralConfig(**_GROUPED, sliding_window=WINDOW),
    "qwen2": lambda: hf.Qwen2Config(**_GROUPED, use_sliding_window=True, **_sliding()),
    "qwen3": lambda: hf.Qwen3Config(**_GROUPED, head_dim=10),
    "phi3": lambda: hf.Phi3Config(**_GROUPED, sliding_window=WINDOW),
    "gemma2": lambda: hf.Gemma2Config(
        **_GROUPED,
        **_sliding(),
        head_dim=12,
        query_pre_attn_scalar=20,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=10.0,
    ),
    "gemma3": lambda: hf.Gemma3TextConfig(**_GROUPED, **_sliding(), head_dim=12, query_pre_attn_scalar=20),
    "opt": lambda: hf.OPTConfig(
        **{k: v for k, v in _SIZES.items() if k != "intermediate_size"}, ffn_dim=48, word_embed_proj_dim=24
    ),
    "gpt2": _gpt2,
    "gpt_neox": lambda: hf.GPTNeoXConfig(**_SIZES),
    "olmo2": lambda: hf.Olmo2Config(**_GROUPED),
    # As in real models, the rows of torch's gelu are whole vectors: it rounds what is left of one otherwise, and passes
    # of another number of rows would differ in the last bit.
    "starcoder2": lambda: hf.Starcoder2Config(
        **(_GROUPED | {"intermediate_size": 64}), sliding_window=WINDOW, use_bias=True
    ),
    "falcon": lambda: hf.FalconConfig(**_FALCON, new_decoder_architecture=True, num_kv_heads=2),
    "granite": lambda: hf.GraniteConfig(
        **_GROUPED, attention_multiplier=0.2, embedding_multiplier=3.0, residual_multiplier=0.7, logits_scaling=0.5
    ),
    "stablelm": lambda: hf.StableLmConfig(**_GROUPED, use_qkv_bias=True, qk_layernorm=True),
}
"""The architectures that are promised."""

VARIANTS: dict[str, Callable[[], Any]] = {
    "gemma2-uncapped": lambda: hf.Gemma2Config(
        **_GROUPED, **_sliding(), head_dim=16, attn_logit_softcapping=None, final_logit_softcapping=None
    ),
    "gpt2-scaled": lambda: _gpt2(scale_attn_by_inverse_layer_idx=True, reorder_and_upcast_attn=False),
    "falcon-multi-query": lambda: hf.FalconConfig(**_FALCON, new_decoder_architecture=False, multi_query=True),
    "falcon-multi-head": lambda: hf.FalconConfig(
        **_FALCON, new_decoder_architecture=False, multi_query=False, parallel_attn=False
    ),
    "gpt_neox-sequential": lambda: hf.GPTNeoXConfig(**_SIZES, use_parallel_residual=False),
    "stablelm-parallel": lambda: hf.StableLmConfig(**_GROUPED, use_parallel_residual=True),
    "llama-multi-query": lambda: hf.LlamaConfig(
        **(_GROUPED | {"num_key_value_heads": 1}), attention_bias=True, mlp_bias=True, head_dim=6
    ),
    "llama-tied": lambda: hf.LlamaConfig(**_GROUPED, tie_word_embeddings=True),
    "llama3-rope": lambda: hf.LlamaConfig(
        **_GROUPED,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
}
"""Settings of the same architectures that take another way through attention."""


def _without(values: dict[str, object], *names: str) -> dict[str, object]:
    return {name: value for name, value in values.items() if name not in names}


OTHERS: dict[str, Callable[[], Any]] = {
    "cohere": lambda: hf.CohereConfig(**_GROUPED),
    "exaone4": lambda: hf.Exaone4Config(**_GROUPED, **_sliding()),
    "gemma": lambda: hf.GemmaConfig(**_GROUPED, head_dim=10),
    "glm": lambda: hf.GlmConfig(**_GROUPED, head_dim=8),
    "gpt_bigcode": lambda: hf.GPTBigCodeConfig(
        vocab_size=VOCAB, n_embd=32, n_layer=3, n_head=4, n_positions=256, bos_token_id=None, eos_token_id=None
    ),
    "mixtral": lambda: hf.MixtralConfig(**_GROUPED, num_local_experts=4, num_experts_per_tok=2),
    "nemotron": lambda: hf.NemotronConfig(**_GROUPED),
    "phi": lambda: hf.PhiConfig(**_GROUPED),
    "qwen3_moe": lambda: hf.Qwen3MoeConfig(
        **_GROUPED, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, head_dim=8
    ),
    "deepseek_v3": lambda: hf.DeepseekV3Config(
        **(_SIZES | {"num_key_value_heads": 4}),
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=4,
        v_head_dim=10,
    ),
    "llama4": lambda: hf.Llama4TextConfig(
        **_GROUPED, head_dim=8, intermediate_size_mlp=48, num_local_experts=2, attention_chunk_size=256
    ),
    "smollm3": lambda: hf.SmolLM3Config(**_GROUPED),
    "gptj": lambda: hf.GPTJConfig(
        vocab_size=VOCAB,
        n_embd=32,
        n_layer=3,
        n_head=4,
        n_positions=256,
        rotary_dim=4,
        bos_token_id=None,
        eos_token_id=None,
    ),
}
"""Not promised, but they work; when one stops to, it should be known."""

_HYBRID = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
_DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_state": 8, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_chunk_size": 16}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_KIMI = _SIZES | {
    "num_key_value_heads": 4, "num_experts": 4, "num_experts_per_token": 2, "moe_intermediate_size": 16,
    "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 4, "v_head_dim": 10, "linear_head_dim": 8,
    "linear_num_heads": 4,
}  # fmt: skip
_NO_ENDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
_BARE = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 3, **_NO_ENDS}
_ZAMBA = _without(_SIZES, "num_hidden_layers") | {
    "num_hidden_layers": 4,
    "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
    "mamba_d_state": 8,
}

HYBRIDS: dict[str, Callable[[], Any]] = {
    "lfm2": lambda: hf.Lfm2Config(**_GROUPED, layer_types=["conv", "full_attention", "conv"]),
    "lfm2_moe": lambda: hf.Lfm2MoeConfig(
        **_GROUPED, **_MOE, layer_types=["conv", "full_attention", "conv"], num_dense_layers=1
    ),
    "lfm3": lambda: hf.Lfm3Config(**_GROUPED, layer_types=["conv", "full_attention", "conv"]),
    "qwen3_next": lambda: hf.Qwen3NextConfig(
        **_GROUPED, **_MOE, **_DELTA, **_HYBRID, head_dim=8, shared_expert_intermediate_size=16
    ),
    "qwen3_5": lambda: hf.Qwen3_5TextConfig(**_GROUPED, **_DELTA, **_HYBRID, head_dim=8),
    "qwen3_5_moe": lambda: hf.Qwen3_5MoeTextConfig(
        **_GROUPED, **_MOE, **_DELTA, **_HYBRID, head_dim=8, shared_expert_intermediate_size=16
    ),
    "olmo_hybrid": lambda: hf.OlmoHybridConfig(**_GROUPED, **(_DELTA | {"linear_num_key_heads": 4}), **_HYBRID),
    "kimi_linear": lambda: hf.KimiLinearConfig(**_KIMI, **_HYBRID),
    "bailing_hybrid": lambda: hf.BailingHybridConfig(**_KIMI, **_HYBRID, num_expert_group=1, topk_group=1),
    "granitemoehybrid": lambda: hf.GraniteMoeHybridConfig(
        **_GROUPED,
        **_MAMBA,
        layer_types=["mamba", "attention", "mamba"],
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=32,
    ),
    "bamba": lambda: hf.BambaConfig(**_GROUPED, **_MAMBA, attn_layer_indices=[1]),
    "falcon_h1": lambda: hf.FalconH1Config(**_GROUPED, **_MAMBA, head_dim=8, mamba_d_ssm=64),
    "nemotron_h": lambda: hf.NemotronHConfig(
        **_without(_GROUPED, "num_hidden_layers"),
        hybrid_override_pattern="M*-M",
        head_dim=8,
        mamba_num_heads=8,
        mamba_head_dim=8,
        ssm_state_size=8,
        n_groups=2,
        chunk_size=16,
    ),
    "zamba2": lambda: hf.Zamba2Config(
        **_ZAMBA, mamba_expand=2, mamba_ngroups=1, n_mamba_heads=8, num_mem_blocks=2, chunk_size=16, use_mem_rope=True
    ),
    "zamba": lambda: hf.ZambaConfig(**_ZAMBA, n_mamba_heads=2, num_key_value_heads=4),
    "mamba2": lambda: hf.Mamba2Config(**_BARE, state_size=8, num_heads=8, head_dim=8, n_groups=2, chunk_size=16),
    "mamba": lambda: hf.MambaConfig(**_BARE, state_size=4),
    "falcon_mamba": lambda: hf.FalconMambaConfig(**_BARE, state_size=4),
    "jamba": lambda: hf.JambaConfig(
        **_GROUPED, num_experts=2, attn_layer_period=2, attn_layer_offset=1, mamba_d_state=4
    ),
    "recurrent_gemma": lambda: hf.RecurrentGemmaConfig(
        **_without(_GROUPED, "max_position_embeddings", "num_hidden_layers"),
        num_hidden_layers=3,
        lru_width=32,
        attention_window_size=WINDOW,
    ),
}
"""Models with recurrent layers or convolutions, at least one family of each kind of state."""

KINDS: dict[str, Callable[[], Any]] = {
    "gpt_oss": lambda: hf.GptOssConfig(
        **_GROUPED, **_sliding(), head_dim=8, num_local_experts=2, num_experts_per_tok=1
    ),
    "granite_swa": lambda: hf.GraniteSWAConfig(**_GROUPED, **_sliding()),
    "mimo_v2_flash": lambda: hf.MiMoV2FlashConfig(
        **_GROUPED, **_sliding(), head_dim=8, v_head_dim=6, n_routed_experts=4, num_experts_per_tok=2, n_group=1,
        topk_group=1, moe_intermediate_size=16,
    ),
    "bloom": lambda: hf.BloomConfig(hidden_size=48, n_layer=3, n_head=6, vocab_size=VOCAB, **_NO_ENDS),
    "mpt": lambda: hf.MptConfig(d_model=48, n_layers=3, n_heads=6, max_seq_len=256, vocab_size=VOCAB, **_NO_ENDS),
    "falcon-alibi": lambda: hf.FalconConfig(**(_FALCON | {"alibi": True})),
    "gemma3n": lambda: hf.Gemma3nTextConfig(
        **_GROUPED, **_sliding(), head_dim=8, num_kv_shared_layers=1, hidden_size_per_layer_input=8, laurel_rank=8,
        altup_num_inputs=2, vocab_size_per_layer_input=VOCAB, activation_sparsity_pattern=[0.9, 0.0, 0.0],
    ),
    "gemma4": lambda: hf.Gemma4TextConfig(
        **_GROUPED, **_sliding(("sliding_attention", "full_attention", "full_attention")), head_dim=8,
        global_head_dim=12, num_kv_shared_layers=1, hidden_size_per_layer_input=8, vocab_size_per_layer_input=VOCAB,
    ),
    "llama4-chunked": lambda: hf.Llama4TextConfig(
        **_GROUPED, head_dim=8, intermediate_size_mlp=48, num_local_experts=2, attention_chunk_size=WINDOW
    ),
    "phimoe": lambda: hf.PhimoeConfig(
        **_GROUPED, sliding_window=WINDOW, num_local_experts=4, num_experts_per_tok=2
    ),
    "minicpm3": lambda: hf.MiniCPM3Config(
        **(_SIZES | {"num_key_value_heads": 4}), q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8,
        qk_nope_head_dim=4, v_head_dim=10,
    ),
}  # fmt: skip
"""Attention of other kinds: sinks, ALiBi, layers that share keys and values, head widths by layer, chunks, windows that
stand in the mask alone, compressed keys."""

REFUSED: dict[str, Callable[[], Any]] = {
    "rwkv": lambda: hf.RwkvConfig(vocab_size=VOCAB, hidden_size=16, num_hidden_layers=2),
    "minimax": lambda: hf.MiniMaxConfig(
        **_GROUPED, **_HYBRID, num_local_experts=2, num_experts_per_tok=1, head_dim=8, block_size=16
    ),
    "zaya": lambda: hf.ZayaConfig(**_GROUPED),
    "doge": lambda: hf.DogeConfig(**_GROUPED, keep_window_size=WINDOW),
    "gpt_neo": lambda: hf.GPTNeoConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        window_size=WINDOW,
        bos_token_id=None,
        eos_token_id=None,
    ),
}
"""What cannot run on our cache: recurrent states that are not known here cannot be rolled back, masks that the model
makes itself are unknown to our operators, gpt_neo cuts its own mask by columns."""

ALL = CONFIGS | VARIANTS | OTHERS


def widen(model: nn.Module, seed: int = 0) -> None:
    """Give every parameter other random values: matrices wide ones, vectors some around what they are.

    Embeddings that are the output matrix too are narrow beside the layers, or every token would predict itself.
    """
    generator = torch.Generator().manual_seed(seed)
    head = model.get_output_embeddings()  # type: ignore[operator]
    tied = head.weight is model.get_input_embeddings().weight  # type: ignore[operator]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() < 2:
                parameter.add_(0.2 * noise)
            elif parameter is head.weight:
                parameter.copy_((0.1 if tied else 1.0) * noise)
            elif "embed" in name or "wte" in name or "wpe" in name:
                parameter.copy_(0.5 * noise)
            else:
                parameter.copy_(2.0 * noise / max(parameter.shape[-2:]) ** 0.5)


OWN: dict[str, Callable[[], Any]] = {
    "gpt_neox_japanese": lambda: hf.GPTNeoXJapaneseConfig(
        vocab_size=VOCAB, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_multiple_size=2,
        max_position_embeddings=256, bos_token_id=None, eos_token_id=None,
    ),
}  # fmt: skip
"""Classes that keep their own attention, in every version of transformers."""


def make(config: Any, seed: int = 0) -> Any:
    """The causal language model of a configuration, fp32, in evaluation mode, with wide weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = hf.AutoModelForCausalLM.from_config(config)
    widen(model, seed)
    return model.eval()


@cache
def model_of(name: str) -> Any:
    """The model of a name in one of these tables, the same object every time: not to be changed."""
    return make((ALL | HYBRIDS | KINDS | OWN)[name]())


def refused_model(name: str) -> Any:
    """A model of a name in ``REFUSED``, new each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return hf.AutoModelForCausalLM.from_config(REFUSED[name]()).eval()


def prompt(length: int, seed: int = 0) -> list[int]:
    """Random token ids; those below 3 are left to special tokens."""
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randint(3, VOCAB, (length,), generator=generator).tolist()  # type: ignore[no-any-return]


def rounds_decoding_otherwise(llm: LLM) -> None:
    """Have decoding passes differ from those over prompts, as other orders of sums do on some processors; by 1 %."""
    score, decoding = llm.target.score, False

    def scored(segments: Any, **options: Any) -> Any:
        nonlocal decoding
        decoding = not any(segment.prompt for segment in segments)
        return score(segments, **options)

    def rounded(module: nn.Module, given: Any, hidden: Tensor) -> Tensor:
        return hidden * 1.01 if decoding else hidden

    llm.target.score = scored  # type: ignore[method-assign]
    llm.target.module.model.layers[0].register_forward_hook(rounded)


@torch.no_grad()
def logits_after(model: Any, tokens: Sequence[int]) -> Tensor:
    """What transformers itself gives for the token after these, (V,): the oracle."""
    return model(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0, -1].float()  # type: ignore[no-any-return]


@torch.no_grad()
def greedy(model: Any, tokens: Sequence[int], count: int, *, stop: Sequence[int] = ()) -> list[int]:
    """New tokens of transformers' own greedy ``generate``, the end token among them."""
    ids = torch.tensor([list(tokens)])
    done = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        do_sample=False,
        num_beams=1,
        eos_token_id=list(stop) or None,
        pad_token_id=0,
    )
    return done[0, len(tokens) :].tolist()  # type: ignore[no-any-return]


@cache
def _reference(name: str, tokens: tuple[int, ...], count: int) -> tuple[int, ...]:
    return tuple(greedy(model_of(name), tokens, count))


def references(name: str, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """``greedy`` texts of the model of a name behind prompts; each is computed once in a process."""
    return [list(_reference(name, tuple(tokens), count)) for tokens in prompts]


def settled(llm: LLM) -> LLM:
    """The same, when its kernels are compiled and its passes recorded, where there are kernels."""
    llm.wait()
    if native() is not None:
        assert llm.target.mode == "recorded", llm.target.mode
    return llm

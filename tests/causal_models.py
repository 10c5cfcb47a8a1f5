"""A tiny configuration of every causal class that transformers names, and what our path makes of it.

``python tests/causal_models.py`` runs all of them, and writes the table that ``sakiyomi models`` shows and the page
docs/models.md.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import architectures
from architectures import VOCAB, WINDOW
from drafters import Branching, texts_of
from sakiyomi import LLM, Draft, SamplingParams
from sakiyomi.cli.models import counted, described
from sakiyomi.core.errors import UnsupportedError
from sakiyomi.model_executor.loading.families import _ENCODERS as ENCODERS
from sakiyomi.model_executor.loading.families import NO_TEXT, check_supported
from sakiyomi.model_executor.own_forward import OwnForward
from toys import character_tokenizer

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
HEAD = """# Models

Every class that transformers {transformers} names for causal language models, by `model_type` (in a model's
`config.json`), and the result for a tiny random model of that type. *runs*: its greedy text was that of transformers,
token for token, in a batch of three, plain, with chains and trees of draft tokens, and with a prompt read in chunks.
*refused*: loading it ends with the error that is shown. `sakiyomi models NAME` shows one of them.

{counts}. `python tests/causal_models.py` makes the table and this page.
"""
KINDS: dict[str, str] = dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
"""Names of the classes by model type, as transformers has them."""

_TINY: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "emb_dim", "embedding_dim", "embedding_size"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "d_inner", "feed_forward_size"), 48),
    **dict.fromkeys(("decoder_ffn_dim", "encoder_ffn_dim", "dense_intermediate_size"), 48),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers", "decoder_layers"), 3),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_layers", "first_k_dense_replace", "n_group", "topk_group"), 1),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_target_positions", "max_seq_len"), 256),
    **dict.fromkeys(("head_dim", "dim_head", "attention_head_size", "d_head", "rotary_dim"), 8),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "index_head_dim"), 8),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("moe_intermediate_size", "shared_experts_intermediate_size", "expert_dim"), 16),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("linear_num_value_heads", "encoder_attention_heads", "index_n_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_experts_per_tok", "linear_num_key_heads"), 2),
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), None),
    "encoder_attention_heads": 4,
    "vocab_size": VOCAB,
    "unpadded_vocab_size": VOCAB,
}
"""Sizes by the names that configurations have for them."""

DECODER = "with is_decoder in its configuration, as here; without it an encoder, which is refused"
_LATENT = {"num_key_value_heads": 4}
_DECODER = {
    "is_decoder": True,
    "is_encoder_decoder": False,
    "pad_token_id": 0,
    "encoder_layers": 3,
    "forced_eos_token_id": None,
}
_SEEING = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "image_size": 28,
}
_HEARING = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_blocks": 1,
    "num_attention_heads": 4,
    "ext_pw_out_channel": 32,
}
_IDS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
_BERT = {"pad_token_id": 0, "is_decoder": True}
_SLIDING_ENDS = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
_LAST_FULL = {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}
_GEMMA3N = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 8,
    "laurel_rank": 8,
    "intermediate_size": 48,
    "activation_sparsity_pattern": None,
}
_GEMMA4 = {"global_head_dim": 16, "num_experts": None, "moe_intermediate_size": None, **_LAST_FULL}
_PER_LAYER = {"vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8}
_QWEN4 = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 8,
    "indexer_compress_ratio": 2,
    "hc_lowrank": 8,
}
_DOTS = {
    "layer_types": ["indexed_attention", "sliding_attention", "indexed_attention"],
    "num_key_value_heads": 4,
    "index_head_dim": 256,
}

SETTINGS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(ENCODERS, _BERT),
    "xmod": _BERT | {"default_language": "en_XX"},
    "roc_bert": _BERT
    | {"pronunciation_vocab_size": VOCAB, "shape_vocab_size": VOCAB, "shape_embed_dim": 8}
    | {"pronunciation_embed_dim": 8},
    **dict.fromkeys(
        ("axk1", "axk2", "deepseek_v2", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "minicpm3", "sarvam_mla"),
        _LATENT,
    ),
    **dict.fromkeys(
        ("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart", "mvp", "pegasus", "plbart"),
        _DECODER,
    ),
    "youtu": _LATENT,
    "longcat_flash": _LATENT
    | {"ffn_hidden_size": 48, "expert_ffn_hidden_size": 16, "zero_expert_num": 2, "moe_topk": 2},
    "whisper": _DECODER | {"num_mel_bins": 8, "max_source_positions": 16},
    "trocr": {"is_decoder": True, "pad_token_id": 0},
    "cwm": _IDS | _SLIDING_ENDS,
    "modernbert-decoder": _IDS | {"local_attention": 2 * WINDOW},
    "biogpt": {"pad_token_id": 0},
    "xglm": {"pad_token_id": 0},
    "emu3": _IDS,
    "mllama": _IDS | {"cross_attention_layers": []},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "cohere_compass_text": {
        **_SLIDING_ENDS,
        "rope_parameters": {
            kind: {"rope_theta": 1e4, "rope_type": "default"} for kind in ("sliding_attention", "full_attention")
        },
        "pad_token_id": 0,
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 48, "moe_top_k": 2},
    },
    "gemma3n": _GEMMA3N,
    "gemma3n_text": _GEMMA3N,
    **dict.fromkeys(("gemma4", "gemma4_text"), _GEMMA4 | _PER_LAYER),
    **dict.fromkeys(("gemma4_unified", "gemma4_unified_text"), _GEMMA4),
    **dict.fromkeys(("qwen4_exp", "qwen4_exp_text"), _QWEN4),
    **dict.fromkeys(("dots3_note", "dots3_note_text"), _DOTS),
    "dory": _SLIDING_ENDS | {"n_input_layers": 1, "n_output_layers": 1},
    "inkling2_loop_text": {
        "loop_layer_index_start": 1,
        "loop_layer_index_end": 2,
        "n_layers_per_attn_res_block": 1,
        "loop_gate_rank": 8,
        "rel_extent": 16,
        "swa_head_dim": 8,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
    },
    "reformer": {"is_decoder": True, "axial_pos_embds": False, "pad_token_id": 0, "hash_seed": 0},
    "xlm": {"pad_token_id": 2, "causal": True, "is_encoder": False},
    "xlnet": {"attn_type": "bi"},
    "xlstm": {"hidden_size": 64, "embedding_dim": 64, "vocab_size": VOCAB, "num_blocks": 3, "qk_dim_factor": 1.0},
    "prophetnet": {
        "max_position_embeddings": 64,  # of each pass it makes masks for all of them
        "is_decoder": True,
        "is_encoder_decoder": False,
        "num_decoder_layers": 3,
        "num_encoder_layers": 3,
        "num_decoder_attention_heads": 4,
        "num_encoder_attention_heads": 4,
        "pad_token_id": 0,
    },
    "laguna": _SLIDING_ENDS | {"sliding_window": WINDOW},
    "mellum": _SLIDING_ENDS | {"sliding_window": WINDOW},
    "qwen2_moe": {"decoder_sparse_step": 1},
    "gemma3": _SLIDING_ENDS | {"sliding_window": WINDOW},
    "ctrl": {"dff": 48},
    "cpmant": {"dim_ff": 48, "prompt_types": 4, "prompt_length": 4, "segment_types": 4},
    "phi4_multimodal": {
        "vision_config": _SEEING | {"crop_size": 28, "patch_size": 14},
        "audio_config": _HEARING,
        "pad_token_id": 0,
    },
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 1},
    "git": {"vision_config": _SEEING, "pad_token_id": 0},
    "kimi_linear": _IDS | {"num_key_value_heads": 4, "kda_num_heads": 4},
    "moss_transcribe_diarize": {"max_window_layers": 3},
    "rembert": _BERT | {"input_embedding_size": 16, "output_embedding_size": 16},
    "blt": {
        "encoder_hash_byte_group_vocab": 50,
        "max_position_embeddings": 256,
        "patcher_config": {
            "hidden_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "intermediate_size": 48,
        },
        "encoder_config": {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48},
        "decoder_config": {
            "hidden_size": 32,
            "num_attention_heads": 4,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
        },
        "global_config": {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 48, "num_hidden_layers": 2},
    },
}
"""What else a configuration needs, by model type."""


PARTS: dict[str, dict[str, Any]] = {
    "got_ocr2": {"vision_config": _SEEING | {"output_channels": 8, "mlp_dim": 32, "global_attn_indexes": [0]}},
    "moss_transcribe_diarize": {"audio_config": {"d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 4}},
    "mllama": {"vision_config": _SEEING | {"num_global_layers": 1, "intermediate_layers_indices": [0]}},
}
"""Of models with several parts the others, by model type."""


def config(kind: str) -> Any:
    """The tiny configuration of a model type; that of its text where the whole has other parts, too."""
    made = architectures.ALL | architectures.HYBRIDS | architectures.REFUSED
    if kind in made:
        return made[kind]()
    whole = CONFIG_MAPPING[kind]
    given = SETTINGS.get(kind, {})
    text = getattr(whole, "sub_configs", {}).get("text_config", whole)
    if text is not whole and getattr(text, "model_type", "") not in KINDS:
        text = type(whole().text_config)
        return whole(text_config=values(text, given), **PARTS.get(kind, {}))
    return text(**values(text, given))


def values(made: type, given: dict[str, Any]) -> dict[str, Any]:
    """Tiny values of what a configuration has."""
    fields = {name: field.default for name, field in made.__dataclass_fields__.items()}
    found = {name: value for name, value in _TINY.items() if name in fields}
    windows = ("sliding_window", "sliding_window_size")
    found |= {name: WINDOW for name in windows if isinstance(fields.get(name), int)}
    if "layer_types" in fields and "layer_types" not in given:
        kinds = list(dict.fromkeys(made(**(found | given | {"num_hidden_layers": 12})).layer_types or ()))
        if len(kinds) > 1:
            found["layer_types"] = (kinds * 3)[:3]
    return found | given


PROMPTS = [architectures.prompt(11, 1), architectures.prompt(3, 2), architectures.prompt(19, 3)]
NEW = 20
TOKENIZER = character_tokenizer("".join(map(chr, range(0x3041, 0x3041 + VOCAB - 2))))
VERSION = {"transformers": transformers.__version__}
TABLE = Path(__file__).parents[1] / "src" / "sakiyomi" / "cli" / "models.jsonl"
UNCACHED = "equal to transformers' own forward without cache; its generate() with a cache writes something else"

BY_TEXT = {
    "cached": "text by text through its own forward",
    "steps": "text by text through its own forward, token by token",
    "whole": "text by text through its own forward, each pass over the whole text",
    "rows": "text by text through its own forward, each token by a pass over the whole text",
}


@torch.no_grad()
def uncached(model: Any, tokens: list[int]) -> list[int]:
    """Greedy tokens, each of a forward over the whole text, with the arguments that ``generate`` gives it."""
    text = list(tokens)
    for _ in range(NEW):
        ids = torch.tensor([text])
        inputs = model.prepare_inputs_for_generation(ids, attention_mask=torch.ones_like(ids), use_cache=False)
        text.append(int(model(**inputs).logits[0, -1].argmax()))
    return text[len(tokens) :]


class Either(Branching):
    """Chains or trees, as its ``branches`` says: one ``LLM`` is made for both."""

    branches = False

    def draft(self, ahead: Sequence[int]) -> Draft:
        return super().draft(ahead) if self.branches else Draft.chain(ahead, self.name)


def check(model: Any) -> dict[str, Any]:
    """What our path makes of a model: in a batch of three with nothing drafted; with chains, and with trees, behind
    prompts read in chunks of four tokens.

    Returns:
        ``state``: "runs", or "wrong" with ``why``; ``without``: what else it cannot have; ``note``: what to know.

    Raises:
        UnsupportedError: it is refused.
    """
    wanted = [architectures.greedy(model, tokens, NEW) for tokens in PROMPTS]
    found: dict[str, Any] = {"state": "runs"}
    llm = LLM((model, TOKENIZER), "none", compile=False)
    if llm.target.weights.own_attention:
        found["without"] = ["cache policies", "quantized caches", "the CPU kernels"]
        if isinstance(llm.target.module, OwnForward):
            found["note"] = BY_TEXT[llm.target.module.reader.way]
    elif not llm.target.cache.shapes:
        found["without"] = ["cache policies", "quantized caches"]
    done = texts(llm)
    if done != wanted and done == (other := [uncached(model, tokens) for tokens in PROMPTS]):
        found["note"], wanted = UNCACHED, other
    if done != wanted:
        return found | {"state": "wrong", "why": "plain"}
    drafter = Either(texts_of(PROMPTS, wanted), "sometimes", VOCAB)
    llm = LLM((model, TOKENIZER), drafter, compile=False, chunk_size=4)
    for drafter.branches in (False, True):
        if texts(llm) != wanted or llm.engine._speculation.broken:
            return found | {"state": "wrong", "why": "tree" if drafter.branches else "chain"}
    return found


def texts(llm: LLM) -> list[list[int]]:
    """What it writes behind the prompts."""
    params = SamplingParams(max_new_tokens=NEW, ignore_eos=True, gamma=3)
    return [out.token_ids for out in llm.generate(PROMPTS, params)]


def refusal(kind: str) -> str:
    """What loading a model of a type says, by its configuration alone."""
    try:
        check_supported(SimpleNamespace(model_type=kind), "it", encoder_decoder=True)
    except UnsupportedError as error:
        return error.message.removeprefix(f"'it' ({kind}) ")
    return "it is not refused"


def outcome(kind: str) -> dict[str, Any]:
    """The row of a model type in the table."""
    row: dict[str, Any] = {"type": kind, "class": KINDS[kind]}
    if kind in NO_TEXT:
        return row | {"state": "refused", "why": refusal(kind)}
    made = config(kind)
    encoder = kind in ENCODERS
    with torch.device("meta"):
        size = sum(weight.numel() for weight in AutoModelForCausalLM.from_config(made).parameters())
    assert size < 60_000_000, f"{kind}: {size} weights are not tiny"
    try:
        row |= check(architectures.make(made))
    except UnsupportedError as error:
        return row | {"state": "refused", "why": error.message}
    return row | {"note": f"{row['note']}; {DECODER}" if "note" in row else DECODER} if encoder else row


def rows(table: Path = TABLE) -> list[dict[str, Any]]:
    """The table as it is shipped; its first row says what made it."""
    return [json.loads(line) for line in table.read_text(encoding="utf-8").splitlines()]


def page() -> str:
    """The page docs/models.md: model types by their result, the commonest first."""
    first, *shown = rows()
    types: dict[str, list[str]] = {}
    for row in shown:
        types.setdefault(described(row).replace("|", "/"), []).append(row["type"])
    cells = [f"| {text} | {', '.join(types[text])} |" for text in sorted(types, key=lambda text: -len(types[text]))]
    head = HEAD.format(transformers=first["transformers"], counts=counted(shown))
    return "\n".join([head, "| result | model types |", "|---|---|", *cells]) + "\n"


def main(kinds: Sequence[str]) -> None:
    """Run all types, or those that are named, and write their rows of the table, and the page.

    Raises:
        ValueError: the other rows are those of another version of transformers, whose name the table would lose.
    """
    head, *old = rows() if TABLE.is_file() and kinds else [VERSION]
    if head != VERSION:
        raise ValueError(f"{TABLE.name} is that of {head}, and this is {VERSION}: run all types, without names")
    found = {}
    for kind in kinds or KINDS:
        try:
            found[kind] = outcome(kind)
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            found[kind] = {"type": kind, "class": KINDS[kind], "state": "wrong", "why": what}
        print(json.dumps(found[kind]), flush=True)
    known = {row["type"]: row for row in old} | found
    lines = [VERSION, *(known[kind] for kind in sorted(known))]
    TABLE.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])

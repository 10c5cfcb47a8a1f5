"""Which models this version can run, decided by their configuration before any weights are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sakiyomi.core.errors import LoadError, UnsupportedError
from sakiyomi.core.foreign_notes import leave_out_foreign_notes
from sakiyomi.core.messages import one_line
from sakiyomi.core.model_folder import raw_config
from sakiyomi.model_executor.encoder_decoder.families import family_of
from sakiyomi.model_executor.recurrences import has_state_functions

_STATES = frozenset({"linear_attention", "mamba", "mamba2", "conv", "recurrent", "hybrid", "hybrid_sliding"})
"""Layer types (transformers' ``layer_types``) that keep a state other than keys and values."""

_STATEFUL = frozenset({"rwkv", "xlstm", "minimax"})
"""Model types with such layers whose class does not set ``_is_stateful``."""

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Settings with the number of experts; a mixture of experts has one of them."""

_ENCODERS = frozenset(
    {
        "bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert",
        "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl", "xmod",
    }
)  # fmt: skip
"""Encoders that transformers also loads as causal models; without ``is_decoder`` rows attend to later rows."""

_ASSISTANT = "is a draft that reads hidden states and keys of its target, and no model by itself"
_SOUNDS = "writes four codes of a sound at once, and no text"
NO_TEXT = {
    "blt": "reads bytes in patches that a second model finds, which transformers' own generate() does not run",
    "gemma4_assistant": _ASSISTANT,
    "gemma4_unified_assistant": _ASSISTANT,
    "musicgen": _SOUNDS,
    "musicgen_melody": _SOUNDS,
    "musicgen_decoder": _SOUNDS,
    "musicgen_melody_decoder": _SOUNDS,
    "xlm": "is an encoder in transformers, which has no causal form of it",
}
"""Model types of transformers' causal classes that write no text, and why."""


def read_config(folder: Path, *, trust_remote_code: bool = False) -> Any:
    """The configuration of a model folder, as transformers' own object.

    Raises:
        LoadError: no config.json, one that cannot be read, a model type that transformers does not know, or one that
            needs code from the folder while ``trust_remote_code`` is False; a damaged generation_config.json.
    """
    path, raw = folder / "config.json", raw_config(folder)
    kind = raw.get("model_type")
    from transformers import AutoConfig
    from transformers import __version__ as version
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        if "auto_map" not in raw:
            raise LoadError(
                f"{path} has the model type {kind!r}, which transformers {version} does not know; check the folder or "
                "update transformers"
            )
        if not trust_remote_code:
            raise LoadError(
                f"{path} has the model type {kind!r}, which needs Python code from the model's folder; read that code, "
                "then pass trust_remote_code=True, or use a model that transformers knows itself"
            )
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    except Exception as error:  # remote code and validators raise errors of any kind
        raise LoadError(f"{path} is not a valid configuration ({one_line(error)})") from error


def check_supported(config: Any, name: str, model_class: type | None = None, *, encoder_decoder: bool = False) -> None:
    """Refuse models that are not supported.

    Args:
        config: a transformers configuration.
        name: the user's name of the model.
        model_class: the class, if known; None: it is looked up.
        encoder_decoder: whether a model with an encoder is accepted.

    Raises:
        UnsupportedError: an encoder-decoder model where none is accepted or of an unknown family, an encoder, or no
            language model.
    """
    kind = getattr(config, "model_type", None) or type(config).__name__
    if kind in NO_TEXT:
        raise UnsupportedError(f"{name!r} ({kind}) {NO_TEXT[kind]}; choose a causal model of text")
    if has_encoder(config):
        if not encoder_decoder:
            raise UnsupportedError(
                f"{name!r} is an encoder-decoder model ({kind}), and this works with decoder-only models; LLM, "
                "generate and transcribe take such a model"
            )
        family_of(config, name)
        return
    if model_class is None:
        model_class = causal_class(config)
    if kind in _ENCODERS and not getattr(config, "is_decoder", False):
        raise UnsupportedError(
            f"{name!r} is an encoder ({kind}), not a causal language model; choose a decoder-only model"
        )
    if model_class is None and not getattr(config, "auto_map", None):
        raise UnsupportedError(
            f"{name!r} ({kind}) has no causal language model in transformers; choose a decoder-only text model"
        )


def check_adapter(model: Any, name: str) -> None:
    """Refuse a loaded model with an adapter of peft that adds tokens to prompts: these are no part of its layers.

    Raises:
        UnsupportedError: prompt tuning, prefix tuning or the like is active.
    """
    # While peft's own generate() runs, the base model has a method of the adapted one.
    adapted = getattr(vars(model).get("prepare_inputs_for_generation"), "__self__", None)
    for part in (model, adapted):
        config = None if part is None else getattr(part, "active_peft_config", None)
        if getattr(config, "is_prompt_learning", False) and not getattr(part, "_adapters_disabled", False):
            kind = getattr(getattr(config, "peft_type", None), "value", type(config).__name__)
            raise UnsupportedError(
                f"{name!r} has an adapter of peft that learns prompts ({kind}): its virtual tokens stand before every "
                "text and are no layers, which is not supported; use peft's own generate(), or an adapter of layers "
                "(LoRA)"
            )


def check_states(config: Any, model_class: type) -> None:
    """Refuse layers with a state that our cache cannot roll back.

    Raises:
        UnsupportedError: their state is computed by functions that we do not replace.
    """
    types = sorted(_STATES.intersection(getattr(text_config(config), "layer_types", None) or ()))
    kind = getattr(config, "model_type", None)
    stateful = types or kind in _STATEFUL or getattr(model_class, "_is_stateful", False)
    if stateful and not has_state_functions(model_class):
        what = f"layers of the type {', '.join(types)}" if types else "a recurrent state"
        raise UnsupportedError(f"{kind} has {what}, computed in a way that is not known here")


def text_config(config: Any) -> Any:
    """The part of a configuration that describes the text model; of most models the configuration itself."""
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config


def has_encoder(config: Any) -> bool:
    """Whether a configuration is that of an encoder-decoder model."""
    return bool(getattr(config, "is_encoder_decoder", False))


def auto_class(config: Any) -> str:
    """Name of transformers' auto class for a model of this configuration."""
    if not has_encoder(config):
        return "AutoModelForCausalLM" if _is_causal(config) else "AutoModelForImageTextToText"
    return "AutoModelForSpeechSeq2Seq" if family_of(config).takes_audio else "AutoModelForSeq2SeqLM"


def has_experts(config: Any) -> bool:
    """Whether a configuration is that of a mixture of experts."""
    text = text_config(config)
    parts = text, getattr(text, "ffn_config", None)
    return any(int(getattr(part, name, 0) or 0) > 1 for part in parts for name in _EXPERTS)


def _is_causal(config: Any) -> bool:
    """Whether transformers' causal auto class loads it; remote code and unknown types count as causal."""
    causal, seeing = _classes()
    return type(config) in causal or type(config) not in seeing


def causal_class(config: Any) -> type | None:
    """The causal class, or that of images and text, which writes text too; None: transformers has none."""
    causal, seeing = _classes()
    found = causal.get(type(config), None) or seeing.get(type(config), None)
    kind: type | None = found[0] if isinstance(found, tuple) else found
    return kind


def _classes() -> tuple[Any, Any]:
    """Transformers' causal classes by configuration, and those of images and text."""
    leave_out_foreign_notes()  # torchao comes with the first class of a model
    from transformers.models.auto import modeling_auto as auto

    return auto.MODEL_FOR_CAUSAL_LM_MAPPING, auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

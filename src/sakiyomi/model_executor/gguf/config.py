"""The configuration of a model in a GGUF file, from its metadata and the names of its tensors."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import numpy as np

from sakiyomi.core.errors import LoadError, UnsupportedError
from sakiyomi.core.gguf import GgufFile
from sakiyomi.core.messages import one_line
from sakiyomi.model_executor.gguf.architectures import ARCHITECTURES, Architecture
from sakiyomi.model_executor.gguf.special import Facts, width_of

logger = logging.getLogger("sakiyomi")

ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
"""Divisors of rotary frequencies: they become part of the configuration."""
_FOLDER = "use the model's folder in Hugging Face format"
_KEPT = ("rope_theta", "partial_rotary_factor", "mscale", "mscale_all_dim")
_YARN = {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}
_NEEDED = (
    "block_count",
    "embedding_length",
    "attention.head_count",
    "attention.layer_norm_epsilon",
    "attention.layer_norm_rms_epsilon",
)
"""Sizes that llama.cpp, too, finds in every file whose architecture has them."""
_ABOVE_ZERO = ("attention.head_count", "attention.head_count_kv", "rope.freq_base", "rope.freq_base_swa")
_NEVER_USED = (
    "attention.key_length",
    "attention.value_length",
    "rope.dimension_count",
    "rope.scaling.finetuned",
    "vocab_size",
)


def architecture_of(file: GgufFile) -> Architecture:
    """The architecture of a file.

    Raises:
        LoadError: the file does not say it.
        UnsupportedError: it holds no language model, or one of an architecture that is not read.
    """
    path, kind = file.paths[0], file.metadata.get("general.architecture")
    what = file.metadata.get("general.type", "model")
    if what == "adapter":
        raise UnsupportedError(f"{path} is an adapter (LoRA), and no model; merge it into its model")
    if what == "mmproj" or kind == "clip":
        raise UnsupportedError(
            f"{path} is the part of a model that reads images or sounds (mmproj), and no model of text; give the file "
            "of the model itself"
        )
    if not isinstance(kind, str):
        raise LoadError(f"{path} does not say its architecture (general.architecture); download it again")
    if kind not in ARCHITECTURES:
        raise UnsupportedError(
            f"{path} has the architecture {kind!r}, which is not read; expected {', '.join(ARCHITECTURES)}; {_FOLDER}"
        )
    if not file.tensors:
        raise LoadError(f"{path} holds a vocabulary without weights; give the file of a model")
    return ARCHITECTURES[kind]


def build_config(file: GgufFile) -> Any:
    """The configuration, as transformers' own object. Metadata that it does not use are named in the log.

    Raises:
        LoadError: a size is missing, or they contradict each other.
        UnsupportedError: an architecture, or rotary positions, that the model cannot have here.
    """
    from transformers import AutoConfig

    architecture, path = architecture_of(file), file.paths[0]
    facts = _facts(file)
    facts.used.update(architecture.unused)
    values: dict[str, Any] = {"rope_parameters": {"rope_type": "default"}, **architecture.fixed}
    for key, name in architecture.keys.items():
        if (value := facts.take(key)) is not None:
            _put(values, name, value)
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise LoadError(f"{path} holds no embedding (token_embd.weight); download it again")
    _check_sizes(facts, architecture, file)
    _check_numbers(facts, architecture, path)
    values[architecture.keys["block_count"]] -= facts.take("nextn_predict_layers", 0)  # which are left out
    values["vocab_size"] = embedding.shape[0]
    values["tie_word_embeddings"] = "output.weight" not in file.tensors
    for name, key in {"bos": "bos", "eos": "eos", "pad": "padding"}.items():
        number = file.metadata.get(f"tokenizer.ggml.{key}_token_id")
        known = not isinstance(number, int) or 0 <= number < embedding.shape[0]
        values[f"{name}_token_id"] = number if known else None  # some files say -1, or a number behind the last
    try:
        architecture.settle(facts, values)
        if "max_position_embeddings" not in values or not values["rope_parameters"].get("rope_theta"):
            _leave_defaults(values)
        config = AutoConfig.for_model(values.pop("model_type", architecture.model_type), **values)
        config.architectures = [_class_name(config.model_type)]
        _rotary(config, facts, path)
    except (LoadError, UnsupportedError):
        raise
    except Exception as error:  # sizes that are missing, and transformers' own kinds
        raise LoadError(
            f"{path} is no intact GGUF file: its configuration cannot be read ({one_line(error)}); download it again"
        ) from error
    unused = sorted(set(facts) - facts.used - {*_NEVER_USED, *ROPE_TENSORS})
    if unused:
        logger.warning("%s: metadata of the model that are not used: %s", path, ", ".join(unused))
    return config


def _check_sizes(facts: Facts, architecture: Architecture, file: GgufFile) -> None:
    """Refuse metadata without a size, for which transformers would take that of another model, or of other layers.

    Raises:
        LoadError: says which.
    """
    needed = [key for key in _NEEDED if key in architecture.keys and facts.get(key) is None]
    path, count, further = file.paths[0], facts.get("block_count"), facts.get("nextn_predict_layers", 0)
    if needed:
        raise LoadError(f"{path} does not say {', '.join(needed)}; download it again")
    if not isinstance(count, int) or not isinstance(further, int) or not 0 < count - further <= file.layers <= count:
        raise LoadError(
            f"{path} holds {file.layers} layers, and its metadata speak of {count!r}; the text would be that of a part "
            "of the model; download it again"
        )


def _check_numbers(facts: Facts, architecture: Architecture, path: Path) -> None:
    """Refuse numbers of which no model can be computed; its logits would be no numbers.

    Raises:
        LoadError: says which.
    """
    for key, value in facts.items():
        if not isinstance(value, int | float):
            continue
        if not math.isfinite(value):
            raise LoadError(f"{path} says that {key} is {value}; expected a finite number; download it again")
        if key in _ABOVE_ZERO and value <= 0 and (key in architecture.keys or key == "rope.freq_base_swa"):
            raise LoadError(f"{path} says that {key} is {value}; expected a number above 0; download it again")


def _facts(file: GgufFile) -> Facts:
    kind = file.metadata["general.architecture"]
    held = {
        key.removeprefix(f"{kind}."): _plain(value)
        for key, value in file.metadata.items()
        if key.startswith(f"{kind}.")
    }
    for name in ROPE_TENSORS:
        if (tensor := file.tensors.get(name)) is not None:
            if tensor.kind != "F32":
                raise UnsupportedError(f"{file.paths[0]} has {name} in {tensor.kind}; expected F32; {_FOLDER}")
            held[name] = tensor.bytes().view("<f4").ravel().tolist()
    return Facts(held, file.tensors)


def _plain(value: Any) -> Any:
    """A value; a list of numbers for each layer that are all the same is one number."""
    if not isinstance(value, np.ndarray):
        return value
    return value[0].item() if len(value) and (value == value[0]).all() and len(value) > 4 else value.tolist()


def _put(values: dict[str, Any], name: str, value: Any) -> None:
    *path, last = name.split(".")
    for part in path:
        values = values.setdefault(part, {})
    values[last] = value


def _leave_defaults(values: dict[str, Any]) -> None:
    """Give transformers no positions where the file says none: it has those of the architecture."""
    rope = values["rope_parameters"]
    if "rope_theta" not in rope and len(rope) == 1:
        del values["rope_parameters"]


def _class_name(kind: str) -> str:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    name: str = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]
    return name


# ---------------------------------------------------------------- rotary positions


def _rotary(config: Any, facts: Facts, path: Path) -> None:
    """Rotary positions by the metadata and tensors of a file.

    Divisors of the frequencies become those of "longrope", the same for short and long texts, which no copy of the
    configuration loses.

    Raises:
        UnsupportedError: they cannot be had in this model.
    """
    given = {
        key.removeprefix("rope.scaling."): facts.take(key)
        for key in list(facts)
        if key.startswith("rope.scaling.") and key not in facts.used
    }
    old = getattr(config, "rope_parameters", None) or {}
    freqs, short, long = (None if name in facts.used else facts.take(name) for name in ROPE_TENSORS)
    _check_width(config, facts, old, path)
    tensors = [name for name, held in zip(ROPE_TENSORS, (freqs, short, long), strict=True) if held is not None]
    kind, factor, _ = given.pop("type", "none"), given.pop("factor", None), given.pop("finetuned", None)
    own = int(given.pop("original_context_length", 0) or getattr(config, "max_position_embeddings", 0))
    new: dict[str, Any] | None = None
    match (kind, tensors):
        case "none", []:
            return
        case "none", ["rope_freqs.weight"]:
            own, new = config.max_position_embeddings, {"short_factor": freqs, "long_factor": freqs, "factor": 1.0}
        case "none" | "longrope", [_, _] if freqs is None:
            new, scale = {"short_factor": short, "long_factor": long}, given.pop("attn_factor", None)
            new |= {} if scale is None else {"attention_factor": scale}
            config.original_max_position_embeddings = own
        case "linear" | "yarn", [] if factor is not None:
            new = {name: given.pop(key) for key, name in _YARN.items() if key in given} | {"factor": factor}
    width = int(width_of(config) * old.get("partial_rotary_factor", 1.0)) // 2
    factors = [held for held in (freqs, short, long) if held is not None]
    if new is None or given or "rope_theta" not in old or any(len(held) != width for held in factors):
        named = ", ".join([*tensors, f"rope.scaling.type {kind}", *(f"rope.scaling.{key}" for key in given)])
        raise UnsupportedError(f"{path} has rotary positions that are not read here ({named}); {_FOLDER}")
    new |= {"rope_type": "longrope" if tensors else kind, "original_max_position_embeddings": own}
    kept = {key: old[key] for key in _KEPT if key in old}
    config.rope_parameters = kept | new


def _check_width(config: Any, facts: Facts, rotary: dict[str, Any], path: Path) -> None:
    """Refuse heads of another width than the model would have, or of which positions turn a part where it turns all."""
    width = facts.get("attention.key_length")
    if width is not None and "attention.key_length" not in facts.used and width != width_of(config):
        raise UnsupportedError(
            f"{path} has heads of {width} values, and this architecture has {width_of(config)} here; {_FOLDER}"
        )
    turned = facts.get("rope.dimension_count")
    if turned is None or "rope.dimension_count" in facts.used or "partial_rotary_factor" in rotary:
        return
    if turned != width_of(config):
        raise UnsupportedError(
            f"{path} turns {turned} of the {width_of(config)} values of a head by position, which this architecture "
            f"does not have here; {_FOLDER}"
        )

"""Metadata of a GGUF file that transformers does not read, such as rotary positions."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from sakiyomi.core.errors import UnsupportedError

logger = logging.getLogger("sakiyomi")

ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
"""Divisors of rotary frequencies."""
_YARN = {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}


def facts_of(reader: Any) -> dict[str, Any]:
    """What transformers may leave out: metadata of the architecture, by their names without it, and rotary tensors."""
    import gguf

    kind = reader.fields["general.architecture"].contents()
    found = {
        key.removeprefix(f"{kind}."): field.contents()
        for key, field in reader.fields.items()
        if key.startswith(f"{kind}.")
    }
    for tensor in reader.tensors:
        if tensor.name in ROPE_TENSORS:
            found[tensor.name] = gguf.dequantize(tensor.data, tensor.tensor_type).ravel().tolist()
    return found | {"architecture": kind}


def use_facts(config: Any, facts: dict[str, Any], path: Path) -> None:
    """Give a configuration what transformers has left out of it, and name what is not read.

    Raises:
        UnsupportedError: rotary positions that the model would not have.
    """
    from transformers.modeling_gguf_pytorch_utils import GGUF_TO_TRANSFORMERS_MAPPING

    kind = facts.pop("architecture")
    names: Any = GGUF_TO_TRANSFORMERS_MAPPING["config"]
    known = set(names.get(kind) or names.get(config.model_type) or facts)
    widths = ("attention.key_length", "attention.value_length")
    known |= {key for key in widths if key in facts and facts[key] == _head_dim(config)}
    scaling = {key: facts.pop(key) for key in list(facts) if key.startswith("rope.scaling.") or key in ROPE_TENSORS}
    if scaling and kind != "gpt-oss":  # whose scaling transformers reads itself
        _rope(config, {key.removeprefix("rope.scaling."): value for key, value in scaling.items()}, path)
    if left := sorted(set(facts) - known):
        logger.warning("%s: metadata of the model that are not used: %s", path, ", ".join(left))


def _rope(config: Any, given: dict[str, Any], path: Path) -> None:
    """Rotary positions by the metadata and tensors of a file.

    Divisors of the frequencies become those of "longrope", the same for short and long texts, which no copy of the
    configuration loses.

    Raises:
        UnsupportedError: they cannot be had in this model.
    """
    old = getattr(config, "rope_parameters", None) or {}
    freqs, short, long = (given.pop(name, None) for name in ROPE_TENSORS)
    tensors = [name for name, held in zip(ROPE_TENSORS, (freqs, short, long), strict=True) if held is not None]
    kind, factor, _ = given.pop("type", "none"), given.pop("factor", None), given.pop("finetuned", None)
    own = int(given.pop("original_context_length", 0) or config.max_position_embeddings)
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
    width = int(_head_dim(config) * old.get("partial_rotary_factor", 1.0)) // 2
    factors = [held for held in (freqs, short, long) if held is not None]
    if new is None or given or "rope_theta" not in old or any(len(held) != width for held in factors):
        named = ", ".join([*tensors, f"rope.scaling.type {kind}", *(f"rope.scaling.{key}" for key in given)])
        raise UnsupportedError(
            f"{path} has rotary positions that are not read here ({named}); use the model's folder in Hugging Face "
            "format"
        )
    new |= {"rope_type": "longrope" if tensors else kind, "original_max_position_embeddings": own}
    kept = {key: old[key] for key in ("rope_theta", "partial_rotary_factor") if key in old}
    config.rope_parameters = kept | new


def _head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)

"""Folders of EAGLE heads in two formats: of the method's authors (and SpecForge), and of vLLM's speculators.

EAGLE-3: the first format has the architecture ``LlamaForCausalLMEagle3`` and calls its layer ``midlayer``. The second
has ``speculators_model_type`` and ``transformer_layer_config`` and calls it ``layers.0``. Both store ``d2t`` as
offsets: the head's token i is the target's token i + d2t[i]. EAGLE-1 and 2 have the configuration of an ordinary model
and are recognized by their tensors: a projection ``fc`` beside ``layers.0``, without the norm of EAGLE-3's features.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sakiyomi.core.draft_specs import EAGLE_ARCHITECTURE, EAGLE_NORM, SPECULATORS, is_first_eagle, is_third_eagle
from sakiyomi.core.errors import LoadError
from sakiyomi.core.trained import trained_config, write_trained
from sakiyomi.drafters.head_files import (
    DraftFile,
    check_layers,
    check_tensors,
    head_config,
    head_tensors,
    layer_config,
    named_options,
    pop_tokens,
    token_tensors,
)

WHAT = "EAGLE head"
IDS = "eagle_aux_hidden_state_layer_ids"
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
"""Options that have the same names in configurations."""
_KINDS = ("eagle3", "peagle")
_MASKS = ("mask_token_id", "pard_token", "ptd_token_id")
_MASK_HIDDEN = "mask_hidden"
_MIDDLE, _FIRST = "midlayer.", "layers.0."


@dataclass(frozen=True, kw_only=True)
class EagleOptions:
    """Settings that differ between heads of this family.

    Attributes:
        layers: decoder layers of the target, counted from 0, whose outputs are read.
        target_size: width of the target's hidden states.
        norm_before_residual: the residual of the first layer is the feature behind its norm, and not before it.
        norm_before_fc: one norm over the hidden states of all layers, side by side.
        fc_norm: a norm for those of each layer.
        norm_output: what is fed back is the output behind the last norm (EAGLE-3.1).
        mask: token that stands for one to be guessed, where several are guessed a pass (P-EAGLE); None: one is.
        first: it reads what the target's head reads, and its logits come from that head (EAGLE-1 and 2).
    """

    layers: tuple[int, ...]
    target_size: int
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    mask: int | None = None
    first: bool = False


EagleFile = DraftFile[EagleOptions]


def usual_layers(count: int) -> tuple[int, ...]:
    """Layers whose outputs a head reads unless its file names others, of a target with `count`."""
    return (1, count // 2 - 1, count - 4)


def read_eagle(folder: str | Path, layers: int, *, allow_pickle: bool = False) -> EagleFile:
    """Read a head.

    Args:
        folder: with ``config.json``.
        layers: of the target.
        allow_pickle: read pickle files where there is no safetensors file.

    Raises:
        LoadError: something is missing, damaged, or no head.
        UnsupportedError: it reads layers that the target does not have.
    """
    folder, config = head_config(folder, WHAT)
    third, kind = is_third_eagle(config), config.get(SPECULATORS)
    if kind is not None and kind not in _KINDS:
        known = " and ".join(map(repr, _KINDS))
        raise LoadError(
            f"{folder} holds a head of the kind {kind!r}; this version runs {known}, and as block drafters 'dflash', "
            "'dflash2' and 'dspark'"
        )
    stored = head_tensors(folder, WHAT, allow_pickle=allow_pickle)
    if not third and not is_first_eagle(stored):
        said = config.get("architectures") or config.get("model_type") or "nothing that is known"
        raise LoadError(
            f"{folder} holds no {WHAT}: config.json says {said}; expected {SPECULATORS} eagle3, the architecture "
            f"{EAGLE_ARCHITECTURE}, or the tensors fc.weight and {_FIRST}* of EAGLE-1 and 2"
        )
    inner = {"model_type": "llama", **layer_config(config)}
    tensors = {name.replace(_MIDDLE, _FIRST): tensor for name, tensor in stored.items()}
    if not third:  # layers are Llama's, with a bias of queries, keys and values or none
        inner["model_type"] = "qwen2" if f"{_FIRST}self_attn.q_proj.bias" in tensors else "llama"
        width, read = tensors["fc.weight"].shape
        options = EagleOptions(layers=(layers - 1,), target_size=read - width, norm_output=True, first=True)
        return EagleFile(inner, options, tensors, None, str(folder))
    check_tensors(tensors, ("fc.weight", "norm.weight", EAGLE_NORM), WHAT, folder)
    parallel = kind == "peagle" or bool(config.get("parallel_drafting"))
    mask = next((config[entry] for entry in _MASKS if config.get(entry) is not None), None) if parallel else None
    if parallel and (mask is None or _MASK_HIDDEN not in tensors):
        missing = _MASK_HIDDEN if mask is not None else "mask_token_id"
        raise LoadError(f"{folder} guesses several tokens a pass and lacks {missing}; get it again")
    # Layer ids count inputs for the authors and for speculators, and outputs in `eagle_config`.
    inputs, outputs = config.get(IDS), (config.get("eagle_config") or {}).get(IDS)
    named = tuple(i - 1 for i in inputs) if inputs else tuple(outputs or usual_layers(layers))
    check_layers(named, layers, WHAT, folder)
    size = int(config.get("target_hidden_size") or tensors["fc.weight"].shape[1] // len(named))
    flags = {"norm_before_residual": kind is not None and "norm_before_residual" not in config}
    flags |= named_options(EagleOptions, dict(zip(FLAGS, FLAGS, strict=True)), config.get)
    options = EagleOptions(layers=named, target_size=size, mask=mask, **flags)
    return EagleFile(inner, options, tensors, pop_tokens(tensors), str(folder))


def write_eagle(folder: Path, file: EagleFile, base: str) -> None:
    """Write a head in the format of the method's authors.

    Args:
        folder: is made.
        file: the head; its name is not written.
        base: the target's name.
    """
    options = file.options
    tensors = {name.replace(_FIRST, _MIDDLE): tensor for name, tensor in file.tensors.items()}
    config = {
        "architectures": [EAGLE_ARCHITECTURE],
        **file.config,
        "draft_vocab_size": len(file.tensors["lm_head.weight"]),
        "target_hidden_size": options.target_size,
        IDS: [layer + 1 for layer in options.layers],
        **{name: True for name in FLAGS if getattr(options, name)},
    }
    tensors |= token_tensors(file.tokens, int(file.config["vocab_size"]))
    write_trained(folder, "model.safetensors", tensors, trained_config(config, base=base), WHAT)

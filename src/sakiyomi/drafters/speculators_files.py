"""Writes EAGLE-3 heads and block drafters in the format of vLLM's speculators, for vLLM, SGLang and training."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sakiyomi.core.draft_specs import SPECULATORS
from sakiyomi.core.dtypes import dtype_name
from sakiyomi.core.errors import UnsupportedError
from sakiyomi.core.trained import write_trained
from sakiyomi.drafters.block_heads.formats import ENTRIES, SECOND, BlockFile, BlockOptions
from sakiyomi.drafters.eagle_heads.formats import FLAGS, IDS, EagleFile, EagleOptions
from sakiyomi.drafters.head_files import token_tensors
from sakiyomi.drafters.head_model import decoder_config

if TYPE_CHECKING:
    from torch import Tensor

VERSION = "0.9.0"
"""Version of speculators whose format this is."""
STEPS = 3
"""Draft tokens a round that an EAGLE head's configuration proposes."""
_CLASSES = {
    "eagle3": "Eagle3Speculator",
    "peagle": "PEagleSpeculator",
    "dflash": "DFlashSpeculator",
    "dspark": "DSparkSpeculator",
    "dflash2": "DFlash2DraftModel",
}


def write_speculators(folder: Path, file: EagleFile | BlockFile, target: str, architectures: list[str]) -> str:
    """Write a head or a drafter.

    Args:
        folder: is made.
        file: what is written.
        target: path or id of the model that it belongs to.
        architectures: of that model, as its configuration has them.

    Returns:
        What speculators call it: "eagle3", "peagle", "dflash", "dflash2" or "dspark".

    Raises:
        UnsupportedError: the format cannot describe it.
        LoadError: nothing can be written there.
    """
    made = (
        _eagle(file.name, file.options)
        if isinstance(file.options, EagleOptions)
        else _block(file.name, file.options, file.tensors)
    )
    kind, own, steps = made
    vocab = int(file.config["vocab_size"])
    tensors = file.tensors | token_tensors(file.tokens, vocab)
    config = {
        "architectures": [_CLASSES[kind]],
        SPECULATORS: kind,
        "speculators_version": VERSION,
        "dtype": dtype_name(file.tensors["fc.weight"].dtype),
        "tie_word_embeddings": False,
        "transformer_layer_config": _layers(file.config),
        "draft_vocab_size": vocab if file.tokens is None else len(file.tokens),
        **own,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": steps}],
            "verifier": {"name_or_path": target, "architectures": architectures},
        },
    }
    write_trained(folder, "model.safetensors", tensors, config, "draft")
    return kind


def _layers(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of the decoder layers, without entries that other tools have added."""
    made = decoder_config(config)
    found: dict[str, Any] = made.to_diff_dict()
    known = type(made)().to_dict().keys()
    left = ("architectures", "dtype", "transformers_version")
    return {name: value for name, value in found.items() if name in known and name not in left}


def _eagle(name: str, options: EagleOptions) -> tuple[str, dict[str, Any], int]:
    """Kind, settings and tokens a round."""
    if options.first:
        raise UnsupportedError(
            f"{name} is a head of EAGLE-1 or 2, which speculators do not run; `train eagle` makes one of EAGLE-3"
        )
    own = {flag: getattr(options, flag) for flag in FLAGS}
    own |= {IDS: [layer + 1 for layer in options.layers], "target_hidden_size": options.target_size}
    if options.mask is None:
        return "eagle3", own, STEPS
    return "peagle", {**own, "mask_token_id": options.mask, "parallel_drafting": True}, 2 * STEPS


def _block(name: str, options: BlockOptions, tensors: Mapping[str, Tensor]) -> tuple[str, dict[str, Any], int]:
    """Kind, settings and tokens a round."""
    usual = {"causal": False, "embedding_scale": 1.0, "logit_scale": 1.0, "softcap": 0.0}
    strange = next((option for option, value in usual.items() if getattr(options, option) != value), None)
    if strange:
        raise UnsupportedError(
            f"the block drafter {name} has {strange} {getattr(options, strange)}, which speculators cannot store"
        )
    own = {entry: getattr(options, option) for option, entry in ENTRIES.items() if option not in (*usual, "confident")}
    own["aux_hidden_state_layer_ids"] = [layer + 1 for layer in options.layers]
    own["target_hidden_size"] = tensors["fc.weight"].shape[1] // len(options.layers)
    if options.kernel:
        own |= {entry: getattr(options, option) for option, entry in SECOND.items()}
        own["selector_rank"] = tensors["candidate_selector.predecessor_codebook"].shape[1]
        return "dflash2", own, options.guesses
    if not (options.markov or options.confident):
        return "dflash", own, options.guesses
    own["markov_rank"] = tensors["markov_head.markov_w1.weight"].shape[1] if options.markov else 0
    own["markov_head_type"] = options.markov or "vanilla"
    own[ENTRIES["confident"]] = options.confident
    width = tensors["hidden_norm.weight"].shape[0]
    own["confidence_head_with_markov"] = options.confident and tensors["confidence_head.proj.weight"].shape[1] > width
    return "dspark", own, options.guesses

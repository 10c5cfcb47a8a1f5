"""Folders of block drafters in three formats: of DFlash's authors, of DeepSpec and of vLLM's speculators.

The first two extend transformers' configuration of the layers, in ``dflash_config`` or at the top level. The third has
``speculators_model_type`` and ``transformer_layer_config``. ``target_layer_ids`` counts outputs of the target's layers,
``aux_hidden_state_layer_ids`` inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sakiyomi.core.draft_specs import BLOCK_ARCHITECTURES, BLOCK_KINDS, SPECULATORS, is_block
from sakiyomi.core.errors import LoadError, UnsupportedError
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

WHAT = "block drafter"
MARKOV = ("vanilla", "gated", "rnn")
_CAUSAL = ("causal_head", "causal", "is_causal")
_INPUTS = ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids")
_HEADS = ("markov_head.", "confidence_head.", "candidate_selector.")
ENTRIES = {
    "size": "block_size",
    "mask": "mask_token_id",
    "anchored": "sample_from_anchor",
    "confident": "enable_confidence_head",
    "embedding_scale": "input_embedding_scale",
    "logit_scale": "output_multiplier",
    "softcap": "final_logit_softcapping",
}
"""What configurations call the options."""
SECOND = {"kernel": "conv_kernel_size", "group": "conv_group_size", "selected": "selector_top_k"}
"""The same of those of DFlash2, and what they are where they are not named."""
_USUAL = {"kernel": 2, "group": 16, "selected": 16}


@dataclass(frozen=True, kw_only=True)
class BlockOptions:
    """Settings that differ between block drafters.

    Attributes:
        layers: decoder layers of the target, counted from 0, whose outputs are read.
        size: rows of a block; the first holds the last committed token.
        mask: token of the other rows.
        anchored: the first row guesses the first token, the next the second (DSpark); else the second row guesses the
            first token (DFlash).
        causal: a row sees those before it, and not those behind it (JetSpec).
        markov: kind of the head that adds what follows from the token before; "": there is none.
        confident: a head says how likely a guess is to be accepted.
        kernel: taps of the convolutions around attention and MLP of each layer (DFlash2); 0: there are none.
        group: numbers of a hidden state that share a convolution's weights.
        selected: guesses of a slot that a selector ranks by the token before (DFlash2), the only ones that are made; 0:
            there is none.
        embedding_scale: the target's embeddings are multiplied with this.
        logit_scale: what the head over the vocabulary gives is multiplied with this,
        softcap: and then bounded by this; 0: it is not.
    """

    layers: tuple[int, ...]
    size: int
    mask: int
    anchored: bool = False
    causal: bool = False
    markov: str = ""
    confident: bool = False
    kernel: int = 0
    group: int = 0
    selected: int = 0
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    softcap: float = 0.0

    @property
    def guesses(self) -> int:
        """Tokens that a pass guesses."""
        return self.size if self.anchored else self.size - 1


BlockFile = DraftFile[BlockOptions]


def usual_layers(count: int) -> tuple[int, ...]:
    """Layers whose outputs are read by default, of a target with `count`: five, evenly spaced from the second to three
    before the last.
    """
    return tuple(sorted({1 + round(place * (count - 4) / 4) for place in range(5)}))


def write_block(folder: Path, file: BlockFile, base: str, layers: int) -> None:
    """Write a drafter in the format of the method's authors, or in DeepSpec's if its first row guesses. A part of the
    vocabulary is stored as EAGLE-3 and speculators store it.

    Args:
        folder: is made.
        file: the drafter, without a head for confidence and what DFlash2 adds; its name is not written.
        base: the target's name.
        layers: of the target.
    """
    options = file.options
    assert not (options.confident or options.kernel), "no recipe trains these"
    named: dict[str, Any] = {"mask_token_id": options.mask, "target_layer_ids": list(options.layers)}
    if options.causal:
        named["causal_head"] = True
    if options.markov:
        rank = int(file.tensors["markov_head.markov_w1.weight"].shape[1])
        named |= {"markov_rank": rank, "markov_head_type": options.markov}
    config = {
        **file.config,
        "architectures": [BLOCK_ARCHITECTURES[options.anchored]],
        "block_size": options.size,
        "num_target_layers": layers,
        **(named if options.anchored else {"dflash_config": named}),
    }
    if file.tokens is not None:
        config["draft_vocab_size"] = len(file.tokens)
    tensors = file.tensors | token_tensors(file.tokens, int(file.config["vocab_size"]))
    write_trained(folder, "model.safetensors", tensors, trained_config(config, base=base), WHAT)


def read_block(folder: str | Path, layers: int, *, allow_pickle: bool = False) -> BlockFile:
    """Read a block drafter.

    Args:
        folder: with ``config.json``.
        layers: of the target.
        allow_pickle: read pickle files where there is no safetensors file.

    Raises:
        LoadError: something is missing, damaged, or no block drafter.
        UnsupportedError: it reads layers that the target does not have, or is of a kind that is not run here.
    """
    folder, config = head_config(folder, WHAT)
    if not is_block(config):
        said = config.get(SPECULATORS) or config.get("architectures") or config.get("model_type") or "nothing known"
        raise LoadError(
            f"{folder} holds no {WHAT}: config.json says {said}; expected {SPECULATORS} {' or '.join(BLOCK_KINDS)}, or "
            f"the architecture {' or '.join(BLOCK_ARCHITECTURES)}"
        )
    inner = layer_config(config, model_type="qwen3")
    inner.pop("is_causal", None)  # of the block, not of the layers
    tensors = head_tensors(folder, WHAT, allow_pickle=allow_pickle)
    check_tensors(tensors, ("fc.weight", "hidden_norm.weight", "norm.weight"), WHAT, folder)
    tokens, nested = pop_tokens(tensors), config.get("dflash_config") or {}
    options = _options(str(folder), {**config, **nested}, inner)
    beside = {part for part in _HEADS if any(tensor.startswith(part) for tensor in tensors)}
    parts = zip(_HEADS, (options.markov, options.confident, options.selected), strict=True)
    if wrong := sorted(beside ^ {part for part, there in parts if there}):
        raise LoadError(
            f"{folder} and its config.json do not belong together: tensors {wrong[0]}* are "
            f"{'there' if wrong[0] in beside else 'missing'}; get it again"
        )
    check_layers(options.layers, layers, WHAT, folder)
    return BlockFile(inner, options, tensors, tokens, str(folder))


def _options(name: str, config: Mapping[str, Any], inner: Mapping[str, Any]) -> BlockOptions:
    """What the configuration says of the drafter.

    Raises:
        LoadError: it lacks something.
        UnsupportedError: what it asks for is not run here.
    """
    said, named = config.get, set(config.get("architectures") or BLOCK_ARCHITECTURES)
    kind, markov = said(SPECULATORS), str(said("markov_head_type") or "vanilla") if said("markov_rank") else ""
    options: dict[str, Any] = {"anchored": kind is None and "Qwen3DSparkModel" in (said("architectures") or ())}
    options |= named_options(BlockOptions, ENTRIES, said)
    if kind == "dflash2":
        options |= _USUAL | named_options(BlockOptions, SECOND, said)
    reasons = {
        f"the architecture {'/'.join(named)}": kind is None and not named & set(BLOCK_ARCHITECTURES),
        "layers with a sliding window": "sliding_attention" in (inner.get("layer_types") or ()),
        **{
            f"{entry} {said(entry)!r}": said(entry) not in (None, "dflash")
            for entry in ("projector_type", "fusion_mode")
        },
        f"markov_head_type {markov!r}": markov not in ("", *MARKOV),
        "a recurrent Markov head whose first row guesses nothing": markov == "rnn" and not options["anchored"],
    }
    if strange := next((reason for reason, holds in reasons.items() if holds), None):
        raise UnsupportedError(f"the {WHAT} in {name} has {strange}, which is not run here; choose another one")
    inputs = next((said(entry) for entry in _INPUTS if said(entry)), None)
    layers = [layer - 1 for layer in inputs] if inputs else said("target_layer_ids")
    missing = next((ENTRIES[own] for own in ("mask", "size") if own not in options), None)
    if missing or not layers:
        raise LoadError(f"config.json of {name} lacks {missing or 'target_layer_ids'} of a {WHAT}; get it again")
    causal = next((bool(said(entry)) for entry in _CAUSAL if said(entry) is not None), False)
    return BlockOptions(layers=tuple(layers), causal=causal, markov=markov, **options)

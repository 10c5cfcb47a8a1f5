"""Writes EAGLE-3 heads and block drafters as GGUF files, in the form that llama.cpp loads beside the target.

llama.cpp calls them ``draft-eagle3``, ``draft-dflash``, and ``draft-dspark`` for block drafters with a Markov head. The
file has the target's tokenizer. Embedding and head over the vocabulary are the target's where the file has none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from sakiyomi.core.errors import UnsupportedError
from sakiyomi.drafters.block_heads.formats import BlockFile, BlockOptions
from sakiyomi.drafters.eagle_heads.formats import EagleFile, EagleOptions
from sakiyomi.drafters.head_files import check_size
from sakiyomi.drafters.head_model import EMBEDDING, HEAD_WEIGHT, decoder_config, with_context
from sakiyomi.model_executor.gguf.architectures import ARCHITECTURES
from sakiyomi.model_executor.gguf.export import check_type, named_tensors, settings, vocabulary, write_file

_BEFORE, _AFTER, _SURE = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight", "confidence_head.proj"
_SELECTOR = "candidate_selector."
_LLAMA, _QWEN = ARCHITECTURES["llama"], ARCHITECTURES["qwen3"]
_EAGLE = replace(
    _LLAMA,
    parts={**_LLAMA.parts, "fc": "model.fc", "enc.output_norm": "model.input_norm", "attn_norm_2": "hidden_norm"},
)
_BLOCK = replace(
    _QWEN,
    parts={
        **_QWEN.parts, "fc": "model.fc", "enc.output_norm": "model.hidden_norm", "conf_proj": f"model.{_SURE}",
        "markov_w1.weight": f"model.{_BEFORE}", "markov_w2.weight": f"model.{_AFTER}",
        "attn_conv_base": "attention_conv.base_kernel", "attn_conv_proj": "attention_conv.kernel_projection",
        "ffn_conv_base": "mlp_conv.base_kernel", "ffn_conv_proj": "mlp_conv.kernel_projection",
        "selector_predecessor.weight": f"model.{_SELECTOR}predecessor_codebook",
        "selector_successor.weight": f"model.{_SELECTOR}successor_codebook",
        "selector_hidden": f"model.{_SELECTOR}hidden_projection",
    },
)  # fmt: skip


def write_head(path: Path, file: EagleFile | BlockFile, target: Any, tokenizer: Any, kind: str) -> str:
    """Write a head or a drafter.

    Args:
        path: of the file to be; it is there whole, or not at all.
        file: what is written.
        target: configuration of the text model that it belongs to.
        tokenizer: of that model.
        kind: type of the matrices, one of ``TYPES``.

    Returns:
        What llama.cpp calls it: "draft-eagle3", "draft-dflash" or "draft-dspark".

    Raises:
        InputError: another type.
        UnsupportedError: the form cannot describe the head or the tokenizer, or the head belongs to another model.
        LoadError: the file cannot be written.
    """
    kind, options, vocab = check_type(kind), file.options, int(target.vocab_size)
    config = decoder_config(with_context(file.config, int(target.max_position_embeddings)), vocab_size=vocab)
    tensors, tokens = dict(file.tensors), _tokens(file, vocab)
    read = tensors["fc.weight"].shape[1] // len(options.layers)
    size = options.target_size if isinstance(options, EagleOptions) else read
    check_size(f"the head {file.name} reads hidden states", size, int(target.hidden_size))
    if isinstance(options, EagleOptions):
        name, called, architecture = "eagle3", "draft-eagle3", _EAGLE
        strange = _strange_head(options, tensors, config)
        own: dict[str, Any] = {"target_hidden_size": options.target_size}
        own |= {"norm_before_residual": options.norm_before_residual, "norm_before_fc": options.norm_before_fc}
    else:
        strange = _strange_block(cast(BlockFile, file), options, config)
        if options.anchored and not options.markov:  # only files with a Markov head guess from the first row
            tensors |= {
                _BEFORE: torch.zeros(vocab, 1),
                _AFTER: torch.zeros(vocab if tokens is None else len(tokens), 1),
            }
        name, called, architecture = "dflash", "draft-dspark" if _BEFORE in tensors else "draft-dflash", _BLOCK
        own = _of_block(options, tensors)
    strange |= _strange(file, config, vocab, int(target.num_hidden_layers))
    if reason := next((reason for reason, holds in strange.items() if holds), None):
        raise UnsupportedError(
            f"{file.name} has {reason}, which llama.cpp's {called} does not read; choose another head"
        )
    own["target_layers"] = [layer + 1 for layer in options.layers]  # which counts inputs
    metadata = settings(config, name, architecture) | {f"{name}.{key}": value for key, value in own.items()}
    metadata |= vocabulary(tokenizer, vocab)
    if isinstance(options, BlockOptions):
        metadata["tokenizer.ggml.mask_token_id"] = options.mask
    in_model = {part if part == HEAD_WEIGHT else f"model.{part}": tensor for part, tensor in tensors.items()}
    parts = list(named_tensors(in_model, config, architecture)) + ([] if tokens is None else [("d2t", tokens)])
    write_file(path, name, metadata, parts, kind, int(config.num_hidden_layers))
    return called


def _tokens(file: EagleFile | BlockFile, vocab: int) -> Tensor | None:
    """The target's token for each of the head's own; None: they are the same."""
    known = len(file.tensors.get(HEAD_WEIGHT, range(vocab)))
    return torch.arange(known) if file.tokens is None and known < vocab else file.tokens


def _of_block(options: BlockOptions, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Metadata that say how a block drafter guesses."""
    own: dict[str, Any] = {"block_size": options.size}
    if options.causal:
        own["attention.causal"] = True
    if _BEFORE in tensors:
        own |= {"sample_from_anchor": options.anchored, "has_confidence_head": options.confident}
    if options.selected:
        rank = tensors[f"{_SELECTOR}hidden_projection.weight"].shape[0]
        own |= {"conv_kernel_size": options.kernel, "conv_group_size": options.group}
        own |= {"selector_rank": rank, "selector_top_k": options.selected}
    scales = {"embedding_scale": options.embedding_scale, "logit_scale": options.logit_scale}
    own |= {key: scale for key, scale in scales.items() if scale != 1.0}
    return own | ({"final_logit_softcapping": options.softcap} if options.softcap else {})


# ---------------------------------------------------------------- what the form cannot hold


def _strange(file: EagleFile | BlockFile, config: Any, vocab: int, layers: int) -> dict[str, bool]:
    """Whether a file has what neither form holds, by what it is called."""
    tensors = file.tensors
    sizes = {part: len(tensors[part]) for part in (EMBEDDING, HEAD_WEIGHT) if part in tensors}
    biases = [part for part in tensors if part.endswith(".bias") and part != f"{_SURE}.bias"]
    return {
        f"the bias {next(iter(biases), '')}": bool(biases),
        f"the activation {config.hidden_act}": config.hidden_act != "silu",
        "rotary positions of the kind longrope": config.rope_parameters.get("rope_type") == "longrope",
        "the output of the target's last layer to read": layers - 1 in file.options.layers,
        f"tokens that the target's {vocab} do not have": file.tokens is not None and int(file.tokens.max()) >= vocab,
        f"an embedding of other tokens than the target's {vocab}": sizes.get(EMBEDDING, vocab) != vocab,
        f"a head over more tokens than the target's {vocab}": sizes.get(HEAD_WEIGHT, vocab) > vocab,
    }


def _strange_head(options: EagleOptions, tensors: Mapping[str, Tensor], config: Any) -> dict[str, bool]:
    return {
        "the form of EAGLE-1 and 2": options.first,
        "several guesses a pass (P-EAGLE)": options.mask is not None,
        f"{config.num_hidden_layers} layers instead of one": config.num_hidden_layers != 1,
        f"{len(options.layers)} layers of the target to read instead of three": len(options.layers) != 3,
        "a norm for each of the target's layers (fc_norm)": options.fc_norm,
        "its normed output fed back (norm_output)": options.norm_output,
        "norms of queries and keys": any(".q_norm." in part for part in tensors),
    }


def _strange_block(file: BlockFile, options: BlockOptions, config: Any) -> dict[str, bool]:
    width, tensors, scaled = int(config.hidden_size), file.tensors, options.logit_scale != 1.0 or options.softcap != 0
    sure = tensors[f"{_SURE}.weight"].shape[1] if options.confident else 0
    return {
        f"a Markov head of the kind {options.markov!r}": options.markov not in ("", "vanilla"),
        "a confidence head that reads no token": options.confident and (not options.markov or sure == width),
        "scaled logits under a Markov head": bool(options.markov) and scaled,
        "another width than its target": tensors["fc.weight"].shape[1] != len(options.layers) * width,
        "an embedding of its own and no head": EMBEDDING in tensors and HEAD_WEIGHT not in tensors,
        "a selector whose first row guesses": bool(options.selected) and options.anchored,
        "a selector over a part of the vocabulary": bool(options.selected) and file.tokens is not None,
        f"hidden states of {width} values for {options.selected} candidates": width
        < options.selected * (options.selected + 1),
    }

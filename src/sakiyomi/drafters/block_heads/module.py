"""A block drafter as a causal LM of transformers.

Keys and values of the text are projected from the target's hidden states, so committed tokens pass through no layer of
the drafter. The layers are ordinary decoder layers that find these pairs in the cache.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from sakiyomi.core.errors import LoadError
from sakiyomi.drafters.block_heads.convolution import ConvolvedLayer
from sakiyomi.drafters.block_heads.formats import BlockFile
from sakiyomi.drafters.head_files import check_size
from sakiyomi.drafters.head_model import (
    HEAD_WEIGHT,
    HiddenOutput,
    check_tokens,
    fill,
    make_decoder,
    token_embedding,
    with_context,
)
from sakiyomi.model_executor.runner import ModelRunner

_BESIDE = ("fc.", "hidden_norm.", "markov_head.", "confidence_head.", "candidate_selector.")


def make_block(file: BlockFile, target: ModelRunner) -> Any:
    """The layers of a block drafter, with the target's embedding where it has none of its own.

    Args:
        file: of the drafter.
        target: whose hidden states it reads.

    Raises:
        LoadError: tensors are missing, or have other shapes.
        UnsupportedError: it belongs to another model.
    """
    options, width, what = file.options, int(target.config.hidden_size), "block drafter"
    embedding = token_embedding(file, target, what, file.tensors["fc.weight"].shape[1])
    head, own = file.tensors.get(HEAD_WEIGHT), int(file.config.get("hidden_size") or 0)
    for other in (embedding.shape[1], width if head is None else own):
        check_size(f"the {what} {file.name} has hidden states", own, other)
    guessed = 0 if head is None else len(head)
    if file.tokens is not None and guessed != len(file.tokens):
        raise LoadError(
            f"{file.name} names {len(file.tokens)} tokens of the target and has a head over {guessed}; get it again"
        )
    known = guessed if file.tokens is None else int(file.tokens.max()) + 1
    check_tokens(file, target, what, known, target.vocab_size)
    check_tokens(file, target, what, options.mask + 1, max(len(embedding), target.vocab_size))
    if options.embedding_scale != 1.0:
        embedding = embedding * options.embedding_scale
    config = with_context(file.config, target.max_context + options.size)
    over = HiddenOutput(len(embedding)) if head is None else nn.Linear(own, guessed, bias=False)
    module = make_decoder(config, embedding, over)
    if options.kernel:
        if own % options.group or options.kernel > options.size:
            raise LoadError(
                f"{file.name} has convolutions of {options.kernel} rows and groups of {options.group} numbers, in "
                f"blocks of {options.size} rows of {own}; get it again"
            )
        module.model.layers = nn.ModuleList([ConvolvedLayer(layer, options, own) for layer in module.model.layers])
    return fill(module, file, _BESIDE, target)

"""An EAGLE head's file as a model beside its target."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from sakiyomi.core.errors import LoadError, UnsupportedError
from sakiyomi.drafters.eagle_heads.formats import EagleFile
from sakiyomi.drafters.eagle_heads.module import BESIDE, make_first, make_module
from sakiyomi.drafters.head_model import fill, with_context
from sakiyomi.model_executor.runner import ModelRunner

__all__ = ["load_module"]

_HEAD = "lm_head.weight"


def load_module(file: EagleFile, target: ModelRunner) -> Any:
    """The head as a model, with the target's embedding where it has none of its own.

    Args:
        file: of the head.
        target: whose hidden states it reads.

    Raises:
        LoadError: tensors are missing, or have other shapes.
        UnsupportedError: it belongs to another model.
    """
    options, tensors, width = file.options, dict(file.tensors), int(target.config.hidden_size)
    read, wanted = tensors["fc.weight"].shape[1], len(options.layers) * width
    read = options.target_size if options.first else read
    if options.target_size != width or read != wanted:
        raise UnsupportedError(
            f"the head {file.name} reads {read} values of {len(options.layers)} layers, and those of the target have "
            f"{wanted}: it belongs to another model"
        )
    embedding = tensors.pop("embed_tokens.weight", None)
    if embedding is None:
        embedding = target.module.get_input_embeddings().weight.detach()
    weight = tensors.pop(_HEAD, None)
    if weight is None and not options.first:
        raise LoadError(f"{file.name} lacks the tensor {_HEAD} of an EAGLE head; get it again")
    _check_tokens(file, target, len(embedding), weight)
    config = with_context(file.config, target.max_context)
    own = {f"model.{name}": value for name, value in tensors.items() if not name.startswith(BESIDE)}
    if options.first:
        module = make_first(config, embedding, tensors["fc.weight"], tensors.get("fc.bias"))
    else:
        assert weight is not None
        module, own = make_module(config, options, embedding, len(weight)), {**own, _HEAD: weight}
    fill(module, own, file.name)
    return module.to(target.device, target.dtype)


def _check_tokens(file: EagleFile, target: ModelRunner, embedded: int, weight: Tensor | None) -> None:
    """Refuse a head that knows tokens which the target does not have."""
    options, vocab = file.options, target.vocab_size
    if options.first:
        known = int(file.config.get("vocab_size") or embedded)
    elif file.tokens is not None:
        known = int(file.tokens.max()) + 1
    else:
        assert weight is not None
        known = len(weight)
    known = max(known, (options.mask or 0) + 1)
    if known > vocab or (embedded < vocab and embedded < known):
        raise UnsupportedError(
            f"the head {file.name} proposes tokens up to {known - 1}, and the target has {vocab}: it belongs to "
            "another model"
        )

"""Small models of decoder layers beside a target, made from a configuration of transformers and tensors."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sakiyomi.core.errors import LoadError, UnsupportedError
from sakiyomi.core.messages import one_line
from sakiyomi.drafters.head_files import OTHER, DraftFile, check_size
from sakiyomi.model_executor.loading.reader import quiet
from sakiyomi.model_executor.runner import ModelRunner

HEAD_WEIGHT = "lm_head.weight"
EMBEDDING = "embed_tokens.weight"

SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")
KINDS = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}
"""Kinds of decoder layers, and what transformers' classes of them begin with."""
ROWS = 1024
"""Most rows of a pass that read a hidden state each."""


class HiddenOutput(nn.Module):
    """Replaces a head over the vocabulary: returns its input, which the target's own head then reads.

    Args:
        vocab_size: tokens that the model reads.
    """

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.out_features = vocab_size

    def forward(self, hidden: Tensor) -> Tensor:
        """(..., hidden), unchanged."""
        return hidden


class FusedEmbedding(nn.Module):
    """Replaces an embedding: joins a token's embedding and the hidden state of the token before it in one vector.

    Args:
        embedding: of tokens, (V, hidden).
        project: of both, (hidden, 2 hidden).
        bias: of the projection, (hidden,).
        norms: of embedding and hidden state; None: there are none.
        hidden_first: the hidden state comes before the embedding where both are joined.

    Attributes:
        given: hidden states of a pass's rows, (ROWS, hidden); written before the pass.
        kept: 1 where a row has its embedding, and 0 where it has none, (ROWS, 1).
    """

    given: Tensor
    kept: Tensor

    def __init__(
        self,
        embedding: Tensor,
        project: Tensor,
        bias: Tensor | None = None,
        *,
        norms: tuple[nn.Module, nn.Module] | None = None,
        hidden_first: bool = False,
    ) -> None:
        super().__init__()
        width = embedding.shape[1]
        self.embed = nn.Embedding.from_pretrained(embedding)
        self.embedding_norm, self.hidden_norm = norms or (nn.Identity(), nn.Identity())
        self.project = nn.Linear(2 * width, width, bias is not None)
        self.project.weight = nn.Parameter(project, requires_grad=False)
        if bias is not None:
            self.project.bias = nn.Parameter(bias, requires_grad=False)
        self._hidden_first = hidden_first
        self.register_buffer("given", torch.zeros(ROWS, width), persistent=False)
        self.register_buffer("kept", torch.ones(ROWS, 1), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        """(1, N) token ids to (1, N, hidden)."""
        rows = ids.shape[1]
        embedded = self.embedding_norm(self.embed(ids) * self.kept[:rows])
        hidden = self.hidden_norm(self.given[:rows].expand_as(embedded))
        fused: Tensor = self.project(torch.cat([hidden, embedded] if self._hidden_first else [embedded, hidden], -1))
        return fused


def last_norm(module: Any) -> nn.Module:
    """A copy of the norm behind a model's last layer, computed by its class.

    Raises:
        UnsupportedError: it has none in the usual place.
    """
    inner = getattr(module, "model", None)
    found = getattr(getattr(inner, "language_model", inner), "norm", None)
    if not isinstance(found, nn.Module):
        raise UnsupportedError(
            f"this draft reads what {type(module).__name__}'s head reads, and expects a norm model.norm before it; "
            "choose another draft"
        )
    norm = copy.deepcopy(found)
    vars(norm).pop("forward", None)  # the kernels'
    return norm


def decoder_config(config: Mapping[str, Any], **settings: Any) -> Any:
    """The configuration of decoder layers as transformers' own object; these settings replace its own.

    Raises:
        LoadError: a kind of layers that is not known, or their sizes make no sense.
    """
    kind = config.get("model_type")
    if kind not in KINDS:
        raise LoadError(f"the head's layers are of the kind {kind!r}; known are {', '.join(map(repr, KINDS))}")
    left = ("architectures", "model_type")
    said = {name: value for name, value in config.items() if name not in left and not name.endswith("_token_id")}
    try:
        return getattr(import_module(f"transformers.models.{kind}"), f"{KINDS[kind]}Config")(**(said | settings))
    except Exception as error:  # a configuration's checks may raise anything
        raise LoadError(f"the head's layers cannot be made ({one_line(error)}); get its config.json again") from error


def make_decoder(config: Mapping[str, Any], embedding: Tensor, head: nn.Module) -> Any:
    """A causal LM of transformers whose layers have no weights yet.

    Args:
        config: of its decoder layers, as transformers has it.
        embedding: of tokens, (V, hidden).
        head: over the vocabulary.

    Raises:
        LoadError: a kind of layers that is not known, or their sizes make no sense.
    """
    none = dict.fromkeys(SPECIAL)
    made = decoder_config(config, tie_word_embeddings=False, use_cache=False, vocab_size=1, **none)
    kind = config["model_type"]
    try:
        module: Any = getattr(import_module(f"transformers.models.{kind}"), f"{KINDS[kind]}ForCausalLM")(made)
    except Exception as error:  # sizes that do not fit each other
        raise LoadError(f"the head's layers cannot be made ({one_line(error)}); get its config.json again") from error
    module.model.embed_tokens = nn.Embedding.from_pretrained(embedding)
    module.lm_head = head
    module.config.vocab_size = len(embedding)
    return module.eval()


def read_model(kind: Any, what: str, *place: Any, **how: Any) -> Any:
    """A model by transformers' ``from_pretrained``, of which no tensor is missing or left.

    Args:
        kind: class, or auto class.
        what: it is and where, for messages.
        place, how: arguments of ``from_pretrained``.

    Raises:
        LoadError: it cannot be read, or its tensors are not those of the class.
    """
    try:
        with quiet():
            module, report = kind.from_pretrained(*place, output_loading_info=True, **how)
    except Exception as error:  # code of the model's class may raise anything
        raise LoadError(f"{what} cannot be read ({one_line(error)}); get it again") from error
    wrong = sorted([*report["missing_keys"], *report["unexpected_keys"]])
    if wrong:
        kind_of = type(module).__name__
        raise LoadError(f"{what} does not have the tensors of {kind_of}: {wrong[0]} does not fit; get it again")
    return module


def with_context(config: Mapping[str, Any], context: int) -> dict[str, Any]:
    """A configuration with positions for so many tokens, if its rotary embedding is the plain one."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        return dict(config)
    return {**config, "max_position_embeddings": max(int(config.get("max_position_embeddings", 0)), context)}


def token_embedding(file: DraftFile[Any], target: ModelRunner, what: str, read: int) -> Tensor:
    """The embedding of tokens, (V, hidden): the head's own, or the target's.

    Args:
        file: of the head; its options name the layers of the target that it reads.
        target: whose hidden states it reads.
        what: it is, for messages.
        read: values that it reads of these layers.

    Raises:
        UnsupportedError: the target's hidden states have other sizes.
    """
    layers, width = len(file.options.layers), int(target.config.hidden_size)
    check_size(f"the {what} {file.name} reads the outputs of {layers} layers, together", read, layers * width)
    if EMBEDDING in file.tensors:
        return file.tensors[EMBEDDING]
    if target.module.get_input_embeddings() is None:
        target.unfold()
    own: Tensor = target.module.get_input_embeddings().weight.detach()
    return own


def check_tokens(file: DraftFile[Any], target: ModelRunner, what: str, known: int, embedded: int) -> None:
    """Refuse a head that knows tokens which the target does not have.

    Args:
        file: of the head.
        target: that it is beside.
        what: it is, for messages.
        known: tokens that it proposes or reads.
        embedded: tokens that may be.

    Raises:
        UnsupportedError: with both.
    """
    if known > embedded:
        raise UnsupportedError(
            f"the {what} {file.name} knows tokens up to {known - 1}, and the target has {target.vocab_size}: {OTHER}"
        )


def fill(module: nn.Module, file: DraftFile[Any], beside: tuple[str, ...], target: ModelRunner) -> Any:
    """A decoder with its weights, where the target runs; the embedding has its own.

    Args:
        module: of ``make_decoder``.
        file: with the tensors.
        beside: beginnings of the names of those that are no part of the decoder.
        target: that it is beside.

    Raises:
        LoadError: tensors are missing, too many, or have other shapes.
    """
    tensors = {
        name if name == HEAD_WEIGHT else f"model.{name}": tensor
        for name, tensor in file.tensors.items()
        if not name.startswith((EMBEDDING, *beside))
    }
    try:
        missing = module.load_state_dict(tensors, strict=False)
    except RuntimeError as error:
        raise LoadError(f"the tensors of {file.name} do not fit its config.json: {one_line(error)}") from error
    wrong = [lacking for lacking in missing.missing_keys if "embed_tokens" not in lacking] + missing.unexpected_keys
    if wrong:
        raise LoadError(f"{file.name} and its config.json do not belong together: tensor {wrong[0]}; get it again")
    return module.to(target.device, target.dtype)


def over_vocabulary(logits: Tensor, tokens: Tensor | None, vocab_size: int) -> Tensor:
    """Logits (..., tokens) as those of the target's vocabulary, (..., V).

    Args:
        logits: of the head's own tokens.
        tokens: the target's token for each of them; None: they are the same, as far as both go, since vocabularies may
            be padded differently.
        vocab_size: V.
    """
    if tokens is None:
        missing = vocab_size - logits.shape[-1]
        return F.pad(logits, (0, missing), value=-torch.inf) if missing > 0 else logits[..., :vocab_size]
    wide = logits.new_full((*logits.shape[:-1], vocab_size), -torch.inf)
    wide[..., tokens] = logits
    return wide

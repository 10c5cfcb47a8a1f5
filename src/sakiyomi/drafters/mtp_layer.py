"""The layer for multi-token prediction (MTP) in the files of some targets, which transformers does not load.

The embedding of a token and the hidden state of the token before it pass a norm each and are projected to one vector.
A decoder layer of the target's kind, a norm and the target's own head follow.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sakiyomi.core.checkpoint import read_checkpoint, read_header
from sakiyomi.core.draft_specs import MTP_ARCHITECTURE
from sakiyomi.core.errors import LoadError, UnsupportedError
from sakiyomi.core.trained import read_tensors, trained_config, write_trained
from sakiyomi.drafters.head_files import check_tensors
from sakiyomi.drafters.head_model import FusedEmbedding, HiddenOutput, last_norm, read_model


@dataclass(frozen=True, kw_only=True)
class MtpForm:
    """Names of the parts in a family of models.

    Attributes:
        prefix: of all names, with the number of the target's layers in it.
        layer: of those of the decoder layer, behind the prefix.
        embedding, hidden: norms of both inputs.
        project: of both to one.
        norm: behind the layer.
        hidden_first: the hidden state comes before the embedding where both are joined.
        blank: the first row of a text has no embedding.
    """

    prefix: str
    layer: str
    embedding: str
    hidden: str
    project: str
    norm: str
    hidden_first: bool = False
    blank: bool = False


FORMS = {
    "Qwen3-Next": MtpForm(
        prefix="mtp.",
        layer="layers.0.",
        embedding="pre_fc_norm_embedding",
        hidden="pre_fc_norm_hidden",
        project="fc",
        norm="norm",
    ),
    "DeepSeek-V3": MtpForm(
        prefix="model.layers.{layers}.",
        layer="",
        embedding="enorm",
        hidden="hnorm",
        project="eh_proj",
        norm="shared_head.norm",
        blank=True,
    ),
    "MiMo": MtpForm(
        prefix="model.mtp_layers.0.",
        layer="",
        embedding="token_layernorm",
        hidden="hidden_layernorm",
        project="input_proj",
        norm="final_layernorm",
        hidden_first=True,
        blank=True,
    ),
}
"""By the first family with the form: Qwen3.5 is like Qwen3-Next, GLM-4.5 like DeepSeek-V3."""
_COPIES = ("embed_tokens.weight", "shared_head.head.weight")  # of the target's own tensors


def read_mtp(folder: Path, layers: int) -> tuple[MtpForm, dict[str, Tensor]]:
    """The tensors of a target's layer, by their names behind the prefix.

    Args:
        folder: of the target.
        layers: that it has.

    Raises:
        LoadError: it has none, or it is damaged.
    """
    files = read_checkpoint(folder).files
    held = {name: file for file in files for name in read_header(file).entries}
    for form in FORMS.values():
        prefix = form.prefix.format(layers=layers)
        if f"{prefix}{form.project}.weight" in held:
            there = dict.fromkeys(file for name, file in held.items() if name.startswith(prefix))
            found = read_tensors(there, "MTP layer", wanted=lambda name: name.startswith(prefix))  # noqa: B023
            return form, {name.removeprefix(prefix): tensor for name, tensor in found.items()}
    known = ", ".join(f"{form.prefix.format(layers=layers)}{form.project}.weight ({n})" for n, form in FORMS.items())
    raise LoadError(f"{folder} holds no MTP layer: expected a tensor {known}; choose another draft")


def write_mtp(folder: Path, form: MtpForm, tensors: Mapping[str, Tensor], layers: int, base: str) -> None:
    """Write a layer to a folder of its own, its tensors named as in a target's files.

    Args:
        folder: is made.
        form: of the tensors.
        tensors: by their names behind the prefix.
        layers: of the target.
        base: the target's name.
    """
    prefix = form.prefix.format(layers=layers)
    config = {"architectures": [MTP_ARCHITECTURE], "hidden_size": len(tensors[f"{form.project}.weight"])}
    named = {prefix + name: tensor for name, tensor in tensors.items()}
    write_trained(folder, "model.safetensors", named, trained_config(config, base=base), "MTP layer")


def make_mtp(form: MtpForm, tensors: Mapping[str, Tensor], target: Any, name: str) -> Any:
    """The layer as a model of the target's class, whose output is what the target's head reads.

    Args:
        form: of the tensors.
        tensors: by ``read_mtp``.
        target: the transformers model.
        name: of the folder, for messages.

    Raises:
        LoadError: tensors are missing, too many, or have other shapes.
        UnsupportedError: the target's class cannot be made again, or the layer belongs to another target.
    """
    embedding = target.get_input_embeddings().weight.detach()
    own = [f"{part}.weight" for part in (form.project, form.embedding, form.hidden, form.norm)]
    check_tensors(tensors, own, "MTP layer in", name)
    project, norm = tensors[f"{form.project}.weight"], tensors[f"{form.norm}.weight"]
    width = embedding.shape[1]
    if project.shape != (width, 2 * width) or norm.shape != (width,):
        raise UnsupportedError(
            f"the MTP layer in {name} joins two vectors of {project.shape[1] // 2} values, and the target's have "
            f"{width}: it belongs to another model, or is damaged"
        )
    beside = {*own, *_COPIES}
    state = {
        f"model.layers.0.{key.removeprefix(form.layer)}": tensor
        for key, tensor in tensors.items()
        if key not in beside and key.startswith(form.layer)
    }
    state["model.norm.weight"] = norm
    state |= {part: norm.new_zeros(1, width) for part in _ENDS}
    module = _decoder(target, state, name)
    norms = norm_of(module, tensors[f"{form.embedding}.weight"]), norm_of(module, tensors[f"{form.hidden}.weight"])
    return _joined(form, module, embedding, project, norms)


def new_mtp(target: Any) -> tuple[MtpForm, Any]:
    """A layer with random weights for a target that may have none, and its form; its last norm is the target's.

    It has no experts: a pass should be short.

    Raises:
        UnsupportedError: the target's class cannot be made again, or keeps its last norm elsewhere.
    """
    form, embedding = FORMS["Qwen3-Next"], target.get_input_embeddings().weight.detach()
    last = last_norm(target)
    config = _config(target, sparse=False)
    module = _class_of(target, config)(config)
    plain, module.model.norm, width = module.model.norm, last, embedding.shape[1]
    # The target's hidden state passes unchanged; training adds the effect of the next token.
    project = torch.cat([0.1 * width**-0.5 * torch.randn(width, width), torch.eye(width)], 1)
    return form, _joined(form, module, embedding, project, (plain, copy.deepcopy(plain)))


def _joined(form: MtpForm, module: Any, embedding: Tensor, project: Tensor, norms: tuple[nn.Module, nn.Module]) -> Any:
    """A decoder that reads tokens beside hidden states, and gives what the target's head reads."""
    module.model.embed_tokens = FusedEmbedding(embedding, project, norms=norms, hidden_first=form.hidden_first)
    module.lm_head = HiddenOutput(len(embedding))
    module.config.vocab_size = len(embedding)
    return module.to(embedding.device, embedding.dtype).eval()


_ENDS = ("model.embed_tokens.weight", "lm_head.weight")


def norm_of(module: Any, weight: Tensor) -> nn.Module:
    """A norm like the one behind a model's last layer, with this weight."""
    norm = last_norm(module)
    norm.weight = nn.Parameter(weight.detach().clone(), requires_grad=False)
    return norm


def _config(target: Any, *, sparse: bool) -> Any:
    """The target's configuration for one layer of full attention, with experts or without, and no tokens."""
    config = copy.deepcopy(target.config.get_text_config())
    wanted = {
        "num_hidden_layers": 1, "vocab_size": 1, "pad_token_id": None, "tie_word_embeddings": False,
        "layer_types": ["full_attention"], "first_k_dense_replace": 0 if sparse else 1, "mlp_only_layers": [],
        "decoder_sparse_step": 1 if sparse else 2, "mlp_layer_types": ["sparse" if sparse else "dense"],
    }  # fmt: skip
    for entry, value in wanted.items():
        if getattr(config, entry, None) is not None or entry in ("vocab_size", "pad_token_id"):
            setattr(config, entry, value)
    config.quantization_config = None
    vars(config).pop("quantization_config")
    return config


def _class_of(target: Any, config: Any) -> Any:
    """The target's class, or that of its text part alone."""
    import transformers

    own = target.config is target.config.get_text_config()
    mapping: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    kind: Any = type(target) if own else mapping.get(type(config), None)
    if kind is None:
        raise UnsupportedError(f"draft mtp: there is no class for the text part of {type(target).__name__} alone")
    return kind


def _decoder(target: Any, state: Mapping[str, Tensor], name: str) -> Any:
    """A model of the target's class with one layer of full attention, with these weights."""
    config = _config(target, sparse=any(".experts." in key for key in state))
    kind, what = _class_of(target, config), f"the MTP layer in {name}"
    return read_model(kind, what, None, config=config, state_dict=dict(state))

"""A model whose linear layers are the blocks of a GGUF file, in the kernels' order; no number changes."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from sakiyomi.core.errors import UnsupportedError
from sakiyomi.core.gguf import GgufFile
from sakiyomi.kernels.experts import expert_weights, is_experts
from sakiyomi.kernels.native import PackedLayer, PackedLinear, PackedWeights
from sakiyomi.kernels.pack import is_linear
from sakiyomi.model_executor.gguf.blocks import BLOCK_TYPES, add_embedding, add_experts, add_linear, share_embedding
from sakiyomi.model_executor.gguf.config import architecture_of
from sakiyomi.model_executor.gguf.weights import Weight, weights_of

logger = logging.getLogger("sakiyomi")


@dataclass
class BlockModel:
    """What a model is made of.

    Attributes:
        native: the kernels' tables.
        layers: those in the tables, by name.
        others: tensors of all other modules, by name.
    """

    native: PackedWeights
    layers: dict[str, PackedLayer] = field(default_factory=dict)
    others: dict[str, Tensor] = field(default_factory=dict)


def named_weights(file: GgufFile, config: Any, name: str) -> list[Weight]:
    """The weights of a file's model. Tensors that belong to none are named in the log.

    Args:
        name: what the user called the model.

    Raises:
        UnsupportedError: some are stored in a type that is not read.
    """
    weights, unused = weights_of(file, architecture_of(file), config)
    if unused:
        shown = ", ".join([*unused[:3], *(["..."] if unused[3:] else [])])
        logger.warning("%s: %d tensors of the file are not used: %s", name, len(unused), shown)
    for weight in weights:
        for source in weight.sources:
            if source.kind not in BLOCK_TYPES:
                raise UnsupportedError(
                    f"{name} has the tensor {source.name!r} in {source.kind}, which is not read; expected "
                    f"{', '.join(BLOCK_TYPES)}; use a file with another quantization"
                )
    return weights


def read_blocks(weights: list[Weight], skeleton: Any, native: PackedWeights, dtype: torch.dtype) -> BlockModel:
    """Put the linear layers, experts and embeddings of a file into the kernels' tables.

    Args:
        weights: of the model.
        skeleton: the transformers model without values.
        native: the tables, empty.
        dtype: of rows: float32 or bfloat16.

    Raises:
        LoadError: a tensor has another shape than the model's.
    """
    config, made = skeleton.config, BlockModel(native)
    modules = dict(skeleton.named_modules())
    named = {weight.name: weight for weight in weights}
    for name, weight in named.items():
        owner, _, own = name.rpartition(".")
        bias = _bias_of(name, modules)
        if bias is None or not (blocks := _blocks(weight, config)):
            continue
        kind, data = blocks
        shape = getattr(modules[owner], own).shape
        _check(weight, data, kind, (*shape[:-2], shape[-1], shape[-2]) if weight.change.turned else shape)
        values = named[bias].numbers(config, torch.float32) if bias in named else None
        if own == "weight":
            made.layers[owner] = add_linear(native, kind, data, values, dtype)
        else:
            made.layers[name] = add_experts(native, kind, data, values, dtype)
    _embeddings(made, named, skeleton, dtype)
    stacks = [f"{name}.{own}" for name, each in modules.items() if is_experts(each) for own in expert_weights(each)]
    native.experts = bool(stacks) and all(stack in made.layers for stack in stacks)
    for name, weight in named.items():
        owner, _, own = name.rpartition(".")
        if name not in made.layers and not (owner in made.layers and own in ("weight", "bias")):
            made.others[name] = weight.numbers(config, dtype)
    check_shapes(weights, made.others, skeleton)
    return made


def block_bytes(weights: list[Weight], skeleton: Any, dtype: torch.dtype) -> tuple[int, int]:
    """Bytes of a model as ``read_blocks`` makes it: of what it keeps in blocks, and of everything else.

    Args:
        weights, skeleton, dtype: as of ``read_blocks``.
    """
    modules, kept, others = dict(skeleton.named_modules()), 0, 0
    tied = skeleton.get_input_embeddings() if skeleton.config.tie_word_embeddings else None
    for weight in weights:
        kind, module = _kind(weight), modules.get(weight.name.rpartition(".")[0])
        stored = sum(source.size for source in weight.sources)
        if isinstance(module, nn.Embedding):
            blocks = kind is not None and BLOCK_TYPES[kind].number_dtype is None
            kept += stored if module is tied and not blocks else 0  # the head has them once more
        else:
            blocks = kind is not None and _bias_of(weight.name, modules) is not None
        kept += stored if blocks else 0
        others += 0 if blocks else sum(source.elements for source in weight.sources) * dtype.itemsize
    return kept, others


def _bias_of(name: str, modules: Mapping[str, nn.Module]) -> str | None:
    """What the bias of the layer with this weight is called, if it has one; None: no layer that the kernels have."""
    owner, _, own = name.rpartition(".")
    module = modules.get(owner)
    if module is None:
        return None
    if own == "weight" and is_linear(module):
        return f"{owner}.bias"
    return f"{name}_bias" if is_experts(module) and own in expert_weights(module) else None


def check_shapes(weights: list[Weight], tensors: Mapping[str, Tensor], skeleton: nn.Module) -> None:
    """Compare tensors that are read as numbers with those of the model without values.

    Raises:
        LoadError: one has another shape.
    """
    wanted = skeleton.state_dict()
    for weight in weights:
        if weight.name in tensors and weight.name in wanted:
            weight.check(tensors[weight.name].shape, wanted[weight.name].shape)


def _blocks(weight: Weight, config: Any) -> tuple[str, Tensor] | None:
    """The type and the bytes (..., rows, bytes) of a weight; None: its numbers have to be computed with."""
    if (kind := _kind(weight)) is None:
        return None
    given = [torch.from_numpy(s.bytes()).unflatten(0, s.shape[:-1]) for s in weight.sources if s.shape[:-1]]
    if len(given) < len(weight.sources):
        return None
    return kind, weight.made_of(given, config).contiguous()


def _kind(weight: Weight) -> str | None:
    """The type of a weight's blocks; None: its numbers have to be computed with."""
    kinds = {source.kind for source in weight.sources}
    return kinds.pop() if len(kinds) == 1 and weight.change.rows and kinds <= BLOCK_TYPES.keys() else None


def _check(weight: Weight, data: Tensor, kind: str, shape: Sequence[int]) -> None:
    width = data.shape[-1] // BLOCK_TYPES[kind].bytes * BLOCK_TYPES[kind].elements
    weight.check((*data.shape[:-1], width), shape)


def _embeddings(made: BlockModel, named: dict[str, Weight], skeleton: Any, dtype: torch.dtype) -> None:
    """Embeddings, of which rows are read as they are; a head that shares its weight with one is a layer, too."""
    config, head = skeleton.config, skeleton.get_output_embeddings()
    modules = dict(skeleton.named_modules())
    names = {id(module): name for name, module in modules.items()}
    entry = names[id(skeleton.get_input_embeddings())]
    for name, module in modules.items():
        scale = _scale(module)
        weight = named.get(f"{name}.weight")
        if scale is None or weight is None or not (blocks := _blocks(weight, config)):
            continue
        kind, data = blocks
        _check(weight, data, kind, module.weight.shape)
        tied = name == entry and config.tie_word_embeddings and names[id(head)] not in made.layers
        shared: PackedLinear | None = None
        if tied:
            made.layers[names[id(head)]] = shared = add_linear(made.native, kind, data, None, dtype)
        if BLOCK_TYPES[kind].number_dtype is None and shared is not None:
            made.layers[name] = share_embedding(made.native, shared, scale=scale)
        elif BLOCK_TYPES[kind].number_dtype is None:
            made.layers[name] = add_embedding(made.native, kind, data, dtype, scale=scale)


def _scale(module: nn.Module) -> float | None:
    """By what an embedding multiplies its rows; None: it is none, or does something else."""
    if type(module) is nn.Embedding:
        return 1.0
    if isinstance(module, nn.Embedding) and type(module).__name__.endswith("ScaledWordEmbedding"):
        return float(module.scalar_embed_scale)  # type: ignore[arg-type]
    return None

"""Files of Medusa heads as three tools have them; what one of them wrote, the others can be given.

"medusa" is FasterDecoding's and text-generation-inference's: a folder with ``config.json`` and
``medusa_lm_head.safetensors``, tensors ``{head}.{layer}.linear.weight``. "merged" is a whole model whose checkpoint
also holds these with ``medusa_head.`` in front (Medusa-2). "vllm" is vLLM's: ``model_type`` "medusa" and tensors
``blocks.{head}.layers.{layer}.weight``. A configuration may be wrong about the number of heads, as published ones are:
the tensors are believed.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from sakiyomi.core.checkpoint import HEADS_FILE, read_checkpoint, read_json
from sakiyomi.core.errors import InputError, LoadError
from sakiyomi.core.trained import read_tensors, write_trained
from sakiyomi.drafters.medusa_heads.heads import HeadsShape, MedusaHeads

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["FORMATS", "Format", "HeadsFile", "read_heads", "write_heads"]

logger = logging.getLogger("sakiyomi")
Format = Literal["medusa", "merged", "vllm"]
FORMATS: tuple[Format, ...] = ("medusa", "merged", "vllm")
FILE, PICKLE = HEADS_FILE, "medusa_lm_head.pt"
PREFIX, WHAT = "medusa_head.", "Medusa heads"

_BLOCK = re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)")
_OWN = re.compile(r"(\d+)\.(\d+)\.weight")
_VLLM_BLOCK = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)")
_VLLM_OWN = re.compile(r"lm_heads\.(\d+)\.weight")
_VLLM_PREFIX = "medusa_heads."


@dataclass(frozen=True)
class HeadsFile:
    """Heads as they were found.

    Attributes:
        heads: themselves, in the dtype in which they are stored.
        format: in which they were.
        base: what their configuration calls the target; None: it does not say.
    """

    heads: MedusaHeads
    format: Format
    base: str | None


def read_heads(folder: str | Path, *, allow_pickle: bool = False) -> HeadsFile:
    """Read heads of any of the three formats.

    Args:
        folder: with ``config.json``.
        allow_pickle: read ``medusa_lm_head.pt`` where there is no safetensors file; tensors and nothing else are taken.

    Raises:
        LoadError: something is missing, damaged, or no heads.
    """
    folder = Path(folder).expanduser()
    if not folder.is_dir():
        raise LoadError(f"there is no folder {str(folder)!r} with Medusa heads; check the path")
    config = read_json(folder / "config.json")
    kind: Format
    if config.get("model_type") == "medusa":
        kind, said = "vllm", config.get("num_heads")
        heads = _from_vllm(folder, read_tensors(read_checkpoint(folder).files, WHAT))
    elif (folder / FILE).is_file() or (folder / PICKLE).is_file():
        kind, said = "medusa", config.get("medusa_num_heads")
        file = folder / (FILE if (folder / FILE).is_file() else PICKLE)
        heads = _from_medusa(folder, read_tensors([file], WHAT, allow_pickle=allow_pickle))
    else:
        kind, said = "merged", config.get("medusa_num_heads")
        files = read_checkpoint(folder).files
        tensors = read_tensors(files, WHAT, wanted=lambda name: name.startswith(PREFIX))
        heads = _from_medusa(folder, {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()})
    if said is not None and said != heads.shape.heads:
        logger.warning(
            "%s: config.json speaks of %s heads and the file holds %d, which are taken", folder, said, heads.shape.heads
        )
    base = config.get("base_model_name_or_path")
    return HeadsFile(heads, kind, base if isinstance(base, str) else None)


def write_heads(
    heads: MedusaHeads,
    folder: str | Path,
    format: Format = "medusa",
    *,
    base: str | Path | None = None,
    head: Tensor | None = None,
) -> None:
    """Write heads for one of the tools; both files are there whole or not at all.

    Args:
        heads: to be written, in the dtype that they have.
        folder: is made; what is in it is left, but for the two files that are written.
        format: see ``FORMATS``.
        base: the target: its name, for the configuration; for "merged" its folder.
        head: weight of the target's own head over the vocabulary. Format "vllm" needs it where heads use it.

    Raises:
        InputError: the format cannot say what these heads are.
        LoadError: nothing can be written there, or the target's folder cannot be read.
    """
    if format not in FORMATS:
        raise InputError(f"there is no format {format!r} of Medusa heads; expected {', '.join(map(repr, FORMATS))}")
    folder, shape = Path(folder).expanduser(), heads.shape
    if heads.token_map is not None and format != "vllm":
        raise InputError(f"heads about {shape.vocab_size} of the target's tokens can only be written as 'vllm'")
    if format == "vllm":
        tensors, config = _to_vllm(heads, head)
    else:
        if shape.own == 1 and shape.heads > 1:
            raise InputError(f"one head over the vocabulary for all of {shape.heads} can only be written as 'vllm'")
        tensors = _to_medusa(heads)
        config = {"medusa_num_heads": shape.heads, "medusa_num_layers": shape.layers}
        if not shape.own:
            config["version"] = "2"
    if format == "merged":
        tensors, config = _into_model(tensors, config, base)
    elif base is not None:
        config = {"base_model_name_or_path": str(base), **config}
    name = FILE if format == "medusa" else "model.safetensors"
    write_trained(folder, name, tensors, config, WHAT)


# ---------------------------------------------------------------- tensors to heads


def _from_medusa(folder: Path, tensors: Mapping[str, Tensor]) -> MedusaHeads:
    blocks, own = {}, {}
    for name, tensor in tensors.items():
        if match := _BLOCK.fullmatch(name):
            blocks[int(match[1]), int(match[2]), match[3]] = tensor
        elif match := _OWN.fullmatch(name):
            own[int(match[1])] = tensor
        else:
            raise LoadError(f"{folder} holds a tensor {name!r}, which Medusa heads do not have")
    return _assembled(folder, blocks, own)


def _from_vllm(folder: Path, tensors: Mapping[str, Tensor]) -> MedusaHeads:
    blocks, own, token_map = {}, {}, None
    for stored, tensor in tensors.items():
        name = stored.removeprefix(_VLLM_PREFIX)
        if match := _VLLM_BLOCK.fullmatch(name):
            blocks[int(match[1]), int(match[2]), match[3]] = tensor
        elif match := _VLLM_OWN.fullmatch(name):
            own[int(match[1])] = tensor
        elif name == "token_map":
            token_map = tensor
        else:
            raise LoadError(f"{folder} holds a tensor {name!r}, which Medusa heads of vLLM do not have")
    heads = _assembled(folder, blocks, own)
    if token_map is not None:
        if token_map.shape != (heads.shape.vocab_size,):
            raise LoadError(
                f"{folder}: token_map has the shape {tuple(token_map.shape)}, expected ({heads.shape.vocab_size},)"
            )
        heads.token_map = token_map
    return heads


def _assembled(folder: Path, blocks: dict[tuple[int, int, str], Tensor], own: dict[int, Tensor]) -> MedusaHeads:
    """Heads of single tensors, all of which have to be there."""
    import torch

    if not blocks:
        raise LoadError(f"{folder} holds no Medusa heads; check that it is the folder of the heads")
    heads, layers = 1 + max(key[0] for key in blocks), 1 + max(key[1] for key in blocks)
    bias = any(key[2] == "bias" for key in blocks)
    parts = ("weight", "bias") if bias else ("weight",)
    wanted = {(head, layer, part) for head in range(heads) for layer in range(layers) for part in parts}
    if wanted != blocks.keys() or own.keys() not in (set(), {0}, set(range(heads))):
        lacking = [str(key) for key in sorted(wanted - blocks.keys())]
        lacking += [f"head {head} over the vocabulary" for head in range(heads) if head not in own]
        raise LoadError(f"{folder} holds {heads} heads of {layers} layers in part: {lacking[0]} is missing, ...")
    dtypes = {tensor.dtype for tensor in (*blocks.values(), *own.values())}
    size = blocks[0, 0, "weight"].shape[-1]
    shapes = {(key[2], tuple(tensor.shape)) for key, tensor in blocks.items()}
    vocab = {tuple(tensor.shape) for tensor in own.values()}
    right = shapes <= {("weight", (size, size)), ("bias", (size,))} and all(
        len(shape) == 2 and shape[1] == size for shape in vocab
    )
    if len(dtypes) != 1 or len(vocab) > 1 or not right:
        raise LoadError(
            f"{folder}: the heads differ in shape or dtype ({sorted(shapes | {('own', s) for s in vocab})})"
        )
    shape = HeadsShape(heads, layers, size, next(iter(vocab))[0] if vocab else None, len(own), bias)
    found = MedusaHeads(shape, next(iter(dtypes)), "meta")

    def stacked(part: str) -> torch.nn.Parameter:
        rows = [torch.stack([blocks[head, layer, part] for head in range(heads)]) for layer in range(layers)]
        return torch.nn.Parameter(torch.stack(rows))

    found.weights = stacked("weight")
    found.biases = stacked("bias") if bias else None
    found.own = torch.nn.Parameter(torch.stack([own[head] for head in sorted(own)])) if own else None
    return found


# ---------------------------------------------------------------- heads to tensors


def _to_medusa(heads: MedusaHeads) -> dict[str, Tensor]:
    tensors = {}
    for head in range(heads.shape.heads):
        for layer in range(heads.shape.layers):
            tensors[f"{head}.{layer}.linear.weight"] = heads.weights[layer, head]
            if heads.biases is not None:
                tensors[f"{head}.{layer}.linear.bias"] = heads.biases[layer, head]
            else:  # readers of this format expect one
                tensors[f"{head}.{layer}.linear.bias"] = heads.weights.new_zeros(heads.shape.hidden_size)
        if heads.own is not None:
            tensors[f"{head}.{heads.shape.layers}.weight"] = heads.own[head]
    return tensors


def _to_vllm(heads: MedusaHeads, head: Tensor | None) -> tuple[dict[str, Tensor], dict[str, Any]]:
    shape = heads.shape
    if heads.own is not None:
        own: Tensor = heads.own
    elif head is not None:
        own = head.to(heads.weights.dtype)[None]
    else:
        raise InputError(
            "these heads use the target's own head over the vocabulary, which format 'vllm' holds a copy of; pass its "
            "weight as head"
        )
    if own.shape[-1] != shape.hidden_size:
        raise InputError(f"head is {tuple(own.shape[1:])} and the heads read {shape.hidden_size} values")
    tensors = {f"lm_heads.{number}.weight": weight for number, weight in enumerate(own)}
    for number in range(shape.heads):
        for layer in range(shape.layers):
            tensors[f"blocks.{number}.layers.{layer}.weight"] = heads.weights[layer, number]
            if heads.biases is not None:
                tensors[f"blocks.{number}.layers.{layer}.bias"] = heads.biases[layer, number]
    config = {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "hidden_size": shape.hidden_size,
        "vocab_size": own.shape[1],
        "num_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "truncated_vocab_size": None,
        "medusa_fc_bias": shape.bias,
        "original_lm_head": len(own) == 1 and shape.heads > 1,
    }
    if heads.token_map is not None:
        tensors["token_map"] = heads.token_map
        config["truncated_vocab_size"] = own.shape[1]
        config["vocab_size"] = max(own.shape[1] + 1, int(heads.token_map.max()) + 1)
    return tensors, config


def _into_model(
    tensors: dict[str, Tensor], config: dict[str, Any], base: str | Path | None
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The target's tensors and configuration with the heads in them."""
    if base is None or not Path(base).expanduser().is_dir():
        raise InputError(f"base is {str(base)!r}; format 'merged' holds the target too and needs its folder")
    folder = Path(base).expanduser()
    own = read_json(folder / "config.json")
    if own.get("hidden_size") != tensors["0.0.linear.weight"].shape[-1]:
        raise InputError(
            f"the heads read {tensors['0.0.linear.weight'].shape[-1]} values and the hidden states of {folder} have "
            f"{own.get('hidden_size')}; they belong to another model"
        )
    model = read_tensors(read_checkpoint(folder).files, "the target")
    return {**model, **{PREFIX + name: tensor for name, tensor in tensors.items()}}, {**own, **config}

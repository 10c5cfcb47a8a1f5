"""Reads and writes Medusa heads in the formats of three tools.

"medusa" is the format of FasterDecoding and text-generation-inference: a folder with ``config.json`` and
``medusa_lm_head.safetensors``, tensors ``{head}.{layer}.linear.weight``. "merged" is a whole model whose checkpoint
also holds these tensors with the prefix ``medusa_head.`` (Medusa-2). "vllm" is vLLM's: ``model_type`` "medusa" and
tensors ``blocks.{head}.layers.{layer}.weight``. The number of heads is taken from the tensors, since published
configurations may be wrong.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from sakiyomi.core.checkpoint import HEADS_FILE, read_checkpoint, read_json
from sakiyomi.core.errors import InputError, LoadError
from sakiyomi.core.trained import BASE, Trained, read_tensors, write_trained
from sakiyomi.drafters.head_files import head_config
from sakiyomi.drafters.medusa_heads.heads import HeadsShape, MedusaHeads

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger("sakiyomi")
Format = Literal["medusa", "merged", "vllm"]
FORMATS: tuple[Format, ...] = ("medusa", "merged", "vllm")
FILE, PICKLE = HEADS_FILE, "medusa_lm_head.pt"
PREFIX, WHAT = "medusa_head.", "Medusa heads"


@dataclass(frozen=True)
class _Form:
    """What a tool calls the parts of heads.

    Attributes:
        block: weight or bias of a residual block, with the numbers of head and layer.
        own: weight of a head over the vocabulary; its layer is the one behind the blocks.
        prefix: may stand before all names.
        count: entry of the configuration with the number of heads.
        whose: heads these are, for messages.
    """

    block: str = "{head}.{layer}.linear.{part}"
    own: str = "{head}.{layer}.weight"
    prefix: str = ""
    count: str = "medusa_num_heads"
    whose: str = WHAT


_FORMS: dict[Format, _Form] = {
    "medusa": _Form(),
    "merged": _Form(prefix=PREFIX),
    "vllm": _Form(
        "blocks.{head}.layers.{layer}.{part}", "lm_heads.{head}.weight", "medusa_heads.", "num_heads", f"{WHAT} of vLLM"
    ),
}


@dataclass(frozen=True, kw_only=True)
class HeadsFile(Trained):
    """Heads as they were found.

    Attributes:
        heads: themselves, in the dtype in which they are stored.
        format: in which they were.
    """

    heads: MedusaHeads
    format: Format


def read_heads(folder: str | Path, *, allow_pickle: bool = False) -> HeadsFile:
    """Read heads of any of the three formats.

    Args:
        folder: with ``config.json``.
        allow_pickle: read ``medusa_lm_head.pt`` where there is no safetensors file; tensors and nothing else are taken.

    Raises:
        LoadError: something is missing, damaged, or no heads.
    """
    folder, config = head_config(folder, WHAT)
    stored = next((folder / name for name in (FILE, PICKLE) if (folder / name).is_file()), None)
    kind: Format = "vllm" if config.get("model_type") == "medusa" else "merged" if stored is None else "medusa"
    form = _FORMS[kind]
    wanted = (lambda name: name.startswith(PREFIX)) if kind == "merged" else None
    files = [stored] if stored is not None and kind == "medusa" else read_checkpoint(folder).files
    tensors = read_tensors(files, WHAT, wanted=wanted, allow_pickle=allow_pickle)
    heads, said = _from_tensors(folder, tensors, form), config.get(form.count)
    if said is not None and said != heads.shape.heads:
        logger.warning(
            "%s: config.json speaks of %s heads and the file holds %d, which are taken", folder, said, heads.shape.heads
        )
    return HeadsFile.of(config, heads=heads, format=kind, name=str(folder))


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
        tensors = _to_tensors(heads, heads.own if heads.own is not None else (), _FORMS["medusa"])
        config = {"medusa_num_heads": shape.heads, "medusa_num_layers": shape.layers}
        if not shape.own:
            config["version"] = "2"
    if format == "merged":
        tensors, config = _into_model(tensors, config, base)
    elif base is not None:
        config = {BASE: str(base), **config}
    name = FILE if format == "medusa" else "model.safetensors"
    write_trained(folder, name, tensors, config, WHAT)


# ---------------------------------------------------------------- tensors to heads


def _from_tensors(folder: Path, tensors: Mapping[str, Tensor], form: _Form) -> MedusaHeads:
    """Heads of tensors that have a tool's names."""
    block, own_head = _pattern(form.block), _pattern(form.own)
    blocks, own, token_map = {}, {}, None
    for stored, tensor in tensors.items():
        name = stored.removeprefix(form.prefix)
        if match := block.fullmatch(name):
            blocks[int(match["head"]), int(match["layer"]), match["part"]] = tensor
        elif match := own_head.fullmatch(name):
            own[int(match["head"])] = tensor
        elif name == "token_map" and form is _FORMS["vllm"]:
            token_map = tensor
        else:
            raise LoadError(f"{folder} holds a tensor {name!r}, which {form.whose} do not have")
    heads = _assembled(folder, blocks, own)
    if token_map is not None:
        if token_map.shape != (heads.shape.vocab_size,):
            raise LoadError(
                f"{folder}: token_map has the shape {tuple(token_map.shape)}, expected ({heads.shape.vocab_size},)"
            )
        heads.token_map = token_map
    return heads


def _pattern(name: str) -> re.Pattern[str]:
    numbers = {"head": r"(?P<head>\d+)", "layer": r"(?P<layer>\d+)"}
    return re.compile(name.replace(".", r"\.").format(**numbers, part="(?P<part>weight|bias)"))


def _assembled(folder: Path, blocks: dict[tuple[int, int, str], Tensor], own: dict[int, Tensor]) -> MedusaHeads:
    """Heads made of single tensors; none may be missing."""
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


def _to_tensors(heads: MedusaHeads, own: Iterable[Tensor], form: _Form) -> dict[str, Tensor]:
    """Tensors by name, with these heads over the vocabulary."""
    shape, tensors = heads.shape, {}
    for head in range(shape.heads):
        for layer in range(shape.layers):
            tensors[form.block.format(head=head, layer=layer, part="weight")] = heads.weights[layer, head]
            bias = form.block.format(head=head, layer=layer, part="bias")
            if heads.biases is not None:
                tensors[bias] = heads.biases[layer, head]
            elif form is _FORMS["medusa"]:  # its readers expect one
                tensors[bias] = heads.weights.new_zeros(shape.hidden_size)
    return tensors | {form.own.format(head=head, layer=shape.layers): weight for head, weight in enumerate(own)}


def _to_vllm(heads: MedusaHeads, head: Tensor | None) -> tuple[dict[str, Tensor], dict[str, Any]]:
    shape = heads.shape
    own = heads.own if heads.own is not None or head is None else head.to(heads.weights.dtype)[None]
    if own is None:
        raise InputError(
            "these heads use the target's own head over the vocabulary, which format 'vllm' holds a copy of; pass its "
            "weight as head"
        )
    if own.shape[-1] != shape.hidden_size:
        raise InputError(f"head is {tuple(own.shape[1:])} and the heads read {shape.hidden_size} values")
    tensors = _to_tensors(heads, own, _FORMS["vllm"])
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

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
from collections.abc import Mapping
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
    """Names of tensors and entries in the files of one tool.

    Attributes:
        block: weight or bias of a residual block, with the numbers of head and layer.
        own: weight of a head over the vocabulary; its layer is the one behind the blocks.
        prefix: optional prefix of all names.
        count: entry of the configuration with the number of heads.
        whose: what the heads are called in messages.
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
        tensors = _to_tensors(heads, heads.own, _FORMS["medusa"])
        config = {"medusa_num_heads": shape.heads, "medusa_num_layers": shape.layers}
        if not shape.own:
            config["version"] = "2"
    if format == "merged":
        tensors, config = _into_model(tensors, config, base)
    elif base is not None:
        config = {BASE: str(base), **config}
    name = FILE if format == "medusa" else "model.safetensors"
    write_trained(folder, name, tensors, config, WHAT)


# ---------------------------------------------------------------- tensors and heads


def _layout(form: _Form, shape: HeadsShape, own: int, bias: bool) -> dict[str, tuple[str, tuple[int, ...]]]:
    """For each tensor name of a tool: the parameter of ``MedusaHeads`` that holds the tensor, and the index there."""
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for head in range(shape.heads):
        for layer in range(shape.layers):
            found[form.block.format(head=head, layer=layer, part="weight")] = "weights", (layer, head)
            if bias:
                found[form.block.format(head=head, layer=layer, part="bias")] = "biases", (layer, head)
    for head in range(own):
        found[form.own.format(head=head, layer=shape.layers)] = "own", (head,)
    return found


def _from_tensors(folder: Path, tensors: Mapping[str, Tensor], form: _Form) -> MedusaHeads:
    """Heads of tensors that have a tool's names; none may be missing."""
    named = {name.removeprefix(form.prefix): tensor for name, tensor in tensors.items()}
    token_map = named.pop("token_map", None) if form is _FORMS["vllm"] else None
    blocks = [match for name in named if (match := _pattern(form.block).fullmatch(name))]
    own = [name for name in named if _pattern(form.own).fullmatch(name)]
    if not blocks:
        raise LoadError(f"{folder} holds no {WHAT}; check that it is the folder of the heads")
    heads, layers = (1 + max(int(match[part]) for match in blocks) for part in ("head", "layer"))
    first, bias = named[blocks[0][0]], any(match["part"] == "bias" for match in blocks)
    if not first.numel() or not first.is_floating_point():
        what = f"{blocks[0][0]} is {tuple(first.shape)} in {first.dtype}"
        raise LoadError(f"{folder}: {what}, which is no weight of a head; get the heads again")
    size = max(first.shape, default=1)
    vocab = max(named[own[0]].numel() // size, 1) if own else None
    shape = HeadsShape(heads, layers, size, vocab, heads if len(own) > 1 else len(own), bias)
    found, layout = MedusaHeads(shape, first.dtype, "meta"), _layout(form, shape, shape.own, bias)
    if strange := sorted(named.keys() - layout.keys()):
        raise LoadError(f"{folder} holds a tensor {strange[0]!r}, which {form.whose} do not have")
    if lacking := sorted(layout.keys() - named.keys()):
        raise LoadError(f"{folder} holds {heads} heads of {layers} layers in part: {lacking[0]} is missing, ...")
    for name, (part, place) in layout.items():
        goal, tensor = getattr(found, part).data[place], named[name]
        if (goal.shape, goal.dtype) != (tensor.shape, tensor.dtype):
            raise LoadError(
                f"{folder}: the heads differ in shape or dtype ({name} is {tuple(tensor.shape)} in {tensor.dtype}, "
                f"expected {tuple(goal.shape)} in {goal.dtype})"
            )
    found.to_empty(device="cpu")
    for name, (part, place) in layout.items():
        getattr(found, part).data[place] = named[name]
    if token_map is not None and token_map.shape != (vocab,):
        raise LoadError(f"{folder}: token_map has the shape {tuple(token_map.shape)}, expected ({vocab},)")
    found.token_map = token_map
    return found


def _pattern(name: str) -> re.Pattern[str]:
    numbers = {"head": r"(?P<head>\d+)", "layer": r"(?P<layer>\d+)"}
    return re.compile(name.replace(".", r"\.").format(**numbers, part="(?P<part>weight|bias)"))


def _to_tensors(heads: MedusaHeads, own: Tensor | None, form: _Form) -> dict[str, Tensor]:
    """Tensors by name, with these heads over the vocabulary, (heads, V, hidden)."""
    biases: Tensor | None = heads.biases
    if biases is None and form is _FORMS["medusa"]:  # its readers expect one
        biases = heads.weights.new_zeros(heads.weights.shape[:-1])
    parts: dict[str, Any] = {"weights": heads.weights, "biases": biases, "own": own}
    layout = _layout(form, heads.shape, 0 if own is None else len(own), biases is not None)
    return {name: parts[part][place] for name, (part, place) in layout.items()}


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
